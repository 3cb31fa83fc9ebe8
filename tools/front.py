"""The parts of README and home that are made of lessons, addresses and results: ``python -m tools.front``.

A part stands between ``<!-- made: NAME -->`` and ``<!-- end of NAME -->``. Addresses come from ``pyproject.toml``.
"""

import json
import re
from pathlib import Path

from cria_tricks.common.lessons import PARTS
from cria_tricks.common.markdown_table import table
from tools import notebooks

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
CAPSTONE = "kwanzaa"

LEARNT = {
    "the_bill": "say what fills a GPU's memory, and predict the peak",
    "lora": "train 11 million parameters instead of 1.2 billion",
    "flash_attention": "make attention save memory on a T4, where the default saves nothing (predicted)",
    "gradient_checkpointing": "save memory by computing some results twice",
    "chunked_loss": "stop the loss from taking 3 GiB, so that rows can be longer",
    "mixed_precision": "nearly halve the memory with 16-bit numbers, and explain a `nan`",
    "nf4": "store weights in 4 bits, so that an 8B model fits a T4 (predicted)",
    "optimizers": "tell when an 8-bit optimizer saves 5.4 GiB, and when hardly any",
    "gradient_accumulation": "learn from eight rows at a time in nearly the memory of one",
    "packing": "train on short texts without paying for padding",
    "fused_lora": "write a backward pass by hand, as the fast trainers do",
    "a_full_card": "tell how much one more technique will save",
    "when_libraries_lie": "catch seven failures that raise no error",
    "checkpoint_and_resume": "resume a killed run without losing its work",
    "kwanzaa": "do a whole run: plan, train, compare, publish",
    "int8": "choose between 8-bit and 4-bit weights",
    "flash_decoding": "explain why long chats get slow, and read each past token once",
    "long_rows": "train an 8B on rows three times as long (predicted)",
    "weights_elsewhere": "train all weights of a 1B model on a T4 (predicted)",
    "choose_your_hardware": "predict fit, minutes and price before you rent a card",
    "data_parallel": "train on two cards, and predict how much faster that is",
    "sharding": "split a model across cards, and know when that saves memory",
    "tensor_parallel": "cut every matrix in two, and still get the right gradients",
    "pipeline_parallel": "keep two cards busy instead of taking turns",
    "context_parallel": "split one long row across cards",
    "hybrid": "find the fastest of ten ways to use eight cards",
    "interconnect": "predict when one more card stops helping",
    "many_cards": "understand reports of very large runs",
    "data_at_scale": "train on more text than fits in memory, each row once",
    "monitoring": "find why a run is slow although its GPU shows 100 % use",
    "jobs_and_elasticity": "rent by the price of the whole job, and survive a crash",
}
"""What a reader can do after each lesson, in one line that goes on from :data:`CAN`."""
CAN = "you will be able to"

MEASURED = {
    "off": "full fine-tuning in fp32",
    "ladder_attention": "+ LoRA, and PyTorch's fused attention",
    "ladder_gradient_checkpointing": "+ gradient checkpointing",
    "ladder_chunked_loss": "+ a chunked loss",
    "ladder_paged_optimizer": "+ 16 bits, 4-bit weights, 8-bit optimizer",
}
"""The measured runs that README shows, by their names in the results: the job as it shrinks, and our worst error."""


def lessons(page: Path) -> str:
    """The table of all lessons and what each is good for; on the site, a table for each part, and how to run them."""
    if page.name == "README.md":  # a repository has notebooks, and the site has pages; README has little room
        of_all = notebooks.lessons()
        told = [(f"[{_heading(path)}](notebooks/{path.stem}.ipynb)", LEARNT[path.stem]) for path in of_all]
        return table(("lesson", CAN), told)
    parts = []
    for part, names in PARTS.items():
        rows = []
        for name in names:
            read, run = f"lessons/{name}.md", notebooks.colab_address(name)
            rows.append((f"[{_heading(notebooks.LESSONS / f'{name}.py')}]({read})", LEARNT[name], f"[run]({run})"))
        parts.append(f"### {part}\n\n{table(('lesson', CAN, ''), rows)}")
    return "\n\n".join(parts)


def _heading(lesson: Path) -> str:
    """A lesson's number and the first part of its title."""
    return notebooks.titled(lesson).partition(":")[0]


def links(page: Path) -> str:
    """The three ways in; on the site they are buttons."""
    colab = notebooks.colab_address(CAPSTONE)
    if page.name == "README.md":
        site = notebooks.SITE
        return f"**[Will it fit?]({site}fit.html) · [The course]({site}) · [Train free in Colab]({colab})**"
    return (
        "[Will it fit my card?](fit.md){ .md-button .md-button--primary }\n"
        "[Start the course](lessons/the_bill.md){ .md-button }\n"
        f"[Train free in Colab]({colab}){{ .md-button }}"
    )


def measured(_: Path) -> str:
    """Five runs on a real GPU, beside what we had predicted."""
    results = ROOT / "benchmarks" / "results" / "h200" / "second_sitting.json"
    cases = {case["name"]: case for case in json.loads(results.read_text(encoding="utf-8"))["cases"]}
    rows = []
    for name, text in MEASURED.items():
        predicted, peak = cases[name]["estimated_bytes"], cases[name]["peak_allocated_bytes"]
        mib = [f"{size / 2**20:,.0f}" for size in (predicted, peak)]
        rows.append((text, *mib, f"{100 * (peak / predicted - 1):+.1f} %"))
    return table(("peak of Llama-3.2-1B", "predicted MiB", "measured MiB", "above predicted"), rows)


def clone(_: Path) -> str:
    """How the repository comes to a machine."""
    folder = notebooks.REPOSITORY.rpartition("/")[2]
    return (
        f"```\ngit clone {notebooks.REPOSITORY} && cd {folder}\n"
        "make train                 # installs, then trains a 135M model: 3 minutes on two CPU cores\n"
        "source .venv/bin/activate  # for the command cria\n"
        "make test                  # optional tests: 5 to 15 minutes\n```"
    )


MADE = {"lessons": lessons, "links": links, "clone": clone, "measured": measured}


def filled(page: Path) -> str:
    """The text of a page with its parts as they should be."""
    return re.sub(
        r"(<!-- made: (\w+) -->\n).*?(<!-- end of \2 -->)",
        lambda match: f"{match[1]}\n{MADE[match[2]](page)}\n\n{match[3]}",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )


def write() -> None:
    """Write both pages."""
    for page in PAGES:
        page.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    write()
