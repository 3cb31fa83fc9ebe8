"""Documents in one packed row are as far apart as in two."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from transformers import MistralConfig, MistralForCausalLM

from cria_tricks.common.errors import BadInput
from cria_tricks.data.batches import PadToLongest, real_tokens
from cria_tricks.data.lengths import row_lengths
from cria_tricks.data.tokens import IGNORED
from cria_tricks.hardware import Device
from cria_tricks.load.attention import lengths_or_mask
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.techniques.packing import (
    PackedRows,
    best_fit,
    block_causal_mask,
    by_document,
    document_lengths,
    documents,
)
from tests.helpers import prepare, train
from tests.techniques.attention import Attended, with_gradients
from tests.tolerances import PACKED_ATTENTION, PACKED_LOSS

LENGTHS = row_lengths("train")


def collated(rows, capacity=64):
    return PadToLongest(2)(PackedRows(rows, capacity))


def logits(model, batch, **more):
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **more).logits


def test_the_first_label_of_each_document_is_masked():
    """Also where a prompt does not mask it anyway: the token before it belongs to another document."""
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    (row,) = PackedRows(rows, 8)
    assert row == {
        "input_ids": [5, 6, 7, 8, 9],
        "labels": [IGNORED, 6, 7, IGNORED, 9],
        "position_ids": [0, 1, 2, 0, 1],
    }


def test_math(rows):
    """Three ways to the same attention: under the reference's mask, document by document, each document alone."""
    position_ids = collated(rows[:3], 48)["position_ids"]
    number = documents(position_ids)
    lengths = document_lengths(number.diff(dim=1, prepend=number[:, :1] - 1) != 0)
    assert (position_ids.shape[0], len(lengths)) == (2, 4), "three documents, and the padding of one row"
    assert lengths.sum() == position_ids.numel()
    torch.manual_seed(0)
    shape = (2, 2, position_ids.shape[1], 8)
    *q_k_v, grad = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(4))

    def causal(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    real = torch.ones_like(position_ids, dtype=torch.bool)
    real[1, -int(lengths[-1]) :] = False
    grad = grad.detach() * real[:, None, :, None]  # what padding gives nobody reads
    mask = block_causal_mask(position_ids)[:, None]
    under_a_mask = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask), grad, *q_k_v)
    one_by_one = with_gradients(lambda *x: by_document(causal, *x, lengths.tolist()).transpose(1, 2), grad, *q_k_v)
    for masked, single in zip(under_a_mask, one_by_one, strict=True):
        assert (masked - single).transpose(1, 2)[real].abs().max() < PACKED_ATTENTION
    for row, document in ((0, 0), (0, 1), (1, 0)):
        here = (slice(row, row + 1), slice(None), number[row] == document)
        assert here[-1].any()
        alone = with_gradients(lambda *x: causal(*x).transpose(1, 2), grad[here], *(x[here] for x in q_k_v))
        for found, expected in zip(one_by_one, alone, strict=True):
            assert torch.equal(found[here], expected), "not a bit of a neighbour"


