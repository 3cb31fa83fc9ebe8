"""An adapter on the hub: what would be sent, said first; sent only when asked, under a version tag.

The token is the hub's own login (``hf auth login``) or HF_TOKEN. It is never an argument, and never looked at here but
to make sure that no file holds it.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cria_tricks.adapter import folder as artifact
from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.errors import BadInput, first_line, usable_path
from cria_tricks.models import identity, is_hub_id, network

TAG = "v0.1.0"
"""The version when none is named."""
_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b")
"""How the hub's tokens look."""


def prepare(adapter: str | Path, repo: str, tag: str = TAG, private: bool = False) -> dict[str, Any]:
    """Check an adapter and say what would be published; asks no network.

    Args:
        adapter: a folder of ``cria train`` or ``cria merge``.
        repo: OWNER/NAME on the hub.
        tag: the version, ``vX.Y.Z``.
        private: whether only the owner may see it.

    Returns:
        ``repo``, ``tag``, ``private``, ``files`` (``path``, ``bytes``, ``sha256``), ``bytes``, ``card``, ``notes``
        and ``commands``, which do the same by hand.

    Raises:
        BadInput: if the folder is not whole and safe, holds a token, or a name is none that the hub takes.
    """
    folder = usable_path("adapter", adapter)
    if not is_hub_id(repo) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo, re.ASCII):
        raise BadInput(f"{repo}: is no name of a repository on the hub; write OWNER/NAME")
    if not re.fullmatch(r"v\d+\.\d+\.\d+", tag, re.ASCII):
        raise BadInput(f"--tag {tag}: is no version; write it as {TAG}")
    artifact.verify(folder)
    listed = atomic_files.listed(folder)
    _refuse_tokens(folder, list(listed))
    files = [{"path": name, **entry} for name, entry in listed.items()]
    files.append({"path": atomic_files.MANIFEST, **atomic_files.entry(folder / atomic_files.MANIFEST)})
    private_option = " --private" if private else ""
    return {
        "folder": str(folder),
        "repo": repo,
        "tag": tag,
        "private": private,
        "files": files,
        "bytes": sum(file["bytes"] for file in files),
        "card": (folder / "README.md").read_text(encoding="utf-8"),
        "notes": _notes(folder),
        "commands": [
            f"hf repos create {repo} --exist-ok{private_option}",
            f"hf upload {repo} {folder} .",
            f"hf repos tag create {repo} {tag}",
        ],
    }


def push(prepared: dict[str, Any], say: Callable[[str], None] = lambda sentence: None) -> dict[str, Any]:
    """Send what was prepared, and tag it.

    Only what the manifest lists is sent, in one commit: the hub shows all of it or nothing. Stopped before the tag, the
    same command goes on: what is there already is not sent again.

    Args:
        prepared: from :func:`prepare`.
        say: takes a sentence on what is done.

    Returns:
        ``url`` and ``commit``.

    Raises:
        BadInput: if nobody is logged in, the tag is taken, the base is no model of the hub, the repository holds files
            that would be read together with these, or the hub refuses.
    """
    # It takes a while to import, and nothing is sent before somebody says --yes.
    import huggingface_hub
    from huggingface_hub import CommitOperationAdd, HfApi

    folder, repo, tag = Path(prepared["folder"]), prepared["repo"], prepared["tag"]
    network.refuse_offline(f"publish: {repo}: can only be reached over the network", "leave one of the two out")
    network.bound()
    if reason := _unusable_base(folder):
        raise BadInput(f"{folder}: {reason}, so nobody else could load it; train over a model of the hub")
    if not huggingface_hub.get_token():
        raise BadInput("publish: nobody is logged in to the hub; run hf auth login, or set HF_TOKEN")
    api = HfApi()
    names = [file["path"] for file in prepared["files"]]
    try:
        _refuse_what_is_there(api, prepared)
        if warning := _another_base_there(api, folder):
            say(f"warning: {warning}")
        api.create_repo(repo, private=prepared["private"], exist_ok=True)
        say(f"sending {len(names)} files to {repo}")
        interrupts.now_saved(f"nothing is tagged in {repo}; the same command goes on")
        sent = api.create_commit(
            repo,
            [CommitOperationAdd(name, folder / name) for name in names],
            commit_message=f"{tag}, by cria publish",
        )
        api.create_tag(repo, tag=tag, revision=sent.oid)
    except BadInput:
        raise
    except Exception as error:  # httpx's, the hub's, and what an upload's thread raised
        raise BadInput(f"publish: {repo}: {_in_one_line(error)}") from None
    interrupts.now_saved(f"{repo} is published as {tag}")
    say(f"tagged {tag}")
    return {"url": f"{api.endpoint}/{repo}/tree/{tag}", "commit": sent.oid}


