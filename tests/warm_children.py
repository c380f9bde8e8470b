"""Modules in processes forked from one that has imported Vorox and a framework, so that none pays for the imports.

The server imports, calls nothing and forks for every request. A child has its own process id, working directory and
output, the environment of its server with more variables, and modules as they are right after their import. It shares
the seed of ``hash`` with its siblings, so the process that ends a run is better a fresh one. Where importing starts a
thread (OpenBLAS does unless ``OMP_NUM_THREADS=1``) or processes have no descriptors, children are fresh interpreters.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

TRAINING = ("vorox.cli.training.train", "vorox.cli.training.run", "vorox.run", "vorox.training.replay")
ENGINES = {"torch": "vorox.backends.torch_engine.engine", "jax": "vorox.backends.jax_engine.engine"}
_LONGEST_REQUEST_BYTES = 1 << 16


class WarmChild:
    """One forked process, with what of ``subprocess.Popen`` the tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(_receive_line(connection))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: It is still alive.
        """
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(_receive_line(self._connection))
            self._connection.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


class FreshChild(subprocess.Popen[bytes]):
    """One fresh interpreter, where processes cannot be forked."""

    def kill(self) -> None:
        """As that of a warm child: the process has ended when it returns."""
        super().kill()
        self.wait()


class WarmChildren:
    """A server and its children; ends with the process that made it, or as a context manager."""

    def __init__(self, engine: str, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = dict(environment)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *TRAINING, ENGINES[engine], *modules],
                pass_fds=[theirs.fileno()], env=self._environment, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._requests = ours
        self.forks = _receive_line(ours) == "forks\n"

    def __enter__(self) -> WarmChildren:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._requests.close()
        self._server.wait()

    def vorox(
        self, words: Sequence[str], *, cwd: Path, output: IO[bytes], variables: Mapping[str, str] | None = None
    ) -> WarmChild | FreshChild:
        """Start ``python -m vorox``, its output and errors in one file; see ``start``."""
        return self.start("vorox", words, cwd=cwd, output=output, errors=output, variables=variables)

    def start(
        self,
        module: str,
        words: Sequence[str],
        *,
        cwd: Path,
        output: IO[bytes],
        errors: IO[bytes],
        variables: Mapping[str, str] | None = None,
    ) -> WarmChild | FreshChild:
        """Start ``python -m MODULE`` with nothing to read, its output and errors in files, and more variables."""
        variables = dict(variables or {})
        if not self.forks:
            return FreshChild(
                [sys.executable, "-m", module, *words], cwd=cwd, env=self._environment | variables,
                stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            )  # fmt: skip
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = {"module": module, "words": list(words), "cwd": str(cwd), "variables": variables}
            descriptors = [theirs.fileno(), output.fileno(), errors.fileno()]
            socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
        return WarmChild(ours)


def _receive_line(connection: socket.socket) -> str:
    line = connection.recv(64)
    if not line:
        raise EOFError("the server of warm children has ended")
    return line.decode()


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for every request and report how each child ended; returns the request in a child, else nothing."""
    ends: dict[int, tuple[int, socket.socket]] = {}  # of a process descriptor: process id, and who waits
    while True:
        for ready in select.select([requests, *ends], [], [])[0]:
            if ready is not requests:
                process, waiting = ends.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                with contextlib.suppress(OSError):
                    waiting.sendall(b"%d\n" % code)
                waiting.close()
                continue
            message, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST_BYTES, 3)
            if not message:
                return None
            connection, outputs = socket.socket(fileno=descriptors[0]), descriptors[1:]
            process = os.fork()
            if process == 0:
                nothing = os.open(os.devnull, os.O_RDONLY)
                for number, descriptor in enumerate((nothing, *outputs)):
                    os.dup2(descriptor, number)
                os.closerange(3, max(*descriptors, *ends, nothing, requests.fileno()) + 1)
                for inherited in (requests, connection, *(waiting for _, waiting in ends.values())):
                    inherited.detach()  # its number will be that of another descriptor, which it must not close
                return json.loads(message)
            for descriptor in outputs:
                os.close(descriptor)
            connection.sendall(b"%d\n" % process)
            ends[os.pidfd_open(process)] = process, connection


def _main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1 and os.environ.get("TESTS_COMPLETE") == "1":  # each child would import all of it again
        raise SystemExit(f"Importing {', '.join(sys.argv[2:])} started the threads {threads}")
    forks = hasattr(os, "pidfd_open") and len(threads) == 1
    gc.freeze()  # collections of children neither visit nor copy what was imported
    requests.sendall(b"forks\n" if forks else b"starts\n")
    request = _serve(requests)
    if request is None:
        return
    os.environ.update(request["variables"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    sys.argv = [request["module"], *request["words"]]
    # The standard streams of the server write to the descriptors 1 and 2, whatever these are now.
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
