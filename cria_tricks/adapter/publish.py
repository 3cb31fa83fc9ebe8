"""Publish an adapter on the Hugging Face hub under a version tag.

:func:`prepare` checks the folder and describes what would be sent. :func:`push` sends it; ``cria publish`` calls
:func:`push` only with ``--yes``. The access token comes from ``hf auth login`` or from HF_TOKEN, and is never an
argument. The hub's library is imported inside functions, because its import is slow.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cria_tricks.adapter import folder as artifact
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput, first_line, usable_path
from cria_tricks.models import is_hub_id, network

TAG = "v0.1.0"
"""The version tag if the user gives none."""
_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b")
"""What an access token of the hub looks like."""


def prepare(adapter: str | Path, repo: str, tag: str = TAG, private: bool = False) -> dict[str, Any]:
    """Check an adapter's folder and describe what would be published, without using the network.

    Args:
        adapter: a folder that ``cria train`` or ``cria merge`` wrote.
        repo: the repository on the hub, OWNER/NAME.
        tag: the version, ``vX.Y.Z``.
        private: whether a new repository is private.

    Returns:
        The arguments; ``files`` (the manifest and what it lists, each with ``path``, ``bytes`` and ``sha256``); their
        ``bytes``; the text of the model ``card``; and ``notes``, what the user should look at before sending.

    Raises:
        BadInput: if the folder is damaged, a file contains a token, or the hub would refuse the repository's name.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    folder = usable_path("adapter", adapter)
    try:
        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise HFValidationError("it needs the name of its owner, too")
    except HFValidationError as error:
        raise BadInput(
            f"{repo!r}: is no name of a repository on the hub: {first_line(error)}; write OWNER/NAME"
        ) from None
    if not re.fullmatch(r"v\d+\.\d+\.\d+", tag, re.ASCII):
        raise BadInput(f"--tag {tag}: is no version; write it as {TAG}")
    artifact.verify(folder)
    listed = atomic_files.listed(folder)
    _refuse_tokens(folder, list(listed))
    files = [{"path": name, **entry} for name, entry in listed.items()]
    files.append({"path": atomic_files.MANIFEST, **atomic_files.entry(folder / atomic_files.MANIFEST)})
    return {
        "folder": str(folder),
        "repo": repo,
        "tag": tag,
        "private": private,
        "files": files,
        "bytes": sum(file["bytes"] for file in files),
        "card": (folder / "README.md").read_text(encoding="utf-8"),
        "notes": _notes(folder),
    }


def push(prepared: dict[str, Any], say: Callable[[str], None] = lambda sentence: None) -> dict[str, Any]:
    """Send the prepared files to the hub in one commit, and tag the commit.

    Because it is one commit, the hub shows all files or none. If the program stops before the tag is set, the same
    command continues: it does not upload again what the hub has already.

    Args:
        prepared: what :func:`prepare` returned.
        say: called with one sentence for each step, for the terminal.

    Returns:
        ``url``, the page of the published version, and ``commit``, the hash of the commit.

    Raises:
        BadInput: if the network is switched off, nobody is logged in, the tag exists already, the base is not on the
            hub, a repository that must be private is public, the repository holds other files that a loader might read
            together with these, or the hub refuses.
    """
    import huggingface_hub

    folder = Path(prepared["folder"])
    repo = prepared["repo"]
    tag = prepared["tag"]
    network.refuse_offline(
        f"publish: {repo}: can only be reached over the network", "publish without --offline and HF_HUB_OFFLINE"
    )
    reason = _unusable_base(folder)
    if reason:
        raise BadInput(f"{folder}: {reason}, so nobody else could load it; train over a model of the hub")
    if not huggingface_hub.get_token():
        raise BadInput("publish: nobody is logged in to the hub; run hf auth login, or set HF_TOKEN")
    api = huggingface_hub.HfApi()
    names = [file["path"] for file in prepared["files"]]
    try:
        _refuse_what_is_there(api, prepared)
        api.create_repo(repo, private=prepared["private"], exist_ok=True)
        say(f"sending {len(names)} files to {repo}")
        message = f"{tag}, by cria publish"
        sent = api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=names, commit_message=message)
        api.create_tag(repo, tag=tag, revision=sent.oid)
    except BadInput:
        raise
    except Exception as error:  # from httpx, from the hub's library, or from the thread of an upload
        # Of an error in an upload's thread only the cause is informative.
        cause = error.__cause__ if type(error) is RuntimeError else None
        raise BadInput(f"publish: {repo}: {network.why(cause or error)}; nothing was tagged") from None
    say(f"tagged {tag}")
    return {"url": f"{api.endpoint}/{repo}/tree/{tag}", "commit": sent.oid}


def _refuse_what_is_there(api: Any, prepared: dict[str, Any]) -> None:
    """Refuse a repository that has this tag already, is public despite ``--private``, or holds other readable files."""
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
    """Refuse files that contain an access token: the user's own, or anything that looks like one."""
    from huggingface_hub import get_token

    own = (get_token() or "").encode()
    for name in names:
        if name.endswith(".safetensors"):  # large; besides tensors it holds only what save_pretrained wrote
            continue
        content = (folder / name).read_bytes()
        # The user's own token may have another form. Tests set very short ones, which occur in any file by chance.
        if _TOKEN.search(content) or (len(own) >= 8 and own in content):
            raise BadInput(f"{folder}: {name} holds a token of the hub; revoke it there, and train again without it")


def _notes(folder: Path) -> list[str]:
    """Return what the user should look at before sending."""
    notes = [f"{name} is not in the manifest and is not sent" for name in atomic_files.unlisted(folder)]
    reason = _unusable_base(folder)
    if reason:
        notes.append(f"{reason}: nobody else could load it, and --yes refuses it")
    recipe = folder / artifact.RECIPE
    if recipe.is_file():
        # Quoted strings that begin like a path: ~, /, ./, ../ or C:\
        paths = re.findall(r'"((?:~|\.{0,2}/|[A-Za-z]:\\)[^"]*)"', recipe.read_text(encoding="utf-8"))
        notes += [f"{artifact.RECIPE} shows a path of this machine: {path}" for path in dict.fromkeys(paths)]
    return notes


def _unusable_base(folder: Path) -> str:
    """Say why other people could not download the adapter's base; empty if they can, and for a whole model."""
    if artifact.is_whole(folder):
        return ""
    base = artifact.named_base(folder)
    # A local folder may be called OWNER/NAME, too. A model of that name on the hub would be a different one.
    is_folder = artifact.trained_over(folder).get("kind") == "folder" or Path(base).is_dir()
    if is_hub_id(base) and not is_folder:
        return ""
    return f"its base is {base}, which is not on the hub"
