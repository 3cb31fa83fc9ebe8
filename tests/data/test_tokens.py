"""The mask: the assistant's tokens have labels, all others have none."""

import pytest

from cria_tricks.data import sources
from cria_tricks.data.chat import Chat
from cria_tricks.data.tokens import IGNORED, TokenRows, tokenize, trained
from cria_tricks.errors import BadInput


def chat(*turns: tuple[str, str]) -> Chat:
    return Chat(tuple({"role": role, "content": content} for role, content in turns), "", "", "file:1")


def labelled(row, tokenizer) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED])


def test_only_the_answer_and_its_end_are_trained(tokenizer):
    (row,) = tokenize([chat(("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello there"))], tokenizer, 256).rows
    assert labelled(row, tokenizer) == "Hello there<|im_end|>"
    assert tokenizer.decode(row["input_ids"]).endswith("assistant\nHello there<|im_end|>\n")
    assert all(label in (IGNORED, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))


def test_every_assistant_turn_is_trained(tokenizer):
    turns = (("user", "a?"), ("assistant", "First."), ("user", "b?"), ("assistant", "Second."))
    (row,) = tokenize([chat(*turns)], tokenizer, 256).rows
    assert labelled(row, tokenizer) == "First.<|im_end|>Second.<|im_end|>"


def test_the_end_token_is_trained_although_it_is_the_padding_token(tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    (row,) = tokenize([chat(("user", "Hi"), ("assistant", "Yes"))], tokenizer, 256).rows
    assert tokenizer.eos_token_id in row["labels"]


def test_prompt_and_completion_are_taken_as_they_are(tokenizer):
    (row,) = tokenize([Chat((), "2 + 2 =", " 4", "file:1")], tokenizer, 256).rows
    assert tokenizer.decode(row["input_ids"]) == "2 + 2 = 4<|im_end|>"
    assert labelled(row, tokenizer) == " 4<|im_end|>"


def test_the_first_token_never_has_a_label(tokenizer):
    (row,) = tokenize([Chat((), "", "one two three", "file:1")], tokenizer, 256).rows
    assert row["labels"][0] == IGNORED
    assert trained(row) == len(row["input_ids"]) - 1


def test_long_rows_are_cut_and_counted(tokenizer):
    long = chat(("user", "Hi"), ("assistant", "word " * 100))
    short = chat(("user", "Hi"), ("assistant", "word"))
    found = tokenize([long, short], tokenizer, 64)
    assert found.dropped == 0
    assert found.cut == 1
    assert len(found.rows[0]["input_ids"]) == len(found.rows[0]["labels"]) == 64
    assert found.tokens == 64 + len(found.rows[1]["input_ids"])
    assert found.trained_tokens == sum(trained(row) for row in found.rows)


def test_a_row_with_nothing_left_to_train_on_is_refused(tokenizer):
    with pytest.raises(BadInput, match="file:1: the prompt alone takes .* data.max_length=32") as caught:
        tokenize([chat(("user", "word " * 100), ("assistant", "Yes"))], tokenizer, 32)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_template_is_refused(tokenizer):
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(BadInput, match="no chat template"):
        tokenize([chat(("user", "Hi"), ("assistant", "Yes"))], bare, 32)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    import copy

    odd = copy.deepcopy(tokenizer)
    odd.chat_template = "{% for m in messages %}{{ messages | length }} {{ m['content'] }}{% endfor %}"
    turns = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(BadInput, match="rewrites earlier turns"):
        tokenize([chat(*turns)], odd, 256)


def test_a_template_that_writes_the_date_gives_the_same_tokens_tomorrow(tokenizer):
    import copy

    dated = copy.deepcopy(tokenizer)
    dated.chat_template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%H:%M:%S.%f') %}{% endif %}"
        "{{ date_string }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    )
    row = chat(("user", "a"), ("assistant", "b"))
    assert tokenize([row], dated, 64).rows == tokenize([row], dated, 64).rows


def test_the_real_rows(tokenizer, real_data):
    train = sources.find(str(real_data / "kwanzaa_train.jsonl"), "train")
    assert len(train.rows) == 107
    whole = tokenize(train.rows, tokenizer, 4096)
    lengths = sorted(len(row["input_ids"]) for row in whole.rows)
    assert (lengths[0], lengths[-1], whole.tokens, whole.cut) == (484, 2802, 156_488, 0)
    assert tokenize(train.rows, tokenizer, 2048).cut == 10
    for row, source in zip(whole.rows, train.rows, strict=True):
        assert labelled(row, tokenizer) == source.messages[-1]["content"] + "<|im_end|>"


def test_long_rows_are_dropped_or_refused_when_asked(tokenizer):
    long = chat(("user", "Hi"), ("assistant", "word " * 100))
    short = chat(("user", "Hi"), ("assistant", "Yes"))
    kept = tokenize([long, short, long], tokenizer, 64, "drop")
    assert (len(kept.rows), kept.dropped, kept.cut) == (1, 2, 0)
    with pytest.raises(BadInput, match="all 2 rows are longer than data.max_length=64 tokens and were dropped"):
        tokenize([long, long], tokenizer, 64, "drop")
    with pytest.raises(BadInput, match=r"the row takes \d+ tokens, data.max_length is 64; raise it, or set"):
        tokenize([short, long], tokenizer, 64, "error")


def test_the_fullest_micro_batch_is_the_one_that_is_billed():
    labels = [[-100, 1], [-100, 1, 2, 3], [-100, -100, -100, 1, 2]]
    rows = TokenRows([{"input_ids": [5] * len(each), "labels": each} for each in labels], 0, 0)
    assert [rows.most_trained(size) for size in (1, 2, 3, 9)] == [3, 5, 6, 6]
    assert (rows.longest, rows.tokens, rows.trained_tokens) == (5, 11, 6)
