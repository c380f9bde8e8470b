"""Google Cloud Storage by gcp-storage-emulator, with what it leaves out: reads of a generation, and pages."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from servers.environment import pointed_at
from servers.recorded import Handler, Log, Request, serving


@dataclass
class GcsServer:
    """The running server.

    Attributes:
        page_items: Objects in one page of a listing.
    """

    emulator: str
    url: str = ""
    log: Log = field(default_factory=Log)
    page_items: int = 1000
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def environment(self, url: str | None = None) -> dict[str, str]:
        """Variables that point at this server, or at a proxy in front of it."""
        return {
            "STORAGE_EMULATOR_HOST": url or self.url,
            "GCSFS_DEFAULT_PROJECT": "test",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "NO_GCE_CHECK": "true",
        }

    def bucket(self, name: str) -> None:
        """Create a bucket."""
        status, body = self._ask("POST", "/storage/v1/b?project=test", json.dumps({"name": name}).encode())
        assert status == 200, body

    def put(self, bucket: str, name: str, content: bytes) -> None:
        """Write an object."""
        parts = [(b"application/json", json.dumps({"name": name}).encode()), (b"application/octet-stream", content)]
        body = b"".join(b"--border\r\nContent-Type: %s\r\n\r\n%s\r\n" % part for part in parts) + b"--border--"
        status, answer = self._ask(
            "POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart", body,
            {"Content-Type": 'multipart/related; boundary="border"'},
        )  # fmt: skip
        assert status == 200, answer

    def respond(self, handler: Handler, request: Request) -> None:
        address = urlsplit(request.path)
        query = parse_qs(address.query)
        if query.get("alt") == ["media"] and "generation" in query:
            _, body = self._ask("GET", address.path.replace("/download", "", 1))
            if json.loads(body or b"{}").get("generation") != query["generation"][0]:
                handler.send(request, 404, {}, b"No such object: the generation is gone")
                return
        passed = {
            name: value for name, value in request.headers.items()
            if name in {"Range", "Content-Type", "Content-Range"}
        }  # fmt: skip
        with self._writing if request.method != "GET" else contextlib.nullcontext():
            if not self._holds(address.path, query):
                handler.send(request, 412, {}, b"conditionNotMet")
                return
            status, headers, body = self._forward(request, passed)
        if address.path.endswith("/o") and request.method == "GET" and status == 200:
            body = self._page(json.loads(body), int(query.get("pageToken", ["0"])[0]))
        kept = {name: value for name, value in headers.items() if name in {"Content-Range", "Content-Type"}}
        if "Location" in headers:
            kept["Location"] = headers["Location"].replace(self.emulator, self.url)
        if headers.get("Range", "bytes=0-0") != "bytes=0-0":  # which the emulator says where it has nothing
            kept["Range"] = headers["Range"]
        handler.send(request, status, kept, body)

    def _holds(self, path: str, query: dict[str, list[str]]) -> bool:
        """Whether the condition of a write holds, by the generation that stands there (0: none)."""
        if "ifGenerationMatch" not in query or "name" not in query:
            return True
        place = path.replace("/upload", "", 1) + "/" + quote(query["name"][0], safe="")
        status, body = self._ask("GET", place)
        return query["ifGenerationMatch"][0] == (json.loads(body)["generation"] if status == 200 else "0")

    def _forward(self, request: Request, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Ask the emulator, which knows empty objects only as the end of a resumable upload."""
        path = request.path
        if "uploadType=media" in path and not request.body:
            path = path.replace("uploadType=media", "uploadType=resumable")
            _, begun, _ = self._exchange("POST", path, b"", headers)
            location = urlsplit(begun["Location"])
            return self._exchange("PUT", f"{location.path}?{location.query}", b"", {"Content-Range": "bytes */0"})
        return self._exchange(request.method, path, request.body, headers)

    def _page(self, listing: dict[str, Any], first: int) -> bytes:
        items = sorted(listing.get("items", []), key=lambda item: item["name"])
        page: dict[str, Any] = {"items": items[first : first + self.page_items]}
        if first + self.page_items < len(items):
            page["nextPageToken"] = str(first + self.page_items)
        return json.dumps(page).encode()

    def _ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        status, _, answer = self._exchange(method, path, body, headers or {"Content-Type": "application/json"})
        return status, answer

    def _exchange(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(urlsplit(self.emulator).netloc, timeout=30)
        try:
            connection.request(method, path, body=None if method == "GET" else body, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


@contextmanager
def gcs_server() -> Iterator[GcsServer]:
    """Start an empty Google Cloud Storage and point this process at it."""
    for package in ("gcsfs", "gcp_storage_emulator"):
        pytest.importorskip(package)
    from gcp_storage_emulator.server import create_server

    emulator = create_server("127.0.0.1", 0, in_memory=True)
    emulator.start()
    try:
        host, port = emulator._api._httpd.server_address
        server = GcsServer(f"http://{host}:{port}")
        with serving(server.respond) as (url, log):
            server.url, server.log = url, log
            with pointed_at(server.environment()):
                yield server
    finally:
        emulator.stop()
