"""Measure a training step on the reader's own GPU, or show what was measured on another one."""

from dataclasses import replace

import torch

from cria_tricks.bench import results, tables
from cria_tricks.course.notebook import show_table


def on_a_gpu(bench: str, off: str, on: str, shorter: int = 1) -> None:
    """Measure a step of Llama-3.2-1B's shape without and with a technique; without a GPU, print the committed results.

    Args:
        bench: the technique's benchmark, a name in ``benchmarks/bench_techniques.py``.
        off: settings of the step without the technique, as in that file: ``"peft=lora attention=best precision=best"``.
        on: settings of the step with the technique.
        shorter: the rows have 2,048 / ``shorter`` tokens; not 1 where the benchmark takes shorter rows.
    """
    if torch.cuda.is_available():
        # This imports transformers and peft, which only a measurement needs.
        from cria_tricks.bench import case as cases

        setup = cases.default_setup()
        setup = replace(setup, tokens=setup.tokens // shorter)
        # Measuring draws random numbers. Restore the RNG state, so that the lesson goes on as it does without a GPU.
        with torch.random.fork_rng():
            found = [cases.measure(bench, "off", off, setup), cases.measure(bench, "on", on, setup, "off")]
    else:
        found = [case for case in results.read(results.COMMITTED) if case.bench == bench]
    if not found:
        print(f"no GPU here, and no committed results of {bench} next to this package")
    else:
        show_table(tables.tricks(found))
