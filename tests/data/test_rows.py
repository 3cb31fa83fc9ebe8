"""Rows are read in the forms that people have, and checked before any model: an error names file, line and field."""

import gzip
import json
from pathlib import Path

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.data.rows import Chat, check_rows, read_file
from cria_tricks.data.sources import with_contract

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
PAIRS = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "x,\ty", "completion": 'say "5"\n\nand NA'}]
FORMS = (
    "a row needs messages, prompt and completion, conversations, instruction and output (or response), question and "
    "answer, or text"
)
ORDER = "the order is: system (or none), then user and assistant in turn (results of tools between two answers)"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def messages(*turns: tuple[str, object]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def row(content: object) -> Chat:
    (found,) = check_rows([(content, "here")])
    return found


def refused(content: object) -> str:
    with pytest.raises(BadInput) as caught:
        row(content)
    return str(caught.value)


# Files


def as_table(between: str) -> str:
    def cell(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    lines = [["prompt", "completion"], *([pair["prompt"], pair["completion"]] for pair in PAIRS)]
    return "".join(between.join(map(cell, line)) + "\r\n" for line in lines)


@pytest.mark.parametrize(
    "name", ["d.jsonl", "d.json", "list.json", "indented.json", "utf16.jsonl", "d.csv", "d.tsv", "d.parquet", "d.txt.x"]
)
@pytest.mark.parametrize("zipped", [False, True])
def test_files_of_many_kinds_hold_the_same_rows(name, zipped, tmp_path):
    texts = {
        "list.json": json.dumps(PAIRS),
        "indented.json": "\n".join(json.dumps(pair, indent=2) for pair in PAIRS),
        "d.csv": as_table(","),
        "d.tsv": as_table("\t"),
    }
    text = texts.get(name, "\n\n".join(map(json.dumps, PAIRS)))
    path = tmp_path / name
    if name == "d.parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), path)
    else:
        path.write_bytes(text.encode("utf-16" if "utf16" in name else "utf-8-sig"))
    if zipped:
        if name == "d.parquet":
            return
        path = tmp_path / f"{name}.gz"
        path.write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    found = read_file(path)
    assert [{"prompt": one.prompt, "completion": one.completion} for one in found] == PAIRS
    assert len({one.where for one in found}) == 2
    assert all(one.where.startswith(str(path)) for one in found)


def test_a_line_separator_inside_a_string_is_no_end_of_a_line(tmp_path):
    line = json.dumps({"prompt": "one\u2028two", "completion": "x"}, ensure_ascii=False)
    assert read_file(write(tmp_path / "d.jsonl", line))[0].prompt == "one\u2028two"


GZIPPED = gzip.compress(b'{"text": "a"}' * 99, mtime=0)
"""Without the time, which each process of the tests would write into the name of its test, another each."""


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "d.jsonl",
            b"{\n\n",
            "{path}:1: not valid JSON: Expecting property name enclosed in double quotes",
        ),
        ("d.jsonl", b'{"text": "a"}\n{"text":\n', "{path}:2: not valid JSON: Expecting value at column 9"),
        ("d.jsonl", b'{"text": "a"}\n' + b"[" * 100_000, "{path}:2: not a row: maximum recursion depth exceeded"),
        ("d.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "{path}:1: not a row: Exceeds the limit"),
        ("d.jsonl", b'{"text": "a"}\n[1]', "{path}:2: a row must be a JSON object, not list"),
        ("d.jsonl", b'{"text": "a", "x": {"y": 1, "y": 2}}', "{path}:1: the key 'y' is there twice"),
        ("d.json", b'[\n{"text": "a"},\n{"text": 3}\n]', "{path}:1 (row 2): text must be text, not int"),
        ("d.json", b'[\n{"text": "a"},\n{"text": }]', "{path}:3: not valid JSON: Expecting value at column 10"),
        ("d.json", b'{\n"text": "a"\n}\n\n{\n"text": 3}', "{path}:5: text must be text, not int"),
        ("d.json", b'[{"text": "a", "text": "b"}]', "{path}:1: the key 'text' is there twice"),
        ("d.json", b"[" * 100_000, "{path}:1: not a row: maximum recursion depth exceeded"),
        ("d.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}', "data {path}:2: not UTF-8 text (byte 13 of the line); save"),
        ("d.jsonl", b"\n  \n", "data {path}: no rows in it"),
        ("d.jsonl", None, "data {path}: cannot be read: No such file or directory"),
        ("d.csv", b"prompt,completion\na,b\n\na,b,c\n", "{path}:4: has 3 cells, and the first line names 2 columns"),
        ("d.csv", b'prompt,completion\n"a\n\nb",c\n"a"b,c\n', "{path}:5: no row of a table: "),
        ("d.csv", b"prompt,completion\na,\n", "{path}:2: completion must be text, not NoneType"),
        ("d.csv", b"text,text\na,b\n", "{path}:1: the column 'text' is there twice; keep one"),
        ("d.jsonl", '{"text": "é"}'.encode("utf-16")[:-1], "data {path}:1: not UTF-16 text; save the file as UTF-8"),
        ("d.parquet", b"PAR1 no", "data {path}: cannot be read as Parquet: "),
        ("d.jsonl.gz", GZIPPED[:30], "data {path}: cannot be read: Compressed file ended"),
        ("d.jsonl.gz", b'{"text": "a"}', "data {path}: cannot be read: Not a gzipped file"),
    ],
)
def test_a_file_that_cannot_be_read_is_this_line(name, content, said, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_file(path)
    assert str(caught.value).startswith(said.replace("{path}", str(path)))


# Forms


def turns(*said: tuple[object, object]) -> list[dict]:
    return [{"from": who, "value": text} for who, text in said]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD, "user Hi, assistant Hello"),
        ({**GOOD, "system": "s"}, "system s, user Hi, assistant Hello"),
        (messages(("developer", "s"), ("user", "a"), ("assistant", "b")), "system s, user a, assistant b"),
        ({"conversations": turns(("human", "a"), ("gpt", "b"))}, "user a, assistant b"),
        ({"conversations": turns(("system", "s"), ("user", "a"), ("gpt", "b"))}, "system s, user a, assistant b"),
        ({"conversations": turns(("human", "a"), ("gpt", "b")), "system": "s"}, "system s, user a, assistant b"),
        ({"instruction": "i", "output": "o", "system": None, "history": [], "id": 3}, "user i, assistant o"),
        ({"instruction": "i", "input": "x", "output": "o", "text": "all"}, "user i\n\nx, assistant o"),
        ({"instruction": "i", "context": "x", "response": "o", "category": "c"}, "user i\n\nx, assistant o"),
        ({"question": "q", "answer": "\n\na", "system": "s"}, "system s, user q, assistant \n\na"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
         "user a, assistant b"),
        ({"prompt": "p", "completion": "    c", "text": "t"}, "p -> '    c'"),
        ({"prompt": None, "completion": "c", "text": "t"}, " -> 'c'"),
        ({"prompt": None, "completion": None, "text": "t"}, "text t"),
        ({"prompt": "", "completion": "c"}, " -> 'c'"),
        ({"conversations": turns(("human", "a"), ("gpt", "b")), "instruction": "i", "output": "o"},
         "user a, assistant b"),
    ],
)  # fmt: skip
def test_forms_of_rows(content, said):
    found = row(content)
    if found.kind == "chat":
        assert ", ".join(f"{turn['role']} {turn['content']}" for turn in found.messages) == said
    else:
        assert said == (f"text {found.text}" if found.text else f"{found.prompt} -> {found.completion!r}")
    with pytest.raises(AttributeError):
        found.text = "x"


