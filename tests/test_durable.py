"""Whole or not at all, wherever it is stopped."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput, Diverged, OutOfMemory, Unwritten


def write(folder: Path, text: str) -> None:
    with atomic_files.new_folder(folder) as aside:
        (aside / "inner").mkdir()
        (aside / "inner" / "a.txt").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_has_its_manifest_and_takes_the_place_of_an_older_one(tmp_path):
    for text in ("one", "two"):
        write(tmp_path / "f", text)
        assert (tmp_path / "f" / "inner" / "a.txt").read_text() == text
        assert atomic_files.damage(tmp_path / "f") == ""
        assert set(atomic_files.listed(tmp_path / "f")) == {"inner/a.txt"}
        assert names(tmp_path) == ["f"]


def test_a_stop_inside_leaves_what_was_there(tmp_path, monkeypatch):
    write(tmp_path / "f", "one")

    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "f", "two")
    assert names(tmp_path) == ["f"]
    assert atomic_files.damage(tmp_path / "f") == ""


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_stop_between_the_two_renames_loses_neither(error, tmp_path, monkeypatch):
    write(tmp_path / "f", "one")
    honest = Path.rename

    def rename(self, target):
        if self.name.endswith(atomic_files.ASIDE):
            raise error
        return honest(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        for _ in range(2):
            with pytest.raises(Unwritten if isinstance(error, OSError) else KeyboardInterrupt):
                write(tmp_path / "f", "two")
            assert (tmp_path / "f" / "inner" / "a.txt").read_text() == "one"
    # A kill there leaves only the passing name, and the next write may fail too.
    (tmp_path / "f").rename(tmp_path / f"f{atomic_files.OLD}")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(Unwritten, match="No space left on device"):
            write(tmp_path / "f", "two")
    assert atomic_files.damage(tmp_path / "f") == ""


def test_a_copy_of_something_damaged_is_not_made_to_look_whole(tmp_path):
    write(tmp_path / "f", "one")
    atomic_files.copy_folder(tmp_path / "f", tmp_path / "copy")
    assert atomic_files.damage(tmp_path / "copy") == ""
    (tmp_path / "f" / "inner" / "a.txt").write_text("eno")
    with pytest.raises(Unwritten, match="in the copy inner/a.txt has other content"):
        atomic_files.copy_folder(tmp_path / "f", tmp_path / "copy")
    assert (tmp_path / "copy" / "inner" / "a.txt").read_text() == "one"


def test_a_file_is_replaced_in_one_stroke(tmp_path, monkeypatch):
    atomic_files.write_file(tmp_path / "a" / "f", "one")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Unwritten, match="f: cannot be written: No space left on device"):
        atomic_files.write_file(tmp_path / "a" / "f", "two")
    assert names(tmp_path / "a") == ["f"]
    assert (tmp_path / "a" / "f").read_text() == "one"


def test_a_file_that_cannot_be_read_is_damage(tmp_path, monkeypatch):
    write(tmp_path / "f", "one")
    honest = Path.open

    def broken(self, *arguments, **options):
        if self.name == "a.txt":
            raise OSError(5, "Input/output error")
        return honest(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", broken)
    assert atomic_files.damage(tmp_path / "f") == "inner/a.txt cannot be read: Input/output error"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"files": []}'],
)
def test_a_spoilt_manifest_is_damage(content, tmp_path):
    write(tmp_path / "f", "one")
    (tmp_path / "f" / atomic_files.MANIFEST).write_text(content)
    assert atomic_files.damage(tmp_path / "f") == "manifest.json is damaged"


def test_each_way_to_be_damaged_has_its_words(tmp_path):
    write(tmp_path / "f", "one")
    file = tmp_path / "f" / "inner" / "a.txt"
    file.write_text("four")
    assert atomic_files.damage(tmp_path / "f") == "inner/a.txt has other content than was written"
    file.write_text("eno")
    assert atomic_files.damage(tmp_path / "f") == "inner/a.txt has other content than was written"
    file.unlink()
    assert atomic_files.damage(tmp_path / "f") == "inner/a.txt is missing"
    (tmp_path / "f" / atomic_files.MANIFEST).unlink()
    assert atomic_files.damage(tmp_path / "f") == "manifest.json is missing"


def test_a_folder_deep_inside_new_ones_with_leftovers_and_an_empty_file(tmp_path):
    folder = tmp_path / "a" / "b" / "f"
    for ending in (atomic_files.ASIDE, atomic_files.OLD):
        (folder.with_name(folder.name + ending) / "leftover").mkdir(parents=True)
    (folder.parent / "f").mkdir()
    with atomic_files.new_folder(folder) as aside:
        assert list(aside.iterdir()) == []
        for name in ("z", "a.txt"):
            (aside / name).write_text("")
        (aside / atomic_files.MANIFEST).write_text("of something else")
    assert names(folder.parent) == ["f"]
    assert atomic_files.damage(folder) == ""
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    entries = [f'    "{name}": {{\n      "bytes": 0,\n      "sha256": "{empty}"\n    }}' for name in ("a.txt", "z")]
    assert (folder / atomic_files.MANIFEST).read_text() == '{\n  "files": {\n' + ",\n".join(entries) + "\n  }\n}\n"
    (folder / "deep").mkdir()
    (folder / "deep" / "new").write_text("x")
    (folder / "b").write_text("x")
    assert atomic_files.unlisted(folder) == ("b", "deep/new")


def test_a_file_system_that_syncs_no_folders_is_written_all_the_same(tmp_path, monkeypatch):
    honest = os.fsync

    def fsync(descriptor):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(22, "Invalid argument")
        honest(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "f", "one")
    atomic_files.write_file(tmp_path / "new" / "folders" / "file", b"\x00one")
    assert (tmp_path / "new" / "folders" / "file").read_bytes() == b"\x00one"
    assert atomic_files.damage(tmp_path / "f") == ""


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path, monkeypatch):
    def refused(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(atomic_files.fcntl, "flock", refused)
    with atomic_files.only_writer(tmp_path):
        assert names(tmp_path) == [".lock"]
    with pytest.raises(Unwritten, match="cannot be written: No such file"), atomic_files.only_writer(tmp_path / "none"):
        pass


class SafetensorError(Exception):
    """By its name alone the library's is known."""


