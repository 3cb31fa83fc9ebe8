"""A step on the reader's own GPU, or what was measured on one before."""

from dataclasses import replace

import torch

from cria_tricks.bench import results, tables


def on_a_gpu(bench: str, off: str, on: str, shorter: int = 1) -> None:
    """With a card, measure a step of Llama-3.2-1B's shape without a trick and with it; else show what is committed.

    Args:
        bench: of the trick, ``benchmarks/bench_BENCH.py``.
        off: the settings of the step without it, as in that file: ``"peft=lora attention=best precision=best"``.
        on: those with it.
        shorter: a part of 2,048 tokens, where that file takes shorter rows.
    """
    if torch.cuda.is_available():
        # It brings transformers and peft, and only a machine with a GPU measures.
        from cria_tricks.bench import case as cases

        setup = cases.default_setup()
        setup = replace(setup, tokens=setup.tokens // shorter)
        with torch.random.fork_rng():  # what the lesson draws next is what it draws without a card
            found = [cases.measure(bench, "off", off, setup), cases.measure(bench, "on", on, setup, "off")]
    else:
        found = [case for case in results.read(results.COMMITTED) if case.bench == bench]
    if not found:
        print(f"no GPU here, and no committed results of {bench} beside this package")
    else:
        print(tables.tricks(found))
