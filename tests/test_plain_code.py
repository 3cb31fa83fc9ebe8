"""``PLAIN`` of every technique runs in a script of one's own, beside the same script without the technique.

Four conditions: a Trainer in fp32 with rows of one length; a loop of one's own; padded rows of several lengths; bf16 by
autocast. In all of them the model's config leaves the KV cache on, as it is by default. Compared are the loss, the
gradients where the card calls them exact, and the bytes that the card promises. ``CRIA_ALL=1 pytest -n0 -qs`` of this
file prints the table.
"""

import functools
import re
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer

from cria_tricks.switches import TECHNIQUES, technique_name
from cria_tricks.techniques import INFERENCE, code_of
from tests import tolerances
from tests.helpers import difference
from tests.plain_scripts import (
    CONDITIONS,
    HEAD_DIM,
    HEADS,
    INNER,
    LAYERS,
    RANK,
    SHARED,
    WIDTH,
    WORDS,
    Found,
    gradients,
    rows_of,
    script,
    step,
)  # fmt: skip
from tests.sweeps import sample

LOAD = """
from transformers import AutoModelForCausalLM, TrainingArguments
model = AutoModelForCausalLM.from_pretrained(base, dtype="{}")
"""
MODEL, IN_16_BITS = LOAD.format("float32"), LOAD.format("float16")
ADAPTED = """
from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
"""
PREPARED = """
from peft import prepare_model_for_kbit_training
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
"""
ARGUMENTS = "arguments = TrainingArguments('plain', max_steps=1, bf16=True, use_cpu=True)"
ONE_STEP = """
import torch
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
ids = torch.arange(3, 19)[None]
model(ids, labels=ids).loss.backward()
optimizer.step()
optimizer.zero_grad()
"""
EAGER = LOAD.format("float32") + "model.set_attn_implementation('eager')"

KEYS = SHARED * HEAD_DIM
MATRICES = LAYERS * [
    (WIDTH, WIDTH),
    (WIDTH, KEYS),
    (WIDTH, KEYS),
    (WIDTH, WIDTH),
    *2 * [(WIDTH, INNER)],
    (INNER, WIDTH),
]
ELEMENTS = sum(wide * high for wide, high in MATRICES)
OF_A_BLOCK = ELEMENTS // LAYERS
NORMS = (2 * LAYERS + 1) * WIDTH
TABLE = WORDS * WIDTH


class Bytes(NamedTuple):
    """The bytes that a card promises to save, and between which two numbers they must lie."""

    what: str
    before: int
    after: int
    least: int
    most: int


def kept(fewer: Callable[[int, int], int]) -> Callable[..., Bytes]:
    """What a forward pass leaves alive shrinks by so much at least, for so many tokens and the bytes of a number."""

    def promise(condition: str, off: Found, on: Found) -> Bytes:
        most = off.kept - fewer(LAYERS * off.tokens, _itemsize(condition))
        return Bytes("kept", off.kept, on.kept, 0, most)

    return promise


def exactly(what: str, promised: Callable[[int], int]) -> Callable[..., Bytes]:
    """One of the counts is what a function makes of the count without the technique."""

    def promise(condition: str, off: Found, on: Found) -> Bytes:
        expected = promised(getattr(off, what))
        return Bytes(what, getattr(off, what), getattr(on, what), expected, expected)

    return promise


def _itemsize(condition: str) -> int:
    return 2 if condition == "autocast" else 4


def checkpointed(also: Callable[[int], int]) -> Callable[..., Bytes]:
    """What is outside of the blocks, each block's input in fp32, and what is kept besides for each token."""

    def promise(condition: str, off: Found, on: Found) -> Bytes:
        longest = max(CONDITIONS[condition])
        of_call = 8 * longest + (8 * longest**2 if condition == "padding" else 0)  # positions, and a bool mask
        blocks = LAYERS * off.tokens * (4 * WIDTH + also(_itemsize(condition)))
        expected = off.kept - off.in_blocks + blocks + of_call
        return Bytes("kept", off.kept, on.kept, expected, expected)

    return promise


