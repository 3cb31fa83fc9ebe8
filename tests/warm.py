"""A process that has imported our libraries and forks: a new process in a tenth of a CPU second, not in eight.

A test that needs real processes, to signal them or to join them, gets children of this one. They have a pid, an exit
code, an environment and a folder of their own, and run the same ``python -m cria_tricks``. They differ from processes
that are started anew in one thing: the libraries are imported already. So a test of the imports, or of what the first
second of a process does, starts its own. ``CRIA_ALL=1`` starts all processes anew.

Each request is a connection to a socket, with the file descriptors that the child gets. A guard, forked for it, forks
the child, waits for it, and says how it has ended.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from cria_tricks.course.processes import Ranks
from tests.sweeps import ALL

ADDRESS = "CRIA_TESTS_WARM"
"""The environment variable with the server's socket: a child may ask for children, as torchrun does."""
SERVER = "CRIA_TESTS_WARM_PID"
"""The environment variable with its process's id."""
LARGEST = 2**17
"""Of a request [bytes]."""


class Child:
    """A forked process, as ``subprocess.Popen`` shows a started one.

    Args:
        what: ``("module", name, *arguments)``, ``("code", text, *arguments)``, or ``("ranks", *words)`` with the file
            descriptors of pipes among the words.
        stdout: a file, ``subprocess.PIPE`` or ``DEVNULL``, or None to keep this process's.
        stderr: a file, ``subprocess.PIPE`` or ``STDOUT``, or None.
        env: the child's whole environment; None to keep this one's.
        cwd: its folder.
        start_new_session: whether Ctrl-C in a terminal passes it by.
    """

    def __init__(
        self, what: Sequence[Any], stdout: IO | int | None = None, stderr: IO | int | None = None,
        env: Mapping[str, str] | None = None, cwd: str | Path | None = None, start_new_session: bool = False,
    ):  # fmt: skip
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        opened: list[int] = []
        if stdout == subprocess.PIPE:
            ours, stdout = os.pipe()
            self.stdout = open(ours, encoding="utf-8")  # noqa: SIM115 (whoever started it reads it)
            opened.append(stdout)
        if stderr == subprocess.PIPE:
            ours, stderr = os.pipe()
            self.stderr = open(ours, encoding="utf-8")  # noqa: SIM115
            opened.append(stderr)
        if stdout == subprocess.DEVNULL:
            stdout = os.open(os.devnull, os.O_WRONLY)
            opened.append(stdout)
        fds = [0, 1 if stdout is None else number_of(stdout), 2 if stderr is None else -1]
        if stderr is not None:
            fds[2] = fds[1] if stderr == subprocess.STDOUT else number_of(stderr)
        pipes = [word for word in what[1:] if isinstance(word, int)]
        environment = dict(os.environ if env is None else env) | {ADDRESS: os.environ[ADDRESS]}
        request = {
            "what": [str(word) for word in what if not isinstance(word, int)], "env": environment,
            "cwd": str(cwd or Path.cwd()), "session": start_new_session,
        }  # fmt: skip
        sys.stdout.flush()
        sys.stderr.flush()
        self._guard = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._guard.connect(os.environ[ADDRESS])
        socket.send_fds(self._guard, [pickle.dumps(request)], fds + pipes)
        for number in opened:
            os.close(number)
        self.pid: int = pickle.loads(self._guard.recv(LARGEST))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None and not select.select([self._guard], [], [], 0)[0]:
            return None
        return self._ended()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended."""
        if self.returncode is None and not select.select([self._guard], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        code = self._ended()
        assert code is not None
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it still says until its end. It says little on its standard output."""
        said = self.stderr.read() if self.stderr else ""
        answered = self.stdout.read() if self.stdout else ""
        self.wait(timeout)
        return answered, said

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()
        for pipe in (self.stdout, self.stderr):
            if pipe:
                pipe.close()

    def _ended(self) -> int | None:
        if self.returncode is None:
            said = self._guard.recv(LARGEST)
            assert said, "the guard has died"
            self.returncode = pickle.loads(said)
            self._guard.close()
        return self.returncode


