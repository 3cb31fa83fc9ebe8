"""Rows are checked before any model is loaded: every error names file, line and field."""

import json

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.data.rows import check_rows, read_jsonl

NO_KIND = (
    "a row needs the field messages, the fields prompt and completion, or text; or those of ShareGPT (conversations) "
    "or Alpaca (instruction and output)"
)
GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def write(path, *lines: str):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def messages(*turns: tuple[str, object]) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})


def test_both_kinds_of_rows(tmp_path):
    path = write(tmp_path / "d.jsonl", json.dumps(GOOD), "", json.dumps({"prompt": "2+2=", "completion": "4"}))
    chat, pair = read_jsonl(path)
    assert chat.messages[1] == {"role": "assistant", "content": "Hello"}
    assert (pair.prompt, pair.completion, pair.where) == ("2+2=", "4", f"{path}:3")


def test_several_turns_and_a_system_message(tmp_path):
    row = messages(("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    (chat,) = read_jsonl(write(tmp_path / "d.jsonl", row))
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_a_byte_order_mark_and_a_line_separator_inside_a_string_are_fine(tmp_path):
    path = tmp_path / "d.jsonl"
    row = json.dumps({"prompt": "one\u2028two", "completion": "x"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + (row + "\r\n").encode())
    assert read_jsonl(path)[0].prompt == "one\u2028two"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [', "not valid JSON"),
        ('{"prompt": "x", "completion": ' + "9" * 5000 + "}", "not a row"),
        ('{"prompt": "\\ud800", "completion": "x"}', "half a surrogate pair"),
        ("[1]", "must be a JSON object, not list"),
        ("[" * 100_000, "not a row: maximum recursion depth exceeded"),
        ("{}", "needs the field messages, the fields prompt and completion, or text"),
        ('{"prompt": "x"}', "needs the field messages"),
        ('{"prompt": "x", "completion": "  "}', "completion is empty"),
        ('{"prompt": 1, "completion": "x"}', "must be text"),
        ('{"messages": "hello"}', "must be a list"),
        ('{"messages": []}', "must be a list with at least one message"),
        ('{"messages": ["hello"]}', "messages[0] must be an object"),
        (messages(("robot", "x")), "messages[0].role is 'robot'; it must be one of system, user, assistant"),
        (messages(("user", None), ("assistant", "x")), "messages[0].content must be text, not NoneType"),
        (messages(("user", "x"), ("assistant", " ")), "messages[1].content is empty"),
        (messages(("user", "x")), "no assistant turn"),
        (messages(("assistant", "x")), "messages[0].role is assistant after nothing"),
        (messages(("user", "x"), ("user", "y"), ("assistant", "z")), "messages[1].role is user after user"),
        (messages(("user", "x"), ("system", "y"), ("assistant", "z")), "messages[1].role is system after user"),
        (messages(("system", "x"), ("assistant", "z")), "messages[1].role is assistant after system"),
    ],
)
def test_a_wrong_row_names_its_line(line, said, tmp_path):
    path = write(tmp_path / "d.jsonl", json.dumps(GOOD), line)
    with pytest.raises(BadInput) as caught:
        read_jsonl(path)
    assert str(caught.value).startswith(f"{path}:2:")
    assert said in str(caught.value)


def test_a_file_without_rows_or_that_is_no_text(tmp_path):
    with pytest.raises(BadInput, match="no rows"):
        read_jsonl(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(BadInput, match="not UTF-8 text"):
        read_jsonl(tmp_path / "bytes.jsonl")
    with pytest.raises(BadInput, match="cannot be read"):
        read_jsonl(tmp_path / "none.jsonl")


def test_rows_of_a_hub_data_set_may_hold_empty_columns():
    row = {"messages": None, "prompt": "x", "completion": "y"}
    assert next(iter(check_rows([(row, "hub row 0")]))).completion == "y"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a": }', "not valid JSON: Expecting value at column 7"),
        ("3", "a row must be a JSON object, not int"),
        ('{"prompt": "x", "completion": 1}', "prompt and completion must be text"),
        ('{"prompt": "x", "completion": ""}', "completion is empty, so there is nothing to train on"),
        ('{"text": 1}', "text must be text, not int"),
        ('{"text": " \\n"}', "text is empty, so there is nothing to train on"),
        ('{"prompt": "x"}', NO_KIND),
        ('{"completion": "x"}', NO_KIND),
        ('{"messages": []}', "messages must be a list with at least one message"),
        ('{"messages": {"role": "user"}}', "messages must be a list with at least one message"),
        ('{"messages": [{"role": "user", "content": "x"}, 3]}', "messages[1] must be an object with role and content"),
        (messages(("user", "x"), ("assistant", 3)), "messages[1].content must be text, not int"),
        (messages(("user", "x"), ("assistant", "")), "messages[1].content is empty, so there is nothing to train on"),
        (messages(("user", "x")), "messages holds no assistant turn, so there is nothing to train on"),
        (messages(("system", "x"), ("user", "y")), "messages holds no assistant turn, so there is nothing to train on"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_this_line(line, said, tmp_path):
    path = write(tmp_path / "d.jsonl", line)
    with pytest.raises(BadInput) as caught:
        read_jsonl(path)
    assert str(caught.value) == f"{path}:1: {said}"


@pytest.mark.parametrize(
    ("roles", "before"),
    [
        ("assistant", "nothing"),
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
    with pytest.raises(BadInput) as caught:
        list(check_rows([(json.loads(messages(*((role, "x") for role in (*earlier, last)))), "here")]))
    assert str(caught.value) == (
        f"here: messages[{len(earlier)}].role is {last} after {before}; the order is: system (or none), then user and "
        "assistant in turn"
    )


@pytest.mark.parametrize(
    "roles",
    ["user assistant", "system user assistant", "user assistant user", "system user assistant user assistant"],
)
def test_the_orders_of_turns_that_are_taken(roles):
    turns = [{"role": role, "content": role[0], "name": "x"} for role in roles.split()]
    (row,) = check_rows([({"messages": turns, "prompt": "p", "completion": "c", "text": "t"}, "here")])
    assert row.messages == tuple({"role": role, "content": role[0]} for role in roles.split())
    assert (row.prompt, row.completion, row.text, row.where) == ("", "", "", "here")
    assert row.content == "\n".join(role[0] for role in roles.split())


def test_turns_of_others_than_the_assistant_may_be_empty():
    (row,) = check_rows([(json.loads(messages(("system", ""), ("user", ""), ("assistant", "x"))), "here")])
    assert row.content == "\n\nx"


def test_the_other_kinds_of_rows_and_what_they_say():
    rows = [{"prompt": "p", "completion": "c", "text": "t"}, {"prompt": "", "completion": "c"},
            {"prompt": None, "completion": "c", "text": "t"}, {"prompt": "p", "text": " t "}]  # fmt: skip
    found = list(check_rows((row, f"f:{number}") for number, row in enumerate(rows)))
    assert [(row.prompt, row.completion, row.text, row.where) for row in found] == [
        ("p", "c", "", "f:0"), ("", "c", "", "f:1"), ("", "", "t", "f:2"), ("", "", " t ", "f:3"),
    ]  # fmt: skip
    assert [row.content for row in found] == ["p\nc", "\nc", "t", " t "]
    with pytest.raises(AttributeError):
        found[0].text = "x"


def test_a_file_that_cannot_be_read_is_this_line(tmp_path):
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    write(tmp_path / "empty.jsonl", "", "  ")
    for name, said in (
        ("bytes.jsonl", "1: not UTF-8 text (byte 15 of the line)"),
        ("none.jsonl", "cannot be read: No such file or directory"),
        ("empty.jsonl", "no rows; one JSON object a line is expected"),
    ):
        with pytest.raises(BadInput) as caught:
            read_jsonl(tmp_path / name)
        assert str(caught.value).replace(".jsonl:1", ".jsonl: 1") == f"data {tmp_path / name}: {said}"


def turns(*said: tuple[object, object]) -> list[dict]:
    return [{"from": who, "value": text} for who, text in said]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": turns(("human", "a"), ("gpt", "b"))}, "user a, assistant b"),
        ({"conversations": turns(("user", "a"), ("assistant", "b"))}, "user a, assistant b"),
        ({"conversations": turns(("system", "s"), ("human", "a"), ("gpt", "b"))}, "system s, user a, assistant b"),
        ({"conversations": turns(("human", "a"), ("gpt", "b")), "system": "s"}, "system s, user a, assistant b"),
        ({"conversations": turns(("human", "a"), ("gpt", "b")), "system": None, "id": 3}, "user a, assistant b"),
        ({"instruction": "i", "output": "o"}, "user i, assistant o"),
        ({"instruction": "i", "input": "", "output": "o", "history": []}, "user i, assistant o"),
        ({"instruction": "i", "input": None, "output": "o", "text": None}, "user i, assistant o"),
        ({"instruction": "i", "input": "x", "output": "o", "system": "s"}, "system s, user i\n\nx, assistant o"),
    ],
)
def test_sharegpt_and_alpaca_rows_become_messages(row, said, tmp_path):
    (chat,) = read_jsonl(write(tmp_path / "d.jsonl", json.dumps(row)))
    assert ", ".join(f"{turn['role']} {turn['content']}" for turn in chat.messages) == said
    assert (chat.prompt, chat.completion, chat.text) == ("", "", "")


def test_a_row_of_several_kinds_is_the_first_of_them(tmp_path):
    alpaca = {"instruction": "i", "output": "o"}
    sharegpt = {**alpaca, "conversations": turns(("human", "a"), ("gpt", "b"))}
    text = {**sharegpt, "text": "t"}
    found = read_jsonl(write(tmp_path / "d.jsonl", *map(json.dumps, (alpaca, sharegpt, text))))
    assert [chat.content for chat in found] == ["i\no", "a\nb", "t"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": "a"}, "conversations must be a list with at least one turn"),
        ({"conversations": []}, "conversations must be a list with at least one turn"),
        (
            {"conversations": [{"role": "user", "content": "a"}]},
            "conversations[0] must be an object with from and value; with role and content it is messages",
        ),
        (
            {"conversations": turns(("human", "a"), ("tool", "b"))},
            "conversations[1].from is 'tool'; it must be one of human, gpt, system, user, assistant",
        ),
        (
            {"conversations": turns((["human"], "a"))},
            "conversations[0].from is ['human']; it must be one of human, gpt, system, user, assistant",
        ),
        ({"conversations": turns(("human", 3))}, "conversations[0].value must be text, not int"),
        (
            {"conversations": turns(("gpt", "a"))},
            "conversations as messages: messages[0].role is assistant after nothing; the order is: system (or none), "
            "then user and assistant in turn",
        ),
        (
            {"conversations": turns(("human", "a"))},
            "conversations as messages: messages holds no assistant turn, so there is nothing to train on",
        ),
        ({"conversations": turns(("human", "a"), ("gpt", "b")), "system": 3}, "system must be text, not int"),
        ({"instruction": 3, "output": "o"}, "instruction must be text, not int"),
        ({"instruction": "i", "input": ["x"], "output": "o"}, "input must be text, not list"),
        ({"instruction": "i", "output": 3}, "output must be text, not int"),
        ({"instruction": " ", "output": "o"}, "instruction is empty, so there is nothing to train on"),
        ({"instruction": "i", "output": ""}, "output is empty, so there is nothing to train on"),
        (
            {"instruction": "i", "output": "o", "history": [["a", "b"]]},
            "history holds earlier turns, which are not read here; write them all as messages",
        ),
        ({"instruction": "i"}, NO_KIND),
        ({"instruction": "i", "input": "x"}, NO_KIND),
    ],
)
def test_a_wrong_row_of_sharegpt_or_alpaca_is_this_line(row, said, tmp_path):
    path = write(tmp_path / "d.jsonl", json.dumps(GOOD), json.dumps(row))
    with pytest.raises(BadInput) as caught:
        read_jsonl(path)
    assert str(caught.value) == f"{path}:2: {said}"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"prompt": "a", "prompt": "b", "completion": "c"}', "'prompt'"),
        ('{"prompt": "a", "completion": "c", "prompt": "a"}', "'prompt'"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "role": "assistant"}]}', "'role'"),
        ('{"text": "a", "about": {"x": 1, "y": 2, "x": 1}}', "'x'"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(line, key, tmp_path):
    path = write(tmp_path / "d.jsonl", json.dumps(GOOD), line)
    said = f"{path}:2: the key {key} is there twice, and only one value can count; keep one"
    with pytest.raises(BadInput) as caught:
        read_jsonl(path)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[\n  {"text": "a"}\n]', "begins a JSON list over several lines; write one object a line: jq -c '.[]' FILE"),
        ('[{"text": "a"}]', "a row must be a JSON object, not list; write one object a line: jq -c '.[]' FILE"),
    ],
)
def test_a_file_that_is_one_json_list_is_told_how_to_become_rows(text, said, tmp_path):
    path = write(tmp_path / "d.json", text)
    with pytest.raises(BadInput) as caught:
        read_jsonl(path)
    assert str(caught.value) == f"{path}:1: {said} > FILE.jsonl"
