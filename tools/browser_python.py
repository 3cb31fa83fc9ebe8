"""Put Python for the browser beside the page "Will it fit?": ``python -m tools.browser_python``.

The page runs this package itself, on Pyodide, which is CPython for browsers. Pyodide comes from npm and the packages
from PyPI, by exact versions with hashes (``tools/browser/``); they are not part of this repository. All Python is
compiled to byte code (``tools/browser/pack.mjs``), because a browser would otherwise compile it at each visit. What was
made is kept until a version or this package changes.
"""

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "tools" / "browser"
KEPT = ROOT / "build" / "browser"
HERE = ROOT / "docs" / "assets" / "python"
"""Where the site serves these files; git ignores this folder."""
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm")
MADE = ("python_stdlib.zip", "packages.zip")
LEFT_OUT = (
    *("committed", "course/", "bench/", "doctor/", "launch/", "cli/", "trainer/", "kwanzaa/", "adapter/"),
    "report/",
)
"""Parts of the package that no plan imports."""
UNUSED = (".dist-info/", "pydantic/v1/", "pydantic/mypy", "pydantic/experimental/", ".pyi")
"""Parts of the wheels that nothing here imports."""
MISSING = 'no npm: "Will it fit?" shows one answer and computes no other; install npm, and build the site again'
FAILED = 'no Python for browsers, so "Will it fit?" shows one answer and computes no other: '
PLATFORM = (
    *("--platform", "pyemscripten_2026_0_wasm32", "--python-version", "3.14"),
    *("--implementation", "cp", "--abi", "cp314"),
)
"""The Python of Pyodide, for which pip takes the wheels."""


def put() -> str:
    """Write the files, unless they are there and nothing has changed.

    Returns:
        Why they cannot be had, in one line; empty if they are there.
    """
    if not (shutil.which("npm") and shutil.which("node")):
        shutil.rmtree(HERE, ignore_errors=True)
        return MISSING
    stamp = HERE / "made_of.txt"
    now = key()
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == now:
        return ""
    try:
        _install()
        _make()
    except subprocess.CalledProcessError as error:
        shutil.rmtree(HERE, ignore_errors=True)
        return f"{FAILED}{shlex.join(error.cmd[:4])} ... ended with {error.returncode}"
    stamp.write_text(now, encoding="utf-8")
    return ""


def key() -> str:
    """Return a hash of all that the files are made of."""
    found = hashlib.sha256(Path(__file__).read_bytes())
    for path in (*sorted(path for path in PINS.iterdir() if path.is_file()), *package_files()):
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def package_files() -> list[Path]:
    """List the files of this repository that the page runs."""
    package = ROOT / "cria_tricks"
    found = [path for path in package.rglob("*") if path.suffix in (".py", ".json") and "__pycache__" not in path.parts]
    found = [path for path in found if not str(path.relative_to(package)).startswith(LEFT_OUT)]
    return sorted([*found, ROOT / "tools" / "__init__.py", *(ROOT / "tools" / "fit").glob("*.py")])


def _install() -> None:
    """Get Pyodide and the wheels into ``build/browser``."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(PINS / name, KEPT / name)
    subprocess.run(["npm", "ci", "--silent", "--prefix", str(KEPT)], check=True)
    wheels = KEPT / "wheels"
    pins = (PINS / "requirements.txt").read_bytes()
    if (KEPT / "wheels.txt").is_file() and (KEPT / "wheels.txt").read_bytes() == pins:
        return
    shutil.rmtree(wheels, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--require-hashes", *PLATFORM, "--dest", str(wheels)]
    subprocess.run([*pip, "--requirement", str(PINS / "requirements.txt")], check=True)
    (KEPT / "wheels.txt").write_bytes(pins)


def _make() -> None:
    """Compile the library and the packages, and copy all into the site's folder."""
    packages = KEPT / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    for wheel in sorted((KEPT / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not any(part in name for part in UNUSED)]
            archive.extractall(packages, names)
    for path in package_files():
        target = packages / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    subprocess.run(["node", str(PINS / "pack.mjs"), str(KEPT)], check=True)
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir(parents=True)
    pyodide = KEPT / "node_modules" / "pyodide"
    for name in PYODIDE:
        shutil.copyfile(pyodide / name, HERE / name)
    lock = json.loads((pyodide / "pyodide-lock.json").read_text(encoding="utf-8"))
    (HERE / "lock.json").write_text(json.dumps(lock | {"packages": {}}), encoding="utf-8")  # the site has none of them
    for name in MADE:
        shutil.copyfile(KEPT / name, HERE / name)
    shutil.copyfile(PINS / "NOTICE.txt", HERE / "NOTICE.txt")


if __name__ == "__main__":
    print(put() or f"Python for the browser is in {HERE.relative_to(ROOT)}")
