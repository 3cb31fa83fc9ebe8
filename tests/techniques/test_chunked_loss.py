"""The chunked loss is the plain loss, in chunks: no more logits at a time, and none of a masked token."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import BioGptConfig, BioGptForCausalLM, TrainerCallback

import cria_tricks.load.losses
from cria_tricks.bill.operation import TOKENS_PER_CHUNK
from cria_tricks.common.errors import BadInput
from cria_tricks.measure.counting import flops, peak_bytes
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.techniques.chunked_loss import chunked_cross_entropy
from tests.helpers import difference, prepare, train
from tests.tolerances import (
    CHUNKED_AUTOCAST,
    CHUNKED_DERIVATIVE,
    CHUNKED_GRADIENT,
    CHUNKED_LOSS,
    CHUNKED_SMALL_FP16,
)

N, D, V = 40, 32, 1000


def inputs(dtype=torch.float32, n=N, words=V):
    torch.manual_seed(0)
    hidden = torch.randn(n, D).to(dtype).requires_grad_(True)
    return hidden, torch.randn(words, D).to(dtype) * 0.2, torch.randint(0, words, (n,))


def plain(hidden, head, labels):
    return F.cross_entropy((hidden @ head.T).float(), labels, reduction="sum")


def torchs(hidden, head, labels):
    """The oracle, in fp32: without its options it would make all logits, and be the plain loss."""
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy; 2.13 brought it")
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it says so when it does not chunk
        return F.linear_cross_entropy(hidden, head, labels, reduction="sum", options=options)


@pytest.mark.parametrize("other", [plain, torchs])
@pytest.mark.parametrize("chunk", [1, 7, N, 4 * N])
def test_math(chunk, other):
    """Loss and gradient, whatever the chunk: the reference and the production version are one function."""
    hidden, head, labels = inputs()
    expected = other(hidden, head, labels)
    (expected_grad,) = torch.autograd.grad(expected, hidden)
    loss = chunked_cross_entropy(hidden, head, labels, chunk)
    (found_grad,) = torch.autograd.grad(loss, hidden)
    assert loss.item() == pytest.approx(expected.item(), rel=CHUNKED_LOSS)
    assert difference(found_grad, expected_grad) < CHUNKED_GRADIENT


def test_the_gradient_is_the_derivative():
    hidden, head, labels = inputs(torch.float64, n=5)
    # The loss is summed in fp32, so the step must be large against its rounding.
    tolerance = CHUNKED_DERIVATIVE
    assert torch.autograd.gradcheck(
        lambda h: chunked_cross_entropy(h, head, labels, 2), (hidden,), eps=1e-2, atol=tolerance, rtol=tolerance
    )


def test_the_gradient_is_scaled_by_what_comes_from_above():
    hidden, head, labels = inputs()
    (once,) = torch.autograd.grad(chunked_cross_entropy(hidden, head, labels, 7), hidden)
    (half,) = torch.autograd.grad(chunked_cross_entropy(hidden, head, labels, 7) / 2, hidden)
    assert torch.equal(half, once / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_fp32_whatever_goes_in(dtype):
    hidden, head, labels = inputs(dtype)
    loss = chunked_cross_entropy(hidden, head, labels, 8)
    assert loss.dtype == torch.float32
    # Both round the same 16-bit logits; only the order of summing differs.
    assert loss.item() == pytest.approx(plain(hidden, head, labels).item(), rel=CHUNKED_LOSS)


def test_small_fp16_probabilities_keep_their_gradient():
    """A sure model leaves each of 100,000 wrong words 1e-8: under 6e-8, the smallest fp16 number there is.

    Held against float64, of the same fp16 logits: torch's own fp32 gradient is off by 8 % here with AVX-512, and by
    16 % without, because its softmax adds one small number after another to a sum near 1.
    """
    torch.manual_seed(0)
    words = 100_000
    head = torch.randn(words, D) * 0.01 + 0.3  # the wrong words pull together, so losing them shows
    head[7] += 1.0
    head, labels = head.half(), torch.tensor([7, 7])
    hidden = torch.full((2, D), 0.575).half().requires_grad_(True)
    probabilities = (hidden @ head.T).detach().double().softmax(-1)
    assert 1e-9 < probabilities[0, 0].item() < 3e-8
    (found,) = torch.autograd.grad(chunked_cross_entropy(hidden, head, labels, 2), hidden)
    gradient = probabilities - F.one_hot(labels, words)
    assert difference(found, gradient @ head.double()) < CHUNKED_SMALL_FP16
    lost = gradient.half().double()
    assert difference(lost @ head.double(), gradient @ head.double()) > 100 * CHUNKED_SMALL_FP16


def test_autocast_decides_the_dtype():
    hidden, head, labels = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        low = chunked_cross_entropy(hidden, head, labels, 8)
    high = chunked_cross_entropy(hidden, head, labels, 8)
    assert low.dtype == torch.float32
    assert low.item() != high.item()
    assert low.item() == pytest.approx(high.item(), rel=CHUNKED_AUTOCAST)


def test_no_trained_token_is_no_loss():
    hidden, head, labels = inputs(n=0)
    assert chunked_cross_entropy(hidden, head, labels).item() == 0.0


def peak(loss, *tensors) -> int:
    return peak_bytes(lambda: loss(*tensors).backward(), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("words", [V, 2 * V])
def test_mechanism(chunk, words, dtype):
    """Peak bytes: e N D + 8 C V and some C: N V is not in it. Plain, in fp32, it is three times 4 N V."""
    e = dtype.itemsize
    one_chunk = 2 * 4 * chunk * words + 4 * chunk + 4  # logits and exp of the same for their sum, it, the loss so far
    for n in (32, 64, 128, 129):
        assert peak(partial(chunked_cross_entropy, chunk=chunk), *inputs(dtype, n, words)) == one_chunk + e * n * D
    if e == 4:
        # Log-softmax, which is kept, and the gradients before it and after it; the loss and its gradient.
        assert peak(plain, *inputs(dtype, n, words)) == 3 * 4 * n * words + 2 * 4


def test_mechanism_evaluation():
    """Without a gradient none is made: one chunk's logits are all."""
    peaks = []
    for wanted in (True, False):
        hidden, head, labels = inputs(n=512)
        with torch.set_grad_enabled(wanted):
            run = partial(chunked_cross_entropy, hidden, head, labels, 16)
            peaks.append(peak_bytes(run, (hidden, head, labels)))
    assert peaks[0] - peaks[1] >= hidden.nbytes
    assert peaks[1] == 2 * 4 * 16 * V + 4 * 16 + 4  # and exp of the same, logsumexp, the loss so far


