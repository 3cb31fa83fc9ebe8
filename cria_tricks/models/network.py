"""Limit the waiting for the hub: give up a host that does not answer for ten seconds, and send nothing when offline.

If a host does not answer, ``huggingface_hub`` repeats the request five times, with pauses of up to 8 s, and the
libraries that use it repeat their calls. So we hook into its client. If a host has not answered within our time limit,
each further request to it fails at once, as when offline. Then the libraries use the files in their cache, or report
that a file is not there. Only silence is limited: an answer that arrives slowly may take any time, and Ctrl-C ends it.

``huggingface_hub`` reads its settings when it is imported. So only functions import it, after ``--offline`` was read.
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
"""How long to wait for a host that has never answered [seconds]."""
ONCE_ANSWERED = 60.0
"""The same for a host that has answered this process before, so that a short break does not end a long download."""
AGAIN = 0.5
"""The shortest remaining time for which another request is worth sending [seconds]."""
GIVEN_UP = 30.0
"""How long requests fail at once after a host was given up [seconds]."""
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


class Patience:
    """Keep track of how long one host has not answered. All times are in seconds of ``time.monotonic``.

    Attributes:
        since: the time of the first request after the host's last answer; ``None`` while it answers.
        last: the time of the last request. After a pause of :data:`GIVEN_UP` the waiting starts again from zero,
            because an old silence says nothing about the host now.
        answered: whether the host has ever answered.
        says: what the host does instead of answering, for messages.
        told: whether the user knows that we are waiting.
        given_up: the time at which the host was last given up.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self.last = -GIVEN_UP
        self.says = "does not answer"
        self.answered = self.told = False
        self.given_up = -GIVEN_UP

    def left(self, host: str) -> float:
        """Return how long a request that is sent now may wait for the host [seconds].

        Args:
            host: the name of the host, for messages.

        Raises:
            OfflineModeIsEnabled: if no time is left. The libraries do not repeat a request after this error.
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
        # The library pauses for 1, 2, 4, 8 and 8 s between its requests. BOUND is 10 s. Requests begin in the first 6 s
        # of it, so the last pause that begins in time has 4 s and ends in time, too. ONCE_ANSWERED has the same share.
        left = 0.6 * bound - waited
        if left < AGAIN:
            self.given_up = now
            self.since = None
            self.told = False
            raise OfflineModeIsEnabled(f"{host} {self.says} (asked for {waited:.0f} s)")
        # A repeated request comes after a pause of 1 s or more. One that comes sooner is another one beside the first.
        if waited >= AGAIN and not self.told:
            self.told = True
            _say(f"{host} {self.says}; asking again, for {bound:.0f} s at most")
        return left

    def answers(self) -> None:
        """Note that the host has answered."""
        self.since = None
        self.answered = True
        self.told = False
        self.says = "does not answer"


_patience: dict[str, Patience] = {}
_lock = threading.Lock()


def bound() -> None:
    """Limit all requests of the hub's library from now on, and silence its warnings about repeated requests."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    for library in ("huggingface_hub", "datasets"):
        logging.getLogger(library).setLevel(logging.ERROR)  # it would warn five times for each file; we print one line
    made = _http._GLOBAL_CLIENT_FACTORY  # the library's own, or one that the user has set
    if getattr(made, "bounded", False):  # bound() was called before
        return

    # The library makes its client only when it needs one, so the function that makes it must add the hooks.
    def factory() -> Any:
        client = made()
        client.event_hooks["request"].append(_before)
        client.event_hooks["response"].append(_after)
        # If no connection can be made, the library closes its client. huggingface_hub 1.10 repeats the request with the
        # closed client, whose error hides the first one. A client that nobody uses any longer is freed without a close.
        client.close = lambda: None  # type: ignore[method-assign]
        return client

    factory.bounded = True  # type: ignore[attr-defined]
    set_client_factory(factory)


def _before(request: Any) -> None:
    """Limit the timeouts of a request to the time that is left for its host.

    The log and the events of a job are exempt, because nothing may happen there for a long time.
    """
    if request.url.path.endswith(("/logs", "/events")):
        return
    with _lock:
        left = _patience.setdefault(request.url.host, Patience()).left(request.url.host)
    asked = request.extensions.get("timeout", {})
    # After an upload the hub may work on a commit for a while before it answers; a download needs no such time.
    read = left if request.method in ("GET", "HEAD") else ONCE_ANSWERED
    most = {"connect": left, "pool": left, "read": read, "write": ONCE_ANSWERED}
    request.extensions["timeout"] = {name: min(limit, asked.get(name) or limit) for name, limit in most.items()}


def _after(response: Any) -> None:
    """Note the answer of a host, and tell the user if the host asks to wait because of too many requests."""
    host = response.request.url.host
    wait = re.search(r"\bt=(\d+)", response.headers.get("ratelimit", ""))
    if response.status_code == 429 and wait:
        _say(f"{host} was asked too often (429), and asks to wait for {wait[1]} s")
    with _lock:
        patience = _patience.setdefault(host, Patience())
        if response.status_code < 500:
            patience.answers()
        else:  # a server error: the library repeats the request, and the time limit still runs
            patience.says = f"answers {response.status_code}"


def _say(sentence: str) -> None:
    """Print a sentence for the user, in the main process only."""
    if not numbers.rank():
        # It imports rich, which a command that prints nothing here should not wait for.
        from cria_tricks.common.console import Aside

        Aside().print(sentence)


def why(error: BaseException) -> str:
    """Explain an error of the hub's libraries in one line."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    chain = list(_chain(error))
    silent = next((each for each in chain if isinstance(each, OfflineModeIsEnabled)), None)
    # datasets drops the original error and raises a ConnectionError. The errors of httpx are not ConnectionErrors. They
    # are recognised by the name of their base class, because a newer huggingface_hub uses httpx2 instead.
    cut = any(isinstance(each, ConnectionError) or "TransportError" in _names(each) for each in chain)
    if offline() and (cut or any(isinstance(each, LocalEntryNotFoundError) for each in chain)):
        return f"it is not in the cache of this machine, and {FORBIDDEN}"
    if silent or cut:
        reason = str(silent or f"the hub does not answer ({first_line(error)})")
        return f"{reason}, and it is not in the cache of this machine"
    return first_line(error)


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
    """Explain why a model could not be downloaded, and say what to do."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

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
    check = "run it once without" if reason.endswith(FORBIDDEN) else "check the name and the network"
    folder = "--set model=DIR or --model DIR, or --base DIR for an adapter's base"
    return f"{reason}; {check}, or give a local folder: {folder}"
