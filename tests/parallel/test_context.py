"""Ring attention: its gradients, its equality with one process at odd lengths, masked and packed, what it sends."""

import pytest
import torch
import torch.distributed as dist

from cria_tricks.common.errors import BadInput
from cria_tricks.load import losses
from cria_tricks.parallel import context, ring_attention
from cria_tricks.parallel.tensor import Copied, Summed
from cria_tricks.resolve import resolve
from cria_tricks.techniques.expand_kv import expand_kv
from tests.parallel import steps
from tests.parallel.strategies import alone, formula, spread, worst

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
"""Two query heads share a key head."""


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """Attention of whole rows in one process, by all scores."""
    groups = q.shape[1] // k.shape[1]
    scores = q @ expand_kv(k, groups).mT / q.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ expand_kv(v, groups)


def rows(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values of two rows, and a gradient of the result; the same in all processes."""
    draw = torch.Generator().manual_seed(length)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [torch.randn(2, many, length, WIDTH, generator=draw, dtype=torch.float64).to(dtype) for many in heads]


def through_the_ring(*q_k_v: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """The same attention, of whole rows to whole rows: cut, computed by all processes, and put together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = None if of is None else ring_attention.chunked(of, size, -1)
    parts = [ring_attention.chunked(Copied.apply(x), size, 0, 2) for x in q_k_v]
    own = [torch.cat([part[number] for number in ring_attention.zigzag(rank, size)], 2) for part in parts]
    out = ring_attention.RingAttention.apply(*own, ring_attention.Chunks(rank, size, numbers), WIDTH**-0.5)
    placed = [torch.zeros_like(chunk) for chunk in parts[0]]
    for number, chunk in zip(ring_attention.zigzag(rank, size), out.chunk(2, 2), strict=True):
        placed[number] = chunk
    return Summed.apply(torch.cat(placed, 2)[:, :, : q_k_v[0].shape[2]])


def errors(length: int, dtype: torch.dtype, of: torch.Tensor | None) -> list[float]:
    """The largest errors of the output and of three gradients, against those of whole rows in fp64."""
    given = rows(length, dtype)
    own = [x.clone().requires_grad_() for x in given[:3]]
    true = [x.double().requires_grad_() for x in given[:3]]
    got, wanted = through_the_ring(*own, of=of), whole(*true, of)
    found = [got, *torch.autograd.grad(got, own, given[3])]
    right = [wanted, *torch.autograd.grad(wanted, true, given[3].double())]
    return [float((f - r).abs().max() / r.abs().max()) for f, r in zip(found, right, strict=True)]


PACKED = torch.tensor([[0] * 5 + [1] * 13 + [2] * 3 + [3, 4], [0] * 11 + [1] * 12])
"""Rows of 23 tokens: three documents and two tokens of padding, each its own; and two documents."""


@pytest.mark.parametrize("pool", ["two", "four"])
@pytest.mark.parametrize(("length", "of"), [(16, None), (23, None), (3, None), (23, PACKED)], ids=str)
def test_math(request, pool, length, of):
    """In fp64: 23 tokens are no multiple of 4 or 8, and 3 leave processes with nothing but filling."""
    for found in request.getfixturevalue(pool).run(errors, length, torch.float64, of):
        # Each is a sum of at most 2 x 23 x 8 products, so it rounds within some hundred eps of its largest element.
        assert max(found) < 368 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-9)])
def test_in_narrow_numbers_partial_results_are_merged_in_fp32(four, dtype, eps):
    for found in four.run(errors, 23, dtype, PACKED):
        # What is stored is rounded: probabilities, the output, each pair's gradients. Merged in bf16 it would be more.
        assert max(found) < 12 * eps


def checked(of: torch.Tensor | None) -> bool:
    """torch's own check of gradients, which moves each number of the rows a little, in all processes at once."""
    given = [x[:, :, :7, :].clone().requires_grad_() for x in rows(23, torch.float64)[:3]]
    return torch.autograd.gradcheck(lambda *x: through_the_ring(*x, of=of), given, fast_mode=True)


@pytest.mark.parametrize("of", [None, PACKED[:, 2:9]], ids=["one document", "packed"])
def test_torchs_gradcheck(two, of):
    assert two.run(checked, of) == [True, True]


def test_each_process_has_as_much_work():
    """Pairs of chunks that a process computes: a causal one is half of a full one."""
    for size in (1, 2, 4):
        work = []
        for rank in range(size):
            chunks = ring_attention.Chunks(rank, size)
            found = [seen for owner in range(size) for _, _, seen in ring_attention.pairs(chunks, owner, torch.float32)]
            work.append(sum(1 - seen.causal / 2 for seen in found))
        assert work == [2 * size] * size
        assert sum(work) == (2 * size) ** 2 / 2, "half of all pairs"


