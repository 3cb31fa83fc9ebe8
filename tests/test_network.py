"""An error of the hub is one line with its true cause; a silent hub is given up; offline, nobody is asked."""

import contextlib
import socket
import threading

import pytest

from cria_tricks import models
from cria_tricks.common.errors import BadInput
from cria_tricks.data import sources
from cria_tricks.models import network
from cria_tricks.models.configs import find_config
from tests.hub import TOKEN, Hub


@contextlib.contextmanager
def hanging():
    """A server that takes every connection, and never answers. Gives its port and what it took."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1], taken
        for connection in taken:
            connection.close()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def hub_at(monkeypatch, tmp_path, online):
    """Point the hub's library to a port of this machine, with nothing in its cache; it waits a second, and no pause."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def point(port: int) -> None:
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")

    return point


def refused(call) -> str:
    with pytest.raises(BadInput) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_hub_that_never_answers_is_given_up(hub_at):
    with hanging() as (port, taken):
        hub_at(port)
        said = refused(lambda: find_config("nobody/nothing"))
        assert taken
    assert "model nobody/nothing: its config.json cannot be had from the hub: the hub does not answer (" in said
    assert "; check the name and the network, or give a local folder" in said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, "Invalid credentials"), "the hub answers 401: Invalid credentials; is the login's token right? hf auth"),
        ((401, 'User Access Token "x" is expired'), "the login's token has expired: make another at https://hugging"),
        ((403, "forbidden"), "the hub answers 403: forbidden; may this login do that? see https://huggingface.co/set"),
        ((404, "none"), "the hub has no such model, or does not show it to this login; check the name"),
        ((429, "slow down"), "the hub answers 429: slow down; the hub was asked too often: wait, then run it again"),
        ((503, "down"), "the hub answers 503: down"),
    ],
)
def test_an_answer_of_the_hub_is_told_with_its_cause(answer, said, hub_at, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with Hub() as hub:
        hub_at(int(hub.url.rpartition(":")[2]))
        status, words = answer
        hub.instead = {"config.json": (status, {"error": words})}
        found = refused(lambda: network.config_of("nobody/nothing"))
    assert f"its config.json cannot be had from the hub: {said}" in found
    assert "the network" not in found


def test_a_token_that_no_header_can_hold_is_told_as_such(hub_at, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN + "\u00e4")
    with Hub() as hub:
        hub_at(int(hub.url.rpartition(":")[2]))
        said = refused(lambda: network.config_of("nobody/nothing"))
        assert hub.asked == []
    assert said.endswith("the login's token holds a letter that no token has; copy it again, then run: hf auth login")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_data_set_of_a_hub_that_cannot_be_reached_is_told_too(streamed, hub_at, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    port = closed_port()
    hub_at(port)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{port}")
    said = refused(lambda: sources.open_rows("nobody/no", "train", stream=streamed))
    assert said.startswith("data.train=nobody/no: cannot be loaded from the hub: the hub does not answer (")


def test_what_the_cache_has_is_taken_when_the_hub_does_not_answer(hub_at, tmp_path):
    snapshot = tmp_path / "models--nobody--nothing" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    with hanging() as (port, taken):
        hub_at(port)
        assert find_config("nobody/nothing") == {"model_type": "llama"}
        assert taken


def test_a_hub_that_says_no_is_not_taken_for_one_that_is_silent(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with Hub() as hub:
        hub.alone(monkeypatch, tmp_path)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        hub.instead = {"README.md": (404, {"error": "none"}), "config.json": (404, {"error": "none"})}
        said = refused(lambda: sources.find("nobody/nothing", "train"))
        assert hub.asked
        assert "nobody/nothing" in said
        assert "does not answer" not in said
        said = refused(lambda: network.config_of("nobody/nothing"))
        assert "from the hub: the hub has no such model, or does not show it to this login; check the name" in said


def test_offline_a_model_of_the_hub_is_refused_by_name(hub_at, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with hanging() as (port, taken):
        hub_at(port)
        for name, shown in (("nobody/nothing", "nobody/nothing"), ("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3")):
            said = refused(lambda name=name: models.refuse_out_of_reach(name))
            assert said.startswith(f"model {shown}: its config.json cannot be had from the hub: it is not in the cache")
            assert "the network is switched off by --offline or HF_HUB_OFFLINE=1" in said
        assert not taken


def test_the_cure_of_an_unknown_model_of_the_hub_is_the_nearest_one(monkeypatch):
    from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RepositoryNotFoundError

    class Answer:
        headers, status_code, request = {}, 404, None

    def download(error):
        def raises(*given):
            raise error("no", response=Answer())

        return raises

    for error, name, said in (
        (RepositoryNotFoundError, "Qwen/Qwen2.5-0.5B-Instrct", "did you mean Qwen/Qwen2.5-0.5B-Instruct?"),
        (RepositoryNotFoundError, "nobody/nothing", "check the name; a private one needs: hf auth login"),
        (GatedRepoError, "meta-llama/x", "ask for access at https://huggingface.co/meta-llama/x, then run: hf auth"),
        (RemoteEntryNotFoundError, "nobody/nothing", "it has none, so it is no transformers model; name another"),
    ):
        monkeypatch.setattr("huggingface_hub.hf_hub_download", download(error))
        assert said in refused(lambda name=name: network.config_of(name))


def test_the_real_rows_are_not_waited_for_for_ever(monkeypatch, tmp_path, online):
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path))
    monkeypatch.setattr(sources, "WAIT", 0.3)
    with hanging() as (port, taken):
        monkeypatch.setattr(sources, "_KWANZAA", f"http://127.0.0.1:{port}/kwanzaa_{{part}}.jsonl")
        said = refused(lambda: sources.place("kwanzaa", "train"))
        assert taken
    assert said.startswith("data.train=kwanzaa: cannot download http://127.0.0.1")
    assert said.endswith("(timed out); with a copy of the file at hand: --set data.train=FILE.jsonl")
