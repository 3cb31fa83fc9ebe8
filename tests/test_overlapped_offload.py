"""Overlapped offload: the same bits on streams that are as late as they may be, no wait left out, and few tensors held.

A CPU has no streams. :class:`LateStreams` stands in for ``torch.cuda``: what is given to the side stream runs only when
the computing stream waits for it, and memory is poisoned until it is filled. So whatever is read too early, or freed
too early, is found.
"""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4, Device
from cria_tricks.load import overlapped_offload
from cria_tricks.load.overlapped_offload import CopyStream, Overlapped
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.toggles import Target, suggestions
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import folds
from cria_tricks.techniques import activation_offload
from tests.helpers import prepare, train, trained_weights
from tests.techniques.test_gradient_checkpointing import KINDS, L, kept, stack

ASKED = ["tricks.gradient_checkpointing=true", "tricks.activation_offload=overlapped"]
CHECKPOINTING = pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])


@pytest.fixture(autouse=True)
def small_tensors_travel(monkeypatch):
    monkeypatch.setattr(overlapped_offload, "SMALL", 0)


class LateStream:
    """A stream whose work waits in a queue; ``waited`` is the last moment of the other stream that it waits for."""

    def __init__(self, streams: "LateStreams"):
        self.streams, self.queue, self.done, self.waited = streams, [], 0, 0

    def record_event(self):
        if self is self.streams.computing:  # which has done all that it was given
            self.streams.moment += 1
            return self.streams.moment
        return len(self.queue)

    def wait_event(self, event: int) -> None:
        if self is not self.streams.computing:
            self.waited = max(self.waited, event)
            return
        side = self.streams.side
        while side.done < event:
            side.queue[side.done]()
            side.done += 1


class LateStreams:
    """Stands in for ``torch.cuda``, and for the two functions that allocate and copy."""

    def __init__(self, monkeypatch):
        self.moment = 0
        self.computing = self.now = LateStream(self)
        self.allocated: dict[int, int] = {}
        monkeypatch.setattr(overlapped_offload, "fill", self.fill)
        monkeypatch.setattr(overlapped_offload, "room_for", self.room_for)

    def Stream(self) -> LateStream:
        self.side = LateStream(self)
        return self.side

    def current_stream(self) -> LateStream:
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: LateStream):
        self.now = stream
        yield
        self.now = self.computing

    def room_for(self, *arguments, **named) -> torch.Tensor:
        assert self.now is self.computing, "its memory is the computing stream's"
        made = activation_offload.room_for(*arguments, **named)
        made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-1)
        self.moment += 1
        self.allocated[id(made)] = self.moment
        return made

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.now is self.side
        assert self.side.waited > self.allocated[id(target)], "until then another tensor may use this memory"
        self.side.queue.append(functools.partial(self._fill, weakref.ref(target), weakref.ref(source)))

    @staticmethod
    def _fill(target, source) -> None:
        assert target() is not None, "it was freed while its copy was to come"
        assert source() is not None
        activation_offload.fill(target(), source())


@pytest.fixture
def copies(monkeypatch) -> CopyStream:
    return CopyStream(LateStreams(monkeypatch))


def forward(blocks, x: torch.Tensor, checkpointing: bool) -> torch.Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
    return x


def gradients(blocks, x) -> list[torch.Tensor]:
    found = [x.grad, *(p.grad for p in blocks.parameters() if p.requires_grad)]
    return [gradient.clone() for gradient in found]


@KINDS
@CHECKPOINTING
@pytest.mark.parametrize("staying", [False, True], ids=["all travels", "the last stays"])
def test_math(kind, checkpointing, staying, copies):
    """Three micro-batches, dropout on: losses and gradients are the plain ones bit for bit, however late copies are."""
    found = []
    for plain in (True, False):
        blocks, x = stack(kind)
        losses = []
        for _ in range(3):
            there = Overlapped(blocks.parameters(), blocks if staying else (), copies=copies)
            with contextlib.nullcontext() if plain else there:
                loss = forward(blocks, x, checkpointing and not plain).square().sum()
            loss.backward()
            losses.append(loss.detach())
        assert plain or there.bytes_to_device == there.bytes_to_host > 0
        found.append([*losses, *gradients(blocks, x)])
    assert all(map(torch.equal, *found))