def with_more_keys(condition: str, off: Found, on: Found) -> Bytes:
    """A CPU's kernel needs no expanded heads, so only their cost is there; under a mask both ways expand them."""
    more = 0 if condition == "padding" else 2 * LAYERS * off.tokens * (WIDTH - KEYS) * _itemsize(condition)
    return Bytes("kept", off.kept, on.kept, off.kept + more, off.kept + more)


def an_eighth(condition: str, off: Found, on: Found) -> Bytes:
    """Eight micro-batches; autocast's 16-bit copies of the weights are there in each of them."""
    copies = 2 * ELEMENTS if condition == "autocast" else 0
    most = (off.in_blocks - copies) // 8 + copies
    return Bytes("in_blocks", off.in_blocks, on.in_blocks, 0, most)


def packed(condition: str, off: Found, on: Found) -> Bytes:
    """Positions, and not bytes: those of padding go."""
    real = sum(CONDITIONS[condition])
    return Bytes("tokens", off.tokens, on.tokens, real, real)


def nf4(condition: str, off: Found, on: Found) -> Bytes:
    """4.127 bits an element, and for each matrix its 16 levels, the 256 of its scales, and their mean."""
    rest = off.weights - 2 * ELEMENTS
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    exact = ELEMENTS * bits / 8 + len(MATRICES) * 4 * (16 + 256 + 1)
    return Bytes("weights", off.weights, on.weights, rest + int(exact), rest + int(exact) + 4 * len(MATRICES))


class Case(NamedTuple):
    """A technique's other half.

    Attributes:
        without: the same script without it.
        alike: how the loss and the gradients compare, by what the card claims; or how near the losses are.
        promise: the bytes.
        more: what is added to ``PLAIN``, because it cannot train alone.
    """

    without: str
    alike: str | float
    promise: Callable[[str, Found, Found], Bytes]
    more: str = ""


