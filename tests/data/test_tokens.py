"""The mask: the assistant's tokens have labels, all others have none."""

import copy
import itertools

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.data import sources
from cria_tricks.data.rows import Chat, check_rows
from cria_tricks.data.tokens import IGNORED, TokenRows, chunks, tokenize, trained


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


def test_a_tokenizer_without_template_is_refused(tokenizer):
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(BadInput, match="no chat template"):
        tokenize([chat(("user", "Hi"), ("assistant", "Yes"))], bare, 32)


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


def test_the_fullest_micro_batch_is_the_one_that_is_billed():
    labels = [[-100, 1], [-100, 1, 2, 3], [-100, -100, -100, 1, 2]]
    rows = TokenRows([{"input_ids": [5, *each[1:]], "labels": each} for each in labels], 0, 0)
    assert [rows.most_trained(size) for size in (1, 2, 3, 9)] == [3, 5, 6, 6]
    assert (rows.count, rows.longest, rows.tokens, rows.trained_tokens, rows.highest_id) == (3, 5, 11, 6, 5)
    assert TokenRows([{"input_ids": [1, 9, 2], "labels": [1]}, {"input_ids": [3], "labels": [1]}], 0, 0).highest_id == 9


class Words:
    """A tokenizer of one token a word, its number; 0 ends a turn and 9 stands for a line break behind it."""

    eos_token_id, chat_template = 0, "a template"

    def __init__(self, tail=(0, 9)):
        self.tail = list(tail)

    def __call__(self, text, **options):
        return {"input_ids": ([] if options.get("add_special_tokens", True) is False else [7]) + self._ids(text)}

    def _ids(self, text):
        return [int(word) for word in text.split()]

    def apply_chat_template(self, messages, add_generation_prompt=False, **options):
        if not options.pop("tokenize"):
            return " ".join(m["content"] for m in messages)
        assert options == {"return_dict": False, "date_string": "26 Jul 2024"}
        marks = {"system": 1, "user": 2, "assistant": 3}
        ids = [each for m in messages for each in (marks[m["role"]], *self._ids(m["content"]), *self.tail)]
        return ids + [3] * add_generation_prompt


TURNS = (("user", "20 21"), ("assistant", "30 31 32"), ("user", "22"), ("assistant", "33"))
IDS = [2, 20, 21, 0, 9, 3, 30, 31, 32, 0, 9, 2, 22, 0, 9, 3, 33, 0, 9]
NO = IGNORED
LABELS = [NO, NO, NO, NO, NO, NO, 30, 31, 32, 0, NO, NO, NO, NO, NO, NO, 33, 0, NO]


@pytest.mark.parametrize("length", [7, 10, 18, 19, 20])
def test_the_labels_of_each_turn_and_where_a_row_is_cut(length):
    found = tokenize([chat(*TURNS)], Words(), length)
    assert found.rows == [{"input_ids": IDS[:length], "labels": LABELS[:length]}]
    assert (found.cut, found.dropped, found.count) == (length < 19, 0, 1)


@pytest.mark.parametrize("length", [18, 19])
@pytest.mark.parametrize("overflow", ["drop", "error"])
def test_a_row_of_just_the_length_is_not_too_long(overflow, length):
    if length == 19:
        assert tokenize([chat(*TURNS)], Words(), length, overflow).rows == [{"input_ids": IDS, "labels": LABELS}]
        return
    with pytest.raises(BadInput) as caught:
        tokenize([chat(*TURNS)], Words(), length, overflow)
    assert (
        str(caught.value)
        == {
            "drop": "file:1: all 1 rows are longer than data.max_length=18 tokens and were dropped; raise it, or set "
            "data.overflow=truncate",
            "error": "file:1: the row takes 19 tokens, data.max_length is 18; raise it, or set data.overflow to "
            "truncate or drop",
        }[overflow]
    )


def test_the_prompts_length_is_said_where_it_leaves_no_room():
    with pytest.raises(BadInput) as caught:
        tokenize([chat(*TURNS)], Words(), 6)
    assert str(caught.value) == (
        "file:1: the prompt alone takes 6 tokens, so data.max_length=6 leaves nothing to train on; raise it or take "
        "the row out"
    )


@pytest.mark.parametrize(
    ("tail", "labels"),
    [
        ((0,), [30, 31, 0]),
        ((0, 9, 9), [30, 31, 0, NO, NO]),
        ((9, 9), [30, 31, 9, 9]),
        ((), [30, 31]),
        ((0, 0), [30, 31, 0, 0]),
    ],
)
def test_what_stands_behind_the_end_of_a_turn_is_not_trained_and_without_an_end_all_is(tail, labels):
    (row,) = tokenize([chat(("user", "20"), ("assistant", "30 31"))], Words(tail), 64).rows
    assert row["labels"] == [NO] * (3 + len(tail)) + labels


