"""Two recipes of ours beside a bare loop and TRL, on the same rows in the same run.

``small`` is the capstone, ``fast`` LoRA that keeps everything but the logits, compiled. Bytes are counted in a run of
their own, for all alike, and seconds are whole periods, with all that happens between two steps (``peers/job.py``).
"""

import importlib.metadata
from typing import Any

import pytest

from benchmarks.conftest import keep
from benchmarks.peers import trl_sft
from benchmarks.peers.job import Job
from cria_tricks.bench import cases
from cria_tricks.bench.case import WARM_UP, Rows, Setup, out_of_memory, settings_of, stamp
from cria_tricks.bench.results import Case
from cria_tricks.hardware import this_device
from cria_tricks.recipe import Recipe, with_settings

ACCUMULATED = 4
KEPT = "peft=lora attention=best precision=best chunked_loss=true"
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "small": ("ours", "capstone", {}),
    "fast": ("ours", f"{KEPT} compile=true", {}),
    "bare_as_small": ("bare", "capstone", {}),
    "trl_as_small": ("trl", "capstone", {}),
    "trl_smallest": ("trl", "capstone", {"activation_offloading": True}),
    "trl_as_fast": ("trl", KEPT, {}),
    "trl_fastest": ("trl", KEPT, {"torch_compile": True}),
}
"""Who does it, with which switches, and with which flags of TRL's own."""


@pytest.mark.parametrize("name", WAYS)
def test_peers(request, benchmark, setup, name):
    way, toggles, flags = WAYS[name]
    if way == "trl" and not trl_sft.installed():
        pytest.skip("TRL is not installed: pip install -e '.[peers]'")
    if flags.get("activation_offloading") and this_device().kind == "cpu":
        pytest.skip("TRL's activation offloading is for cards")
    keep(request.config, benchmark, run(name, way, toggles, flags, setup))


def capstone_words() -> str:
    """The capstone's switches on this device."""
    device = this_device()
    return cases.words(cases.capstone(device), cases.on(device))


def job_of(toggles: str, setup: Setup) -> Recipe:
    """A recipe with few rows to a step."""
    steps = [f"train.max_steps={WARM_UP + setup.rounds}", "train.save_minutes=0", f"data.max_length={setup.tokens}"]
    toggles = capstone_words() if toggles == "capstone" else toggles
    chosen = settings_of(f"{toggles} gradient_accumulation={ACCUMULATED}", this_device())
    return with_settings(Recipe(), [f"model=random:{setup.shape}", *chosen, *steps])


def described(name: str, toggles: str, flags: dict[str, Any], rows: Rows, setup: Setup) -> dict[str, Any]:
    """What a case says beside its numbers."""
    trained = sum(label >= 0 for row in rows for label in row["labels"][1:])
    words_of = capstone_words() if toggles == "capstone" else toggles
    return {
        "bench": "peers",
        "name": name,
        "against": {"small": "", "fast": "small"}.get(name, "fast" if "fast" in name else "small"),
        "settings": [*settings_of(words_of, this_device()), *(f"{key}={value}" for key, value in flags.items())],
        "model": f"random:{setup.shape}",
        "rows": ACCUMULATED,
        "tokens_per_row": setup.tokens,
        "tokens": ACCUMULATED * sum(len(row["input_ids"]) for row in rows),
        "trained_tokens": ACCUMULATED * trained,
        "kind": this_device().kind,
        **stamp(),
    }


def run(name: str, way: str, toggles: str, flags: dict[str, Any], setup: Setup) -> Case:
    """One way to do the job: weighed, then timed."""
    rows = setup.documents([setup.tokens])
    about = described(name, toggles, flags, rows, setup)
    if way == "trl":
        about["versions"]["trl"] = importlib.metadata.version("trl")
    job = Job(job_of(toggles, setup), rows, padder())
    countable = this_device().kind == "cuda" or not (job.plan.compiled or flags.get("torch_compile"))
    try:
        peak = job.weigh(way, flags) if countable else None
        seconds = job.time(way, flags)["step_seconds"][WARM_UP - 1 :]
    except (RuntimeError, MemoryError) as error:
        return Case(**about, status="oom", why=out_of_memory(error))
    return Case(**about, status="ok", peak_allocated_bytes=peak, seconds=seconds)


def padder() -> Any:
    """A tokenizer that only pads: the rows are token ids, and a card's machine may have no other."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, "<end>")), pad_token="<pad>", eos_token="<end>"
    )
