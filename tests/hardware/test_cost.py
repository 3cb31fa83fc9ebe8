"""Bytes as an operation-by-operation count gives them, seconds as the sum of what holds each part up, and the price."""

from dataclasses import replace

import pytest
import torch

from cria_tricks.bill import moved_bytes, step_time
from cria_tricks.hardware import T4, reached
from cria_tricks.hardware.cards import CARDS
from cria_tricks.hardware.reached import ON_A_T4, SPREAD
from cria_tricks.measure.counting import Traffic
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.recipes import capstone
from cria_tricks.switches import adamw_8bit, chunked_loss, folds, nf4
from cria_tricks.techniques import fused_lora
from cria_tricks.techniques.activation_offload import Offloaded
from cria_tricks.techniques.chunked_loss import chunked_cross_entropy
from tests.hardware import models
from tests.sweeps import sample

WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2}
LORA = ["tricks.peft=lora", "lora.r=2"]
BLOCKS = ["tricks.fused_blocks=true"]
FUSED = ["tricks.fused_lora=true", *BLOCKS]
TILED = "tricks.tiled_mlp=16"
MODES = {
    "16 bits": ["tricks.peft=lora", "tricks.precision=bf16", "lora.r=2"],
    "16 bits, lean": ["tricks.peft=lora", "tricks.precision=bf16", "tricks.lean_preparation=true", "lora.r=2"],
    "16 bits, fused": [*LORA, "tricks.precision=bf16", "tricks.fused_lora=true"],
    "16 bits, lean, fused": [*LORA, "tricks.precision=bf16", "tricks.lean_preparation=true", "tricks.fused_lora=true"],
    "16 bits, lean, blocks": [*LORA, "tricks.precision=bf16", "tricks.lean_preparation=true", *BLOCKS],
    "16 bits, lean, all fused": [*LORA, "tricks.precision=bf16", "tricks.lean_preparation=true", *FUSED],
    "16 bits, lean, tiled": [*LORA, "tricks.precision=bf16", "tricks.lean_preparation=true", TILED],
    "fp32, all fused, tiled": [*LORA, *FUSED, TILED],
    "fp32": LORA,
    "fp32, all fused": [*LORA, *FUSED],
    "fp32, fused": [*LORA, "tricks.fused_lora=true"],
    "full, 16-bit products": ["tricks.precision=bf16"],
    "full": [],
}
CHOSEN = dict(sample(MODES.items(), 6))


def in_one_block(recipe: Recipe, count, tokens: int, **widths) -> float:
    """What one more block adds for one more position: differences, so that all that is there once drops out."""

    def of(layers: int, length: int) -> int:
        model, plan = models.model(recipe, "sdpa", **{**WIDE, **widths, "num_hidden_layers": layers})
        return count(model, plan, models.batch(1, length))

    added = [of(3, n) - of(2, n) for n in (tokens, 2 * tokens)]
    return (added[1] - added[0]) / tokens


def moved(way: str):
    def count(model, plan, inputs) -> int:
        with Traffic() as forward:
            loss = models.loss(model, plan, inputs)
        with Traffic() as backward:
            loss.backward()
        return {"forward": forward, "backward": backward}[way].others

    return count


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("settings", CHOSEN.values(), ids=CHOSEN)
def test_what_lies_between_products_moves_so_many_bytes(settings, way, monkeypatch):
    monkeypatch.setattr(fused_lora, "_of_adapter", lambda left, right, dtype: left.mT @ right)  # as a GPU does it
    recipe = with_settings(Recipe(), settings)
    step = folds.step_of(recipe, models.shape(**WIDE), T4)
    forward, backward = moved_bytes.between(step)
    counted = in_one_block(recipe, moved(way), 64)
    # Frozen fp32 norms have no gradient of their own; the constants are those of trained ones.
    near = 0.07 if settings in (MODES["fp32"], MODES["fp32, fused"]) else 0.01
    if TILED in settings:
        near = 0.03  # tiles of 16 tokens: what is done once a tile is much for each of them
    assert {"forward": forward, "backward": backward}[way] == pytest.approx(counted, rel=near)


