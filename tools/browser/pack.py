"""Write two archives of byte code; ``pack.mjs`` runs this inside the Python that the browser runs."""

import importlib._bootstrap_external as importing
import importlib.util
import zipfile
from pathlib import Path
from typing import Any

LEFT_OUT = (
    "idlelib/", "lib2to3/", "ensurepip/", "tkinter/", "turtle", "unittest/", "pydoc", "doctest", "_pyrepl/", "venv/",
    "wsgiref/", "xmlrpc/", "curses/", "dbm/", "sqlite3/", "smtplib", "imaplib", "ftplib", "poplib", "mailbox",
    "webbrowser", "pdb", "profile", "cProfile", "pstats", "trace.", "tabnanny", "nturl2path", "zipapp", "antigravity",
    "this.", "_aix_support", "_osx_support", "multiprocessing/", "xml/", "pickletools", "optparse", "modulefinder",
    "wave", "socketserver", "compileall", "fileinput", "plistlib", "pyclbr", "bdb", "symtable", "encodings/cp1",
    "encodings/cp7", "encodings/cp8", "encodings/cp9", "encodings/iso", "encodings/mac", "encodings/koi8",
    "encodings/big5", "encodings/euc", "encodings/gb", "encodings/jo", "encodings/shift", "encodings/ptcp",
    "encodings/hp", "encodings/tis", "encodings/kz", "statistics",
)  # fmt: skip
"""Parts of Python's library that no plan needs, by the beginnings of their names in the archive."""


def compiled(source: bytes, name: str, optimize: int) -> bytes:
    """Compile a file to byte code that Python takes as it is, without a look at its source."""
    code = compile(source, name, "exec", dont_inherit=True, optimize=optimize)
    bare: Any = importing  # its types leave this function out
    return bytes(bare._code_to_hash_pyc(code, importlib.util.source_hash(source), False))


def pack(out: Path, files: list[tuple[str, bytes]], optimize: int) -> None:
    """Write an archive, always with the same bytes for the same files; ``optimize=2`` leaves docstrings out."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted(files):
            if name.endswith(".py"):
                name, content = f"{name}c", compiled(content, name, optimize)
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 9)


def main() -> None:
    """Pack the library and the packages."""
    with zipfile.ZipFile("/stdlib.zip") as archive:
        names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith(LEFT_OUT)]
        pack(Path("/folder/python_stdlib.zip"), [(name, archive.read(name)) for name in names], 2)
    packages = Path("/folder/packages")
    found = [path for path in packages.rglob("*") if path.is_file()]
    pack(Path("/folder/packages.zip"), [(str(path.relative_to(packages)), path.read_bytes()) for path in found], 0)


main()