def test_parts_of_a_content_are_joined():
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "is it?"}]
    assert row(messages(("user", parts), ("assistant", "b"))).messages[0]["content"] == "Who is it?"
    picture = [{"type": "image_url", "image_url": {}}]
    assert refused(messages(("user", picture), ("assistant", "b"))) == (
        "here: messages[0].content[0] is 'image_url'; only parts of type text, with a text, are trained"
    )


@pytest.mark.parametrize("field", [{"weight": 0}, {"train": False}])
def test_an_answer_without_weight_is_read_and_not_trained(field):
    turns = [*GOOD["messages"], {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", **field}]
    found = row({"messages": turns})
    assert found.untrained == (3,)
    assert (found.answer, [turn["content"] for turn in found.before_answer]) == ("Hello", ["Hi"])
    assert found.key != row({"messages": [*turns[:3], {"role": "assistant", "content": "d"}]}).key
    assert refused({"messages": turns[2:]}).endswith("has a weight other than 0, so there is nothing to train on")
    assert "has the weight 0.5" in refused({"messages": [turns[0], {**turns[1], "weight": 0.5}]})


def test_the_contract_moves_no_weight():
    turns = [*GOOD["messages"], {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    turns[1] = {**turns[1], "weight": 0}
    assert with_contract(row({"messages": turns})).trained_turns == [4]


def test_of_a_prompt_of_messages_no_answer_is_trained():
    prompt = [*GOOD["messages"], {"role": "user", "content": "c"}]
    assert row({"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}]}).untrained == (1,)


def test_tools_their_calls_and_reasoning_are_kept():
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
    found = row(
        {
            "messages": [
                {"role": "user", "content": "1?"},
                {"role": "assistant", "content": None, "tool_calls": [call], "thinking": "hm"},
                {"role": "tool", "content": "2", "tool_call_id": "1"},
                {"role": "assistant", "content": "2", "reasoning_content": "yes"},
            ],
            "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
        }
    )
    assert found.tools[0]["function"]["name"] == "add"
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert (found.messages[1]["content"], found.messages[1]["thinking"]) == ("", "hm")
    assert found.messages[2] == {"role": "tool", "content": "2", "tool_call_id": "1"}
    assert found.messages[3]["reasoning_content"] == "yes"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1], "a row must be a JSON object, not list"),
        ({"text": "\ud800"}, "holds half a surrogate pair (\\ud800 to \\udfff), which is no character"),
        ({}, f"has the fields none; {FORMS}"),
        ({"prompt": "x", "label": 1}, f"has the fields prompt, label; {FORMS}"),
        ({"instruction": "i", "input": "x"}, f"has the fields instruction, input; {FORMS}"),
        ({"prompt": "x", "completion": None}, "completion must be text, not NoneType"),
        ({"prompt": "x", "completion": " "}, "completion is empty, so there is nothing to train on"),
        ({"prompt": 1, "completion": "x"}, "prompt must be text, not int"),
        ({"text": " \n"}, "text is empty, so there is nothing to train on"),
        ({"messages": "hello"}, "messages must be a list with at least one message"),
        ({"messages": ["hello"]}, "messages[0] must be an object with role and content"),
        (messages(("bot", "x")), "messages[0].role is 'bot'; it must be one of system, user, assistant, tool"),
        (messages(("user", "x"), ("assistant", 3)), "messages[1].content must be text, not int"),
        (messages(("user", "x"), ("assistant", "")), "messages[1].content is empty, so there is nothing to train on"),
        (messages(("user", "x")), "messages holds no assistant turn, so there is nothing to train on"),
        ({"conversations": []}, "conversations must be a list with at least one turn"),
        ({"conversations": [{"role": "user", "content": "a"}]},
         "conversations[0] must be an object with from and value; with role and content it is messages"),
        ({"conversations": turns(("human", "a"), ("bot", "b"))},
         "conversations[1].from is 'bot'; it must be one of human, gpt, system, user, assistant, tool"),
        ({"conversations": turns(("human", 3))}, "conversations[0].value must be text, not int"),
        ({"conversations": turns(("gpt", "a"))},
         f"conversations as messages: messages[0].role is assistant after nothing; {ORDER}"),
        ({"instruction": 3, "output": "o"}, "instruction must be text, not int"),
        ({"instruction": "i", "input": ["x"], "output": "o"}, "input must be text, not list"),
        ({"question": "i", "answer": " "}, "answer is empty, so there is nothing to train on"),
        ({"question": "i", "answer": "a", "system": 3}, "system must be text, not int"),
        ({"instruction": "i", "output": "o", "history": [["a", "b"]]},
         "history holds earlier turns, which are not read here; write them all as messages"),
        ({"prompt": "p", "chosen": "a", "rejected": "b"},
         "chosen is of preferences, which are not trained here; write messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "refusal": "no"}]},
         "messages[1].refusal is an answer that is no content; write it as content"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "x"}]}]},
         "messages[1].tool_calls[0] must be an object with a function, which has a name"),
        ({**GOOD, "weight": 0}, "weight of a whole row is not read; give answers a weight of 0 or 1 in messages"),
        ({"prompt": "p", "completion": "c", "system": "s"},
         "system has no place beside a prompt and a completion of text; write messages"),
        ({"instruction": "i", "output": None, "text": "all"}, "output must be text, not NoneType"),
        ({**GOOD, "tools": "{"}, "tools is a text that is not valid JSON"),
        ({**GOOD, "functions": [1]}, "functions is OpenAI's older form; write tools"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_this_line(content, said):
    assert refused(content) == f"here: {said}"


@pytest.mark.parametrize(
    ("roles", "before"),
    [
        ("assistant", "nothing"),
        ("tool", "nothing"),
        ("system system", "system"),
        ("user system", "user"),
        ("system assistant", "system"),
        ("user user", "user"),
        ("user assistant assistant", "assistant"),
        ("system user assistant system", "assistant"),
    ],
)
def test_a_turn_out_of_order_is_this_line(roles, before):
    *earlier, last = roles.split()
    said = refused(messages(*((role, "x") for role in (*earlier, last))))
    assert said == f"here: messages[{len(earlier)}].role is {last} after {before}; {ORDER}"


@pytest.mark.parametrize("roles", ["user assistant", "system user assistant user", "user assistant tool assistant"])
def test_the_orders_of_turns_that_are_taken(roles):
    turns = [{"role": role, "content": role[0], "id": "x"} for role in roles.split()]
    found = row({"messages": turns, "prompt": "p", "completion": "c", "text": "t"})
    assert found.messages == tuple({"role": role, "content": role[0]} for role in roles.split())
    assert found.content == "\n".join(role[0] for role in roles.split())


def test_turns_of_others_than_the_assistant_may_be_empty():
    assert row(messages(("system", ""), ("user", ""), ("assistant", "x"))).content == "\n\nx"
