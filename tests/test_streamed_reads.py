"""Streamed blocks: whatever reads a slot finds there the block that it is part of, arrived and not yet overwritten."""

import functools
import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM

from cria_tricks.load.streaming import ALIGNED, places_of
from cria_tricks.switches.stream_layers import SLOTS
from cria_tricks.techniques import stream_layers
from cria_tricks.techniques.stream_layers import Copies, CopiesOnCpu, Streamed
from tests.gpu.test_streaming_large_layers import KINDS, LARGE, TARGETS, Size, resident_and_streamed_are_equal
from tests.helpers import prepare
from tests.sweeps import sample

SMALL = Size(64, 128, 5, 4, 2, 512)
ON = ("tricks.peft=lora", "tricks.gradient_checkpointing=true", "tricks.stream_layers=true")
SETS = {
    "fp32": (),
    "bf16": ("tricks.precision=bf16", "tricks.lean_preparation=true"),
    "nf4": ("tricks.quantization=nf4",),
    "fp4": ("tricks.quantization=fp4", "tricks.double_quantization=true"),
    "int8": ("tricks.quantization=int8",),
    "fused": ("tricks.quantization=nf4", "tricks.fused_lora=true", "tricks.fused_blocks=true", "tricks.tiled_mlp=5"),
    "kept": ("tricks.attention=sdpa", "tricks.keep_attention=true", "tricks.quantization=nf4"),
}
ADAPTED = ("all-linear", "q_proj,v_proj", "down_proj")


class Reads(TorchDispatchMode):
    """Look at every operation that reads a slot, forward and backward: has its block been entered and waited for?"""

    def __init__(self, fetching: Streamed):
        super().__init__()
        self.fetching = fetching
        self.slots = {slot.untyped_storage().data_ptr(): place for place, slot in enumerate(fetching.slots)}
        self.right = 0
        self.wrong: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            tensors = [one for one in tree_iter((args, kwargs or {})) if isinstance(one, torch.Tensor)]
            for slot in {self.slots.get(one.untyped_storage().data_ptr()) for one in tensors} - {None}:
                block = self.fetching.at
                if block % SLOTS == slot and self.fetching.here[slot] == block:
                    self.right += 1
                else:
                    self.wrong.append((func.name(), block))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A narrow Llama of more blocks than slots."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("deep")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "adapted"), sample([(name, adapted) for name in SETS for adapted in ADAPTED], 7))
def test_nothing_reads_a_slot_that_holds_another_block(deep, monkeypatch, name, adapted):
    """bitsandbytes keeps codes as attributes, which no hook of saved tensors sees. So each operation is looked at."""
    made: list[Streamed] = []
    start = Streamed.__init__

    def noted(self, *given):
        start(self, *given)
        made.append(self)

    monkeypatch.setattr(Streamed, "__init__", noted)
    _, _, loaded = prepare(deep, *ON, *SETS[name], f"lora.target_modules={adapted}")
    ids = torch.arange(3, 35).reshape(2, 16)
    (fetching,) = made
    model = loaded.model.train()
    with Reads(fetching) as reads:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
    assert reads.wrong == []
    assert reads.right >= 2 * 2 * 5 * 7, "seven matrices of five blocks, forward and again or backward"


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "kept"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_test_of_large_blocks_with_small_ones(kind, targets, checkpointing, monkeypatch):
    """Copies are late here, and what lies in the slot meanwhile is no number; so who does not wait is seen."""

    def late(self, slot, buffer, free):
        slot.fill_(255)
        time.sleep(0.02)
        slot.copy_(buffer)

    monkeypatch.setattr(CopiesOnCpu, "copy", late)
    resident_and_streamed_are_equal(SMALL, kind, targets, checkpointing, "cpu", tokens=16)


def test_the_large_blocks_are_larger_than_those_that_others_found_wrong():
    assert [round(LARGE.elements * size / 2**20) for size in (1 / 2, 2)] == [234, 935]


class Stream:
    """A stand-in for a CUDA stream, which notes what is queued."""

    def __init__(self, name: str, log: list):
        self.name, self.log = name, log

    def record_event(self):
        self.log.append(("record", self.name))
        return len(self.log)

    def wait_event(self, event):
        self.log.append(("wait", self.name, event))


def test_on_a_card_a_copy_waits_for_its_slot_and_a_block_for_its_copy(monkeypatch):
    """On its own stream, without holding up the processor."""
    log: list = []
    current = [Stream("compute", log)]

    class Inside:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            current.append(self.stream)

        def __exit__(self, *_):
            current.pop()

    class Slot:
        def copy_(self, buffer, non_blocking=False):
            log.append(("copy", current[-1].name, buffer, non_blocking))

    cuda = {"Stream": lambda _: Stream("copies", log), "stream": Inside, "current_stream": lambda: current[-1]}
    for name, stand_in in cuda.items():
        monkeypatch.setattr(stream_layers.torch.cuda, name, stand_in)
    copies = Copies(torch.device("cuda"))
    free = copies.now()
    arrived = copies.copy(Slot(), "block 3", free)
    copies.wait(arrived)
    assert log == [
        ("record", "compute"),
        ("wait", "copies", free),
        ("copy", "copies", "block 3", True),
        ("record", "copies"),
        ("wait", "compute", arrived),
    ]
    assert (free, arrived) == (1, 4)


def test_every_matrix_in_a_buffer_begins_where_a_kernel_may_read_it():
    odd = functools.partial(nn.Linear, bias=False)
    block = nn.ModuleList([odd(3, 5), odd(7, 11), odd(64, 1)]).requires_grad_(False)
    begins = [place.begin for place in places_of(block)]
    assert begins == [0, ALIGNED, 3 * ALIGNED]
    assert ALIGNED == 256
