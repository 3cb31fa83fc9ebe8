"""Streamed layers: the bits of resident weights, two blocks on the device, each fetched once a pass and in time."""

import copy
import itertools
import mmap
import os
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from cria_tricks.adapter.merge import CPU
from cria_tricks.bill import moved_bytes
from cria_tricks.common.errors import BadInput, Interrupted
from cria_tricks.hardware.cards import CARDS
from cria_tricks.load.host_memory import MappedFile, Pinned
from cria_tricks.load.streaming import into_slots, move_into, places_of, size_of
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import folds
from cria_tricks.switches.stream_layers import SLOTS
from cria_tricks.techniques.stream_layers import Copies, CopiesOnCpu, Streamed
from tests.helpers import prepare, train, trained_weights
from tests.sweeps import sample
from tests.test_trainer import InterruptAt

ON = ("tricks.peft=lora", "tricks.gradient_checkpointing=true")
BLOCKS = 5
STEPS = 6


class Block(nn.Module):
    """A block of two frozen matrices and an adapter."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.one = nn.Linear(width, 2 * width, bias=False)
        self.two = nn.Linear(2 * width, width)
        for weight in self.parameters():
            weight.requires_grad_(False)
        self.adapter = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.two(torch.relu(self.one(y))) + self.adapter(y)


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(BLOCKS)]


def streamed(
    resident: list[nn.Module], copies: Copies, slots: list[torch.Tensor] | None = None
) -> tuple[list, Streamed]:
    """Copies of the blocks whose frozen matrices are in buffers, and what fetches them."""
    found = copy.deepcopy(resident)
    memory = Pinned(for_a_card=False)
    buffers = []
    for block in found:
        places = places_of(block)
        buffers.append(memory.buffer(size_of(places)))
        move_into(buffers[-1], places, filled=False)
    slots = slots or [torch.full((buffers[0].nbytes,), 255, dtype=torch.uint8) for _ in range(SLOTS)]  # NaN, if read
    into_slots(found, slots)
    copies.fetching = Streamed(found, buffers, slots, copies)
    return found, copies.fetching


def loss(through: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    for block in through:
        x = checkpoint(block, x, use_reentrant=False)
    return x.square().sum()


@pytest.mark.parametrize("source", ["resident", "memory"])
def test_math(source):
    """Loss and gradients of several passes, training and evaluation in turn, equal the resident ones bit for bit."""
    resident = blocks()
    ours, fetching = streamed(resident, CopiesOnCpu())
    if source == "resident":  # the test itself: other bytes would be seen
        fetching.buffers[3].view(torch.float32)[7] += 1
    for seed in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            evaluated = [loss(each, x) for each in (resident, ours)]
        losses = [loss(each, x) for each in (resident, ours)]
        for each in losses:
            each.backward()
        pairs = list(zip(nn.ModuleList(resident).parameters(), nn.ModuleList(ours).parameters(), strict=True))
        gradients = [(mine.grad, theirs.grad) for mine, theirs in pairs if mine.requires_grad]
        assert len(gradients) == BLOCKS
        alike = [torch.equal(*pair) for pair in (evaluated, losses, *gradients)]
        assert all(alike) == (source == "memory")


class Recorded(Copies):
    """Stand-ins for a stream and its events: a log of what is queued where, in its order."""

    def __init__(self, log: list, numbers):
        self.log = log
        self.numbers = numbers

    def now(self):
        event = next(self.numbers)
        self.log.append(("free", event, self.fetching.at))
        return event

    def copy(self, slot, buffer, free):
        arrived = next(self.numbers)
        self.log.append(("copy", slot.data_ptr(), buffer.data_ptr(), free, arrived))
        slot.copy_(buffer)
        return arrived

    def wait(self, arrived):
        self.log.append(("wait", arrived))


def test_mechanism():
    """Each pass fetches a block once, one ahead of its use, but not the two that are there."""
    resident = blocks()
    log: list = []
    ours, fetching = streamed(resident, Recorded(log, itertools.count()))
    ran: list[int] = []
    for number, block in enumerate(ours):
        block.one.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    numbers = {buffer.data_ptr(): number for number, buffer in enumerate(fetching.buffers)}

    def a_pass(go) -> tuple[list[int], list[int]]:
        log.clear()
        ran.clear()
        go()
        return ran[:], [numbers[entry[2]] for entry in log if entry[0] == "copy"]

    x = torch.ones(4, 16)
    up, down = list(range(BLOCKS)), list(range(BLOCKS))[::-1]
    # The first micro-batch begins with empty slots. Every later one finds the first two blocks there.
    assert a_pass(lambda: loss(ours, x).backward()) == (up + down, [0, 1, 2, 3, 4, 2, 1, 0])
    before = fetching.fetched, fetching.bytes_to_device
    assert a_pass(lambda: loss(ours, x).backward()) == (up + down, [2, 3, 4, 2, 1, 0])
    fetches = 2 * (BLOCKS - SLOTS)
    assert fetching.fetched - before[0] == fetches
    assert fetching.bytes_to_device - before[1] == fetches * fetching.buffers[0].nbytes
    with torch.no_grad():
        assert a_pass(lambda: loss(ours, x)) == (up, [2, 3, 4])
        assert a_pass(lambda: loss(ours, x)) == (up, [0, 1, 2, 3, 4])


def test_copies_and_blocks_wait_for_each_other():
    """A copy into a slot waits for an event recorded after the block in it ran; a block waits for its own arrival."""
    resident = blocks()
    log: list = []
    ours, fetching = streamed(resident, Recorded(log, itertools.count()))
    for number, block in enumerate(ours):
        block.two.register_forward_hook(lambda *_, number=number: log.append(("ran", number)))
        block.norm.register_full_backward_hook(lambda *_, number=number: log.append(("back", number)))
    loss(ours, torch.ones(4, 16)).backward()
    numbers = {buffer.data_ptr(): number for number, buffer in enumerate(fetching.buffers)}
    slots = {slot.data_ptr(): number for number, slot in enumerate(fetching.slots)}
    there = dict.fromkeys(range(SLOTS), -1)
    looked = 0
    asked = dict(entry[1:] for entry in log if entry[0] == "free")  # event: the block that ran then
    for place, entry in enumerate(log):
        if entry[0] != "copy":
            continue
        _, slot, buffer, free, arrived = entry
        leaves, comes = there[slots[slot]], numbers[buffer]
        there[slots[slot]] = comes
        assert comes % SLOTS == slots[slot]
        waited = log.index(("wait", arrived))
        assert place < waited < log.index(("ran", comes), place)
        if leaves < 0:
            continue
        looked += 1
        assert abs(asked[free] - comes) == 1, "it is asked for while its neighbour runs"
        freed = log.index(("free", free, asked[free]))
        assert freed < place
        done = "ran" if leaves < comes else "back"
        assert (done, leaves) in log[:freed]
    assert looked == 6


def test_only_frozen_matrices_leave_the_device():
    block = blocks()[0]
    places = places_of(block)
    held = [place.holder for place in places]
    assert [weight is held[number] for number, weight in enumerate((block.one.weight, block.two.weight))] == [
        True,
        True,
    ]
    assert len(held) == 2, "norms, biases and adapters stay"
    assert size_of(places) == block.one.weight.nbytes + block.two.weight.nbytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux'")
def test_a_mapped_file_leaves_the_process():
    memory = MappedFile()
    size = 64 * 2**20
    pages = size // mmap.PAGESIZE

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    before = resident()
    buffer = memory.buffer(size)
    buffer.fill_(7)
    assert resident() - before > 0.9 * pages
    memory.done_with(buffer)
    assert resident() - before < 0.1 * pages
    assert buffer[-1].item() == 7, "they come back from the file"
    other = memory.buffer(100)
    other.fill_(8)
    assert {int(buffer[0]), int(buffer[-1]), *other.tolist()} == {7, 8}


def test_a_full_disk_is_said_before_anything_is_written(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(BadInput, match=r"no room for 1\.0 GiB \(No space left on device\); set TMPDIR"):
        MappedFile().buffer(2**30)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A Llama of five narrow blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=BLOCKS, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        pad_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("deep")
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200KB")  # several files, with an index
    return folder


SETS = {
    "fp32": (),
    "bf16": ("tricks.precision=bf16", "tricks.lean_preparation=true"),
    "nf4": ("tricks.quantization=nf4", "tricks.double_quantization=true", "tricks.precision=bf16"),
    "int8": ("tricks.quantization=int8",),
    "fused": (
        "tricks.quantization=nf4", "tricks.fused_lora=true", "tricks.fused_blocks=true", "tricks.tiled_mlp=5",
        "tricks.chunked_loss=true", "tricks.attention=sdpa", "tricks.keep_attention=true",
        "tricks.gradient_accumulation=3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sample(SETS, 3))
def test_switch(deep, rows, tmp_path, name):
    """A whole run equals the resident one: losses, evaluations, adapters; also when it was stopped in the middle."""
    sets = (*ON, *SETS[name], f"train.max_steps={STEPS}", "train.eval_steps=3", "train.save_steps=1000")
    runs = {}
    for stream in ("false", "true", "file"):
        run, loaded = train(deep, rows, tmp_path / stream, *sets, f"tricks.stream_layers={stream}", eval_rows=rows[:3])
        said = [{key: value for key, value in one.items() if key in SAME} for one in run.history]
        runs[stream] = said, trained_weights(loaded)
    assert len(runs["false"][0]) > STEPS
    for stream in ("true", "file"):
        assert runs[stream][0] == runs["false"][0]
        for key, weight in runs["false"][1].items():
            assert torch.equal(runs[stream][1][key], weight), key


SAME = ("step", "loss", "grad_norm", "eval_loss")


def test_killed_and_resumed(deep, rows, tmp_path):
    sets = (*ON, *SETS["nf4"], "tricks.stream_layers=file", f"train.max_steps={STEPS}", "train.save_steps=2")
    whole, loaded = train(deep, rows, tmp_path / "whole", *sets)
    expected = trained_weights(loaded)
    with pytest.raises(Interrupted):
        train(deep, rows, tmp_path / "cut", *sets, callbacks=[InterruptAt(3)])
    resumed, loaded = train(deep, rows, tmp_path / "cut", *sets, resume=True)
    for key, weight in trained_weights(loaded).items():
        assert torch.equal(weight, expected[key]), key
    assert [one["loss"] for one in resumed.history if "loss" in one] == [
        one["loss"] for one in whole.history if "loss" in one
    ]


def test_the_block_by_block_load_is_the_whole_one(deep):
    """Names, kinds, dtypes, numbers and buffers, and the words in which the model prints itself."""
    models = [
        prepare(deep, *ON, *SETS["nf4"], f"tricks.stream_layers={stream}")[2].model.get_base_model()
        for stream in ("false", "file")
    ]
    assert str(models[0]) == str(models[1])
    assert models[0].config.to_dict() == models[1].config.to_dict()
    for kind in ("named_parameters", "named_buffers"):
        whole, ours = (dict(getattr(model, kind)()) for model in models)
        assert list(whole) == list(ours)
        assert all(whole[name].shape == ours[name].shape for name in whole)
        assert all(whole[name].dtype == ours[name].dtype for name in whole)
    layers = models[1].model.layers
    assert [layer.self_attn.layer_idx for layer in layers] == list(range(BLOCKS))
    assert all(layer.self_attn.config is models[1].config for layer in layers)


WRONG = {
    "tricks.peft=none": "weights that train cannot leave the card",
    "tricks.peft=side_network": "its trained copies run beside the blocks",
    "tricks.compile=true": "a compiled block fetches nothing",
    "parallel.strategy=ddp": "it is built for one process",
    "tricks.gradient_checkpointing=2": "each must run again before its backward pass",
    "tricks.gradient_checkpointing=false": "set tricks.gradient_checkpointing=true",
}


@pytest.mark.parametrize("setting", WRONG)
def test_what_it_cannot_do_is_refused(setting):
    wanted = with_settings(Recipe(), [*ON, "tricks.stream_layers=true", setting])
    processes = 2 if "ddp" in setting else 1
    with pytest.raises(BadInput, match=WRONG[setting]) as raised:
        resolve(wanted, CARDS["t4"].device, processes=processes)
    assert str(raised.value).startswith(f"tricks.stream_layers=true with {setting}")


def test_a_head_needs_no_checkpointing():
    plan = resolve(with_settings(Recipe(), ["tricks.peft=head", "tricks.stream_layers=file"]), CARDS["t4"].device)
    assert plan.streaming == {"source": "file"}


def test_without_a_card_only_a_file_gains_something():
    said = {
        value: " ".join(resolve(with_settings(Recipe(), [*ON, f"tricks.stream_layers={value}"]), CPU).warnings)
        for value in ("true", "file")
    }
    words = "stream_layers=true gains nothing without CUDA"
    assert (words in said["true"], words in said["file"]) == (True, False)


def test_mechanism_bill():
    """Llama-3.1-8B in NF4: 2 of 32 blocks are on the card, and 60 cross the link a micro-batch."""
    shape = find_shape("llama-3.1-8b")
    settings = [
        *ON,
        "tricks.quantization=nf4",
        "tricks.precision=fp16",
        "tricks.attention=sdpa",
        "tricks.expand_kv=true",
    ]
    recipes = [with_settings(Recipe(), [*settings, f"tricks.stream_layers={value}"]) for value in ("false", "true")]
    t4 = CARDS["t4"]
    whole, ours = (folds.estimate(recipe, shape, t4.device, 256) for recipe in recipes)
    of_blocks = [next(one.bytes for one in bill.lines if one.name == "weights: blocks") for bill in (whole, ours)]
    assert of_blocks[0] == 16 * of_blocks[1]
    assert whole.peak_bytes - ours.peak_bytes == of_blocks[0] - of_blocks[1]
    step = folds.step_of(recipes[1], shape, t4.device)
    assert step.fetched_blocks == 60
    half = folds.step_of(with_settings(recipes[1], ["tricks.quantization=none"]), shape, t4.device)
    a_block = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    assert moved_bytes.fetched(half) == 60 * a_block, "q and o, k and v, the three of the MLP, in 16 bits"

    def added(tokens: int, *more: str) -> float:
        steps = [folds.time_of(with_settings(recipe, more), shape, t4, tokens).seconds for recipe in recipes]
        return steps[1] / steps[0] - 1

    assert added(16) == 0, "unpacking a block takes longer than fetching it"
    assert added(16, "tricks.quantization=none") > 1, "16 tokens wait for their blocks of 16 bits"
    assert added(4096, "tricks.quantization=none") == 0, "behind 4,096 tokens the copies are hidden"