PART = "the disk took only a part of it"


NO_ROOM = "make room, then run the command again (a training run: with --resume)"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(28, "without a number"), "without a number"),
        (SafetensorError("I/O"), PART),
        (SafetensorError("I/O error: File too large (os error 27)"), "File too large"),
        (Exception("No space left on device (os error 28)"), "No space left on device"),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos"), PART),
        (RuntimeError("PytorchStreamWriter failed writing file"), PART),
    ],
)
def test_what_a_full_disk_raises_is_one_sentence(error, said, tmp_path):
    file = tmp_path / "none" / "f"
    with pytest.raises(Unwritten) as caught, atomic_files.unwritten_in_one_line(file):
        raise error
    assert str(caught.value) == f"{file}: cannot be written: {said}; what was saved before is whole: {NO_ROOM}"


def test_a_protected_folder_asks_for_no_room(tmp_path):
    with pytest.raises(Unwritten, match="Permission denied; .*: mend that, then") as caught:  # noqa: SIM117
        with atomic_files.unwritten_in_one_line(tmp_path):
            raise PermissionError(13, "Permission denied")
    assert caught.value.reason == f"{tmp_path}: cannot be written: Permission denied"


@pytest.mark.parametrize("error", [Unwritten(Path("f"), "full"), BadInput("x"), OutOfMemory("no")])
def test_an_error_comes_whole_out_of_another_process(error):
    """A worker sends it to the first process, and rank 0 sends it to the other ranks, as a pickle."""
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("error", [BadInput("refused"), Diverged("nan"), Unwritten(Path("g"), "full"), MemoryError()])
def test_what_is_one_sentence_already_and_what_nobody_foresaw_stays_as_it_is(error, tmp_path):
    write(tmp_path / "f", "one")
    with pytest.raises(type(error)) as caught, atomic_files.new_folder(tmp_path / "f"):
        raise error
    assert caught.value is error
    assert names(tmp_path) == ["f"]
    assert atomic_files.damage(tmp_path / "f") == ""


def test_only_one_process_writes_and_the_lock_goes_with_it(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from cria_tricks.common import atomic_files as durable\n"
        "with durable.only_writer(Path(sys.argv[1])): print('mine', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "mine\n"
        with pytest.raises(BadInput, match="another run is writing there"), atomic_files.only_writer(tmp_path):
            pass
        process.kill()
    with atomic_files.only_writer(tmp_path):
        pass


def test_every_file_is_on_the_disk_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    """After a power cut a name without its content would be the one thing a checkpoint must not be."""
    happened = []
    honest_sync, honest_rename = os.fsync, Path.rename

    def fsync(descriptor):
        happened.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        honest_sync(descriptor)

    def rename(self, target):
        happened.append(("rename", Path(target)))
        return honest_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    write(tmp_path / "f", "one")
    named = happened.index(("rename", tmp_path / "f"))
    aside = tmp_path / ("f" + atomic_files.ASIDE)
    wanted = {aside, aside / "inner", aside / "inner" / "a.txt", aside / atomic_files.MANIFEST}
    assert {path for what, path in happened[:named] if what == "sync"} == wanted
    assert ("sync", tmp_path) in happened[named:], "the new name itself"
