"""A fault-injecting proxy: errors, truncated bodies, stalls, resets; by seed or scripted."""

from __future__ import annotations

import hashlib
import http.client
import random
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from servers.recorded import Handler, Log, Request, serving

_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "server"}


@dataclass(frozen=True)
class Fault:
    """The fault of one request.

    Attributes:
        kind: ``answer`` (status, headers and body given here), ``truncate`` (a part of the body, then the end),
            ``stall`` (a part of the body, nothing for so many seconds, then the rest), ``reset``, or ``none``.
        sent_fraction: Share of the body that is sent before the fault.
    """

    kind: str
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    sent_fraction: float = 0.5
    seconds: float = 0.0


@dataclass
class FaultProxy:
    """The running proxy.

    Attributes:
        log: Every request, with the fault that met it and the bytes that got through.
        only: Whether a request may have a fault.
    """

    upstream: str
    seed: int
    error_503_fraction: float
    truncated_fraction: float
    stall_once_seconds: float
    url: str = ""
    log: Log = field(default_factory=Log)
    only: Callable[[Request], bool] = lambda request: True
    scripted: deque[Fault] = field(default_factory=deque)
    stopping: threading.Event = field(default_factory=threading.Event)
    _times: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def script(self, *faults: Fault) -> None:
        """Faults of the next requests; the seed decides about those after."""
        with self._lock:
            self.scripted.extend(faults)

    @property
    def faults(self) -> Counter[str]:
        """Number of requests with each kind of fault."""
        with self.log.lock:
            return Counter(request.fault for request in self.log.requests if request.fault)

    def _draw(self, request: Request) -> Fault:
        """Return the fault of a request: a function of the seed, the request and its count, not of timing."""
        with self._lock:
            if not self.only(request):
                return Fault("none")
            if self.scripted:
                return self.scripted.popleft()
            key = f"{self.seed} {request.method} {urlsplit(request.path).path} {request.headers.get('Range')}"
            self._times[key] += 1
            draw = random.Random(hashlib.sha256(f"{key} {self._times[key]}".encode()).digest())
            if self.stall_once_seconds and request.range is not None and request.range != (0, 1):
                seconds, self.stall_once_seconds = self.stall_once_seconds, 0.0
                return Fault("stall", seconds=seconds, sent_fraction=draw.random())
        chance = draw.random()
        if chance < self.error_503_fraction:
            return Fault("answer", 503)
        if chance < self.error_503_fraction + self.truncated_fraction:
            return Fault("truncate", sent_fraction=draw.random())
        return Fault("none")

    def respond(self, handler: Handler, request: Request) -> None:
        fault = self._draw(request)
        request.fault = "" if fault.kind == "none" else fault.kind
        if fault.kind == "answer":
            handler.send(request, fault.status, fault.headers, fault.body)
            return
        if fault.kind == "reset":
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.close_connection = True
            handler.connection.close()
            return
        status, headers, body, length = self._ask(request)
        if fault.kind == "none" or request.method == "HEAD" or not body:
            if fault.kind == "stall" and not self.stall_once_seconds:
                self.stall_once_seconds = fault.seconds  # nothing was there to stop in the middle of
            request.fault = ""
            handler.send(request, status, headers, body, length=length)
            return
        part = body[: min(int(len(body) * fault.sent_fraction), len(body) - 1)]
        handler.send(request, status, headers, part, length=len(body))
        if fault.kind == "stall":
            self.stopping.wait(fault.seconds)
            handler.send_body(request, body[len(part) :])
        else:
            handler.close_connection = True

    def _ask(self, request: Request) -> tuple[int, dict[str, str], bytes, int]:
        target = urlsplit(self.upstream)
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
        try:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_HEADERS}
            connection.request(request.method, request.path, body=request.body or None, headers=headers)
            answer = connection.getresponse()
            body = answer.read()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in {*_HOP_HEADERS, "date"}}
            kept = {name: value.replace(self.upstream, self.url) for name, value in kept.items()}
            return answer.status, kept, body, int(answer.getheader("Content-Length") or len(body))
        finally:
            connection.close()


@contextmanager
def fault_proxy(
    upstream: str,
    *,
    seed: int = 0,
    error_503_fraction: float = 0.0,
    truncated_fraction: float = 0.0,
    stall_once_seconds: float = 0.0,
) -> Iterator[FaultProxy]:
    """Start a proxy that injects faults between clients and a server.

    Args:
        upstream: Address of the server.
        seed: Decides which requests have a fault.
        error_503_fraction: Share of the requests that get a 503.
        truncated_fraction: Share of the bodies that end early.
        stall_once_seconds: The first read of content stops in its middle for so long.
    """
    proxy = FaultProxy(upstream, seed, error_503_fraction, truncated_fraction, stall_once_seconds)
    with serving(proxy.respond) as (url, log):
        proxy.url, proxy.log = url, log
        try:
            yield proxy
        finally:
            proxy.stopping.set()
