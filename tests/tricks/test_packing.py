"""Documents in one packed row are as far apart as in two."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import benchmarks
from cria_tricks.data.batches import PadToLongest, real_tokens
from cria_tricks.data.tokens import IGNORED
from cria_tricks.tricks.packing import best_fit, block_causal_mask, documents, pack
from tests.helpers import prepare, train
from tests.tolerances import PACKED_ATTENTION, PACKED_LOSS

LENGTHS = json.loads((Path(benchmarks.__file__).parent / "kwanzaa_lengths.json").read_text())["train"]


def collated(rows, capacity=64):
    return PadToLongest(2)(pack(rows, capacity))


def logits(model, batch, **more):
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **more).logits


def test_the_first_label_of_each_document_is_masked():
    """Also where a prompt does not mask it anyway: the token before it belongs to another document."""
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    (row,) = pack(rows, 8)
    assert row == {
        "input_ids": [5, 6, 7, 8, 9],
        "labels": [IGNORED, 6, 7, IGNORED, 9],
        "position_ids": [0, 1, 2, 0, 1],
    }


def test_math(rows):
    """Attention over a packed row under the reference's mask is attention over each document alone."""
    batch = collated(rows[:3])
    torch.manual_seed(0)
    T = batch["input_ids"].shape[1]
    q, k, v = torch.randn(3, 1, 2, T, 8, dtype=torch.float64)
    packed = F.scaled_dot_product_attention(q, k, v, attn_mask=block_causal_mask(batch["position_ids"])[:, None])
    number = documents(batch["position_ids"])[0]
    assert len(set(number.tolist())) == 3
    for document in set(number.tolist()):
        here = number == document
        alone = F.scaled_dot_product_attention(q[:, :, here], k[:, :, here], v[:, :, here], is_causal=True)
        assert (packed[:, :, here] - alone).abs().max() < PACKED_ATTENTION


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


def test_every_documents_first_label_is_masked_and_padding_is_no_document(rows):
    packed = pack(rows, 40)
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


def test_switch(rows, tiny_model, tmp_path):
    """What the model really gets: positions and no mask, and attention under a block-diagonal mask."""
    from transformers import TrainerCallback

    seen = {}

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            attention = model.get_base_model().model.layers[0].self_attn
            attention.register_forward_pre_hook(
                lambda m, a, kw: seen.update(mask=kw["attention_mask"]), with_kwargs=True
            )
            model.register_forward_pre_hook(lambda m, a, kw: seen.update(inputs=kw), with_kwargs=True)

    sets = (
        "tricks.peft=lora",
        "tricks.packing=true",
        "data.max_length=64",
        "train.max_steps=1",
        "tricks.attention=sdpa",
    )
    train(tiny_model, rows[:3], tmp_path, *sets, callbacks=[Watch()])
    assert seen["inputs"].get("attention_mask") is None
    expected = block_causal_mask(seen["inputs"]["position_ids"])
    assert expected.sum() < expected.shape[-1] * (expected.shape[-1] + 1) / 2, "narrower than causal"
    assert torch.equal(seen["mask"][:, 0], expected)