def _refuse_what_is_there(api: Any, prepared: dict[str, Any]) -> None:
    """Look at a repository that exists already, before anything is changed in it."""
    # As in push: a while to import.
    from huggingface_hub.errors import RepositoryNotFoundError

    repo, tag, mine = prepared["repo"], prepared["tag"], {file["path"] for file in prepared["files"]}
    try:
        about, tags = api.model_info(repo), sorted(ref.name for ref in api.list_repo_refs(repo).tags)
    except RepositoryNotFoundError:
        return
    if tag in tags:
        raise BadInput(f"--tag {tag}: {repo} has it already ({', '.join(tags)}); name a newer version")
    if prepared["private"] and not about.private:
        raise BadInput(f"--private: {repo} is there already and public; make it private there, or name another")
    there = [file.rfilename for file in about.siblings or []]
    if strangers := [name for name in there if name not in mine and artifact.may_be_read(name)]:
        raise BadInput(
            f"{repo}: holds {strangers[0]}, which is not of this adapter and may be read with it; delete it there, or "
            "name another repository"
        )


def _refuse_tokens(folder: Path, names: list[str]) -> None:
    # As in push: a while to import.
    from huggingface_hub import get_token

    own = (get_token() or "").encode()
    for name in names:
        content = b"" if name.endswith(".safetensors") else (folder / name).read_bytes()
        if _TOKEN.search(content) or (len(own) >= 8 and own in content):
            raise BadInput(f"{folder}: {name} holds a token of the hub; revoke it there, and train again without it")


def _notes(folder: Path) -> list[str]:
    """What a careful publisher looks at twice."""
    notes = [f"{name} is not in the manifest and is not sent" for name in atomic_files.unlisted(folder)]
    if reason := _unusable_base(folder):
        notes.append(f"{reason}: nobody else could load it, and --yes refuses it")
    text = (folder / artifact.RECIPE).read_text(encoding="utf-8") if (folder / artifact.RECIPE).is_file() else ""
    paths = re.findall(r'"((?:~|\.{0,2}/|[A-Za-z]:\\)[^"]*)"', text)
    return notes + [f"{artifact.RECIPE} shows a path of this machine: {path}" for path in dict.fromkeys(paths)]


def _unusable_base(folder: Path) -> str:
    """Why others could not get an adapter's base; a whole model needs none."""
    config = next((folder / name for name in artifact.CONFIGS if (folder / name).is_file()), None)
    if config is None:
        return ""
    base = str(json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path"))
    folder_then = (
        artifact.trained_over(folder).get("kind") == "folder"
    )  # whatever lies under that name here or on the hub
    return (
        ""
        if is_hub_id(base) and not (folder_then or Path(base).is_dir())
        else f"its base is {base}, which is not on the hub"
    )


def _another_base_there(api: Any, folder: Path) -> str:
    """Say so if the hub's newest base is another than the adapter was trained over; the card names the right commit."""
    base = artifact.trained_over(folder)
    if base.get("kind") != "hub" or not base.get("weights"):
        return ""
    try:
        files = {file.rfilename: file.lfs for file in api.model_info(base["name"], files_metadata=True).siblings}
    except Exception as error:  # gone, gated, or the network; the adapter itself may be sent all the same
        return f"{base['name']} cannot be compared with the base that this was trained over: {first_line(error)}"
    there = {name: files[name].sha256 for name in base["weights"] if files.get(name)}
    differ = identity.other(base, {"weights": there}, "weights")
    return f"{base['name']} has changed on the hub since this was trained over it: {differ}" if differ else ""


def _in_one_line(error: Exception) -> str:
    cures = {401: "is the token right? hf auth whoami tells", 403: "may this login write there?"}
    status = getattr(getattr(error, "response", None), "status_code", 0)
    cure = f"; {cures[status]}" if status in cures else ""
    said = [error, error.__cause__] if type(error) is RuntimeError else [error]  # an upload's thread: see its cause
    words = ": ".join(" ".join(str(each).split()) for each in said if each)
    return f"{words or type(error).__name__}{cure}; nothing was tagged"