def test_documents_by_hand():
    """One row of 3 and 2 tokens and one of padding, one of 4 and two of padding, one without: padding counts once."""
    begins = torch.tensor([[1, 0, 0, 1, 0, 1], [1, 0, 0, 0, 1, 1], [1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    assert document_lengths(begins).tolist() == [3, 2, 1, 4, 2, 6]
    assert document_lengths(torch.tensor([[True, True, False]])).tolist() == [1, 2], "one token, then a document"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("training", [False, True])
def test_no_logit_of_one_document_moves_when_another_changes(attention, precision, training, rows, tiny_model):
    sets = ("tricks.peft=lora", f"tricks.attention={attention}", f"tricks.precision={precision}")
    _, _, loaded = prepare(tiny_model, *sets)
    model = loaded.model.train(training)
    batch = collated(rows[:3])
    number = documents(batch["position_ids"])
    before = logits(model, batch)
    changed = {**batch, "input_ids": torch.where(number == number[0, 0], 9, batch["input_ids"])}
    after = logits(model, changed)
    others = number != number[0, 0]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[~others], after[~others])
    if not training:  # the trap: beside a mask of ones the positions do not keep them apart
        ones = torch.ones_like(batch["input_ids"])
        leak = logits(model, batch, attention_mask=ones) - logits(model, changed, attention_mask=ones)
        assert leak[others].abs().max() > 1e-2


@pytest.mark.parametrize("loss", ["tricks.chunked_loss=false", "tricks.chunked_loss=true"])
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_the_loss_of_an_epoch_is_the_unpacked_one(loss, checkpointing, rows, tiny_model, tmp_path):
    sets = ("tricks.peft=lora", loss, f"tricks.gradient_checkpointing={checkpointing}", "train.max_steps=1")
    sets = (*sets, "data.max_length=64", "tricks.gradient_accumulation=8")
    plain, _ = train(tiny_model, rows, tmp_path / "a", *sets)
    packed, _ = train(tiny_model, rows, tmp_path / "b", *sets, "tricks.packing=true")
    (one,), (other,) = plain.training, packed.training
    assert (one["tokens"], one["trained_tokens"]) == (other["tokens"], other["trained_tokens"])
    assert other["loss"] == pytest.approx(one["loss"], abs=PACKED_LOSS)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert (plain.train_rows, packed.train_rows) == (5, 2)


def test_mechanism():
    """The real lengths, cut at 2,048: what a batch of four carries along, and what a packed row does."""
    lengths = [min(length, 2048) for length, _ in LENGTHS]
    packs = best_fit(lengths, 2048)
    assert sorted(index for pack in packs for index in pack) == list(range(107))
    assert all(sum(lengths[i] for i in pack) <= 2048 for pack in packs)
    fewest = -(-sum(lengths) // 2048)
    assert fewest <= len(packs) <= fewest * 11 // 9 + 1
    batches = [lengths[i : i + 4] for i in range(0, 107, 4)]
    padded = sum(len(batch) * max(batch) for batch in batches)
    print(f"{len(packs)} packed rows of 107; padding {padded / sum(lengths) - 1:.1%} -> 0")
    assert padded > 1.25 * sum(lengths)


def test_best_fit_by_hand():
    # 7 opens a row, 5 another; 4 fits only beside 5 (room 5); 3 fits exactly beside 7; 2 and 1 need a third.
    assert best_fit([4, 7, 2, 5, 3, 1], 10) == [[1, 4], [3, 0, 5], [2]]
    assert best_fit([3, 3], 3) == [[0], [1]]


def test_a_document_is_read_when_its_packed_row_is_asked_for(rows):
    """So rows in a file never are all in memory."""
    asked = []

    class File(Sequence):
        def __len__(self):
            return len(rows)

        def __getitem__(self, number):
            asked.append(number)
            return rows[number]

    packed = PackedRows(File(), 40)
    asked.clear()
    row = packed[1]
    assert sorted(asked) == sorted(packed.indices[1])
    assert sorted(row["input_ids"]) == sorted(token for number in asked for token in rows[number]["input_ids"])


def test_every_documents_first_label_is_masked_and_padding_is_no_document(rows):
    packed = PackedRows(rows, 40)
    for row in packed:
        begins = [i for i, position in enumerate(row["position_ids"]) if position == 0]
        assert all(row["labels"][i] == -100 for i in begins)
    batch = PadToLongest(2)(packed)
    assert set(batch) == {"input_ids", "position_ids", "labels"}, "no mask at all"
    assert real_tokens(batch).item() == sum(len(row["input_ids"]) for row in rows)
    assert batch["input_ids"].numel() > real_tokens(batch).item()
    number = documents(batch["position_ids"])
    longest = batch["position_ids"].shape[1]
    for row, numbers in zip(packed, number, strict=True):
        padding = longest - len(row["input_ids"])
        assert len(set(numbers.tolist())) == row["position_ids"].count(0) + padding


def watched(model_folder, rows, out, attention):
    """Train a step on packed rows: what the model gets, what its blocks get for a mask, what reaches the kernel."""
    from transformers import TrainerCallback

    seen = {}

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            block = model.get_base_model().model.layers[0].self_attn
            block.register_forward_pre_hook(lambda m, a, kw: seen.update(mask=kw["attention_mask"]), with_kwargs=True)
            model.register_forward_pre_hook(lambda m, a, kw: seen.update(inputs=kw), with_kwargs=True)

    sets = ("tricks.peft=lora", "tricks.packing=true", f"tricks.attention={attention}")
    sets = (*sets, "data.max_length=48", "train.max_steps=1", "train.batch_size=2")
    with Attended() as attended:
        train(model_folder, rows, out, *sets, callbacks=[Watch()])
    assert "attention_mask" not in seen["inputs"]
    return seen["inputs"]["position_ids"], seen["mask"], attended.calls


def test_switch(rows, tiny_model, tmp_path):
    """The model gets positions and no mask; torch's kernel gets one document at a time, and no mask either."""
    position_ids, mask, calls = watched(tiny_model, rows[:3], tmp_path, "sdpa")
    assert mask.shape == (4,)
    assert mask.sum() == position_ids.numel()
    forward = [{"heads": 4, "tokens": tokens, "kv_heads": 4, "masked": False} for tokens in mask.tolist()]
    assert calls == forward * 2, "in both blocks"


def test_switch_with_eager_attention(rows, tiny_model, tmp_path):
    """There transformers makes the reference's mask of the positions."""
    position_ids, mask, calls = watched(tiny_model, rows[:3], tmp_path, "eager")
    assert torch.equal(mask[:, 0] == 0, block_causal_mask(position_ids))
    assert not calls


@pytest.mark.parametrize("padded", [None, False, True])
def test_rows_that_are_not_packed_get_the_usual_attention(padded, tiny_model):
    """The evaluation's: a mask where there is padding, at either end, and none where there is not."""
    ids, real = torch.arange(3, 27).view(2, 12), torch.ones(2, 12, dtype=torch.long)
    real[0, :3] = real[1, 9:] = not padded
    mask = None if padded is None else real
    found = []
    for switch in ("false", "true"):
        _, plan, loaded = prepare(tiny_model, "tricks.attention=sdpa", f"tricks.packing={switch}")
        assert plan.model["attn_implementation"] == ("sdpa_by_document" if switch == "true" else "sdpa")
        with Attended() as attended, torch.no_grad():
            found.append(loaded.model(input_ids=ids, attention_mask=mask).logits[real.bool()])
        assert [(call["tokens"], call["masked"]) for call in attended.calls] == [(12, bool(padded))] * 2
    assert torch.equal(*found)


def test_packed_rows_of_a_model_with_a_sliding_window_keep_its_mask(rows):
    """It is narrower than the documents, and their lengths do not say so."""
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads, use_cache=False))
    batch = collated([{name: ids[:20] for name, ids in row.items()} for row in rows[:3]])
    batch["input_ids"] %= 300
    found = {}
    for name in ("sdpa", "sdpa_by_document"):
        model.set_attn_implementation(name)
        found[name] = logits(model, batch)
    assert torch.equal(found["sdpa"], found["sdpa_by_document"])


def test_a_mask_beside_the_positions_stays_a_mask():
    def may_look(row, head, t, s):
        return (s <= t) & (s >= 2)

    sizes = {"batch_size": 1, "q_length": 4, "kv_length": 4, "mask_function": may_look, "allow_is_causal_skip": False}
    assert lengths_or_mask(**sizes).tolist() == [2, 2]
    assert lengths_or_mask(**sizes, attention_mask=torch.ones(1, 4, dtype=torch.bool)).shape == (1, 1, 4, 4)
    assert lengths_or_mask(**sizes, use_vmap=True).shape == (1, 1, 4, 4)


def test_flash_attention_2_is_refused_with_several_rows_a_batch(monkeypatch):
    """transformers looks for documents in a single row only; in several they would see each other."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    card = Device("cuda", "NVIDIA A100", (8, 0), real_bf16=True, memory_bytes=40 * 2**30)
    sets = ["tricks.packing=true", "tricks.attention=flash_attention_2", "tricks.precision=bf16"]
    assert resolve(with_settings(Recipe(), [*sets, "train.batch_size=1"]), card).collator
    with pytest.raises(BadInput, match=r"packing=true with .*batch_size=2.*single row only; set train.batch_size=1"):
        resolve(with_settings(Recipe(), [*sets, "train.batch_size=2"]), card)
