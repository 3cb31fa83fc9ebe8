"""Rows are checked before any model is loaded: every error names file, line and field."""

import json

import pytest

from cria_tricks.data.chat import check_rows, read_jsonl
from cria_tricks.errors import BadInput

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
