"""Publish an adapter on the hub under a version tag; first say what would be sent, and send it only when asked.

The token is the hub's own login (``hf auth login``) or HF_TOKEN. It is never an argument. It is read here only to
make sure that no file holds it.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cria_tricks.adapter import folder as artifact
from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.errors import BadInput, cure, first_line, in_one_line, usable_path
from cria_tricks.models import identity, is_hub_id, network

TAG = "v0.1.0"
"""The version when none is named."""
_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b")
"""The form of the hub's tokens."""


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
        BadInput: if the folder is damaged or not safe, holds a token, or the hub would refuse a name.
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
    create = f"hf repos create {repo} --exist-ok"
    if private:
        create += " --private"
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
            create,
            f"hf upload {repo} {folder} .",
            f"hf repos tag create {repo} {tag}",
        ],
    }


def push(prepared: dict[str, Any], say: Callable[[str], None] = lambda sentence: None) -> dict[str, Any]:
    """Send what was prepared, and tag it.

    Only what the manifest lists is sent, in one commit, so the hub shows all of it or nothing. After a stop before the
    tag the same command goes on, and does not send again what is there already.

    Args:
        prepared: what :func:`prepare` returned.
        say: takes a sentence on each step.

    Returns:
        ``url`` and ``commit``.

    Raises:
        BadInput: if nobody is logged in, the tag is taken, the base is no model of the hub, the repository holds files
            that would be read together with these, or the hub refuses.
    """
    import huggingface_hub  # here and below, because it starts slowly, and a wrong name is refused without it
    from huggingface_hub import CommitOperationAdd, HfApi

    folder = Path(prepared["folder"])
    repo = prepared["repo"]
    tag = prepared["tag"]
    network.refuse_offline(f"publish: {repo}: can only be reached over the network", "leave one of the two out")
    network.bound()
    reason = _unusable_base(folder)
    if reason:
        raise BadInput(f"{folder}: {reason}, so nobody else could load it; train over a model of the hub")
    if not huggingface_hub.get_token():
        raise BadInput("publish: nobody is logged in to the hub; run hf auth login, or set HF_TOKEN")
    api = HfApi()
    names = [file["path"] for file in prepared["files"]]
    try:
        _refuse_what_is_there(api, prepared)
        warning = _another_base_there(api, folder)
        if warning:
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

    repo = prepared["repo"]
    tag = prepared["tag"]
    try:
        about = api.model_info(repo)
        tags = sorted(ref.name for ref in api.list_repo_refs(repo).tags)
    except RepositoryNotFoundError:
        return
    if tag in tags:
        raise BadInput(f"--tag {tag}: {repo} has it already ({', '.join(tags)}); name a newer version")
    if prepared["private"] and not about.private:
        raise BadInput(f"--private: {repo} is there already and public; make it private there, or name another")
    mine = {file["path"] for file in prepared["files"]}
    for file in about.siblings or []:
        name = file.rfilename
        if name not in mine and artifact.may_be_read(name):
            raise BadInput(
                f"{repo}: holds {name}, which is not of this adapter and may be read with it; delete it there, or "
                "name another repository"
            )


def _refuse_tokens(folder: Path, names: list[str]) -> None:
    # As in push: a while to import.
    from huggingface_hub import get_token

    own = (get_token() or "").encode()
    for name in names:
        if name.endswith(".safetensors"):  # numbers, and large
            continue
        content = (folder / name).read_bytes()
        # A token of a few letters, as tests set, would be found in any file.
        if _TOKEN.search(content) or (len(own) >= 8 and own in content):
            raise BadInput(f"{folder}: {name} holds a token of the hub; revoke it there, and train again without it")


def _notes(folder: Path) -> list[str]:
    """List what the publisher should look at before sending."""
    notes = [f"{name} is not in the manifest and is not sent" for name in atomic_files.unlisted(folder)]
    reason = _unusable_base(folder)
    if reason:
        notes.append(f"{reason}: nobody else could load it, and --yes refuses it")
    recipe = folder / artifact.RECIPE
    if not recipe.is_file():
        return notes
    paths = re.findall(r'"((?:~|\.{0,2}/|[A-Za-z]:\\)[^"]*)"', recipe.read_text(encoding="utf-8"))
    return notes + [f"{artifact.RECIPE} shows a path of this machine: {path}" for path in dict.fromkeys(paths)]


def _unusable_base(folder: Path) -> str:
    """Say why others could not get an adapter's base; empty if they can, and for a whole model, which needs none."""
    config = artifact.adapter_config(folder)
    if config is None:
        return ""
    base = str(json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path"))
    # A folder may be called OWNER/NAME, too: then a model of that name on the hub is another one.
    is_folder = artifact.trained_over(folder).get("kind") == "folder" or Path(base).is_dir()
    if is_hub_id(base) and not is_folder:
        return ""
    return f"its base is {base}, which is not on the hub"


def _another_base_there(api: Any, folder: Path) -> str:
    """Warn if the base has changed on the hub since the adapter was trained; the card names the right commit."""
    base = artifact.trained_over(folder)
    if base.get("kind") != "hub" or not base.get("weights"):
        return ""
    try:
        files = {file.rfilename: file.lfs for file in api.model_info(base["name"], files_metadata=True).siblings}
    except Exception as error:  # gone, gated, or the network; the adapter itself may be sent all the same
        return f"{base['name']} cannot be compared with the base that this was trained over: {first_line(error)}"
    there = {name: files[name].sha256 for name in base["weights"] if files.get(name)}
    differ = identity.other(base, {"weights": there}, "weights")
    if not differ:
        return ""
    return f"{base['name']} has changed on the hub since this was trained over it: {differ}"


def _in_one_line(error: Exception) -> str:
    cures = {401: "is the token right? hf auth whoami tells", 403: "may this login write there?"}
    words = in_one_line(error)
    if type(error) is RuntimeError and error.__cause__:  # an upload's thread: only the cause says what went wrong
        words += f": {in_one_line(error.__cause__)}"
    return f"{words}{cure(error, cures)}; nothing was tagged"
