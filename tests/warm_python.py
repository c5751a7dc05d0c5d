"""New processes of Python that begin in a tenth of a second instead of six.

`import torch` and what a run imports after it take most of the time of a short command. A server,
one per session, has imported all this. It forks a process for each command, which then does what
`python` does: it takes the environment, imports sitecustomize, sets sys.path and sys.argv, and runs
`-m MODULE`, `-c CODE` or a file as `__main__`. If PYTHONPATH leads to another copy of adloco, it
forgets the one that the server has imported.

`Popen` here stands for `subprocess.Popen` where the command is one of this Python. A process that
has been forked starts its own processes, the ranks of a launcher, in the same way.
"""

import contextlib
import importlib.machinery
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from os import _exit
from pathlib import Path
from types import TracebackType
from typing import IO, Any

PRELOADED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("transformers.models.llama.modeling_llama", "adloco.cli.main", "adloco.cli.train_here"),
)
REAL = subprocess.Popen
CHILDREN = "children"
"""Folder of an empty file for each process, whose name is its starter's id and its own."""

FOLDER = "ADLOCO_TESTS_WARM_PYTHON"
"""Variable with the folder in which the server listens."""

server_folder: Path | None = None
"""That folder; None: this process does not use the server."""


class Popen(REAL):  # type: ignore[type-arg]
    """`subprocess.Popen`, in whose place a process is forked if the command is one of Python that
    reads nothing.
    """

    def __new__(cls, args: Any, **settings: Any) -> Any:  # type: ignore[misc]
        of_python = isinstance(args, list) and args[0] == sys.executable
        reads = settings.get("stdin") not in (None, subprocess.DEVNULL)
        if of_python and server_folder and not reads:
            return ForkedPython([str(word) for word in args[1:]], **settings)
        return REAL(args, **settings)


class ForkedPython:
    """A process of the server, with the interface of `subprocess.Popen`."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        text: bool = False,
        start_new_session: bool = False,
    ) -> None:
        assert server_folder and stdin in (None, subprocess.DEVNULL)
        self.args = [sys.executable, *words]
        self.returncode: int | None = None
        # Files in place of pipes: a process never waits for somebody who reads.
        self._files = [_file() if to == subprocess.PIPE else None for to in (stdout, stderr)]
        self._said: list[str | bytes | None] = [None, None]
        self._text = text
        out = _descriptor(stdout, self._files[0], 1)
        err = out if stderr == subprocess.STDOUT else _descriptor(stderr, self._files[1], 2)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(server_folder / "socket"))
        request = {
            "words": [*words],
            "environment": {**(os.environ if env is None else env)},
            "folder": str(cwd or Path.cwd()),
            "new_session": start_new_session,
            "starter": os.getpid(),
        }
        socket.send_fds(self._server, [b"."], [out, err])
        self._server.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._server.makefile("r")
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(int(self._answers.readline()))
            self._answers.close()
            self._server.close()
        return self.returncode

    def communicate(self, input: None = None, timeout: float | None = None) -> tuple[Any, Any]:
        self.wait(timeout)
        for number, file in enumerate(self._files):
            if file is not None and not file.closed:
                file.seek(0)
                said = file.read()
                self._said[number] = said.decode() if self._text else said
                file.close()
        return self._said[0], self._said[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "ForkedPython":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.wait()


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()  # `communicate` closes it.


def _descriptor(to: int | IO[Any] | None, file: IO[bytes] | None, default: int) -> int:
    if to == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_WRONLY)  # Closed when this process ends.
    if file is not None:
        return file.fileno()
    if to is None:
        return default
    return to if isinstance(to, int) else to.fileno()


def start_server() -> None:
    """Start the server of this session, unless the process that has started this one did so.

    It ends with the process that has started it.
    """
    if FOLDER in os.environ:
        return
    # A short path: that of a socket may have a hundred letters.
    folder = tempfile.mkdtemp(prefix="warm-")
    os.environ[FOLDER] = folder
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # The libraries read some variables when they are imported.
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    life, _ = os.pipe()  # Its other end stays open until this process has ended.
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", __file__, folder, os.environ.get("PYTHONPATH", "")],
        own | quiet | {"OMP_NUM_THREADS": "1"},
        file_actions=[(os.POSIX_SPAWN_DUP2, life, 0)],
    )
    os.close(life)


def wait_for_server() -> None:
    global server_folder
    folder = Path(os.environ[FOLDER])
    deadline = time.monotonic() + 300  # Against a session that hangs.
    while not (folder / "socket").exists():
        assert time.monotonic() < deadline, "the server of new processes did not start"
        time.sleep(0.05)
    server_folder = folder


def children_of(process: subprocess.Popen[Any]) -> list[int]:
    """Ids of the processes that this one has started and that are there, in order."""
    if not isinstance(process, ForkedPython):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return [int(child) for child in children]
    assert server_folder
    files = (server_folder / CHILDREN).glob(f"{process.pid}-*")
    started = [file.name.partition("-")[2] for file in sorted(files, key=_time)]
    return [int(child) for child in started if Path(f"/proc/{child}").exists()]


def _time(file: Path) -> int:
    return file.stat().st_mtime_ns


def serve(folder: Path) -> dict[str, Any] | None:
    """Fork a process for each request.

    It returns in each new process, with the request; in the server None, when stdin ends.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    (folder / CHILDREN).mkdir()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel forgets those that have ended.
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "new"))
    listening.listen(64)
    (folder / "new").rename(folder / "socket")
    while True:
        ready, _, _ = select.select([listening, 0], [], [])
        if listening not in ready:
            shutil.rmtree(folder)
            return None
        connection, _ = listening.accept()
        if os.fork():
            connection.close()
            continue
        listening.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
        request: dict[str, Any] = json.loads(connection.makefile().readline())
        if child := os.fork():
            # This process waits for the new one, and tells its end.
            for descriptor in descriptors:
                os.close(descriptor)
            (folder / CHILDREN / f"{request['starter']}-{child}").touch()
            connection.sendall(f"{child}\n".encode())
            status = os.waitpid(child, 0)[1]

            with contextlib.suppress(OSError):  # The starter may have ended.
                connection.sendall(f"{status}\n".encode())
            _exit(0)  # Without what torch does at the end of a process.
        connection.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate([nothing, *descriptors]):
            os.dup2(descriptor, number)
            os.close(descriptor)
        return request


def paths_of(python_path: str) -> list[str]:
    return [str(Path(path).absolute()) for path in python_path.split(os.pathsep) if path]


def become(words: list[str], environment: dict[str, str], folder: str, paths: list[str]) -> None:
    """Do what `python WORDS` does in this environment and folder.

    paths: sys.path without what PYTHONPATH or the command adds.
    """
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    first = {"-m": folder, "-c": ""}.get(words[0], str(Path(words[0]).parent))
    sys.path[:] = [first, *paths_of(environment.get("PYTHONPATH", "")), *paths]
    found = importlib.machinery.PathFinder.find_spec("adloco", sys.path)
    if found is None or found.origin != sys.modules["adloco"].__file__:
        for name in [name for name in sys.modules if name.partition(".")[0] == "adloco"]:
            del sys.modules[name]
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    subprocess.Popen = Popen  # type: ignore[misc]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    os.setsid()  # Ctrl+C in a terminal is not for the server.
    server_folder, plain = Path(sys.argv[1]), [*sys.path]
    sys.path[:0] = paths_of(sys.argv[2])
    if request := serve(server_folder):
        if request["new_session"]:
            os.setsid()
        become(request["words"], request["environment"], request["folder"], plain)