@pytest.mark.parametrize("settings", CHOSEN.values(), ids=CHOSEN)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_activation_offload_carries_so_many_bytes(settings, checkpointed):
    recipe = with_settings(Recipe(), [*settings, f"tricks.gradient_checkpointing={str(checkpointed).lower()}"])

    def count(model, plan, inputs) -> int:
        offloaded = Offloaded([*model.parameters(), *model.buffers()])
        with offloaded:
            loss = models.loss(model, plan, inputs)
        loss.backward()
        return offloaded.bytes_to_host

    step = folds.step_of(recipe, models.shape(**WIDE), T4)
    assert moved_bytes.saved(step) == pytest.approx(in_one_block(recipe, count, 64), rel=0 if checkpointed else 0.15)


@pytest.mark.parametrize("kind", ["full", "chunked"])
def test_a_logit_moves_so_many_bytes(kind):
    def count(words: int) -> int:
        hidden = torch.randn(256, 8, dtype=torch.bfloat16, requires_grad=True)
        head, labels = torch.randn(words, 8, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.long)
        with Traffic() as seen:
            if kind == "chunked":
                loss = chunked_cross_entropy(hidden, head, labels)
            else:
                loss = torch.nn.functional.cross_entropy((hidden @ head.T).float(), labels, reduction="sum")
            loss.backward()
        return seen.others

    counted = (count(4000) - count(2000)) / 2000 / 256
    # The counter takes a gather or a scatter of one label for a pass over all logits, and logsumexp's three for one.
    assert {"full": moved_bytes.LOGIT, "chunked": chunked_loss.LOGIT_BYTES}[kind] == pytest.approx(counted, abs=8)


@pytest.mark.parametrize("settings", [["tricks.precision=bf16"], []], ids=["16 bits", "fp32"])
def test_a_score_moves_so_many_bytes_when_no_kernel_keeps_it(settings):
    recipe = with_settings(Recipe(), settings)

    def all_of(tokens: int) -> int:
        model, plan = models.model(recipe, "eager", **{**WIDE, "num_hidden_layers": 1})
        with Traffic() as seen:
            models.loss(model, plan, models.batch(1, tokens)).backward()
        return seen.others + seen.products

    short, middle, long = (all_of(tokens) for tokens in (64, 128, 192))
    squares = (long - 2 * middle + short) / 2 / 64**2 / WIDE["num_attention_heads"]
    assert sum(moved_bytes.SCORE) == pytest.approx(squares, rel=0.1)


def test_a_trained_weight_moves_so_many_bytes_in_a_step_of_adamw():
    weight = torch.nn.Parameter(torch.randn(1 << 16))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()  # makes the states
    with Traffic() as clipping:
        torch.nn.utils.clip_grad_norm_([weight], 1.0, foreach=False)
    states = (state for state in optimizer.state[weight].values() if state.ndim)
    before = {tensor: tensor.detach().clone() for tensor in (weight, weight.grad, *states)}
    with Traffic() as stepping:
        optimizer.step()
    # One kernel over lists: it returns nothing, so what it has written is what has changed.
    written = sum(tensor.nbytes for tensor, old in before.items() if not torch.equal(tensor, old))
    assert clipping.others / weight.numel() == pytest.approx(moved_bytes.CLIP, abs=0.1)
    assert (stepping.others + written) / weight.numel() == pytest.approx(moved_bytes.ADAMW, abs=0.1)


def test_stored_bytes_are_those_of_the_cards():
    for settings, bits in (
        (["quantization=nf4"], 4.5),
        (["quantization=nf4", "double_quantization=true"], 4.127),
        (["quantization=int8"], 8),
        (["precision=fp16"], 16),
        ([], 32),
    ):
        recipe = with_settings(Recipe(), ["tricks.peft=lora", *(f"tricks.{setting}" for setting in settings)])
        step = folds.step_of(recipe, find_shape("llama-3.2-1b"), T4)
        assert 8 * step.stored_itemsize == pytest.approx(bits, abs=5e-4)


@pytest.mark.parametrize("double", [False, True])
def test_seconds_read_the_bytes_that_the_bill_stores_but_for_the_tables(double):
    settings = ["tricks.peft=lora", "tricks.quantization=nf4", f"tricks.double_quantization={str(double).lower()}"]
    read = folds.step_of(with_settings(Recipe(), settings), find_shape("llama-3.2-1b"), T4).stored_itemsize
    elements = 3 * 64 * 256  # whole blocks, and whole blocks of scales
    # Each weight has a table of 16 levels; doubly quantised, also one of 256 for its scales, and their mean.
    tables = 4 * (16 + double * (256 + 1))
    assert elements * read == nf4.stored_bytes(elements, double) - tables


