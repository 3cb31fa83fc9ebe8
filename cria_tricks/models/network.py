"""Bound requests to the hub: one that never answers is given up after ten seconds, and offline none is sent.

``huggingface_hub`` asks five times more when nobody answers, with pauses of up to 8 s, and each library above it asks
again. So every request of its client passes through here. Once nobody has answered for as long as we wait, each further
request fails at once, as when offline: then the libraries take what is in their cache, or say that it is not there.
Only silence is bounded: an answer that comes byte by byte is waited for, and Ctrl-C ends it.

``huggingface_hub`` reads its settings when it is imported. So only functions import it, after ``--offline``.
"""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.common.names import hint, nearest
from cria_tricks.models.catalogue import ALIASES
from cria_tricks.processes import numbers

BOUND = 10.0
"""Seconds to wait for a host that has never answered, before we give it up."""
ONCE_ANSWERED = 60.0
"""The same for a host that has answered this process before, so that a short cut does not end a long download."""
AGAIN = 0.5
"""Seconds that must be left for asking again."""
GIVEN_UP = 30.0
"""Seconds for which a host that did not answer is not asked again."""
FORBIDDEN = "the network is switched off by --offline or HF_HUB_OFFLINE=1"


def offline() -> bool:
    """Tell whether the network must not be used: by ``--offline`` or by the variables of Hugging Face's libraries."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def go_offline() -> None:
    """Forbid the network in this process and in those that it starts."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    datasets = sys.modules.get("datasets")
    if datasets:  # it reads the variable once, when it is imported
        datasets.config.HF_HUB_OFFLINE = True


def refuse_offline(what: str, cure: str) -> None:
    """Refuse what would need the network, when it is forbidden.

    Args:
        what: is missing, and where it was asked for.
        cure: what to do instead.

    Raises:
        BadInput: if the network may not be asked.
    """
    if offline():
        raise BadInput(f"{what}, and {FORBIDDEN}; {cure}")


class Patience:
    """How long a host has been asked without an answer.

    Attributes:
        since: when it was first asked after its last answer; ``None`` while it answers.
        last: when it was asked last; what was long ago says nothing of now.
        answered: whether it has answered before.
        says: what it does instead of an answer.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.last = -GIVEN_UP
        self.says = "does not answer"
        self.answered = self.told = False
        self.given_up = -GIVEN_UP

    def left(self, host: str) -> float:
        """Seconds for which a request that is made now may wait.

        Raises:
            OfflineModeIsEnabled: if there are none. The libraries do not ask again after this error.
        """
        from huggingface_hub.errors import OfflineModeIsEnabled

        now = time.monotonic()
        bound = ONCE_ANSWERED if self.answered else BOUND
        if now - self.given_up < GIVEN_UP:
            raise OfflineModeIsEnabled(f"{host} {self.says}")
        if self.since is None or now - self.last > GIVEN_UP:
            self.since = now
            self.told = False
        self.last = now
        waited = now - self.since
        # The library pauses for up to 4 s before it asks again at this point: the rest of the bound is for that.
        left = 0.6 * bound - waited
        if left < AGAIN:
            self.given_up = now
            self.since = None
            self.told = False
            raise OfflineModeIsEnabled(f"{host} {self.says} (asked for {waited:.0f} s)")
        if waited >= AGAIN and not self.told:
            self.told = True
            _say(f"{host} {self.says}; asking again, for {bound:.0f} s at most")
        return left

    def answers(self) -> None:
        """Note an answer."""
        self.since = None
        self.answered = True
        self.told = False
        self.says = "does not answer"


_patience: dict[str, Patience] = {}
_lock = threading.Lock()


def bound() -> None:
    """Bound what the hub's library asks from here on, and silence its warning about each attempt."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    for library in ("huggingface_hub", "datasets"):
        logging.getLogger(library).setLevel(logging.ERROR)  # five warnings a file; ours is one line
    made = _http._GLOBAL_CLIENT_FACTORY  # the user's own, where there is one
    if getattr(made, "bounded", False):
        return

    # The library makes its client when it first needs one, so the hooks go into the function that makes it.
    def factory() -> Any:
        client = made()
        client.event_hooks["request"].append(_before)
        client.event_hooks["response"].append(_after)
        return client

    factory.bounded = True  # type: ignore[attr-defined]
    set_client_factory(factory)


