"""The input fuzz: seeded mutations of rows, recipes, settings, adapters and checkpoints, through the command line.

    python -m tests.drills.fuzz --cases 500 --real 20 --out /tmp/fuzz

Each case spoils one input and runs a command on it, in this process through the same entry, or as a real command. It
must end with exit code 0, 2 or 3; say what is wrong in one line, without a traceback; and leave every file as it was,
unless it went well. A run resumed past a spoilt checkpoint must end with the adapter of the undisturbed run.
"""

import argparse
import collections
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n} and {n}?"}, {"role": "assistant", "content": f"{2 * n}."}]}
    for n in range(4)
] + [{"prompt": "Sing", "completion": " la la"}]
RECIPE = """name = "fuzzed"
model = "random:tiny"

[data]
max_length = 64

[tricks]
peft = "lora"
precision = "fp32"
quantization = "none"
chunked_loss = true

[lora]
r = 2
alpha = 4.0
dropout = 0.1
target_modules = ["q_proj", "v_proj"]

[train]
batch_size = 2
epochs = 1.0
learning_rate = 0.001
seed = 3
"""
JUNK: list[Any] = [
    None, True, 0, -1, 2**70, 1.5, float("nan"), float("inf"), "", " ", "\n", "x" * 5000, "\u2028", "\ud800", "\x00",
    [], {}, [[]], {"role": "user"}, "assistant", "user", "system", "tool", "nf4", "../..", "/", "a/b", "none.jsonl",
]  # fmt: skip


@dataclass
class Case:
    """One spoilt input: the command's arguments, the files that must stay, and a check for when it goes well."""

    kind: str
    arguments: list[str]
    precious: Path
    well: Callable[[], None] = lambda: None


class Fuzz:
    """Makes and runs cases below one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = folder / "rows.jsonl"
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(RECIPE)
        steps = ["--set", "train.max_steps=3", "--set", "train.save_steps=1"]
        self.training = ["train", str(self.recipe), *self._data(self.rows), *steps]
        if run([*self.training, "--out", str(folder / "run")]) != (0, ""):
            raise AssertionError("the unspoilt run fails")
        (folder / "run" / "report.json").unlink()
        shutil.move(folder / "run" / "adapter", folder / "adapter")

    def case(self, seed: int) -> Case:
        """The case of a seed."""
        draw = random.Random(seed)
        here = self.folder / f"case-{seed}"
        here.mkdir()
        kind = draw.choice(["rows", "rows", "recipe", "recipe", "settings", "path", "adapter", "checkpoint"])
        return getattr(self, f"_{kind}")(draw, here)

    def _rows(self, draw: random.Random, here: Path) -> Case:
        path = here / "rows.jsonl"
        if draw.random() < 0.5:
            path.write_bytes(spoil_bytes(self.rows.read_bytes(), draw))
        else:
            rows = json.loads(json.dumps(ROWS))
            for _ in range(draw.randint(1, 2)):
                spoil_tree(rows, draw)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows) if isinstance(rows, list) else "")
        data = [*self._data(path), "--set", f"data.overflow={draw.choice(['truncate', 'drop', 'error'])}"]
        return Case("rows", ["train", str(self.recipe), *data, *self._short(here)], here)

    def _recipe(self, draw: random.Random, here: Path) -> Case:
        path = here / "recipe.toml"
        lines = RECIPE.splitlines()
        if draw.random() < 0.4:
            path.write_bytes(spoil_bytes(RECIPE.encode(), draw))
        else:
            number = draw.choice([n for n, line in enumerate(lines) if "=" in line])
            name = lines[number].partition("=")[0]
            value = draw.choice(
                ['"x"', "-1", "0", "1e400", "1e-300", "nan", "inf", "true", "[]", "{}", '[""]', "9" * 40, '"int8"', ""]
            )
            lines[number] = f"{draw.choice([name, name + 'x'])}= {value}"
            path.write_text("\n".join(lines))
        return Case("recipe", ["train", str(path), *self._data(self.rows), *self._short(here)], here)

    def _settings(self, draw: random.Random, here: Path) -> Case:
        from cria_tricks.recipe import field_names

        key = draw.choice(field_names())
        if draw.random() < 0.3:
            key = spoil_bytes(key.encode(), draw).decode("latin1")
        setting = f"{key}{draw.choice(['=', '=', '=', ''])}{draw.choice(JUNK)}".replace("\x00", "")
        setting = setting.encode(errors="replace").decode()  # a command line holds no half of a character
        base = ["train", str(self.recipe), *self._data(self.rows)]
        return Case("settings", [*base, "--set", setting, *self._short(here)], here)

    def _path(self, draw: random.Random, here: Path) -> Case:
        odd = [
            "x" * 300,
            "~nobody-of-this-name",
            "[b]x[/b]",
            "[/]",
            "caf\udcff",
            "a\nb",
            " ",
            "\u202e",
            "-",
            "x/" * 3000,
        ]
        path = draw.choice([*odd, *(str(here / name) for name in odd)])
        option = draw.choice(["--out", "data.train", "data.eval", "model", "train.mirror"])
        arguments = ["train", str(self.recipe), *self._data(self.rows), *self._short(here)]
        arguments += [option, path] if option == "--out" else ["--set", f"{option}={path}"]
        if option in ("--out", "train.mirror") and not os.path.isabs(path):
            path = f"{here / 'out'}{path}"  # nothing is written beside the cases
            arguments[-1] = path if option == "--out" else f"{option}={path}"
        return Case("path", arguments, here)

    def _adapter(self, draw: random.Random, here: Path) -> Case:
        folder = here / "adapter"
        shutil.copytree(self.folder / "adapter", folder)
        spoil_files(folder, draw)
        chat = ["chat", str(folder), "--prompt", "Hi", "--max-new-tokens", "1"]
        return Case("adapter", draw.choice([["verify", str(folder)], chat]), here)

    def _checkpoint(self, draw: random.Random, here: Path) -> Case:
        out = here / "run"
        shutil.copytree(self.folder / "run", out)
        newest = out / "checkpoints" / "checkpoint-3"
        spoil_files(draw.choice([newest, newest, newest.parent, out]), draw)  # from checkpoint-2 one step is left

        def same_adapter() -> None:
            name = "adapter_model.safetensors"
            wanted = (self.folder / "adapter" / name).read_bytes()
            assert (out / "adapter" / name).read_bytes() == wanted, "a silently different run"

        return Case("checkpoint", [*self.training, "--out", str(out), "--resume"], out, same_adapter)

    def _data(self, path: Path) -> list[str]:
        return ["--set", f"data.train={path}", "--set", f"data.eval={self.rows}"]

    def _short(self, here: Path) -> list[str]:
        """Spoilt numbers are checked, and then replaced: a fuzz must not train for a year."""
        sets = ["train.max_steps=1", "lora.r=2", "model=random:tiny", "train.mirror="]
        return [part for setting in sets for part in ("--set", setting)] + ["--out", str(here / "out")]


def spoil_bytes(content: bytes, draw: random.Random) -> bytes:
    """Flip, cut, double, insert or drop some bytes."""
    where, length = draw.randrange(len(content)), draw.randint(1, 40)
    before, after = content[:where], content[where:]
    return draw.choice(
        [
            before + bytes([content[where] ^ (1 << draw.randrange(8))]) + after[1:],
            before,
            before + after[:length] * 2 + after[length:],
            before + draw.randbytes(length) + after,
            before + after[length:],
            b"",
            b"\xef\xbb\xbf" + content,
            content.replace(b"\n", b"\r\n"),
        ]
    )


def spoil_tree(tree: Any, draw: random.Random) -> None:
    """Change one place of a JSON tree: take it out, or put junk there."""
    places = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(tree)
    if places:
        node, key = draw.choice(places)
        if draw.random() < 0.3:
            del node[key]
        else:
            node[key] = draw.choice(JUNK)


def spoil_files(folder: Path, draw: random.Random) -> None:
    """Spoil, or take away, one to three files of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in draw.sample(files, min(len(files), draw.randint(1, 3))):
        if draw.random() < 0.2:
            path.unlink()
        else:
            path.write_bytes(spoil_bytes(path.read_bytes() or b"x", draw))


