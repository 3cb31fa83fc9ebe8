"""The parts of README and home that are made of something: the lessons and the addresses: ``python -m tools.front``.

A part stands between ``<!-- made: NAME -->`` and ``<!-- end of NAME -->``. Addresses come from ``pyproject.toml``.
"""

import re
from pathlib import Path

from cria_tricks.bench.tables import table
from cria_tricks.common.lessons import PARTS
from tools import films, notebooks

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
CAPSTONE = "kwanzaa"

LEARNT = {
    "the_bill": "on long rows, gradients do not raise the peak",
    "lora": "frozen weights save 9.6 GiB; the rank hardly matters",
    "flash_attention": "on a T4 the usual flag alone saves nothing",
    "gradient_checkpointing": "a block computed twice needs the same dropout mask",
    "chunked_loss": "a token's logits take 12 times its 16 block inputs",
    "mixed_precision": "a usual line of code costs 1.1 GiB",
    "nf4": "4-bit weights save 1.3 GiB if nothing else is in the way",
    "optimizers": "8 bits save 5.4 GiB in full fine-tuning, 64 MiB here",
    "gradient_accumulation": "one row at a time, it only costs memory",
    "packing": "documents that see each other lower the loss, wrongly",
    "fused_lora": "two of an MLP's four saved tensors are enough",
    "a_full_card": "savings do not add up; 7.3 GiB of tensors reserve 9.3",
    "when_libraries_lie": "a dead run logs a falling loss, then 0.0",
    "checkpoint_and_resume": "without the random state it is another run",
    "kwanzaa": "plan, train, resume, evaluate",
    "int8": "half the weights' bytes, and almost the same bill",
    "flash_decoding": "each new token moves the whole KV cache 3 times",
    "long_rows": "one open block is as large as all saved inputs",
    "weights_elsewhere": "4.6 GiB of freed gradients lower the peak by 3.6",
    "choose_your_hardware": "of ten rules of thumb, two hold",
    "data_parallel": "two cards wait for the longest row",
    "sharding": "on two cards the job's peak grows",
    "tensor_parallel": "the loss can be right and the gradients wrong",
    "pipeline_parallel": "a device map makes two cards as fast as one",
    "context_parallel": "on long rows the ring costs little",
    "hybrid": "the order of the axes decides what the slow link carries",
    "interconnect": "where one more card stops helping",
    "many_cards": "zero bubble does not help LoRA",
    "data_at_scale": "a character takes 12 bytes in lists, 0.6 in an array",
    "monitoring": "a card that is 100 % busy can reach 11 % of its peak",
    "jobs_and_elasticity": "start-up makes a short A100 job cost 4 times a T4's",
}
"""What a reader learns in each lesson, in one line."""


def lessons(page: Path) -> str:
    """The table of all lessons: what a reader learns, the page, the notebook; on the site, a table for each part."""
    if page.name == "README.md":  # a repository has notebooks, and the site has pages; README has little room
        rows = []
        for path in notebooks.lessons():
            number, _, title = _heading(path).partition(". ")
            read, run = f"{notebooks.SITE}lessons/{path.stem}.html", f"notebooks/{path.stem}.ipynb"
            rows.append((f"[{number}]({run})", f"[{title}]({read})", LEARNT[path.stem]))
        return table(("run", "lesson", "what you learn"), rows)
    parts = []
    for part, names in PARTS.items():
        rows = []
        for name in names:
            read, run = f"lessons/{name}.md", notebooks.colab_address(name)
            rows.append((f"[{_heading(notebooks.LESSONS / f'{name}.py')}]({read})", LEARNT[name], f"[run]({run})"))
        parts.append(f"### {part}\n\n{table(('lesson', 'what you learn', ''), rows)}")
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