def _before(request: Any) -> None:
    """Hold a request to the time that is left. A job's log may be silent for long, and is let alone."""
    if request.url.path.endswith(("/logs", "/events")):
        return
    with _lock:
        left = _patience.setdefault(request.url.host, Patience()).left(request.url.host)
    asked = request.extensions.get("timeout", {})
    # A hub that has taken a commit may think about it for longer than one that is only asked for something.
    read = left if request.method in ("GET", "HEAD") else ONCE_ANSWERED
    most = {"connect": left, "pool": left, "read": read, "write": ONCE_ANSWERED}
    request.extensions["timeout"] = {name: min(limit, asked.get(name) or limit) for name, limit in most.items()}


def _after(response: Any) -> None:
    host = response.request.url.host
    wait = re.search(r"\bt=(\d+)", response.headers.get("ratelimit", ""))
    if response.status_code == 429 and wait:
        _say(f"{host} was asked too often (429), and asks to wait for {wait[1]} s")
    with _lock:
        patience = _patience.setdefault(host, Patience())
        if response.status_code < 500:
            patience.answers()
        else:  # it is asked again, and the time runs on
            patience.says = f"answers {response.status_code}"


def _say(sentence: str) -> None:
    if not numbers.rank():  # the main process speaks for all
        # It imports rich, and whoever only names a model should not wait for that.
        from cria_tricks.common.console import Aside

        Aside().print(sentence)


def why(error: BaseException) -> str:
    """Say in one line what an error of the hub's libraries means."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    chain = list(_chain(error))
    silent = next((each for each in chain if isinstance(each, OfflineModeIsEnabled)), None)
    # datasets throws the cause away, and keeps a ConnectionError; those of httpx, under any of its names, are no such.
    cut = any(isinstance(each, ConnectionError) or "TransportError" in _names(each) for each in chain)
    if offline() and (cut or any(isinstance(each, LocalEntryNotFoundError) for each in chain)):
        return f"it is not in the cache of this machine, and {FORBIDDEN}"
    if silent or cut:
        reason = str(silent or f"the hub does not answer ({first_line(error)})")
        return f"{reason}, and it is not in the cache of this machine"
    return first_line(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _names(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


def config_of(hub_id: str) -> Path:
    """Get a model's ``config.json`` from the hub, or from its cache: the first thing that says a model is there.

    Args:
        hub_id: OWNER/NAME.

    Raises:
        BadInput: if it cannot be had, in one line that says why.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    bound()
    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except Exception as error:
        reason = refusal(hub_id, error)
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            reason = "it has none, so it is no transformers model; name another"
    raise BadInput(f"model {hub_id}: its config.json cannot be had from the hub: {reason}")


def refusal(hub_id: str, error: Exception) -> str:
    """Say why the hub does not give a model, and what to do."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        cure = f"ask for access at https://huggingface.co/{hub_id}, then run: hf auth login"
        return f"it is gated, and not shown to this login; {cure}"
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        near = nearest(hub_id, ALIASES.values(), cutoff=0.8)
        cure = hint(near, "check the name; a private one needs: hf auth login")
        return f"the hub has no such model, or does not show it to this login; {cure}"
    # The network; or a name that the hub does not take, an answer that is none.
    reason = why(error)
    check = "run it once without" if reason.endswith(FORBIDDEN) else "check the name and the network"
    folder = "--set model=DIR or --model DIR, or --base DIR for an adapter's base"
    return f"{reason}; {check}, or give a local folder: {folder}"