def run(arguments: list[str], *, real: bool = False) -> tuple[int, str]:
    """Run a command; its exit code, and what it said when that was not 0."""
    if real:
        command = [sys.executable, "-m", "cria_tricks", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        return done.returncode, done.stderr if done.returncode else ""
    from cria_tricks.cli import main as cli

    err, before, code = io.StringIO(), sys.argv, 0
    sys.argv = ["cria", *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        sys.argv = before
    return code, err.getvalue() if code else ""


def check(case: Case, *, real: bool = False) -> int:
    """Run a case and hold it against the promises.

    Raises:
        AssertionError: naming the promise.
    """
    before = _hashes(case.precious)
    code, said = run(case.arguments, real=real)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code in (0, 2, 3), f"exit code {code}: {said[-500:]}"
    assert "Traceback" not in said, said
    if code:
        assert len(errors) == 1, said
        assert said.splitlines()[-1] == errors[0], said
        assert len(errors[0]) < 2000, errors[0]
        after = _hashes(case.precious)
        assert {name: after.get(name) for name in before} == before, "a file was changed"
    else:
        case.well()
    return code


def _hashes(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def main() -> None:
    """Run many cases and count how they ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--real", type=int, default=20, help="how many more through the real command")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the cases; replaced")
    chosen = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    shutil.rmtree(chosen.out, ignore_errors=True)
    fuzz = Fuzz(chosen.out)
    ends: collections.Counter[str] = collections.Counter()
    failed, began = 0, time.perf_counter()
    for number in range(chosen.first, chosen.first + chosen.cases + chosen.real):
        case = fuzz.case(number)
        try:
            ends[f"{case.kind}: {check(case, real=number >= chosen.first + chosen.cases)}"] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed += 1
            what = f"seed {number} ({case.kind}), {case.arguments}"
            print(f"{what[:1000]}:\n  {type(error).__name__}: {str(error)[:1000]}", flush=True)
        else:
            shutil.rmtree(fuzz.folder / f"case-{number}")
    for end in sorted(ends):
        print(f"{end:<16} {ends[end]}")
    print(f"{sum(ends.values())} cases kept every promise, {failed} did not, {time.perf_counter() - began:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