@pytest.mark.parametrize("chunk", [1, 16, 4 * N])
def test_mechanism_flops(chunk):
    """As many as the plain loss over a frozen head: two products of 2 N D V; one when nothing is learnt from it."""
    hidden, head, labels = inputs()
    product = 2 * N * D * V
    assert flops(lambda: chunked_cross_entropy(hidden, head, labels, chunk).backward()) == 2 * product
    assert flops(lambda: plain(hidden, head, labels).backward()) == 2 * product
    assert flops(lambda: chunked_cross_entropy(hidden.detach(), head, labels, chunk)) == product


class Watch(TrainerCallback):
    """What ran: calls of the head, and the gradients."""

    def __init__(self):
        self.head_calls, self.gradients = 0, {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.get_output_embeddings().register_forward_pre_hook(self.count)
        draw = torch.Generator().manual_seed(0)
        for name, p in model.named_parameters():
            if "lora_B" in name:  # they begin at zero, and then lora_A has no gradient
                p.data.normal_(0, 0.1, generator=draw)

    def count(self, *_):
        self.head_calls += 1

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_switch(tiny_model, rows, tmp_path, monkeypatch, no_twin):
    """Over peft with a frozen head: the head never runs, only trained tokens come in, the gradients stay."""
    called = []

    def watched(*arguments):
        called.append(arguments)
        return chunked_cross_entropy(*arguments)

    monkeypatch.setattr(cria_tricks.load.losses, "chunked_cross_entropy", watched)
    sets = ("tricks.peft=lora", "tricks.gradient_accumulation=2", "train.batch_size=2", "train.max_steps=1")
    seen = {}
    for on in (False, True):
        watch = seen[on] = Watch()
        switch = f"tricks.chunked_loss={str(on).lower()}"
        sets_on = (switch, *sets, "train.max_grad_norm=1e9")
        watch.run, loaded = train(
            tiny_model, rows[:4], tmp_path / str(on), *sets_on, eval_rows=rows[4:], callbacks=[watch]
        )
    assert seen[False].head_calls == 2 + 2  # and the evaluations before and after
    assert seen[True].head_calls == 0
    trained = sum(label != -100 for row in rows for label in row["labels"][1:])
    last = sum(label != -100 for label in rows[4]["labels"][1:])  # is evaluated twice
    assert sum(len(labels) for _, _, labels, _ in called) == trained + last
    assert all(head is loaded.model.get_output_embeddings().weight for _, head, _, _ in called)
    assert {chunk for *_, chunk in called} == {TOKENS_PER_CHUNK}
    assert seen[True].gradients.keys() == seen[False].gradients.keys()
    for name, found in seen[False].gradients.items():
        assert difference(seen[True].gradients[name], found) < CHUNKED_GRADIENT
    for entries, key in (("training", "loss"), ("evaluations", "eval_loss")):
        full, chunked = ([entry[key] for entry in getattr(seen[on].run, entries)] for on in (False, True))
        assert chunked == pytest.approx(full, rel=CHUNKED_LOSS)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["tricks.peft=none"], "it keeps no logits to learn a head from, and peft=none trains the head"),
        (["tricks.peft=head"], "peft=head trains the head; set tricks.peft=lora, or tricks.chunked_loss=false"),
        (["tricks.peft=lora", "lora.target_modules=q_proj,lm_head"], "it needs a frozen head; leave one out"),
    ],
)
def test_a_head_that_learns_is_refused(settings, why):
    with pytest.raises(BadInput, match="tricks.chunked_loss=true with .*" + why):
        resolve(with_settings(Recipe(), ["tricks.chunked_loss=true", *settings]))


def test_an_adapted_head_is_refused_under_any_name(tmp_path):
    config = BioGptConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    BioGptForCausalLM(config).save_pretrained(tmp_path)
    sets = ("tricks.peft=lora", "tricks.chunked_loss=true")
    with pytest.raises(
        BadInput, match="with output_projection in lora.target_modules: it is the head of .*; leave one out"
    ):
        prepare(tmp_path, *sets, "lora.target_modules=q_proj,output_projection")
    prepare(tmp_path, *sets, "lora.target_modules=q_proj")


@pytest.mark.parametrize("labels", [[1, -100], [-100, -100], [-1, 2]])
def test_a_masked_label_is_refused_in_words(labels):
    with pytest.raises(BadInput, match="leave out each hidden state whose label is -100"):
        chunked_cross_entropy(torch.ones(2, 3), torch.ones(5, 3), torch.tensor(labels))


def test_a_head_that_trains_is_refused_in_words():
    head_VD = torch.ones(5, 3, requires_grad=True)
    with pytest.raises(BadInput, match="no gradient for the head: freeze the head, or take the full loss"):
        chunked_cross_entropy(torch.ones(2, 3), head_VD, torch.tensor([1, 2]))
