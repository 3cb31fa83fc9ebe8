"""What one of several processes needs at most, counted while gloo processes train, and by hand.

``python -m benchmarks.per_process`` takes each strategy through two optimizer steps, with two and with four processes,
and counts the bytes that are alive in the second one. Beside each peak stands the bill of ``predict/per_process.py``.
Writes ``benchmarks/results/cpu/per_process.json``.

A device map has one process and several cards. On a CPU we count for each card what is made while its blocks run, and
copy whatever crosses a border, as the hooks of accelerate do.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils._pytree import tree_map

from benchmarks import common
from cria_tricks.bench.case import stamp
from cria_tricks.common.units import human
from cria_tricks.course.processes import Ranks
from cria_tricks.hardware import this_device
from cria_tricks.load import losses
from cria_tricks.load.model import device_map, load, quiet_libraries
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.models import Weights
from cria_tricks.models.shape import shape_of
from cria_tricks.parallel import STRATEGIES, dtensor, pipeline
from cria_tricks.predict.per_process import per_process
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.trainer.pipeline_stage import Stage

WIDTHS: dict[str, dict[str, Any]] = {
    "toy": {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 1024, "tie_word_embeddings": True,
    },
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 49152, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""A toy, and SmolLM2-135M with six of its 30 blocks, and with 8 heads and 4 key heads in place of 9 and 3, so that four
processes can share them."""
TOKENS = {"toy": 64, "smollm2": 256}
"""Tokens of a row, if the strategy does not share them."""
LENGTHS = (64, 256, 1024)
"""Tokens of a row that processes share."""
LORA = ("tricks.peft=lora", "lora.r=8", "tricks.attention=sdpa")
SETTINGS = {
    "LoRA": LORA,
    "LoRA, checkpointed": (*LORA, "tricks.gradient_checkpointing=true"),
    "all weights": ("tricks.attention=sdpa",),
}
PACKED = "tricks.packing=true"
SEQUENCE = "parallel.sequence=true"
DOCUMENTS = 4
"""Documents of a packed row."""
ROWS = 4
"""Micro-batches of a step; the strategies that share them give each process its part."""


def saved(where: Path, widths: Mapping[str, Any]) -> Path:
    """Write a Llama of these widths with random weights to a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**widths, max_position_embeddings=2048)).save_pretrained(where)
    return where


def prepared(folder: Path, *settings: str, processes: int = 1) -> tuple[Any, Any]:
    """Plan a recipe for the model in a folder, and load that."""
    plan = resolve(with_settings(Recipe(model=str(folder)), settings), processes=processes)
    torch.manual_seed(0)
    return plan, load(plan, Weights(str(folder), str(folder), None)).model.train()


class Live(LiveBytes):
    """Sees at every operation that FSDP has given the bytes of a gathered weight back, not only at its next gather."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.remeasure()
        return super().__torch_dispatch__(func, types, args, kwargs)


MicroBatch = Callable[[int, bool], None]
"""Takes a row of so many tokens forward and backward; the second argument says whether it is the last of its step."""


