"""Every check of the selftest holds here, and fails alone when its failure is switched back on."""

import json
import os
import random
from dataclasses import replace

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from cria_tricks.common.errors import Interrupted
from cria_tricks.data import tokens
from cria_tricks.data.batches import PadToLongest
from cria_tricks.doctor import selftest
from cria_tricks.load import losses
from cria_tricks.load import model as load
from cria_tricks.models import pretrained
from cria_tricks.trainer import fit as fitting
from cria_tricks.trainer import loop as training
from cria_tricks.trainer.training import Training

NAMES = [check.name for check in selftest.CHECKS]


def only_failing(name: str) -> str:
    """Make a check and one more, or with CRIA_ALL every one; the others hold. What was found."""
    others = [check for check in selftest.CHECKS if check.name != name]
    if not os.environ.get("CRIA_ALL"):  # loss_in_fp32 takes 20 s on a CPU without 16-bit units
        others = [random.Random(name).choice([check for check in others if check.name != "loss_in_fp32"])]
    made = [check for check in selftest.CHECKS if check.name == name or check in others]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "CHECKS", made)
        checks = {check["name"]: check for check in selftest.examine()["checks"]}
    assert [check["name"] for check in checks.values() if not check["holds"]] == [name]
    return checks[name]["found"]


def test_all_hold_and_cost_seconds_of_a_slow_core(run_cria):
    """Counted in operations, because seconds depend on what else runs: found 49 GFLOP; a slow core does 10 a second."""
    state = torch.get_rng_state()
    with FlopCounterMode(display=False) as counted:
        code, stdout, stderr = run_cria("doctor", "--selftest", "--json")
    assert code == 0, stdout
    found = json.loads(stdout)
    assert [(check["name"], check["holds"]) for check in found["checks"]] == [(name, True) for name in NAMES]
    assert set(found) == {"ok", "seconds", "device", "versions", "checks"}
    assert {key for check in found["checks"] for key in check} == {"name", "asks", "holds", "found", "cause", "cure"}
    assert found["ok"] is True
    assert found["seconds"] > 0
    assert 1e9 < counted.get_total_flops() < 100e9
    assert stderr.startswith("looking for failures that raise nothing")
    assert torch.equal(torch.get_rng_state(), state), "no random number was drawn from the caller's"


# Each failure, switched back on.


def test_a_base_with_made_up_numbers(monkeypatch):
    monkeypatch.setattr(pretrained, "_refuse", lambda *_: None)
    assert "was loaded, with random numbers of size" in only_failing("whole_base")


def of_the_template(chat, tokenizer, *given):
    """What transformers gives where the template has no {% generation %} block."""
    made = tokenizer.apply_chat_template(list(chat.messages), return_dict=True, return_assistant_tokens_mask=True)
    masks = zip(made["input_ids"], made["assistant_masks"], strict=True)
    return made["input_ids"], [token if mask else -100 for token, mask in masks]


def test_a_mask_of_zeros(monkeypatch):
    monkeypatch.setattr(tokens, "_chat", of_the_template)
    assert "leaves out what the assistant says" in only_failing("trained_tokens")


def test_labels_masked_by_the_padding_token_which_is_the_end_token_too(monkeypatch):
    right = tokens._chat

    def without_padding(chat, tokenizer, *given):
        ids, labels = right(chat, tokenizer)
        return ids, [-100 if label == tokenizer.pad_token_id else label for label in labels]

    monkeypatch.setattr(tokens, "_chat", without_padding)
    assert "trained is 'Four.Seven: 4 + 3.'" in only_failing("trained_tokens")


def test_packed_rows_with_a_mask_of_ones(monkeypatch):
    collate = PadToLongest.__call__

    def with_a_mask(self, rows):
        batch = collate(self, rows)
        return {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}

    monkeypatch.setattr(PadToLongest, "__call__", with_a_mask)
    assert "when its neighbour changes" in only_failing("packed_documents")


def test_packed_rows_with_a_cache(monkeypatch):
    prepare = training.prepare

    def with_a_cache(run):
        prepare(run)
        run.model.config.use_cache = True

    monkeypatch.setattr(training, "prepare", with_a_cache)
    assert "when its neighbour changes" in only_failing("packed_documents")


