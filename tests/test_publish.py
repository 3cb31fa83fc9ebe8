"""Publishing: said first, done when asked, against a stand-in of the hub; and no token anywhere."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from cria_tricks.adapter.folder import verify
from cria_tricks.adapter.publish import (
    _notes,
    _refuse_what_is_there,
    _unusable_base,
    prepare,
    push,
)
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput, redacted
from cria_tricks.models.catalogue import SMOLLM2
from tests.hub import TOKEN


@pytest.fixture
def adapter(trained, tmp_path) -> Path:
    """An adapter whose base others can have."""
    folder = Path(shutil.copytree(trained / "adapter", tmp_path / "run" / "adapter"))
    for name in ("adapter_config.json", "README.md"):
        (folder / name).write_text((folder / name).read_text().replace("random:tiny", SMOLLM2))
    return sealed(folder)


def sealed(folder: Path) -> Path:
    (folder / "manifest.json").unlink()
    atomic_files.write_manifest(folder)
    return folder


@pytest.fixture
def publish(hub, run_cria, monkeypatch, tmp_path):
    """Run the command with only the stand-in to ask; its exit code, stdout and stderr."""

    def run(adapter: Path, *options: str, token: str | None = TOKEN) -> tuple[int, str, str]:
        hub.alone(monkeypatch, tmp_path, token)
        done = run_cria("publish", adapter, "owner/name", *options)
        assert TOKEN not in done[1] + done[2]
        return done

    return run


def test_the_dry_run_says_everything_and_asks_nobody(hub, adapter, publish):
    code, stdout, stderr = publish(adapter, "--tag", "v1.2.3", "--private")
    assert code == 0, stderr
    assert hub.asked == []
    card = (adapter / "README.md").read_text()
    assert card in stdout
    assert "owner/name v1.2.3, private if it is new" in stdout
    for name, about in atomic_files.listed(adapter).items():
        assert any(line.split() == [about["sha256"], f"{about['bytes']:,}", name] for line in stdout.splitlines()), name
    assert "manifest.json" in stdout
    assert "Nothing was sent" in stdout
    assert "shows a path of this machine" in stdout
    code, stdout, _ = publish(adapter, "--json")
    found = json.loads(stdout)
    assert (code, found["published"], found["tag"], found["private"]) == (0, False, "v0.1.0", False)
    assert found["card"] == card
    assert sum(file["bytes"] for file in found["files"]) == found["bytes"]
    assert {file["path"] for file in found["files"]} == {path.name for path in adapter.iterdir()}
    assert hub.asked == []


def test_with_yes_the_whole_folder_is_there_under_its_tag(hub, adapter, publish, tmp_path):
    (adapter / "NOTES.md").write_text("mine alone")
    code, stdout, stderr = publish(adapter, "--tag", "v1.0.0", "--private", "--yes", "--json")
    assert code == 0, stderr
    done, repo = json.loads(stdout), hub.repos["owner/name"]
    assert done["published"]
    assert repo.private
    assert repo.tags == {"v1.0.0": repo.commits[0]}
    assert f"sending {len(done['files'])} files to owner/name" in stderr
    assert "tagged v1.0.0" in stderr
    assert done["files"][-1]["path"] == "manifest.json"
    assert done["commit"] == repo.commits[0]
    assert done["url"] == f"{hub.url}/owner/name/tree/v1.0.0"
    there = tmp_path / "downloaded"
    there.mkdir()
    for name, content in repo.files.items():
        (there / name).write_bytes(content)
    assert verify(there)["unlisted"] == [".gitattributes"]
    assert (there / "adapter_model.safetensors").read_bytes() == (adapter / "adapter_model.safetensors").read_bytes()
    assert len(hub.paths("PUT")) == 2, "the two large files went to the store"

    before = json.dumps(repo.tags)
    code, stdout, stderr = publish(adapter, "--tag", "v1.0.0", "--yes")
    assert (code, stdout) == (2, "")
    assert "--tag v1.0.0: owner/name has it already (v1.0.0); name a newer version" in stderr
    assert json.dumps(repo.tags) == before
    assert len(repo.commits) == 1
    card = (adapter / "README.md").read_text() + "\nThe second version.\n"
    (adapter / "README.md").write_text(card)
    (adapter / "manifest.json").unlink()
    atomic_files.write_manifest(adapter)
    assert publish(adapter, "--tag", "v1.0.1", "--yes")[0] == 0
    assert list(repo.tags) == ["v1.0.0", "v1.0.1"]
    assert repo.files["README.md"].decode() == card


def test_stopped_before_the_tag_the_same_command_goes_on(hub, adapter, publish):
    honest = hub.answer
    hub.answer = lambda method, path, *rest: (  # type: ignore[method-assign]
        (503, {"error": "down"}) if "/tag/" in path else honest(method, path, *rest)
    )
    code, stdout, stderr = publish(adapter, "--yes")
    assert (code, stdout) == (2, "")
    assert "nothing was tagged" in stderr.splitlines()[-1]
    assert hub.repos["owner/name"].tags == {}
    hub.answer = honest  # type: ignore[method-assign]
    sent = len(hub.paths("PUT"))
    assert publish(adapter, "--yes")[0] == 0
    assert list(hub.repos["owner/name"].tags) == ["v0.1.0"]
    assert len(hub.paths("PUT")) == sent, "what is there is not sent again"


@pytest.mark.parametrize(
    ("ending", "answer", "said"),
    [
        ("/create", (403, {"error": f"the token {TOKEN} may not"}), "[hidden]"),
        ("/preupload/main", (403, {"error": f"see https://me:{TOKEN}@example.org"}), "may this login do that?"),
        ("/objects/batch", (400, {"error": f"Bearer {TOKEN}"}), "publish: owner/name: "),
        ("/validate-yaml", (400, {"errors": [{"message": f"bad {TOKEN}"}], "warnings": []}), "Invalid metadata"),
    ],
)
def test_what_the_hub_refuses_is_one_line_without_the_token(ending, answer, said, hub, adapter, publish):
    hub.instead[ending] = answer
    code, stdout, stderr = publish(adapter, "--yes")
    assert (code, stdout) == (2, "")
    assert said in stderr.splitlines()[-1]
    assert stderr.splitlines()[-1].startswith("error: publish: ")
    assert "Traceback" not in stderr


def test_a_wrong_token_nobody_logged_in_and_nobody_there(hub, adapter, publish):
    code, _, stderr = publish(adapter, "--yes", token=None)
    assert (code, hub.asked) == (2, [])
    assert "nobody is logged in to the hub; run hf auth login" in stderr
    wrong = "hf_" + "wrong" * 7
    code, _, stderr = publish(adapter, "--yes", token=wrong)
    assert code == 2
    assert "is the login's token right?" in stderr
    assert wrong not in stderr
    hub.url = "http://127.0.0.1:9"
    code, _, stderr = publish(adapter, "--yes")
    assert code == 2
    assert stderr.startswith("error: publish: owner/name: ")
    assert stderr.count("\n") == 1


def test_a_file_that_holds_a_token_is_never_sent(hub, adapter, publish):
    (adapter / "README.md").write_text(f"HF_TOKEN={TOKEN}\n")
    code, stdout, stderr = publish(sealed(adapter), "--yes")
    assert (code, stdout, hub.asked) == (2, "", [])
    assert "README.md holds a token of the hub; revoke it" in stderr


@pytest.mark.parametrize(("own", "refused"), [("seven77", False), ("eight888", True), (TOKEN, True)])
def test_a_token_of_ones_own_is_looked_for_from_eight_letters_on(own, refused, adapter, monkeypatch):
    """In the usual form or not; and weights are not text, where eight bytes may be alike by chance."""
    monkeypatch.setenv("HF_TOKEN", own)
    with (adapter / "recipe.toml").open("a") as file:
        file.write(f"# {own}\n")
    with pytest.raises(BadInput, match="recipe.toml holds a token of the hub") if refused else nullcontext():
        prepare(sealed(adapter), "owner/name")


def test_of_weights_nothing_is_taken_for_a_token(adapter, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "lm_head_")
    weights = adapter / "adapter_model.safetensors"
    header = json.dumps({"__metadata__": {"x": "lm_head_"}}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    assert prepare(sealed(adapter), "owner/name")["private"] is False, "when nothing is said"


def test_what_a_careful_publisher_looks_at_twice(adapter):
    (adapter / "NOTES.md").write_text("mine")
    paths = ('train = "/home/me/x"', 'eval = "~/y"', 'other = "../z"', 'again = "~/y"', 'win = "C:\\w"', 'a = "b/c"')
    (adapter / "recipe.toml").write_text("\n".join(paths))
    shown = [f"recipe.toml shows a path of this machine: {path}" for path in ("/home/me/x", "~/y", "../z", "C:\\w")]
    assert _notes(sealed(adapter)) == shown
    (adapter / "MORE.md").write_text("mine")
    (adapter / "recipe.toml").unlink()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/a/folder"}))
    assert _notes(adapter) == [
        "MORE.md is not in the manifest and is not sent",
        "its base is /a/folder, which is not on the hub: nobody else could load it, and --yes refuses it",
    ]
    (adapter / "adapter_config.json").unlink()
    assert _unusable_base(adapter) == "", "a whole model"


def test_a_folder_of_ones_own_is_not_on_the_hub_though_it_looks_so(adapter, tmp_path, monkeypatch):
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    monkeypatch.chdir(tmp_path)
    assert _unusable_base(adapter) == ""
    (tmp_path / "owner" / "base").mkdir(parents=True)
    assert _unusable_base(adapter) == "its base is owner/base, which is not on the hub"


class Api:
    """A hub with a repository, or without a list of its files."""

    def __init__(self, there: tuple[str, ...] | None, tags: tuple[str, ...] = (), private: bool = True):
        self.there, self.tags, self.private = there, tags, private

    def model_info(self, repo):
        siblings = None if self.there is None else [SimpleNamespace(rfilename=name) for name in self.there]
        return SimpleNamespace(private=self.private, siblings=siblings)

    def list_repo_refs(self, repo):
        return SimpleNamespace(tags=[SimpleNamespace(name=name) for name in self.tags])

    def create_repo(self, *given, **options):
        pass


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeError("a thread"), "its cause"), (ValueError("said"), "said"), (ValueError(""), "ValueE")],
)
def test_of_an_error_in_a_thread_of_the_upload_only_the_cause_is_told(error, said, adapter, monkeypatch, online):
    api = Api(None)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: TOKEN)
    error.__cause__ = ValueError("its cause")

    def raises(**given):
        raise error

    monkeypatch.setattr(api, "upload_folder", raises, raising=False)
    with pytest.raises(BadInput, match=f"^publish: owner/name: {said}.*; nothing was tagged$"):
        push(prepare(adapter, "owner/name"))


@pytest.mark.parametrize(
    ("there", "private", "said"),
    [
        (Api(("README.md", ".gitattributes", "LICENSE"), ("v0.9.0",)), True, ""),
        (Api((), (), private=False), False, ""),
        (Api((), (), private=False), True, "--private: owner/name is there already and public"),
        (Api((), ("v2.0.0", "v1.0.0")), False, "--tag v1.0.0: owner/name has it already (v1.0.0, v2.0.0)"),
        (Api(("README.md", "config.json", "x.bin")), False, "owner/name: holds config.json, which is not of this"),
    ],
)
def test_a_repository_that_is_there_is_looked_at_first(there, private, said):
    prepared = {"repo": "owner/name", "tag": "v1.0.0", "private": private, "files": [{"path": "README.md"}]}
    with pytest.raises(BadInput, match=re.escape(said)) if said else nullcontext():
        _refuse_what_is_there(there, prepared)


def test_a_base_that_nobody_else_has_is_noted_and_then_refused(hub, trained, publish):
    code, stdout, _ = publish(trained / "adapter")
    assert code == 0
    assert "note: its base is random:tiny, which is not on the hub" in stdout
    code, stdout, stderr = publish(trained / "adapter", "--yes")
    assert (code, stdout, hub.asked) == (2, "", [])
    assert "its base is random:tiny, which is not on the hub" in stderr


@pytest.mark.parametrize(
    "repo",
    ["name", "a/b/c", "../name", "owner/", "https://huggingface.co/owner/name", "o/n\n", "o/a--b", "o/a..b", "o/n.git",
     "o/n-", ".o/n", "o/" + "n" * 97, "ö/n"],
)  # fmt: skip
def test_a_name_that_the_hub_refuses_is_refused_before(repo, adapter):
    with pytest.raises(BadInput, match="is no name of a repository on the hub: .*; write OWNER/NAME") as caught:
        prepare(adapter, repo)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tag", ["1.0.0", "v1", "v1.0.0-rc", "latest", "v1.0.0\n", "../v1.0.0"])
def test_what_is_no_version(tag, adapter):
    with pytest.raises(BadInput, match="is no version; write it as v0.1.0"):
        prepare(adapter, "owner/name", tag)


def test_training_with_a_token_in_the_environment_writes_it_nowhere(trained, run_cria, tmp_path, monkeypatch):
    """Report, card, provenance, recipe, checkpoints, and all that was said."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    recipe = ["train", trained / "recipe.toml", "--json"]
    code, stdout, stderr = run_cria(*recipe, "--out", tmp_path / "run")
    assert code == 0, stderr
    wrong = run_cria(*recipe, "--set", f"model=https://me:{TOKEN}@huggingface.co/x", "--out", tmp_path / "none")
    assert wrong[0] == 2
    assert "[hidden]" in wrong[2]
    assert TOKEN not in stdout + stderr + wrong[1] + wrong[2]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"report.json", "report.md", "provenance.json", "recipe.toml", "run.json"} <= {path.name for path in files}
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_redacted(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "not-in-the-usual-form")
    assert redacted("a not-in-the-usual-form b") == "a [hidden] b"
    assert redacted(f"Bearer {TOKEN}.") == "Bearer [hidden]."
    assert redacted("https://me:pass@host/x and git@host") == "https://[hidden]@host/x and git@host"
    assert redacted("see hf_hub_download and owner/hf_x") == "see hf_hub_download and owner/hf_x"
    assert TOKEN not in str(BadInput(f"x {TOKEN}"))
