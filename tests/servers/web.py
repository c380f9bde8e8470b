"""A plain web server over a folder: ranges, strong ETags, preconditions, index pages; each can be switched off."""

from __future__ import annotations

import email.utils
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from servers.environment import pointed_at
from servers.recorded import Handler, Log, Request, serving


@dataclass
class WebServer:
    """The running server and its settings.

    Attributes:
        etags: ``strong``, ``weak`` or ``none``.
        modified: Whether responses have Last-Modified.
        ranges: Whether ranges are supported.
        honours_preconditions: Whether If-Match is checked.
    """

    root: Path
    url: str = ""
    log: Log = field(default_factory=Log)
    etags: str = "strong"
    modified: bool = True
    ranges: bool = True
    honours_preconditions: bool = True

    def respond(self, handler: Handler, request: Request) -> None:
        path = self.root / unquote(urlsplit(request.path).path).lstrip("/")
        if path.is_dir():
            if not request.path.endswith("/"):
                handler.send(request, 301, {"Location": request.path + "/"}, b"")
                return
            names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in path.iterdir())
            links = "".join(f'<li><a href="{quote(name)}">{escape(name)}</a>' for name in ["../", *names])
            handler.send(request, 200, {"Content-Type": "text/html"}, f"<ul>{links}</ul>".encode())
            return
        if not path.is_file():
            handler.send(request, 404, {}, b"not found")
            return
        content = path.read_bytes()
        headers = {"Content-Type": "application/octet-stream"}
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        modified = email.utils.formatdate(path.stat().st_mtime, usegmt=True)
        if self.etags != "none":
            headers["ETag"] = etag if self.etags == "strong" else f"W/{etag}"
        if self.modified:
            headers["Last-Modified"] = modified
        wanted = request.headers.get("If-Match")
        if self.honours_preconditions and wanted is not None and wanted != headers.get("ETag"):
            handler.send(request, 412, {}, b"")
        elif self.ranges:
            handler.send_part(request, content, headers)
        else:
            handler.send(request, 200, headers, content)


@contextmanager
def http_server(root: Path) -> Iterator[WebServer]:
    """Serve a folder."""
    server = WebServer(root)
    with serving(server.respond) as (url, log), pointed_at({}):
        server.url, server.log = url, log
        yield server
