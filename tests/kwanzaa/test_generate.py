"""Answers in batches are the answers one by one; the base below an adapter is the base."""

import math
import sys

import pytest
import torch

from cria_tricks.common.console import Aside
from cria_tricks.common.errors import Diverged, OutOfMemory
from cria_tricks.data.rows import Chat
from cria_tricks.data.tokens import tokenize
from cria_tricks.kwanzaa import generate
from cria_tricks.load import answering
from cria_tricks.load.adapters import without_adapter
from cria_tricks.load.losses import full_loss_sum
from cria_tricks.settings import Data
from tests.helpers import prepare

TOKENS = 6
CHATS = [
    Chat(({"role": "user", "content": question}, {"role": "assistant", "content": answer}), "", "", f"made:{number}")
    for number, (question, answer) in enumerate(
        [
            ("Hi", "Hello"),
            ("What is Nia, the fifth principle?", "Purpose."),
            ("Who?", "Ruth Adeyemi, in 1969."),
        ]
    )
]


class Letters:
    """As much of a tokenizer as is needed, with the 512 tokens of the tiny model."""

    pad_token_id = eos_token_id = 2
    chat_template = "yes"

    def apply_chat_template(self, messages, add_generation_prompt=False, **options):
        text = "".join(f"<{m['role']}>{m['content']}\x02" for m in messages)
        if not options.get("tokenize", True):
            return text
        return list((text + "<assistant>" * add_generation_prompt).encode())

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(token) for token in ids if token != self.eos_token_id)


@pytest.fixture(params=["lora", "prompt_tuning", "side_network", "head", "none"])
def adapted(request, tiny_model):
    """An adapted model whose adapter matters, over a base whose answers hang on every token of the prompt."""
    sets = [f"tricks.peft={request.param}"] + ["side.blocks=1"] * (request.param == "side_network")
    _, _, loaded = prepare(tiny_model, *sets)
    model = loaded.model.eval()
    model.config.use_cache = request.param != "side_network"
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and request.param != "none":
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.dim() == 2:
                parameter.mul_(5)
    return model


def answers(model, ids) -> list:
    return answering.answer_batch(model, Letters(), ids, TOKENS)


def test_batched_answers_are_those_of_single_rows(adapted):
    ids = answering.prompt_ids(CHATS, Letters())
    assert len({len(row) for row in ids}) == 3, "ragged, so there is padding"
    single = [answers(adapted, [row])[0] for row in ids]
    assert answers(adapted, ids) == single
    assert len({text for text, *_ in single}) == 3, "answers hang on the prompt"


def test_without_its_mask_padding_would_change_them(adapted, monkeypatch):
    """The test above can fail: the padding is seen when nobody hides it."""
    if getattr(adapted, "peft_config", None) and adapted.active_peft_config.is_prompt_learning:
        pytest.skip("rows behind a learnt prompt are answered one by one")
    ids = answering.prompt_ids(CHATS, Letters())
    single = [answers(adapted, [row])[0] for row in ids]
    make = adapted.generate
    monkeypatch.setattr(
        adapted, "generate", lambda attention_mask, **rest: make(attention_mask=torch.ones_like(attention_mask), **rest)
    )
    assert answers(adapted, ids) != single


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "sdpa_expanded"])
def test_padding_is_hidden_from_every_attention_that_chat_may_choose(implementation, tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() == 2 else 1)
    ids = answering.prompt_ids(CHATS, Letters())
    assert answers(model, ids) == [answers(model, [row])[0] for row in ids]


def test_the_base_below_an_adapter_is_the_model_without_it_and_the_adapter_comes_back(adapted, tiny_model):
    if not hasattr(adapted, "peft_config") and not any("side" in type(m).__name__.lower() for m in adapted.modules()):
        pytest.skip("a whole model has no base below it")
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    with torch.no_grad():  # the same factor as in the fixture, which the head's copy did not get
        for parameter in plain.parameters():
            parameter.mul_(5 if parameter.dim() == 2 else 1)
    ids = answering.prompt_ids(CHATS, Letters())
    before = answers(adapted, ids)
    expected = answers(plain, ids)
    with without_adapter(adapted) as base:
        assert answers(base, ids) == expected
        assert generate.reference_loss(base, Letters(), CHATS[1]) == pytest.approx(
            generate.reference_loss(plain, Letters(), CHATS[1]), rel=1e-5
        )
    assert before != expected
    assert answers(adapted, ids) == before


def test_an_answer_ends_at_its_end_token_and_is_bounded(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    ids = answering.prompt_ids(CHATS, Letters())
    ((text, tokens, ended),) = answers(model, ids[:1])
    assert (tokens, ended) == (TOKENS, False), "the tiny model does not know when to stop"
    said = [int(token) for token in text.split()]
    model.generation_config.eos_token_id = [511, said[0]]
    ((_, tokens, ended),) = answers(model, ids[:1])
    assert (tokens, ended) == (1, True)


def test_the_loss_is_that_of_all_rows_in_one_batch(tiny_model):
    from transformers import AutoModelForCausalLM

    from cria_tricks.data.batches import PadToLongest

    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    found = [generate.reference_loss(model, Letters(), chat) for chat in CHATS]
    batch = PadToLongest(0)(tokenize(CHATS, Letters(), sys.maxsize).rows)
    with torch.no_grad():
        assert sum(loss for loss, _ in found) == pytest.approx(full_loss_sum(model, batch).item(), rel=1e-5)
    assert sum(trained for _, trained in found) == int((batch["labels"] != -100).sum())


@pytest.mark.parametrize("scale", [math.nan, 1e4], ids=["nan", "huge"])
def test_a_loss_that_no_model_has_is_told_and_not_averaged(scale, tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    with pytest.raises(Diverged, match=r"made:0: the loss of its answer is (nan|\d{4,}.*) per token, in float32"):
        generate.reference_loss(model, Letters(), CHATS[0])


def test_batches_have_prompts_of_like_length_and_answers_come_in_the_order_of_the_rows(tiny_model, monkeypatch):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    prompts = answering.prompt_ids(CHATS, Letters())
    asked = []

    def answer(model, tokenizer, batch, longest):
        if len(batch) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        asked.append(batch)
        return make(model, tokenizer, batch, longest)

    make = generate.answer_batch
    monkeypatch.setattr(generate, "answer_batch", answer)
    found = generate.answer_rows(model, Letters(), CHATS, Data(), 2, 3, "base", Aside())
    assert asked == [[prompts[1]], [prompts[0], prompts[2]]], "the longest first"
    assert [(each.text, each.tokens) for each in found] == [make(model, Letters(), [ids], 3)[0][:2] for ids in prompts]
    with pytest.raises(OutOfMemory, match="with 3 rows at a time; give a smaller --batch-size"):
        generate.answer_rows(model, Letters(), CHATS, Data(), 3, 3, "base", Aside())
