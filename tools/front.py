"""The parts of README and home that are made of something: the lessons and the addresses: ``python -m tools.front``.

A part stands between ``<!-- made: NAME -->`` and ``<!-- end of NAME -->``. Addresses come from ``pyproject.toml``.
"""

import re
from pathlib import Path

from cria_tricks.bench.tables import table
from tools import films, notebooks

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
CAPSTONE = "kwanzaa"

SURPRISES = {
    "the_bill": "gradients do not raise the peak of long rows",
    "mixed_precision": "eager attention: 16 bits take more than 32",
    "gradient_accumulation": "one row at a time, it only costs memory",
    "gradient_checkpointing": "another dropout mask: wrong gradients",
    "lora": "freezing saves memory; the rank hardly matters",
    "int8": "half the weights' bytes, and a larger bill",
    "nf4": "weights shrink by 1,377 MiB, the peak by 239",
    "adamw_8bit": "5,539 MiB of full fine-tuning, 64 of the job",
    "paged_optimizer": "with room for 79 pages of 80, all 80 travel",
    "flash_attention": "on a T4 the flag alone makes it worse",
    "flash_decoding": "a new token moves the KV cache 3 times",
    "packing": "a leak between documents lowers the loss",
    "chunked_loss": "logits take 12 times 16 checkpointed blocks",
    "lean_preparation": "one line of most scripts costs 1,155 MiB",
    "checkpoint_and_resume": "the first loss is right, the run is not",
    "choose_your_hardware": "of ten rules of thumb, two hold",
    "together": "savings of 43,866 MiB on a bill of 32,046",
    "kwanzaa": "plan, train, resume, evaluate",
    "when_libraries_lie": "a dead run logs a falling loss, then 0.0",
    "allocated_is_not_reserved": "7.3 GiB of tensors reserve 9.3 GiB",
    "data_parallel": "two cards wait for the longest row",
    "sharding": "on two cards the job's peak grows",
    "tensor_parallel": "right loss, wrong gradients",
    "pipeline_parallel": "a device map's two cards are as fast as one",
    "hybrid": "the order decides what crosses the slow link",
    "interconnect": "where one more card stops helping",
    "data_at_scale": "a character: 12 bytes in lists, 0.6 in an array",
    "monitoring": "a public T4 run reached 11 % of peak FLOP/s",
    "jobs_and_elasticity": "a short A100 job costs over four times a T4's",
    "fused_lora": "two of an MLP's four saved tensors are enough",
    "long_rows": "one open block equals all block inputs",
    "weights_elsewhere": "4.6 GiB of gradients freed, 3.6 gained",
    "context_parallel": "long rows make the ring cheap",
    "many_cards": "zero bubble does nothing for LoRA",
}
"""The surprise of each lesson."""


def lessons(page: Path) -> str:
    """The table of all lessons, each with its surprise, its page and its notebook."""
    rows = []
    for path in notebooks.lessons():
        heading = notebooks.titled(path).partition(":")[0]
        surprise = SURPRISES[path.stem]
        if page.name == "README.md":  # a repository has notebooks, and the site has pages; README has little room
            number, _, title = heading.partition(". ")
            read, run = f"{notebooks.SITE}lessons/{path.stem}.html", f"notebooks/{path.stem}.ipynb"
            rows.append((f"[{number}]({run})", f"[{title}]({read})", surprise))
        else:
            read, run = f"lessons/{path.stem}.md", notebooks.colab_address(path.stem)
            rows.append((f"[{heading}]({read})", surprise, f"[run]({run})"))
    names = ("run", "lesson", "the surprise") if page.name == "README.md" else ("lesson", "the surprise", "")
    return table(names, rows)


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


def picture(page: Path) -> str:
    """A step as a film: on the site with its switches, in README as a picture that moves."""
    if page.name != "README.md":
        return films.element("home", "assets/films")
    folder = (films.FOLDER.relative_to(page.parent) / "moving").as_posix()
    says = re.search("<title>(.+)</title>", (films.FOLDER / "moving-light.svg").read_text(encoding="utf-8"))
    assert says
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}-dark.svg">'
        f'<img width="640" alt="{says[1]}" src="{folder}-light.svg"></picture>'
    )


def clone(_: Path) -> str:
    """How the repository comes to a machine."""
    folder = notebooks.REPOSITORY.rpartition("/")[2]
    return (
        f"```\ngit clone {notebooks.REPOSITORY} && cd {folder}\n"
        "make train                    # trains a real adapter, without a GPU or a model hub\n"
        "source .venv/bin/activate     # from here on: cria, python\n"
        "cria plan kwanzaa --gpu t4    # the bill of the real job\n"
        "python lessons/the_bill.py # a lesson, without its figures\n```"
    )


MADE = {"lessons": lessons, "links": links, "picture": picture, "clone": clone}


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
