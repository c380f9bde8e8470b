"""A threaded HTTP server that records its requests and answers ranges; the base of the other servers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Request:
    """One request and its response."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    status: int = 0
    sent_bytes: int = 0
    fault: str = ""

    @property
    def range(self) -> tuple[int, int] | None:
        """The requested ``[start, end)``; an open end is 2**63."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        return None if match is None else (int(match[1]), int(match[2]) + 1 if match[2] else 2**63)

    @property
    def sent(self) -> tuple[int, int]:
        """The ``[start, end)`` of the object that was sent."""
        start = self.range[0] if self.range else 0
        return start, start + self.sent_bytes


@dataclass
class Log:
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, request: Request) -> None:
        with self.lock:
            self.requests.append(request)

    def reads(self, name: str) -> list[Request]:
        """Requests for content whose path holds a name, in order."""
        with self.lock:
            return [
                request for request in self.requests
                if request.method == "GET" and name in request.path and request.range not in {None, (0, 1)}
            ]  # fmt: skip

    def clear(self) -> None:
        with self.lock:
            self.requests.clear()


Answer = Callable[["Handler", Request], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log: Log
    respond: Answer

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        headers = {name.title(): value for name, value in self.headers.items()}  # clients write them as they like
        request = Request(self.command, self.path, headers, self.rfile.read(length))
        self.log.add(request)
        try:
            type(self).respond(self, request)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send(
        self, request: Request, status: int, headers: Mapping[str, str], body: bytes, *, length: int | None = None
    ) -> None:
        """Send a response; a length beyond the body's announces bytes that are never sent."""
        request.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if request.method != "HEAD":
            self.send_body(request, body)

    def send_body(self, request: Request, body: bytes) -> None:
        """Count the bytes before sending them, so that a client that has read them finds them counted."""
        before = request.sent_bytes
        request.sent_bytes += len(body)
        try:
            self.wfile.write(body)
            self.wfile.flush()
        except OSError:
            request.sent_bytes = before
            raise

    def send_part(self, request: Request, content: bytes, headers: Mapping[str, str]) -> None:
        """Respond with the requested range of the content, by default with all of it."""
        headers = {"Accept-Ranges": "bytes", **headers}
        if request.range is None:
            self.send(request, 200, headers, content)
            return
        start, end = request.range[0], min(request.range[1], len(content))
        if start >= len(content):
            self.send(request, 416, {**headers, "Content-Range": f"bytes */{len(content)}"}, b"")
            return
        part = {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}
        self.send(request, 206, {**headers, **part}, content[start:end])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # some tests break connections on purpose


@contextmanager
def serving(respond: Answer) -> Iterator[tuple[str, Log]]:
    """Run a server for the block: its address and its log."""
    log = Log()
    handler = type("OneHandler", (Handler,), {"log": log, "respond": staticmethod(respond)})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", log
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
