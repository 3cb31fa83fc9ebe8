"""What our loop costs: the same job by it, by a bare loop (``peers/bare_loop.py``) and by TRL, side by side.

    python -m benchmarks.overhead                                                  # smoke, 5 times 4 steps of each
    python -m benchmarks.overhead --pairs 2 --steps 3 --set data.max_length=256    # a few minutes on two cores

Every run has a freshly loaded model and the same rows in the same order. Timed is from the end of the first optimizer
step, which warms up, to the end of the last: whole periods with all that happens between two steps, but no loading,
no evaluation and no checkpoint. Who goes first changes from pair to pair.
"""

import argparse
import importlib.metadata
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import write
from benchmarks.peers import trl_sft
from benchmarks.peers.job import Job
from cria_tricks import models, recipes
from cria_tricks.bench.case import stamp
from cria_tricks.data import sources
from cria_tricks.data.tokens import tokenize
from cria_tricks.load.model import load_tokenizer
from cria_tricks.recipe import Recipe, with_settings


def real_job(recipe: Recipe) -> Job:
    """The job of a recipe on its own rows."""
    tokenizer = load_tokenizer(models.find(recipe.model))
    chats = sources.find(recipe.data.train, "train").rows
    return Job(recipe, list(tokenize(chats, tokenizer, recipe.data.max_length).rows), tokenizer)


def compare(job: Job, pairs: int, console: Console) -> dict[str, Any]:
    """Time every way ``pairs`` times, in turn."""
    ways = ["ours", "bare", *(["trl"] if trl_sft.installed() else [])]
    timed: list[dict[str, Any]] = []
    for number in range(pairs):
        first = number % len(ways)
        timed.append({way: job.time(way) for way in ways[first:] + ways[:first]})
        seconds = ", ".join(f"{way} {run['seconds']:.2f} s" for way, run in timed[-1].items())
        console.print(f"pair {number + 1} of {pairs}, in this order: {seconds}", highlight=False)

    def spread(values: list[float]) -> dict[str, Any]:
        return {"median": statistics.median(values), "range": [min(values), max(values)], "pairs": values}

    def apart(way: str) -> float:
        both = (zip(pair["ours"]["losses"], pair[way]["losses"], strict=True) for pair in timed)
        return max(abs(ours - other) for losses in both for ours, other in losses)

    speed = "trained_tokens_per_second"
    return {
        "trained_tokens": job.tokens,
        speed: {way: spread([pair[way][speed] for pair in timed]) for way in ways},
        "ours_over": {way: spread([pair["ours"][speed] / pair[way][speed] for pair in timed]) for way in ways[1:]},
        "final_loss": {way: [pair[way]["losses"][-1] for pair in timed] for way in ways},
        "largest_loss_difference": {way: apart(way) for way in ways[1:]},
        "runs": timed,
    }


def main() -> None:
    """Measure, write the result file, print the numbers that matter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="smoke")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--pairs", type=int, default=5, help="how often each is timed")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps; the first is not timed")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    if chosen.steps < 2 or chosen.pairs < 1:
        parser.error("at least 2 steps and 1 pair are needed")
    steps = [f"train.max_steps={chosen.steps}", f"train.save_steps={chosen.steps + 1}", "train.save_minutes=0"]
    recipe = with_settings(recipes.get(chosen.recipe), [*chosen.settings, *steps])
    console = Console()
    if not trl_sft.installed():
        console.print("TRL is not installed, so it is not measured; pip install 'cria_tricks[peers]'", markup=False)
    result = stamp(recipe) | compare(real_job(recipe), chosen.pairs, console)
    if trl_sft.installed():
        result["versions"]["trl"] = importlib.metadata.version("trl")
    path = write("overhead", result, chosen.results)
    for way, speed in result["trained_tokens_per_second"].items():
        said = f"{way}: {speed['median']:.1f} trained tokens/s, final loss {result['final_loss'][way][0]:.6f}"
        if way in result["ours_over"]:
            said += f", ours {result['ours_over'][way]['median']:.3f} times as fast"
        console.print(said, highlight=False)
    console.print(f"wrote {path}", highlight=False)


if __name__ == "__main__":
    main()