def test_an_empty_turn_has_its_end_trained():
    (row,) = tokenize([chat(("user", "20"), ("assistant", ""))], Words(), 64).rows
    assert row["labels"] == [NO, NO, NO, NO, NO, 0, NO]


def test_a_template_that_leaves_out_the_answer_or_fails():
    class Silent(Words):
        def apply_chat_template(self, messages, **options):
            return [1, 2] if options["tokenize"] else "assistant:"

    class Failing(Words):
        def apply_chat_template(self, messages, **options):
            raise ValueError("no system turn\nplease")

    for tokenizer, said in (
        (
            Silent(),
            "messages[0].content of user is left out by this model's chat template; take it out of the row, or "
            "put it where the template writes it",
        ),
        (Failing(), "this model's chat template cannot write the row: no system turn"),
    ):
        with pytest.raises(BadInput) as caught:
            tokenize([chat(*TURNS)], tokenizer, 64)
        assert str(caught.value) == f"file:1: {said}"


def test_completions_and_texts_among_other_rows():
    rows = [
        Chat((), "20", "30 31", "file:1"),
        Chat((), "", "", "file:2", "40 41 42 43 44"),
        Chat((), "20", "3 4 5 6", "f"),
    ]
    found = tokenize(rows, Words(), 5, "drop")
    assert found.rows == [
        {"input_ids": [7, 20, 30, 31, 0], "labels": [NO, NO, 30, 31, 0]},
        {"input_ids": [7, 40, 41, 42, 43], "labels": [NO, 40, 41, 42, 43]},
        {"input_ids": [43, 44, 0], "labels": [NO, 44, 0]},
    ]
    assert (found.cut, found.dropped, found.tally.rows) == (0, 1, {})


@pytest.mark.parametrize(
    ("length", "overlap", "rows"),
    [
        (4, 1, [([0, 1, 2, 3], 1), ([3, 4, 5, 6], 1)]),
        (4, 2, [([0, 1, 2, 3], 1), ([2, 3, 4, 5], 2), ([4, 5, 6], 2)]),
        (4, 3, [([0, 1, 2, 3], 1), ([1, 2, 3, 4], 3), ([2, 3, 4, 5], 3), ([3, 4, 5, 6], 3)]),
        (6, 1, [([0, 1, 2, 3, 4, 5], 1), ([5, 6], 1)]),
        (7, 1, [([0, 1, 2, 3, 4, 5, 6], 1)]),
        (8, 1, [([0, 1, 2, 3, 4, 5, 6], 1)]),
    ],
)
def test_the_pieces_of_seven_tokens(length, overlap, rows):
    assert list(chunks(range(7), length, overlap)) == [
        {"input_ids": ids, "labels": [NO] * known + ids[known:]} for ids, known in rows
    ]
    assert list(chunks([], length, overlap)) == []


TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + ASKS
THINKS = PLAIN.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
"""As DeepSeek-V3 and Nemotron: the prompt of generation begins a reasoning that rows need not have."""
SPACE = PLAIN.replace("{{ m['role'] }}\n", "{{ m['role'] }}: ").replace("assistant\n{%", "assistant: {%")
LAST = PLAIN.replace(ASKS, "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}")
"""As Phi-3: what stands behind the last turn stands behind no other."""
REASONS = PLAIN.replace(
    "{{ m['content'] }}",
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}",
)
"""As Qwen3: reasoning is written in the last turn alone."""