def test_views_expanded_and_whole_numbers_come_back_as_they_went(copies):
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(4, 1, requires_grad=True)
    places, table = torch.tensor([[2, 0], [1, 1]]), torch.randn(3, 5, requires_grad=True)
    with Overlapped(copies=copies):
        product = x.t() * y.expand(4, 3)
        picked = table[places]
    assert product.grad_fn._saved_self.stride() == (1, 4)
    assert torch.equal(product.grad_fn._saved_self, x.t())
    assert product.grad_fn._saved_other.stride() == (1, 0)
    assert torch.equal(product.grad_fn._saved_other, y.expand(4, 3))
    picked.sum().backward()
    assert torch.equal(table.grad[:, 0], torch.tensor([1.0, 2.0, 1.0]))


def test_a_second_backward_pass_fetches_again(copies):
    blocks, x = stack("lora")
    with (there := Overlapped(blocks.parameters(), blocks, copies=copies)):
        y = forward(blocks, x, True).sum()
    y.backward(retain_graph=True)
    once = gradients(blocks, x)
    out = there.bytes_to_host
    y.backward(retain_graph=True)
    assert there.bytes_to_host == out
    on_the_device = [one for reference in there._order if (one := reference()).tensor is not None]
    assert [one.host for one in on_the_device] == [None], "the last block's input, which has stayed"
    assert there.bytes_to_device == 2 * out
    assert all(torch.equal(2 * first, both) for first, both in zip(once, gradients(blocks, x), strict=True))


def test_a_pass_without_backward_leaves_nothing(copies):
    """Its graph is dropped, and with it goes all that the host has."""
    blocks, x = stack("lora")
    there = Overlapped(blocks.parameters(), blocks, copies=copies)
    with there:
        y = forward(blocks, x, True)
    saved = [reference() for reference in there._order]
    assert len(saved) == L
    hosts = [weakref.ref(one.host) for one in saved if one.host is not None]
    assert len(hosts) == L - 1
    del saved, y
    gc.collect()
    assert not any(host() is not None for host in hosts)
    assert copies.begun == copies.awaited


def test_an_error_in_the_forward_pass_ends_the_context_and_frees_its_tensors(copies):
    blocks, x = stack("lora")

    class Stop(Exception):
        pass

    def fail(*_):
        raise Stop

    hook = blocks[2].register_forward_pre_hook(fail)
    there = Overlapped(blocks.parameters(), blocks, copies=copies)
    with pytest.raises(Stop), there:
        forward(blocks, x, True)
    hook.remove()
    assert there.bytes_to_host == 3 * x.nbytes
    assert copies.begun == copies.awaited == 3
    assert not blocks[-2]._forward_hooks
    plain = x.sin()
    assert torch.equal(plain.grad_fn._saved_self, x), "nothing is packed any more"


