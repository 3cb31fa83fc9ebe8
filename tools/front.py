"""The parts of README and home that are made of something: the lessons and the addresses: ``python -m tools.front``.

A part stands between ``<!-- made: NAME -->`` and ``<!-- end of NAME -->``. Addresses come from ``pyproject.toml``.
"""

import re
from pathlib import Path

from cria_tricks.bench.tables import table
from tools import films, notebooks

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
CAPSTONE = "17_kwanzaa"

SURPRISES = {
    "00": "gradients do not raise the peak of long rows",
    "01": "eager attention: 16 bits take more than 32",
    "02": "one row at a time, it only costs memory",
    "03": "another dropout mask: wrong gradients",
    "04": "freezing saves memory; the rank hardly matters",
    "05": "half the weights' bytes, and a larger bill",
    "06": "weights shrink by 1,377 MiB, the peak by 239",
    "07": "5,539 MiB of full fine-tuning, 64 of the job",
    "08": "with room for 79 pages of 80, all 80 travel",
    "09": "on a T4 the flag alone makes it worse",
    "10": "a new token moves the KV cache 3 times",
    "11": "a leak between documents lowers the loss",
    "12": "logits take 12 times 16 checkpointed blocks",
    "13": "one line of most scripts costs 1,155 MiB",
    "14": "the first loss is right, the run is not",
    "15": "of ten rules of thumb, two hold",
    "16": "savings of 43,866 MiB on a bill of 32,046",
    "17": "plan, train, resume, evaluate",
    "18": "a dead run logs a falling loss, then 0.0",
    "19": "7.3 GiB of tensors reserve 9.3 GiB",
    "20": "two cards wait for the longest row",
    "21": "on two cards the job's peak grows",
    "22": "right loss, wrong gradients",
    "23": "a device map's two cards are as fast as one",
    "24": "the order decides what crosses the slow link",
    "25": "where one more card stops helping",
    "26": "a character: 12 bytes in lists, 0.6 in an array",
    "27": "a public T4 run reached 11 % of peak FLOP/s",
    "28": "a short A100 job costs over four times a T4's",
    "29": "two of an MLP's four saved tensors are enough",
    "30": "one open block equals all block inputs",
    "31": "4.6 GiB of gradients freed, 3.6 gained",
    "32": "long rows make the ring cheap",
    "33": "zero bubble does nothing for LoRA",
}
"""The surprise of each lesson, by its number."""


def lessons(page: Path) -> str:
    """The table of all lessons, each with its surprise, its page and its notebook."""
    rows = []
    for path in notebooks.lessons():
        heading = re.search(r"^# # (.+?)(?::.*)?$", path.read_text(encoding="utf-8"), re.M)
        assert heading, path
        surprise = SURPRISES[path.stem[:2]]
        if page.name == "README.md":  # a repository has notebooks, and the site has pages; README has little room
            number, _, title = heading[1].partition(". ")
            read, run = f"{notebooks.SITE}lessons/{path.stem}.html", f"notebooks/{path.stem}.ipynb"
            rows.append((f"[{number}]({run})", f"[{title}]({read})", surprise))
        else:
            read, run = f"lessons/{path.stem}.md", notebooks.colab_address(path.stem)
            rows.append((f"[{heading[1]}]({read})", surprise, f"[run]({run})"))
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
        "[Start the course](lessons/00_the_bill.md){ .md-button }\n"
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
        "python lessons/00_the_bill.py # a lesson, without its figures\n```"
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