def test_a_part_takes_the_longer_of_its_two_times_and_parts_are_added():
    card = CARDS["t4"]
    found = folds.time_of(capstone(card.device), find_shape("llama-3.2-1b"), card)
    *working, launches = found.parts
    for part in working:
        ideal = max(part.flops / 65e12, part.bytes / 320e9) / ON_A_T4.half
        assert part.seconds == pytest.approx(ideal + part.link_bytes / (16e9 * reached.LINK))
        assert part.why
    assert (launches.name, launches.seconds) == ("launches", 0), "these rows keep the card busier than the host"
    assert found.seconds == pytest.approx(sum(part.seconds for part in found.parts))
    assert found.tokens == 8 * 2048


USUAL = ["expand_kv=false", "lean_preparation=false"]
"""As a model is usually prepared; on a T4 the recipe asks for both."""


def part(name: str, settings: list[str], card: str = "t4", **options) -> step_time.StepPart:
    recipe = with_settings(capstone(CARDS[card].device), [f"tricks.{setting}" for setting in [*USUAL, *settings]])
    found = folds.time_of(recipe, find_shape("llama-3.2-1b"), CARDS[card], **options)
    return next(part for part in found.parts if part.name == name)


def test_what_toggles_do_to_a_step():
    shape = find_shape("llama-3.2-1b")
    sent = part("offload", ["activation_offload=true"])
    assert sent.link_bytes == 2 * 8 * 2048 * shape.layers * shape.width * 4, "inputs of blocks, in fp32 as prepared"
    assert part("head", [], trained_share=0.5).flops * 2 == part("head", ["chunked_loss=false"]).flops
    assert part("loss", [], trained_share=0.5).bytes < part("loss", ["chunked_loss=false"]).bytes
    assert part("unpacking", ["double_quantization=false"]).bytes > part("unpacking", []).bytes > 0
    with pytest.raises(StopIteration):
        part("unpacking", ["quantization=none"])
    assert part("between products", ["compile=true"]).bytes < part("between products", []).bytes / 3
    saved = part("optimizer", ["optimizer=adamw"]).bytes - part("optimizer", []).bytes
    assert saved == (moved_bytes.ADAMW - adamw_8bit.STEP_BYTES) * 11_272_192
    with pytest.raises(StopIteration):
        part("blocks again", ["gradient_checkpointing=false"])
    together = part("gradients of the other cards", [], cards=4)
    assert together.link_bytes == 2 * 3 / 4 * 4 * 11_272_192


def test_copies_that_overlap_take_the_time_by_which_they_outlast_the_blocks():
    shape, card = find_shape("llama-3.2-1b"), CARDS["t4"]
    recipe = with_settings(capstone(T4), [f"tricks.{setting}" for setting in USUAL])
    overlapped = with_settings(recipe, ["tricks.activation_offload=overlapped"])
    synchronous = with_settings(recipe, ["tricks.activation_offload=true"])
    plain, hidden, added = (folds.time_of(one, shape, card).seconds for one in (recipe, overlapped, synchronous))
    assert hidden == plain < added
    travel = part(step_time.TRAVEL, ["activation_offload=overlapped"])
    assert travel.link_bytes == 2 * 8 * 2048 * (shape.layers - 1) * shape.width * 4
    slow = replace(card, link_rate=card.link_rate / 1000)
    seconds = {one.name: one.seconds for one in folds.time_of(overlapped, shape, slow).parts}
    blocks = sum(seconds[name] for name in step_time.BLOCKS if name in seconds)
    link = travel.link_bytes / (slow.link_rate * slow.reached.link)
    assert seconds[step_time.TRAVEL] == pytest.approx(link - blocks)


def test_each_pass_hides_its_own_half_of_the_copies():
    """Checkpointed products of frozen weights take a third of their time forward, so that pass waits for longer."""
    busy = {"blocks forward": 2.0, "blocks again": 2.0, "blocks backward": 2.0, "attention": 3.0}
    parts = [step_time.StepPart(name, 0, 0, 0, seconds, "") for name, seconds in busy.items()]

    def waits(copies, parts=parts):
        return step_time.beside_the_blocks(step_time.StepPart(step_time.FETCHED, 0, 0, 0, copies, ""), parts).seconds

    assert waits(6.0) == 0, "3 s of 9 are forward, and as long are the copies there"
    assert waits(8.0) == pytest.approx(1), "all copies take less time than the blocks, and the forward pass waits"
    assert waits(14.0) == pytest.approx(4 + 1)
    assert waits(14.0, [parts[0], parts[3]]) == pytest.approx(14 - 5), "one pass, so all copies are in it"