CASES = {
    "mixed_precision": Case(MODEL, 2**-8, kept(lambda n, a: 1)),
    "int8": Case(
        IN_16_BITS + ADAPTED, 2**-8,
        exactly("weights", lambda before: before - ELEMENTS + sum(4 * out for _, out in MATRICES)), ADAPTED,
    ),
    "nf4": Case(IN_16_BITS + ADAPTED, 2**-5, nf4, ADAPTED),
    "lora": Case(MODEL, "at step 0", exactly("of_gradients", lambda _: 4 * 2 * RANK * sum(map(sum, MATRICES)))),
    "head_only": Case(MODEL, "at step 0", exactly("of_gradients", lambda _: 4 * TABLE)),
    "prompt_tuning": Case(MODEL, "other", exactly("of_gradients", lambda _: 4 * 16 * WIDTH)),
    "side_network": Case(
        MODEL, "at step 0", exactly("of_gradients", lambda _: 4 * 2 * (OF_A_BLOCK + 2 * WIDTH + WIDTH**2))
    ),
    "lean_preparation": Case(
        LOAD.format("bfloat16") + PREPARED + ADAPTED + ARGUMENTS, 2**-8,
        exactly("weights", lambda before: before - 2 * (ELEMENTS + TABLE + NORMS)),
    ),
    "stream_layers": Case(
        MODEL + "model.model.layers.requires_grad_(False)", "equal",
        exactly("weights", lambda before: before - (LAYERS - 2) * 4 * OF_A_BLOCK),
    ),
    "fused_lora": Case(MODEL + ADAPTED, "rounded", kept(lambda n, a: a * n * (2 * INNER + 7 * RANK))),
    "fused_blocks": Case(MODEL + ADAPTED, "rounded", kept(lambda n, a: a * n * INNER)),
    "tiled_mlp": Case(MODEL, "rounded", kept(lambda n, a: a * n * 4 * INNER)),
    "flash_attention": Case(EAGER, "rounded", kept(lambda n, a: 1)),
    "expand_kv": Case(MODEL, "rounded", with_more_keys),
    "gradient_checkpointing": Case(MODEL, "equal", checkpointed(lambda a: 0)),
    "activation_offload": Case(MODEL, "equal", exactly("saved", lambda _: 0)),
    "keep_attention": Case(MODEL, "equal", checkpointed(lambda a: a * WIDTH + 4 * HEADS)),
    "compile": Case(
        MODEL, "rounded", lambda condition, off, on: Bytes("saved", off.saved, on.saved, 0, off.saved - 1)
    ),
    "packing": Case(MODEL, "rounded", packed),
    "chunked_loss": Case(MODEL, "rounded", kept(lambda n, a: 4 * n // LAYERS * WORDS)),
    "gradient_accumulation": Case(MODEL, "rounded", an_eighth),
    "adamw_8bit": Case(
        MODEL, "equal",
        # The Trainer leaves the embedding in 32 bits. Each 8-bit state has a table of 256 levels.
        exactly("states", lambda _: ELEMENTS * 2 + ELEMENTS // 32 + len(MATRICES) * 2048 + 8 * (TABLE + NORMS)),
    ),
    "paged_optimizer": Case(MODEL, "equal", exactly("states", lambda before: before)),  # a CPU pages nothing
    "optimizer_in_backward": Case(MODEL + ONE_STEP, "loss alone", exactly("of_gradients", lambda _: 0)),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A narrow Llama of three blocks, so that two slots are fewer than all; its config leaves the KV cache on."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=SHARED, vocab_size=WORDS, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    assert config.use_cache
    folder = tmp_path_factory.mktemp("narrow")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


BY_NAME = {technique_name(trick): code_of(trick) for trick in (*TECHNIQUES, *INFERENCE)}
ALIKE = {"exact": "equal", "approximate": 2**-5, "reparametrised": "at step 0"}
"""How the numbers compare by a card's claim; all other claims are exact within rounding."""


def by_claim(technique: ModuleType) -> Case:
    """The case of a technique without a row in the table: its numbers by its claim; its own test has its bytes."""
    declared = technique.TECHNIQUE
    adapted = any("peft=lora" in needs for needs in declared.needs.values())
    alike = ALIKE.get(declared.claim, "rounded")
    return Case(MODEL + ADAPTED if adapted else MODEL, alike, exactly("tokens", lambda tokens: tokens))


for technique in TECHNIQUES:
    if technique_name(technique) != "layer_by_layer":
        CASES.setdefault(technique_name(technique), by_claim(technique))
# Arguments are a Trainer's, so in a loop of one's own they do nothing.
SCRIPTS = [
    (name, condition)
    for name in CASES
    for condition in CONDITIONS
    if name != "compile"
    and not (condition == "own loop" and re.search(r"arguments = |\(Trainer\)", BY_NAME[name].PLAIN))
]
# Each way of calling a block is compiled anew, for 10 to 30 s.
SCRIPTS += [("compile", condition) for condition in sample(CONDITIONS, 1)]


@functools.cache
def without(code: str, base: str, condition: str, *, compiled: bool, new: bool) -> Found:
    return step(code, base, condition, compiled=compiled, new=new)


def trained_by(model: torch.nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize(("name", "condition"), SCRIPTS)
def test_a_script_with_it_learns_what_the_same_script_learns_without_it(name, condition, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    case = CASES[name]
    kind = {"compiled": name == "compile", "new": case.alike == "at step 0"}
    other = "Trainer" if name == "mixed_precision" and condition == "autocast" else condition  # the same rows, in fp32
    off = without(case.without, base, other, **kind)
    on = step(BY_NAME[name].PLAIN + case.more, base, condition, **kind)
    near = compare(case.alike, condition, off, on)
    promised = case.promise(condition, off, on)
    print(
        f"\n| {name} | {condition} | {off.loss:.7f} | {on.loss:.7f} | {case.alike} | {near} | {promised.what} "
        f"| {promised.before:,} | {promised.after:,} |"
    )
    assert promised.least <= promised.after <= promised.most, promised


def compare(alike: str | float, condition: str, off: Found, on: Found) -> str:
    """Compare losses and gradients as a card claims, and return how far the gradients are from each other."""
    apart = abs(on.loss - off.loss) / off.loss
    if isinstance(alike, float):
        assert 0 < apart < alike
        return ""
    if alike == "other":
        assert apart > 0
        return ""
    rounded = alike == "rounded"
    assert apart <= (tolerances.PLAIN_LOSS[condition] if rounded else 0)
    if alike in ("at step 0", "loss alone"):
        return ""
    assert on.gradients.keys() == off.gradients.keys() == trained_by(on.known["model"])
    furthest = max(difference(on.gradients[name], off.gradients[name]) for name in off.gradients)
    assert furthest <= (tolerances.PLAIN_GRADIENT[condition] if rounded else 0)
    return f"{furthest:.1g}"


@pytest.mark.parametrize("condition", CONDITIONS)
def test_two_micro_batches_layer_by_layer_are_two_passes(condition, base):
    known = script(BY_NAME["layer_by_layer"].PLAIN, base, condition)
    model, batch = known["model"].train(), known["collate"](known["rows"])

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=condition == "autocast"):
            return model(**batch).loss

    model.zero_grad()
    known["one_pass"](model.model.layers, [loss, loss], torch.Tensor.backward)
    ours = gradients(model)
    model.zero_grad()
    for _ in range(2):
        loss().backward()
    plain = gradients(model)
    assert ours.keys() == plain.keys() == trained_by(model)
    assert all(torch.equal(ours[name], gradient) for name, gradient in plain.items())
    print(f"\n| layer_by_layer | {condition} | {loss():.7f} | {loss():.7f} | equal | 0 | time alone | | |")


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("name", [technique_name(technique) for technique in INFERENCE])
def test_an_answer_is_the_one_that_plain_attention_finds_likeliest(name, condition, base):
    """Plain attention without a cache reads prompt and answer at once; padded prompts bring their mask."""
    prompts = [row["input_ids"] for row in rows_of(condition)]
    padding = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    ids = torch.tensor([[2] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * len(prompt) for pad, prompt in zip(padding, prompts, strict=True)])
    with torch.autocast("cpu", torch.bfloat16, enabled=condition == "autocast"):
        known = script(BY_NAME[name].PLAIN, base, condition, inputs={"input_ids": ids, "attention_mask": mask})
    answer = known["answer"]
    assert torch.equal(answer[:, :-2], ids)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype="float32", attn_implementation="eager")
    seen = torch.cat((mask, torch.ones(len(ids), 1, dtype=int)), 1)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = plain(answer[:, :-1], attention_mask=seen, position_ids=positions).logits[:, -2:]
    behind = logits.amax(-1) - logits.gather(-1, answer[:, -2:, None])[..., 0]
    assert behind.max() <= tolerances.PLAIN_LOGITS, "no word is clearly likelier"
    print(f"\n| {name} | {condition} | | | rounded | {behind.max():.1g} | time alone | | |")


def test_every_technique_is_here():
    assert {*CASES, "layer_by_layer", *map(technique_name, INFERENCE)} == BY_NAME.keys()


def test_the_chunked_trainer_takes_adapters_and_evaluates(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on = script(ADAPTED.replace("\n", "", 1) + BY_NAME["chunked_loss"].PLAIN, base, "autocast")
    dtypes = []
    on["model"].model.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda *given: dtypes.append(given[2].dtype)
    )
    plain = Trainer(on["model"], on["arguments"], data_collator=on["collate"])
    losses = [trainer.evaluate(on["rows"])["eval_loss"] for trainer in (on["trainer"], plain)]
    assert losses[0] == pytest.approx(losses[1], rel=tolerances.PLAIN_LOSS["autocast"])
    on["trainer"].train()
    assert set(dtypes) == {torch.bfloat16}, "the products are in 16 bits, in the Trainer and in ours"