def trained_text(template: str, tokenizer, *turns, **row) -> list[str]:
    """The runs of trained tokens of a row, as text."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    messages = [
        dict(zip(("role", "content"), turn, strict=True)) if isinstance(turn, tuple) else turn for turn in turns
    ]
    (found,) = tokenize(list(check_rows([({"messages": messages, **row}, "file:1")])), tokenizer, 256).rows
    runs = itertools.groupby(found["labels"], lambda label: label != IGNORED)
    return [tokenizer.decode(list(labels)) for is_trained, labels in runs if is_trained]


ONE = (("user", "Who?"), ("assistant", "It is I."))
TWO = (*ONE, ("user", "And then?"), ("assistant", "You."))
THOUGHT = {"role": "assistant", "content": "It is I.", "reasoning_content": "Let me see."}


@pytest.mark.parametrize(
    ("template", "turns", "runs"),
    [
        (PLAIN, TWO, ["It is I.<|im_end|>", "You.<|im_end|>"]),
        (PLAIN, (ONE[0], ("assistant", "Blue.\n\nRed.")), ["Blue.\n\nRed.<|im_end|>"]),
        (
            PLAIN,
            (ONE[0], ("assistant", "\n\nBlue.")),
            ["\nBlue.<|im_end|>"],
        ),  # one of its line breaks is one token with the prompt's
        (PLAIN, (ONE[0], ("assistant", "    return 1")), [" return 1<|im_end|>"]),  # and so are three of these spaces
        (SPACE, ONE, [" is I.<|im_end|>"]),  # its first word is one token with the prompt's space
        (THINKS, TWO, ["It is I.<|im_end|>", "You.<|im_end|>"]),
        (THINKS, (ONE[0], ("assistant", "<think>\nHm.</think>Yes.")), ["Hm.</think>Yes.<|im_end|>"]),
        (LAST, TWO, ["It is I.<|im_end|>", "You.<|im_end|>"]),
        (REASONS, (ONE[0], THOUGHT), ["<think>Let me see.</think>It is I.<|im_end|>"]),
        (REASONS, (ONE[0], THOUGHT, *TWO[2:]), ["It is I.<|im_end|>", "You.<|im_end|>"]),
        (REASONS, (ONE[0], {**THOUGHT, "content": "<b>It</b>"}, *TWO[2:]), ["<b>It</b><|im_end|>", "You.<|im_end|>"]),
        (PLAIN, (*ONE, TWO[2], {"role": "assistant", "content": "You.", "weight": 0}), ["It is I.<|im_end|>"]),
    ],
)
def test_the_answers_are_found_in_templates_of_many_kinds(template, turns, runs, tokenizer):
    assert trained_text(template, tokenizer, *turns) == runs


@pytest.mark.parametrize(
    ("template", "turns", "row", "said"),
    [
        (PLAIN.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}"),
         (("system", "Be kind."), *ONE), {}, "messages[0].content of system is left out by this model's chat template"),
        (PLAIN, (ONE[0], THOUGHT), {}, "messages[1].reasoning_content: this model's chat template writes no reasoning"),
        (PLAIN.replace("m['content'] }}", "m['content'].split('</think>')[-1] }}"),
         (ONE[0], ("assistant", "<think>Hm.</think>Yes.")), {}, "messages[1].content before </think> is left out"),
        (PLAIN, ONE, {"tools": [{"type": "function"}]}, "tools: this model's chat template writes no tools"),
        (PLAIN, (ONE[0], {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}), {},
         "messages[1].tool_calls: this model's chat template writes no calls of tools"),
        (PLAIN.replace("{{ m['content'] }}", "{{ loop.length }}{{ m['content'] }}"), TWO, {},
         "before an answer differ"),
        (PLAIN.replace("{{ m['content'] }}", "{{ m['content'] }}{% if loop.last %} Be brief.{% endif %}"), ONE, {},
         "before an answer differ"),  # a reminder in the last turn alone
    ],
)  # fmt: skip
def test_what_a_template_would_leave_out_is_refused(template, turns, row, said, tokenizer):
    with pytest.raises(BadInput) as caught:
        trained_text(template, tokenizer, *turns, **row)
    assert said in str(caught.value)
    assert str(caught.value).startswith("file:1: ")


def test_reasoning_is_given_under_the_name_that_the_template_reads(tokenizer):
    gpt = REASONS.replace("reasoning_content", "thinking")
    assert trained_text(gpt, tokenizer, ONE[0], THOUGHT) == ["<think>Let me see.</think>It is I.<|im_end|>"]


def test_a_template_that_writes_the_day_writes_the_same_on_every_day(tokenizer):
    dated = PLAIN + "{{ strftime_now('%d %b %Y') }}"
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = dated
    assert tokenizer.decode(tokenize([chat(*ONE)], tokenizer, 256).rows[0]["input_ids"]).endswith("26 Jul 2024")


class Adds(Words):
    """A tokenizer with ``add_bos_token`` and ``add_eos_token``; a row's text may hold both as well."""

    bos_token_id = 7

    def __call__(self, text, **options):
        found = super().__call__(text, **options)["input_ids"]
        return {"input_ids": found + [0] * options.get("add_special_tokens", True)}


@pytest.mark.parametrize("begins", ["", "7 "])
@pytest.mark.parametrize("ends", ["", " 0"])
def test_one_bos_token_in_front_and_one_eos_token_behind(begins, ends):
    rows = [Chat((), f"{begins}20", f"30{ends}", "f"), Chat((), "", "", "f", f"{begins}40 41{ends}")]
    found = tokenize(rows, Adds(), 9).rows
    assert [row["input_ids"] for row in found] == [[7, 20, 30, 0], [7, 40, 41, 0]]