def test_short_rows_are_not_offloaded_because_their_copies_would_take_time():
    """At the least length the blocks outlast both the copies and the host's launches; one token less, and not."""
    shape = find_shape("smollm2")
    recipe = with_settings(capstone(T4), ["tricks.activation_offload=overlapped", "train.batch_size=2"])
    for card in (CARDS["t4"], CARDS["a100"]):
        least = folds.travels_from(recipe, shape, card.device)
        assert least % 2 == 0, "two rows, equally long"
        for row, enough in ((least // 2 - 1, False), (least // 2, True), (2 * least, True)):
            step = replace(folds.step_of(recipe, shape, card.device, 2 * least), tokens=row)
            assert step.travelling_blocks == shape.layers - 1
            assert folds.hidden(step, card) is enough
    card = CARDS["a100"]
    slow = folds.least_tokens(step, replace(card, link_rate=card.link_rate / 50))
    assert slow > folds.least_tokens(step, card), "a slower link needs rows with more attention"
    assert folds.least_tokens(step, replace(card, link_rate=1e3)) == 2 * 2**20


def test_on_a_t4_grouped_rows_without_a_mask_pay_for_the_math_kernel():
    grouped, expanded = part("attention", []), part("attention", ["expand_kv=true"])
    assert "math attention holds all" in grouped.why
    assert "memory-efficient kernel, which leaves out" in expanded.why
    assert grouped.bytes > 100 * expanded.bytes
    assert part("attention", [], card="l4").why.startswith("the flash kernel")


def test_a_fused_kernel_leaves_out_the_half_that_a_token_may_not_see_unless_a_mask_says_what_it_is():
    recipe, shape, card = capstone(CARDS["l4"].device), find_shape("llama-3.2-1b"), CARDS["l4"]
    one, two = (
        next(
            part.flops
            for part in folds.time_of(with_settings(recipe, [f"train.batch_size={rows}"]), shape, card).parts
            if part.name == "attention"
        )
        for rows in (1, 2)
    )
    assert two == 4 * one, "twice the rows, which have a mask"


def kernel_of(recipe: Recipe, shape) -> tuple[str, bool]:
    step = folds.step_of(recipe, shape, T4, 512)
    return step.kernel, not step.maskless


@pytest.mark.parametrize(
    ("settings", "kernel", "masked"),
    [
        (["attention=eager"], "eager", True),
        (["attention=sdpa"], "math", False),
        (["attention=sdpa", "packing=true"], "memory-efficient", False),
        (["attention=sdpa", "train.batch_size=2"], "memory-efficient", True),
        (["attention=flash_attention_2"], "flash", False),
    ],
)
def test_the_kernel_follows_the_rows(settings, kernel, masked):
    recipe = with_settings(Recipe(), [s if s.startswith("train") else f"tricks.{s}" for s in settings])
    assert kernel_of(recipe, find_shape("llama-3.2-1b")) == (kernel, masked)


@pytest.mark.parametrize(("window", "masked"), [(0, False), (1, True), (511, True), (512, True), (513, False)])
def test_a_window_is_a_mask_if_a_row_is_longer(window, masked):
    shape = replace(find_shape("llama-3.2-1b"), window=window)
    for attention, kernel, has in (
        ("eager", "eager", True),
        ("sdpa", "memory-efficient" if masked else "math", masked),
        ("flash_attention_2", "flash", False),
    ):
        recipe = with_settings(Recipe(), [f"tricks.attention={attention}"])
        assert kernel_of(recipe, shape) == (kernel, has)


@pytest.mark.parametrize(("settings", "kernel"), [([], "math"), (["tricks.expand_kv=true"], "memory-efficient")])
def test_keys_of_as_many_heads_need_not_be_repeated(settings, kernel):
    recipe = with_settings(Recipe(), ["tricks.attention=sdpa", *settings])
    grouped = find_shape("llama-3.2-1b")
    assert kernel_of(recipe, grouped) == (kernel, False)
    alike = replace(grouped, kv_heads=grouped.heads)
    assert kernel_of(recipe, alike) == ("memory-efficient", False)


def test_one_card_and_tokens_that_are_all_trained_are_what_is_meant_when_nothing_is_said():
    card, shape = CARDS["t4"], find_shape("smollm2")
    recipe = with_settings(capstone(card.device), ["tricks.chunked_loss=true"])
    assert folds.time_of(recipe, shape, card, 512) == folds.time_of(recipe, shape, card, 512, 1.0, 1)
    assert folds.time_of(recipe, shape, card, 512) != folds.time_of(recipe, shape, card, 512, 0.9, 1)
    assert folds.time_of(recipe, shape, card, 512) != folds.time_of(recipe, shape, card, 512, 1.0, 2)


def test_emulated_bf16_is_computed_in_fp32():
    t4, l4 = CARDS["t4"], CARDS["l4"]
    assert t4.flops("bf16") == t4.flops("fp32") < t4.flops("fp16")
    assert l4.flops("bf16") == l4.flops("fp16") > l4.flops("fp32")


def test_a_step_is_a_range_around_its_middle():
    card = CARDS["t4"]
    found = folds.time_of(capstone(card.device), find_shape("llama-3.2-1b"), card)
    assert found.high / found.low == pytest.approx(SPREAD)
    assert found.low * found.high == pytest.approx(found.seconds**2)


@pytest.mark.parametrize(
    ("card", "precision", "spread"),
    [
        ("t4", "fp16", SPREAD),
        ("t4", "fp32", reached.WIDE),
        ("t4", "bf16", reached.WIDE),
        ("a100", "bf16", SPREAD),
        ("l4", "bf16", reached.WIDE),
    ],
)
def test_the_range_is_narrow_only_where_public_runs_back_it(card, precision, spread):
    assert CARDS[card].spread(precision) == spread


def test_short_rows_wait_for_the_host_that_starts_kernels():
    card, shape = CARDS["a100"], find_shape("smollm2")
    recipe = with_settings(capstone(card.device), ["tricks.gradient_accumulation=1"])
    for tokens, waits in ((16, True), (8192, False)):
        found = folds.time_of(recipe, shape, card, tokens)
        *working, launches = found.parts
        busy = sum(part.seconds for part in working)
        assert (launches.seconds > 0) is waits
        started = sum(part.launches for part in step_time.counts(folds.step_of(recipe, shape, card.device, tokens)))
        assert found.seconds == pytest.approx(max(busy, started * card.reached.launch))


def test_a_cpu_spends_the_launches_itself():
    cpu = replace(CARDS["a100"], device=replace(T4, kind="cpu"))
    recipe, shape = capstone(T4), find_shape("smollm2")
    *working, launches = folds.time_of(recipe, shape, cpu, 2048).parts
    started = sum(part.launches for part in step_time.counts(folds.step_of(recipe, shape, cpu.device, 2048)))
    assert launches.seconds == pytest.approx(started * cpu.reached.launch)
    assert sum(part.seconds for part in working) > 0


def test_tokens_of_a_run():
    recipe = with_settings(Recipe(), ["train.epochs=1.5", "train.batch_size=2", "tricks.gradient_accumulation=4"])
    assert step_time.run_tokens(recipe, 101, 100) == 152 * 100
    assert step_time.run_tokens(with_settings(recipe, ["train.max_steps=7"]), 101, 100) == 7 * 8 * 100


def test_seconds_grow_with_every_toggle_that_only_adds_work():
    shape, card = find_shape("llama-3.2-1b"), CARDS["l4"]
    plain = Recipe(tricks={"peft": "lora", "precision": "bf16", "attention": "sdpa"})
    base = folds.time_of(plain, shape, card).seconds
    for setting in ("gradient_checkpointing=true", "activation_offload=true", "quantization=nf4"):
        assert folds.time_of(with_settings(plain, [f"tricks.{setting}"]), shape, card).seconds > base, setting
    assert folds.step_of(plain, shape, T4).repeated_blocks == 0


@pytest.mark.parametrize("settings", [[], ["tricks.expand_kv=true"], ["train.batch_size=2"]])
def test_on_a_cpu_torchs_attention_is_the_flash_kernel_as_the_bill_says(settings):
    cpu = replace(T4, kind="cpu", capability=(0, 0))
    recipe = with_settings(Recipe(), ["tricks.attention=sdpa", *settings])
    shape = find_shape("smollm2")
    assert folds.step_of(recipe, shape, cpu, 256).kernel == "flash"
    assert folds.step_of(with_settings(recipe, ["tricks.attention=eager"]), shape, cpu, 256).kernel == "eager"