class Server:
    """The process that forks, from here on until :meth:`close`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cria-warm-")
        os.environ[ADDRESS] = str(Path(self._folder.name) / "socket")
        alive, self._alive = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(alive)],
            pass_fds=[alive],
            start_new_session=True,
            cwd=Path(__file__).parents[1],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        os.close(alive)
        os.environ[SERVER] = str(self.process.pid)
        while not Path(os.environ[ADDRESS]).exists():
            assert self.process.poll() is None
            time.sleep(0.02)

    def close(self) -> None:
        """End it: it ends when the pipe is closed."""
        os.close(self._alive)
        self.process.wait()
        self._folder.cleanup()
        del os.environ[ADDRESS], os.environ[SERVER]


def number_of(file: IO | int) -> int:
    """Of a file, its descriptor."""
    return file if isinstance(file, int) else file.fileno()


def start(*words: Any, **options: Any) -> Child | subprocess.Popen[str]:
    """Start ``python -m cria_tricks`` with these words."""
    if ALL:
        return subprocess.Popen([sys.executable, "-m", "cria_tricks", *map(str, words)], text=True, **options)
    return Child(("module", "cria_tricks", *map(str, words)), **options)


def workers(agent: Child | subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that torchrun's agent has started, by their ranks."""
    if isinstance(agent, Child):
        all_of_them = psutil.Process(int(os.environ[SERVER])).children(recursive=True)
        return sorted((p for p in all_of_them if p.name().startswith("rank ")), key=psutil.Process.name)
    return [p for p in psutil.Process(agent.pid).children() if "train" in p.cmdline()]


def ranks(self: Ranks, place: dict[str, str], *words: str | int) -> None:
    """What takes the place of :meth:`Ranks._begin`."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **place}
    self._started.append(Child(("ranks", *words), env=environment, start_new_session=True))


def serve(alive: int) -> Callable[[], None] | None:
    """Fork for each request until the pipe is closed; a child returns what it shall do."""
    import cria_tricks.run.train
    import cria_tricks.trainer.loop  # noqa: F401
    from cria_tricks.report import page

    draw_once(page)
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        address = os.environ[ADDRESS]
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)
        while True:
            ready, _, _ = select.select([listener, alive], [], [], 1)
            with contextlib.suppress(ChildProcessError):  # guards that have ended, so that their CPU time is counted
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if alive in ready:
                return None
            if listener in ready:
                connection, _ = listener.accept()
                if os.fork() == 0:
                    listener.close()
                    os.close(alive)
                    return guard(connection)
                connection.close()


def draw_once(page: Any) -> None:
    """As ``conftest.py`` does it: a drawing takes 0.4 s of each run [CPU]."""
    draw, drawn = page.draw, []

    def first(report: Any) -> bytes:
        if not drawn:
            drawn.append(draw(report))
        return drawn[0]

    page.draw = first


def guard(connection: socket.socket) -> Callable[[], None]:
    """Fork the child that was asked for, and say how it has ended."""
    said, fds, *_ = socket.recv_fds(connection, LARGEST, 16)
    request = pickle.loads(said)
    child = os.fork()
    if child == 0:
        return lambda: become(connection, fds, **request)
    for number in fds:
        os.close(number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):  # nobody waits for it
        connection.send(pickle.dumps(code))
    os._exit(0)


def become(
    connection: socket.socket, fds: list[int], what: list[str], env: dict[str, str], cwd: str, session: bool
) -> None:
    """Be the process that was asked for."""
    if session:
        os.setsid()
    connection.send(pickle.dumps(os.getpid()))
    connection.close()
    pipes = fds[3:]
    for number, mine in enumerate(fds[:3]):
        os.dup2(mine, number)
        os.close(mine)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a shell in the background ignores some
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    ctypes.CDLL(None).prctl(15, f"rank {env['RANK']}".encode() if "RANK" in env else b"cria")  # its name in ps
    kind, *words = what
    sys.path[0] = cwd
    if kind == "ranks":
        from cria_tricks.course import processes

        processes._start(pipes, alone="--alone" in words)
        return
    name, *arguments = words
    sys.argv = ["-c" if kind == "code" else name, *arguments]
    if kind == "code":
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
    else:
        with torchruns_workers_forked():
            runpy.run_module(name, run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def torchruns_workers_forked():
    """torchrun's agent starts ``python -u -m MODULE ...``; here it asks for a forked process instead."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler as handler

    def popen(self, args, env):
        assert args[:3] == (sys.executable, "-u", "-m"), args
        return Child(("module", *args[3:]), stdout=self._stdout, stderr=self._stderr, env=env, start_new_session=True)

    original = handler.SubprocessHandler._popen
    handler.SubprocessHandler._popen = popen
    try:
        yield
    finally:
        handler.SubprocessHandler._popen = original


if __name__ == "__main__":
    task = serve(int(sys.argv[1]))
    if task:
        task()
