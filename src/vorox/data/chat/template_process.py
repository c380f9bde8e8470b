"""Render the chat templates of others in a child process, with limits of time and memory.

Batches of conversations go in; their texts and answers, or refusals, come out. One child serves all threads of a
process. A conversation that takes too long or too much memory is refused by itself; a child that hangs or dies is
started again, and its batch is rendered one by one. So a downloaded template cannot hang or exhaust a build or a
server. This module is also the program of the child.

Both sides speak JSON, because a template may be hostile.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

from vorox.core.errors import ConfigError, DataError
from vorox.core.processes.child_process import child_command

CPU_SECONDS = 10.0
"""Processor time that one conversation may take."""
SILENT_SECONDS = 60.0
"""Time without an answer after which the child is killed: it is in code that the first limit cannot interrupt."""
MEMORY_BYTES = 1 << 30
"""Memory that the child may allocate beyond what it has at its start."""
TEXT_CHARACTERS = 1 << 26
"""Longest text of a conversation."""
_LENGTH = struct.Struct("<Q")

Reply = dict[str, Any]
"""``error``: why a conversation is refused; ``fault``: a wrong template; else what the template returned."""


class Template(Protocol):
    """What the child runs."""

    def to_json(self) -> Mapping[str, Any]: ...
    def reply_to(self, request: Any, /) -> Reply: ...


class TemplateProcess:
    """The child of this process, started when it is first used, and again after it ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def submit(self, template: Template, requests: Sequence[object]) -> Future[list[Reply]]:
        """Send a batch, and return its replies when they come.

        Raises:
            DataError: The child cannot be started.
        """
        message = json.dumps([template.to_json(), list(requests)], default=str).encode()
        with self._lock:
            if self._child is None or self._child.has_ended:
                self._child = _Child()
            return self._child.send(message)

    def replies(self, template: Template, requests: Sequence[object], future: Future[list[Reply]]) -> list[Reply]:
        """Wait for the replies to a batch; if the child hangs or dies, find the conversations that make it do so.

        Raises:
            DataError: As ``submit``.
        """
        try:
            return future.result(SILENT_SECONDS)
        except _ChildEnded:
            pass
        except TimeoutError:
            self.stop()
        if len(requests) == 1:
            return [{"error": "the chat template does not end, or ends its process, on this conversation"}]
        return [self.replies(template, [one], self.submit(template, [one]))[0] for one in requests]

    def stop(self) -> None:
        """End the child. Idempotent; the next batch starts another one."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()


class _ChildEnded(Exception):
    """The child ended before it answered."""


class _Child:
    """A running child, with a thread that writes to it and one that reads from it."""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                child_command("vorox.data.chat.template_process", str(CPU_SECONDS), str(MEMORY_BYTES)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        except OSError as error:
            raise DataError(
                f"The process for chat templates cannot be started: {error.strerror}", where="tokenizer.chat_template",
                hint="free memory and processes, and run the command again",
            ) from error  # fmt: skip
        self.has_ended, self._lock = False, threading.Lock()
        self._pending: deque[Future[list[Reply]]] = deque()
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for run in (self._write, self._read):
            threading.Thread(target=run, daemon=True, name="chat templates").start()

    def send(self, message: bytes) -> Future[list[Reply]]:
        future: Future[list[Reply]] = Future()
        with self._lock:
            if self.has_ended:
                future.set_exception(_ChildEnded())
                return future
            self._pending.append(future)
            self._messages.put(message)
        return future

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stream:  # it has ended: the other thread notices
            while (message := self._messages.get()) is not None:
                stream.write(_LENGTH.pack(len(message)) + message)
                stream.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError), self._process.stdout as stream:
            while (data := _read_message(stream)) is not None:
                replies = json.loads(data)
                self._pending.popleft().set_result(replies)
        self.kill()
        self._messages.put(None)
        with self._lock:
            self.has_ended = True
            for future in self._pending:
                future.set_exception(_ChildEnded())


def _read_message(stream: BinaryIO | IO[bytes]) -> bytes | None:
    """Return the next message; ``None`` at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


_process, _owner = TemplateProcess(), os.getpid()


def template_process() -> TemplateProcess:
    """Return the one of this process; a forked process has its own."""
    global _process, _owner
    if _owner != os.getpid():
        _process, _owner = TemplateProcess(), os.getpid()
    return _process


atexit.register(lambda: template_process().stop())


# The child


class _TooSlow(BaseException):
    """A conversation took too much processor time; no template can catch it."""


def _raise_too_slow(*_: object) -> None:
    raise _TooSlow


def _limit_memory(size_bytes: int) -> None:
    """Limit what the child may allocate from now on, where the system has such a limit."""
    if sys.platform != "linux":
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _reply(template: Template, request: object, cpu_seconds: float, memory_bytes: int) -> Reply:
    has_timer = hasattr(signal, "setitimer")
    try:
        if has_timer:
            signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
        try:
            found = template.reply_to(request)
        finally:
            if has_timer:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _TooSlow:
        return {"error": f"the chat template needs more than {cpu_seconds:.0f} s for this conversation"}
    except MemoryError:
        return {"error": f"the chat template needs more than {memory_bytes >> 20:,} MiB for this conversation"}
    except ConfigError as error:
        return {"fault": {"what": error.what, "where": error.where, "hint": error.hint}}
    if len(found.get("text", "")) > TEXT_CHARACTERS:
        return {"error": f"the chat template writes more than {TEXT_CHARACTERS:,} characters for this conversation"}
    return found


def _serve(cpu_seconds: float, memory_bytes: int) -> None:
    """Answer batches until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    if hasattr(signal, "SIGVTALRM"):
        signal.signal(signal.SIGVTALRM, _raise_too_slow)
    with contextlib.suppress(ImportError):  # Jinja is optional
        importlib.import_module("vorox.data.chat.jinja")
    chat_template: Any = importlib.import_module("vorox.data.chat.template")  # before the limit of memory
    _limit_memory(memory_bytes)
    while (data := _read_message(sys.stdin.buffer)) is not None:
        described, requests = json.loads(data)
        template: Template = chat_template.ChatTemplate.from_json(described)
        replies = [_reply(template, request, cpu_seconds, memory_bytes) for request in requests]
        answer = json.dumps(replies).encode()
        sys.stdout.buffer.write(_LENGTH.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(float(sys.argv[1]), int(sys.argv[2]))