def test_an_error_in_the_backward_pass_frees_nothing_under_a_copy(copies):
    """The tensor on its way back is held until the next pass, which waits for it first."""
    blocks, x = stack("lora")
    with Overlapped(blocks.parameters(), blocks, copies=copies):
        y = forward(blocks, x, True)
    hook = blocks[-2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    hook.remove()
    del y
    gc.collect()
    assert copies.begun - copies.awaited == 1
    with Overlapped(blocks.parameters(), blocks, copies=copies):
        assert copies.begun == copies.awaited


@KINDS
@CHECKPOINTING
def test_mechanism(kind, checkpointing):
    """Of L blocks, L - 1 send (s + a) bytes each way, with checkpointing s; what the last one saves stays."""
    s, a = kept(kind)
    blocks, x = stack(kind)
    there = Overlapped(blocks.parameters(), blocks)
    alive = LiveBytes()
    for tensor in (x, *blocks.parameters()):
        alive.track(tensor)
    before = alive.live
    with alive:
        with there:
            y = forward(blocks, x, checkpointing)
        travels = s if checkpointing else s + a
        assert there.bytes_to_host == (L - 1) * travels
        stays = alive.live - before - there.bytes_to_host - y.nbytes
        assert stays == travels, "what the last block has saved"
        y.sum().backward()
    assert there.bytes_to_device == there.bytes_to_host, "each byte came back once"


def test_mechanism_order(copies):
    """Forward no more than one tensor is held for its copy; backward one is on its way while a block computes."""
    blocks, x = stack("frozen")
    held = []
    for block in blocks:
        block.register_forward_pre_hook(lambda *_: held.append(copies.begun - copies.awaited))
    with (there := Overlapped(blocks.parameters(), blocks, copies=copies)):
        y = forward(blocks, x, True)
    assert held == [1] * (L - 1) + [0], "before the last block, all copies have been waited for"
    held.clear()
    y.sum().backward()
    assert held == [1] * (L - 1) + [0], "the first block has none below it"
    fetched = [one.tensor for reference in there._order if (one := reference()) and one.host is not None]
    assert not [tensor for tensor in fetched if tensor is not None]


def test_no_more_than_one_tensor_waits_ahead_in_any_order(copies):
    """Branches that are asked in another order than the reverse one fetch what they need themselves."""
    xs = [torch.randn(8, requires_grad=True) for _ in range(6)]
    with (there := Overlapped(copies=copies)):
        ys = [x.sin() for x in xs]
    for number in (2, 5, 0, 4, 1, 3):
        ys[number].sum().backward()
        waiting = [one for reference in there._order if (one := reference()) and one.tensor is not None]
        assert len(waiting) <= 1
        assert torch.equal(xs[number].grad, xs[number].detach().cos())


def test_a_tensor_that_three_products_read_travels_once(copies):
    """Queries, keys and values: one copy out and one back, where the synchronous offload makes three."""
    x, weights = torch.randn(8, 32), [torch.randn(16, 32, requires_grad=True) for _ in range(3)]
    with (there := Overlapped(weights, copies=copies)):
        total = sum(F.linear(x, weight) for weight in weights).sum()
    assert there.bytes_to_host == x.nbytes
    total.backward()
    assert there.bytes_to_device == x.nbytes
    assert all(torch.equal(weight.grad, torch.ones(16, 8) @ x) for weight in weights)


def test_a_changed_tensor_and_one_at_a_freed_address_are_others(copies):
    weight = torch.randn(64, requires_grad=True)
    buffer = torch.randn(64)
    with (there := Overlapped([weight], copies=copies)):
        weight * buffer  # whose graph is dropped, so the buffer may change
        buffer.add_(1)
        changed = weight * buffer
        many = []
        for number in range(32):  # each is freed when its copy has gone, and the next one gets its address
            many.append(weight * torch.full((64,), float(number)))
    assert there.bytes_to_host == 34 * buffer.nbytes
    assert torch.equal(changed.grad_fn._saved_other, buffer)
    assert [one.grad_fn._saved_other[0].item() for one in many] == list(range(32))


def test_weights_small_tensors_and_short_micro_batches_stay(monkeypatch):
    blocks, x = stack("frozen")
    for least, small, travels in (
        (0, 0, True),
        (x.numel(), x.nbytes, True),
        (x.numel() + 1, 0, False),
        (0, 9999, False),
    ):
        monkeypatch.setattr(overlapped_offload, "SMALL", small)
        with (there := Overlapped(blocks.parameters(), blocks, least)):
            y = forward(blocks, x, True)
        assert there.bytes_to_host == travels * (L - 1) * x.nbytes
        y.sum().backward()


def test_switch(tiny_model, rows, tmp_path):
    """In the trainer and on a CPU, where streams do nothing: the plain losses and weights, bit for bit."""
    settings = ["tricks.peft=lora", "lora.r=4", "lora.dropout=0.1", "train.batch_size=2", "train.max_steps=4"]
    found = {}
    first = [ASKED[1], "tricks.gradient_checkpointing=1"]
    for name, extra in {
        "plain": [],
        "all": ASKED,
        "first": first,
        "side": [*ASKED, "tricks.peft=side_network"],
    }.items():
        run, loaded = train(tiny_model, rows, tmp_path / name, *settings, *extra)
        found[name] = ([entry["loss"] for entry in run.training], trained_weights(loaded))
    side, _ = train(tiny_model, rows, tmp_path / "plain side", *settings, "tricks.peft=side_network", ASKED[0])
    assert found.pop("side")[0] == [entry["loss"] for entry in side.training]
    for losses, weights in found.values():
        assert losses == found["plain"][0]
        assert all(torch.equal(weights[key], value) for key, value in found["plain"][1].items())


def test_switch_in_a_step(tiny_model, monkeypatch, tmp_path, rows):
    """Of two blocks the first one's input travels, in each forward pass of the training and in no evaluation."""
    made: list[Overlapped] = []

    overlapped = overlapped_offload.overlapped

    def make(model, plan):
        made.append(overlapped(model, plan))
        return made[-1]

    monkeypatch.setattr(overlapped_offload, "overlapped", make)
    settings = ["tricks.peft=lora", "lora.r=4", "train.max_steps=3", *ASKED]
    train(tiny_model, rows[:1], tmp_path, *settings, eval_rows=rows[:1])
    assert [there.bytes_to_host for there in made] == 3 * [4 * 24 * 256]  # fp32, 24 tokens, width 256
    assert all(there.bytes_to_device == there.bytes_to_host for there in made)


def test_the_plan_says_from_which_micro_batch_inputs_travel(tiny_model):
    """A number that follows from the card's rates: a faster card needs longer rows, and so does a small model."""
    recipe = with_settings(Recipe(), ["tricks.peft=lora", "tricks.precision=fp16", "tricks.attention=sdpa", *ASKED])
    assert resolve(recipe, T4).step_context == ("load.overlapped_offload.overlapped",)
    assert not resolve(recipe, T4).warnings
    target = Target(find_shape("smollm2"), T4)
    plan = target.resolve(recipe)
    least = plan.checkpointing["travels_from"]
    assert least == folds.travels_from(recipe, target.shape, T4) > 100
    assert f"fewer than {least:,} tokens" in plan.warnings[-1]
    assert Target(find_shape("llama-3.1-8b"), T4).resolve(recipe).checkpointing["travels_from"] < least
    unknown = Device("cuda", "another card", (8, 6), real_bf16=True, memory_bytes=T4.memory_bytes)
    assert "is not known" in Target(target.shape, unknown).resolve(recipe).warnings[-1]
    for tokens, travels in ((least - 1, False), (least, True)):
        assert target.memory(recipe, tokens).step.overlapped is travels
        assert bool(folds.step_of(recipe, target.shape, T4, tokens).travelling_blocks) is travels
    _, plan, _ = prepare(tiny_model, *ASKED)
    assert "gains nothing without CUDA" in " ".join(plan.warnings)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["tricks.gradient_checkpointing=false"], "none is checkpointed; set tricks.gradient_checkpointing=true"),
        (["tricks.compile=true"], "set tricks.compile=false"),
        (["parallel.strategy=pipeline", "tricks.gradient_accumulation=2"], "use parallel.strategy=ddp"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, why):
    with pytest.raises(BadInput, match=f"tricks.activation_offload=overlapped: .*{why}"):
        resolve(with_settings(Recipe(), [*ASKED, *settings]), T4, 2 if "parallel" in settings[0] else 1)


def test_nothing_chooses_it():
    """No T4 has run it yet, so neither the search nor the suggestions name it."""
    recipe = with_settings(Recipe(), ["tricks.peft=lora", "tricks.gradient_checkpointing=true"])
    changes = suggestions(Target(find_shape("llama-3.2-1b"), T4), recipe)
    assert "tricks.activation_offload=true" in [change.set for change in changes]
    assert not [change.set for change in changes if "overlapped" in change.set]