def made(folder: Path, strategy: str, data: int, settings: Sequence[str]) -> tuple[Any, Any, Any, MicroBatch]:
    """Return a model, what processes share of it, its optimizer, and what takes a row through."""
    settings, wanted = [one for one in settings if one != SEQUENCE], SEQUENCE in settings
    plan, model = prepared(folder, *settings)
    if wanted:  # the plan is one of a single process, which cannot ask for it
        plan = plan.with_("parallel", sequence=True)
    world = World.of(data, "cpu", "context" if strategy == "context" else "tensor")
    loss_sum = losses.find(plan, contextlib.nullcontext)
    total = STRATEGIES[strategy].spread(losses.LossSum(model, loss_sum), plan, world)
    optimizer = adamw(total)

    def micro_batch(tokens: int, last: bool) -> None:
        ids = torch.arange(tokens)[None]
        batch = {"input_ids": ids, "labels": ids}
        if PACKED in settings:
            batch["position_ids"] = ids % (tokens // DOCUMENTS)
        with STRATEGIES[strategy].window(total, world, last):
            total(batch).backward()

    return model, total, optimizer, micro_batch


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of what trains; fused, so that a step allocates nothing."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    dtensor.group_apart(optimizer)
    return optimizer


def moments_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the two states of each trained tensor, without its count of steps."""
    return [value for state in optimizer.state.values() for value in state.values() if value.ndim]


def counted_peak(
    folder: Path, strategy: str, data: int, settings: Sequence[str], micro_batches: int, tokens: int = 64,
    reduce: str = "micro_batch",
) -> int:  # fmt: skip
    """Count the bytes that are alive at most in a step of this process, after the first.

    On a busy CPU gloo's threads hold some tensors for a moment longer, so that a step's peak is sometimes above what it
    needs. The least of five steps is returned.
    """
    model, total, optimizer, micro_batch = made(folder, strategy, data, settings)

    def step() -> None:
        for number in range(micro_batches):
            micro_batch(tokens, number == micro_batches - 1 or (strategy, reduce) == ("fsdp", "micro_batch"))
        optimizer.step()
        model.zero_grad()

    step()
    live = Live() if strategy == "fsdp" else LiveBytes()
    live.track_all(total.parameters())
    live.track_all(moments_of(optimizer))
    live.track_all([p.grad for p in total.parameters() if p.grad is not None])  # DDP's buckets
    peaks = []
    with live:
        for _ in range(5):
            live.peak = live.live
            step()
            peaks.append(live.peak)
    return min(peaks)


def counted_stage(folder: Path, settings: Sequence[str], micro_batches: int, tokens: int) -> int:
    """Count the same of this process's stage of a pipeline."""
    processes = torch.distributed.get_world_size()
    sets = (*settings, "parallel.strategy=pipeline", f"tricks.gradient_accumulation={micro_batches}")
    plan, model = prepared(folder, *sets, processes=processes)
    world = World.of(1, "cpu", "stage")
    pipeline.spread(losses.LossSum(model, losses.full_loss_sum), plan, world)
    stage = Stage(model, plan, world, contextlib.nullcontext, None)
    optimizer = adamw(model)
    ids = torch.arange(tokens).expand(micro_batches, -1).contiguous()

    def step() -> None:
        stage.step({"input_ids": ids, "labels": ids}, 1)
        optimizer.step()
        optimizer.zero_grad()

    step()
    live = LiveBytes()
    live.track_all(model.parameters())
    live.track_all(moments_of(optimizer))
    live.track_all(buffers_of(stage))
    with live:
        step()
    return live.peak


def buffers_of(stage: Stage) -> list[torch.Tensor]:
    """Return the buffers in which a stage receives hidden states and gradients, which torch makes once."""
    infos = [*stage.stage.args_recv_info.values(), *stage.stage.grad_recv_info.values()]
    buffers = [getattr(info, "buffer", None) for chunk in infos for info in chunk]
    return [buffer for buffer in buffers if isinstance(buffer, torch.Tensor)]


class Cards(LiveBytes):
    """Counts for each card what is made while one of its modules runs.

    Attributes:
        peaks: the most bytes that were alive on each card, by its number.
        card: the card that computes.
    """

    def __init__(self, cards: int):
        super().__init__()
        self.alive = [0] * cards
        self.peaks = [0] * cards
        self.card = 0
        self._on: dict[int, int] = {}

    def track(self, tensor: torch.Tensor) -> None:
        """Count a tensor on the card that computes."""
        key = tensor.untyped_storage()._cdata
        before = self.live
        super().track(tensor)
        if self.live > before:
            self._on[key] = self.card
            self.alive[self.card] += self.live - before
            self.peaks[self.card] = max(self.peaks[self.card], self.alive[self.card])

    def _free(self, key: int) -> None:
        before = self.live
        super()._free(key)
        self.alive[self._on.pop(key)] -= before - self.live

    def where(self, tensor: torch.Tensor) -> int:
        """Return the card on which a tensor is."""
        return self._on[tensor.untyped_storage()._cdata]


class Across(torch.autograd.Function):
    """Copies a tensor to the card that computes next; its gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cards: Cards, card: int) -> torch.Tensor:
        """Copy it."""
        ctx.cards, ctx.back = cards, cards.where(x)
        cards.card = card
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Copy its gradient."""
        ctx.cards.card = ctx.back
        return gradients[0].clone(), None, None


def placed(model: Any, live: Cards) -> None:
    """Give each module its card of the device map: its tensors are counted there, and its inputs are copied there."""
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    places = device_map(causal_lm.config.num_hidden_layers, len(live.peaks))

    def entered(card: int) -> Callable[..., Any]:
        def copied(x: Any) -> Any:
            here = not isinstance(x, torch.Tensor) or live.where(x) == card
            return x if here else Across.apply(x, live, card)

        def hook(module: torch.nn.Module, inputs: Any, named: Any) -> Any:
            live.track_all(x for x in (*inputs, *named.values()) if isinstance(x, torch.Tensor))
            inputs, named = tree_map(copied, inputs), tree_map(copied, named)
            live.card = card
            return inputs, named

        return hook

    for name, card in places.items():
        module = causal_lm.get_submodule(name)
        live.card = card
        live.track_all(module.parameters())
        module.register_forward_pre_hook(entered(card), with_kwargs=True)
    live.card = 0


def counted_cards(folder: Path, cards: int, settings: Sequence[str], micro_batches: int, tokens: int) -> list[int]:
    """Count the bytes that are alive at most on each card of a device map, in the second step."""
    plan, model = prepared(folder, *settings)
    total = losses.LossSum(model, losses.find(plan, contextlib.nullcontext))
    live = Cards(cards)
    placed(model, live)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = [torch.optim.AdamW(own, fused=True) if own else None
                  for own in ([p for p in trained if live.where(p) == card] for card in range(cards))]  # fmt: skip
    ids = torch.arange(tokens)[None]

    def step() -> None:
        for _ in range(micro_batches):
            live.card = 0
            total({"input_ids": ids, "labels": ids}).backward()
        for live.card, optimizer in enumerate(optimizers):
            if optimizer:
                optimizer.step()
                optimizer.zero_grad()

    with live:
        step()
        live.peaks = list(live.alive)
        step()
    return live.peaks


def shares(strategy: str, processes: int) -> int:
    """Return the number of shares into which a strategy divides the rows."""
    return {"tensor": 1, "context": 1, "ddp_tensor": processes // 2}.get(strategy, processes)


def cases(processes: int) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the strategy, the name of the settings, and what else differs."""
    for label in SETTINGS:
        if processes == 1:
            for tokens in LENGTHS:
                yield "none", label, {"tokens": tokens}
            continue
        for strategy in ("ddp", "tensor", "ddp_tensor", "pipeline", "model"):
            # A tied embedding cannot train in two stages.
            if (strategy, processes) != ("ddp_tensor", 2) and (strategy, label) != ("pipeline", "all weights"):
                yield strategy, label, {}
        for reduce in ("micro_batch", "step"):
            yield "fsdp", label, {"reduce": reduce}
        for tokens in LENGTHS:
            yield "context", label, {"tokens": tokens}
            if label == "LoRA":
                yield "context", label, {"tokens": tokens, "more": (PACKED,)}


def measured(
    ranks: Ranks, folder: Path, name: str, strategy: str, label: str, *,
    tokens: int = 0, reduce: str = "", more: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Count one case, and bill it."""
    settings, processes = (*SETTINGS[label], *more), ranks.size
    tokens = tokens or TOKENS[name]
    share = 1 if strategy in ("none", "pipeline", "model") else shares(strategy, processes)
    own = ROWS // share
    if strategy in ("none", "model"):  # one process is a device map with one card
        counted = counted_cards(folder, processes, settings, own, tokens)
    elif strategy == "pipeline":
        counted = ranks.run(counted_stage, folder, settings, own, tokens)
    else:
        counted = ranks.run(counted_peak, folder, strategy, share, settings, own, tokens, reduce)
    sets = [f"tricks.gradient_accumulation={ROWS}", f"data.max_length={tokens}", *settings]
    recipe = with_settings(Recipe(), [*sets, *([f"parallel.reduce={reduce}"] if reduce else [])])
    shape = shape_of({"model_type": "llama", **WIDTHS[name]}, name)
    # Of FSDP's collectives on a CPU, gloo's threads hold some tensors for a moment longer: the least of all processes.
    peak = min(counted) if strategy == "fsdp" else max(counted)
    billed = per_process(recipe, shape, this_device(), strategy, processes).peak_bytes
    of_each = {}
    if strategy in ("pipeline", "model"):
        bills = [
            per_process(recipe, shape, this_device(), strategy, processes, stage=stage) for stage in range(processes)
        ]
        of_each = {"counted_of_each": counted, "billed_of_each": [bill.peak_bytes for bill in bills]}
    label = f"{label}, packed" if more else label
    about = {"model": name, "strategy": strategy, "processes": processes, "settings": label, "tokens": tokens}
    return {**about, "reduce": reduce, "peak_bytes": peak, "billed_bytes": billed, **of_each}


def main() -> None:
    """Measure every case, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=WIDTHS, default=list(WIDTHS))
    chosen = parser.parse_args()
    quiet_libraries()
    console = Console(highlight=False, soft_wrap=True)
    found = []
    with tempfile.TemporaryDirectory() as out:
        folders = {name: saved(Path(out, name), WIDTHS[name]) for name in chosen.models}
        for processes in (1, 2, 4):
            with Ranks(processes) as ranks:
                for name, folder in folders.items():
                    for strategy, label, options in cases(processes):
                        case = measured(ranks, folder, name, strategy, label, **options)
                        found.append(case)
                        off = case["billed_bytes"] / case["peak_bytes"] - 1
                        about = (
                            f"{strategy} {case['reduce']} x {processes}, {case['settings']}, {case['tokens']} tokens"
                        )
                        console.print(f"{name}, {about}: {human(case['peak_bytes'])}, by hand {off:+.2%}")
    common.write("per_process", stamp(Recipe()) | {"cases": found})


if __name__ == "__main__":
    main()
