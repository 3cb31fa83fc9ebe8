"""Switch the network off, and turn an error of the hub's libraries into one line that says the true cause.

How long they wait for a hub that does not answer, the variables ``HF_HUB_ETAG_TIMEOUT`` and
``HF_HUB_DOWNLOAD_TIMEOUT`` say: 10 s each by the library's own default.

``huggingface_hub`` reads its settings when it is imported. So only functions import it, after ``--offline`` was read.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput, first_line, in_one_line
from cria_tricks.common.fields import hint, nearest
from cria_tricks.models.catalogue import ALIASES

FORBIDDEN = "the network is switched off by --offline or HF_HUB_OFFLINE=1"


def offline() -> bool:
    """Tell whether the network must not be used, because of ``--offline`` or a Hugging Face environment variable."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def go_offline() -> None:
    """Forbid the network in this process and in the processes that it starts."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    datasets = sys.modules.get("datasets")
    if datasets:  # already imported, so it has read the variable and will not read it again
        datasets.config.HF_HUB_OFFLINE = True


def refuse_offline(what: str, cure: str) -> None:
    """Refuse something that needs the network if the network must not be used.

    Args:
        what: what is missing and where it was asked for, as the beginning of the message.
        cure: what to do instead, as its end.

    Raises:
        BadInput: if :func:`offline` is true.
    """
    if offline():
        raise BadInput(f"{what}, and {FORBIDDEN}; {cure}")


CURES = {
    401: "is the login's token right? hf auth whoami tells",
    402: "no credit is left: see https://huggingface.co/settings/billing",
    403: "may this login do that? see https://huggingface.co/settings/tokens",
    429: "the hub was asked too often: wait, then run it again",
}
"""The advice for an answer of the hub, by its HTTP status code."""


def why(error: BaseException) -> str:
    """Explain an error of the hub's libraries in one line."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    chain = list(_chain(error))
    if any(isinstance(each, UnicodeEncodeError) for each in chain) and not (get_token() or "").isascii():
        return "the login's token holds a letter that no token has; copy it again, then run: hf auth login"
    answered = next((each for each in chain if getattr(each, "response", None) is not None), None)
    # These errors of the libraries say more than the answer that they stand for: no such data set, a wrong model card.
    says_more = error is not answered and (isinstance(error, ValueError) or "DatasetNotFoundError" in _names(error))
    if answered and (_expired(answered) or not says_more):
        return _answer(answered)
    # datasets drops the original error and raises a ConnectionError. The errors of httpx are not ConnectionErrors. They
    # are recognised by the name of their base class, because a newer huggingface_hub uses httpx2 instead.
    cut = next((each for each in chain if isinstance(each, ConnectionError) or "TransportError" in _names(each)), None)
    missing = any(isinstance(each, LocalEntryNotFoundError | OfflineModeIsEnabled) for each in chain)
    if offline() and (cut or missing):
        return f"it is not in the cache of this machine, and {FORBIDDEN}"
    if cut:
        return f"the hub does not answer ({first_line(cut)})"
    return first_line(error)


def _answer(error: Any) -> str:
    """Explain an error by which the hub has answered, and say what to do."""
    if _expired(error):
        return (
            "the login's token has expired: make another at https://huggingface.co/settings/tokens, then hf auth login"
        )
    status = error.response.status_code
    words = error.response.headers.get("X-Error-Message") or in_one_line(error)
    cure = CURES.get(status)
    return f"the hub answers {status}: {words}; {cure}" if cure else f"the hub answers {status}: {words}"


def _expired(error: Any) -> bool:
    """Tell whether the hub has refused the token because it has expired; to the library, a model is then missing."""
    return "expired" in error.response.headers.get("X-Error-Message", "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the error that caused it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _names(error: BaseException) -> list[str]:
    """Return the names of an error's class and of all its base classes."""
    return [kind.__name__ for kind in type(error).__mro__]


def config_of(hub_id: str) -> Path:
    """Download a model's ``config.json`` from the hub, or take it from the cache, and return its path.

    It is the smallest proof that the hub has the model and gives access to it.

    Args:
        hub_id: OWNER/NAME.

    Raises:
        BadInput: if that fails; it says why in one line.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(hub_id, "config.json"), str) and not offline():
            # One question first: hf_hub_download would ask a hub that does not answer six more times, a minute each.
            get_hf_file_metadata(hf_hub_url(hub_id, "config.json"), timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return Path(hf_hub_download(hub_id, "config.json"))
    except Exception as error:
        reason = refusal(hub_id, error)
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            reason = "it has none, so it is no transformers model; name another"
    raise BadInput(f"model {hub_id}: its config.json cannot be had from the hub: {reason}")


def refusal(hub_id: str, error: Exception) -> str:
    """Explain why a model could not be downloaded, and say what to do."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if getattr(error, "response", None) is not None and _expired(error):
        return why(error)
    # Asked first, because a GatedRepoError is a RepositoryNotFoundError, too.
    if isinstance(error, GatedRepoError):
        cure = f"ask for access at https://huggingface.co/{hub_id}, then run: hf auth login"
        return f"it is gated, and not shown to this login; {cure}"
    if isinstance(error, RepositoryNotFoundError):
        # 0.8 and not the usual 0.6, because ids share their owner and family: Qwen/Qwen2-VL-7B is 0.77 like Qwen3-1.7B.
        near = nearest(hub_id, ALIASES.values(), cutoff=0.8)
        cure = hint(near, "check the name; a private one needs: hf auth login")
        return f"the hub has no such model, or does not show it to this login; {cure}"
    # All other errors: of the network, a name that the hub does not accept, or an answer that cannot be read.
    reason = why(error)
    if reason.startswith(("the hub answers", "the login's token")):  # then neither the name nor the network is wrong
        return reason
    check = "run it once without" if reason.endswith(FORBIDDEN) else "check the name and the network"
    folder = "--set model=DIR or --model DIR, or --base DIR for an adapter's base"
    return f"{reason}; {check}, or give a local folder: {folder}"
