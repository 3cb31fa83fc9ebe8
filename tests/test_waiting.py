"""No command is silent for more than five seconds. Time is made up here: nothing waits."""

import io

import pytest

from cria_tricks.cli import entry, main
from cria_tricks.common import interrupts, waiting
from cria_tricks.common.startup import importing


class Clock:
    """Time that goes on when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def said():
    return []


@pytest.fixture
def speaker(clock, said, monkeypatch):
    found = waiting.Waiting(said.append, clock)
    found.phases.append("running cria merge")
    monkeypatch.setattr(waiting, "_waiting", found)
    monkeypatch.setattr(interrupts, "_state", interrupts._State())
    return found


def live(speaker, clock, seconds: float) -> None:
    """Let time pass as the thread does: it sleeps as long as it was told."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now = min(end, clock.now + speaker.tick())
    speaker.tick()


def test_a_silent_command_says_every_few_seconds_what_it_does(speaker, clock, said):
    live(speaker, clock, 10)
    with waiting.doing("loading MODEL"):
        live(speaker, clock, 9)
    live(speaker, clock, 1)
    assert said == [
        "still running cria merge, 4 s\n",
        "still running cria merge, 8 s\n",
        "still loading MODEL, 2 s\n",
        "still loading MODEL, 6 s\n",
        "still running cria merge, 1 s\n",
    ]
    assert waiting.PATIENCE < 5


def test_many_short_phases_are_one_long_silence(speaker, clock, said):
    for number in range(6):
        with waiting.doing(f"phase {number}"):
            live(speaker, clock, 2.5)
    assert [line.split(",")[0] for line in said] == ["still phase 1", "still phase 3", "still phase 4"]


def test_what_is_printed_meanwhile_counts(speaker, clock, said):
    stream = io.StringIO()
    speaker.listen_to(stream)
    for _ in range(10):
        live(speaker, clock, 3.9)
        print("a step", file=stream)
    assert said == []
    assert stream.getvalue() == 10 * "a step\n"
    live(speaker, clock, 4)
    assert said == ["still running cria merge, 4 s\n"]


def test_a_line_does_not_go_into_another_that_is_not_finished(speaker, clock, said):
    stream = io.StringIO()
    speaker.listen_to(stream)
    print("The answer is", end="", file=stream)
    live(speaker, clock, 8)
    assert said == ["\nstill running cria merge, 4 s\n", "still running cria merge, 8 s\n"]


def test_while_the_user_is_asked_and_after_the_last_words_it_is_silent(speaker, clock, said, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: live(speaker, clock, 60) or "Hello")
    assert main.adapters._ask() == "Hello"
    live(speaker, clock, 3.9)
    interrupts.speaking()
    live(speaker, clock, 60)
    assert said == []


def test_imports_and_loads_have_names(speaker, monkeypatch):
    with importing():
        assert speaker.phases[-1] == "importing the libraries"
    seen = []

    def open_for_chat(folder, *more, **options):
        seen.append(speaker.phases[-1])
        raise KeyboardInterrupt

    monkeypatch.setattr("cria_tricks.adapter.folder.adapter", lambda *what, **more: None)
    monkeypatch.setattr("cria_tricks.adapter.chat.open_for_chat", open_for_chat)
    with pytest.raises(KeyboardInterrupt):
        main.adapters.chat("run/adapter", prompt="Hi")
    assert seen == ["loading run/adapter"]
    assert speaker.phases == ["running cria merge"]


def test_a_run_names_its_phases(speaker, trained_phases):
    assert trained_phases == ["reading the rows", "turning rows into tokens", "loading", "training", "writing"]


@pytest.fixture
def trained_phases(speaker, tmp_path, monkeypatch):
    """What was being done when each part of a run was called."""
    from cria_tricks.adapter import folder as artifact
    from cria_tricks.data import sources
    from cria_tricks.run import api, steps
    from cria_tricks.trainer.shared import SharedTrainer

    found = []

    def spy(module, name):
        honest = getattr(module, name)

        def called(*arguments, **options):
            phase = speaker.phases[-1]
            short = phase.split()[0] if phase.startswith(("loading", "writing")) else phase
            if short not in found:
                found.append(short)
            return honest(*arguments, **options)

        monkeypatch.setattr(module, name, called)

    spy(sources, "find")
    spy(steps, "train_rows")
    spy(steps, "load")
    spy(SharedTrainer, "train")
    spy(artifact, "save")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    settings = ["model=random:tiny", "train.max_steps=1", "data.max_length=32", "tricks.peft=lora", "lora.r=2"]
    api.train("baseline", tmp_path / "run", settings=[*settings, f"data.train={rows}", f"data.eval={rows}"])
    return found


def test_the_command_starts_it_before_its_imports(monkeypatch, capsys):
    begun = []
    monkeypatch.setattr("sys.argv", ["cria", "--version"])
    monkeypatch.setattr(interrupts, "listen", lambda: begun.append("signals"))
    monkeypatch.setattr(waiting, "start", lambda what, streams: begun.append(what))
    monkeypatch.setattr(main, "main", lambda: begun.append("command"))
    monkeypatch.setattr(interrupts, "end", begun.append)
    entry.main()
    assert begun == ["signals", "running cria --version", "command", 0]