def test_documents_that_never_meet_are_not_computed():
    of = torch.arange(16)[None] // 4  # four documents, one in each chunk of two processes
    chunks = ring_attention.Chunks(0, 2, ring_attention.chunked(of, 2))
    found = [list(ring_attention.pairs(chunks, owner, torch.float32)) for owner in range(2)]
    assert found == [[(0, 0, ring_attention.Seen(True, None)), (1, 1, ring_attention.Seen(True, None))], []]


SDPA = ("tricks.attention=sdpa", "data.max_length=21")
SETTINGS = [
    (*SDPA, "lora.target_modules=o_proj,up_proj"),
    (*SDPA, "tricks.peft=none", "train.batch_size=2"),
    (*SDPA, "tricks.gradient_checkpointing=true", "tricks.chunked_loss=true"),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings[-1])
def test_mechanism(four, settings: tuple[str, ...]):
    """Rows of 21 tokens are filled up to 24; the formula counts what gloo sent; gradients are those of whole rows."""
    found = spread(four, "context", *settings)
    assert [process["bytes"] for process in found] == [formula("context", 4, *settings)] * 4
    assert {process["weights"] for process in found} == {alone(*settings)["weights"]}, "no weight is divided"
    for process in found:
        # Sums over 4 x 21 tokens and 64 widths in two orders: 2 x 6e-8 x the root of 5,376. 4e-6 were found.
        assert worst(process["gradients"], alone(*settings)["gradients"]) < 9e-6


def test_a_chunk_has_the_labels_of_the_tokens_behind_it_wherever_these_are():
    ids = torch.arange(10, 23)[None]
    for by_places in (False, True):
        seen = {}
        for rank in range(2):
            part = context.cut({"input_ids": ids, "labels": ids}, rank, 2, by_places)
            assert part["input_ids"].shape == (1, 8), "13 tokens, filled up to 16"
            row, column, label = part["trained"] if by_places else losses.places(part["shift_labels"])
            positions = part["position_ids"][0, column]
            assert torch.equal(part["input_ids"][row, column], positions + 10)
            seen |= dict(zip(positions.tolist(), label.tolist(), strict=True))
        assert seen == {position: position + 11 for position in range(12)}


PACKED_RUN = (
    "model=random:tiny", "train.batch_size=2", "data.max_length=143", "tricks.gradient_accumulation=2",
    "tricks.peft=lora", "tricks.packing=true", "tricks.attention=sdpa", "train.max_steps=3",
    "train.eval_steps=3", "train.save_steps=3",
    "train.learning_rate=0.003",
)  # fmt: skip


def test_switch(four, tmp_path):
    """Packed rows, of which each has its own documents and its own padding; the evaluation's rows have a mask."""
    few = steps.write_rows(tmp_path / "few.jsonl", 12)
    settings = [*PACKED_RUN, f"data.train={few}", f"data.eval={few}"]
    one = steps.train(settings, tmp_path / "one")
    mine, *others = four.run(steps.train, [*settings, "parallel.strategy=context"], tmp_path / "four")
    assert all(other == mine for other in others)
    assert len(mine["history"]) == len(one["history"]) == 5
    for got, wanted in zip(mine["history"], one["history"], strict=True):
        assert got.keys() == wanted.keys()
        for key in {"loss", "grad_norm", "tokens", "trained_tokens", "eval_loss", "eval_tokens"} & got.keys():
            # Sums in another order: 1e-7 a step, which Adam's first steps, of the gradient's sign, make larger.
            assert got[key] == pytest.approx(wanted[key], rel=2e-4 if key == "grad_norm" else 2e-5), key
    assert mine["attention_kernel"] == "flash"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("tricks.attention=eager",), "attention=eager: the ring computes .* set tricks.attention=sdpa"),
        (("tricks.expand_kv=true",), "expand_kv=true: the ring repeats"),
        (("tricks.keep_attention=true", "tricks.gradient_checkpointing=true"), "keep_attention=true: keys and values"),
        (("tricks.peft=prompt_tuning",), "peft=prompt_tuning: it changes rows"),
        (("tricks.peft=side_network",), "peft=side_network"),
    ],
)
def test_what_the_ring_cannot_do_is_refused(settings, says):
    with pytest.raises(BadInput, match=says):
        resolve(steps.recipe_of("parallel.strategy=context", "tricks.attention=sdpa", *settings), processes=2)
    with pytest.raises(BadInput, match="needs two processes or more"):
        resolve(steps.recipe_of("parallel.strategy=context", "tricks.attention=sdpa"), processes=1)


def test_a_model_with_other_attention_is_refused_at_its_first_batch():
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(BadInput, match="Linear takes no chunks of a row; use parallel.strategy=ddp"):
        ring_attention.attention(torch.nn.Linear(1, 1), q, q, q, None)
    with pytest.raises(BadInput, match="Linear has a sliding window or dropout"):
        ring_attention.attention(
            torch.nn.Linear(1, 1), q, q, q, None, ring=ring_attention.Chunks(0, 1), sliding_window=4
        )