def test_a_loss_in_16_bits(monkeypatch):
    """torch's own, called as ours is."""

    def of_torch(hidden, head, labels, chunk):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
        with torch.autocast(device, enabled=False):
            if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
                return F.linear_cross_entropy(hidden.to(dtype), head.to(dtype), labels, reduction="sum")
            return F.cross_entropy(hidden.to(dtype) @ head.to(dtype).T, labels, reduction="sum")

    monkeypatch.setattr(losses, "chunked_cross_entropy", of_torch)
    assert "the chunked loss by " in only_failing("loss_in_fp32")


def test_a_nan_that_nobody_looks_at(monkeypatch):
    monkeypatch.setattr(Training, "refuse_infinite", lambda self, loss: None)
    monkeypatch.setattr(training, "clip", lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0))
    found = only_failing("nan_stops")
    assert ", nan, nan, nan, and 28 of 28 trained matrices are NaN" in found


@pytest.mark.filterwarnings("ignore:bitsandbytes")
def test_repacking_drops_gradients(monkeypatch):
    """On a CPU with AVX512-BF16; such a one is played elsewhere, as the repacking does not ask the CPU again."""
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)
    (check,) = (check for check in selftest.CHECKS if check.name == "gradients_after_evaluation")
    monkeypatch.setattr(selftest, "CHECKS", (check,))
    assert selftest.examine()["ok"], "kept from it by load.forbid_cpu_repacking"
    monkeypatch.undo()
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)
    monkeypatch.setattr(load, "forbid_cpu_repacking", lambda model: None)
    assert "an evaluation moves the next gradient by " in only_failing("gradients_after_evaluation")


def test_an_evaluation_that_is_a_mean_of_means(monkeypatch):
    def evaluate(run):
        """As transformers does it, with the loss that its models give."""
        run.model.eval()
        with torch.no_grad():
            batches = run.loader(run.eval_rows, range(len(run.eval_rows)))
            means = [run.model(**batch).loss.item() for batch in batches]
        run.log({"eval_loss": sum(means) / len(means)})

    monkeypatch.setattr(training, "evaluate", evaluate)
    monkeypatch.setattr(fitting, "evaluate", evaluate)
    assert "over all trained tokens it is" in only_failing("evaluation_is_token_mean")


# What the selftest itself must not do.


def one_check(monkeypatch, look):
    check = selftest.CHECKS[0]
    monkeypatch.setattr(selftest, "CHECKS", (replace(check, look=look), *selftest.CHECKS[:1]))


def test_a_comparison_with_nan_does_not_hold(monkeypatch):
    """Not of the first number, either: max() of 1 and NaN is 1."""
    right, nan = selftest.token_mean, float("nan")
    wholes = iter([right])  # of the first loss in 16 bits
    monkeypatch.setattr(selftest, "apart", lambda *gradients: nan)
    monkeypatch.setattr(selftest, "token_mean", lambda *what: next(wholes, lambda *what: nan)(*what))
    failing = [check["name"] for check in selftest.examine()["checks"] if not check["holds"]]
    assert failing == [name for name in NAMES if name not in ("whole_base", "trained_tokens", "nan_stops")]


def test_a_check_that_cannot_be_made_does_not_hold_and_the_others_go_on(run_cria, monkeypatch):
    def broken(weights):
        raise ImportError("a library changed\nand says so at length")

    one_check(monkeypatch, broken)
    code, stdout, _ = run_cria("doctor", "--selftest")
    lines = stdout.splitlines()
    assert code == 1
    assert lines[0] == "fails  broken                     ImportError: a library changed"
    assert lines[1].startswith(
        "holds  whole_base                 a base without model.layers.1.mlp.up_proj.weight is refused"
    )
    check = selftest.CHECKS[0]
    assert lines[2:] == ["", f"broken: {check.asks}", f"  cause: {check.cause}", f"  cure: {check.cure}"]


@pytest.mark.parametrize(("raised", "expected"), [(MemoryError, MemoryError), (Interrupted, KeyboardInterrupt)])
def test_what_is_no_finding_is_raised(raised, expected, monkeypatch):
    def stopped(weights):
        raise raised("enough")

    one_check(monkeypatch, stopped)
    with pytest.raises(expected):
        selftest.examine()
