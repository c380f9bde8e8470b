"""Google Cloud Storage with its XML API: generations, conditions, pages, multipart uploads."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from servers.environment import pointed_at
from servers.recorded import Handler, Log, Request, serving


@dataclass(frozen=True)
class _Object:
    content: bytes
    generation: int
    etag: str
    modified: datetime

    @property
    def headers(self) -> dict[str, str]:
        return {
            "ETag": self.etag, "x-goog-generation": str(self.generation),
            "Last-Modified": format_datetime(self.modified, usegmt=True),
        }  # fmt: skip


@dataclass
class GcsServer:
    """The running server.

    Attributes:
        page_items: Objects in one page of a listing.
    """

    url: str = ""
    log: Log = field(default_factory=Log)
    page_items: int = 1000
    _buckets: dict[str, dict[str, _Object]] = field(default_factory=dict)
    _uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    _generation: int = 0
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def environment(self, url: str | None = None) -> dict[str, str]:
        """Variables that point at this server, or at a proxy in front of it."""
        return {"STORAGE_EMULATOR_HOST": url or self.url}

    def bucket(self, name: str) -> None:
        """Create a bucket."""
        self._buckets[name] = {}

    def put(self, bucket: str, name: str, content: bytes) -> None:
        """Write an object."""
        with self._writing:
            self._write(bucket, name, content, _md5(content).hexdigest())

    def _write(self, bucket: str, name: str, content: bytes, digest: str) -> _Object:
        self._generation += 1
        modified = datetime.now(UTC).replace(microsecond=0)
        written = self._buckets[bucket][name] = _Object(content, self._generation, f'"{digest}"', modified)
        return written

    def respond(self, handler: Handler, request: Request) -> None:
        address = urlsplit(request.path)
        bucket, _, name = address.path.lstrip("/").partition("/")
        query = {key: values[0] for key, values in parse_qs(address.query, keep_blank_values=True).items()}
        if bucket not in self._buckets:
            self._refuse(handler, request, 404, "NoSuchBucket")
        elif not name:
            self._list(handler, request, bucket, query)
        elif request.method in {"GET", "HEAD"}:
            self._read(handler, request, self._buckets[bucket].get(unquote(name)), query)
        else:
            with self._writing:
                self._change(handler, request, bucket, unquote(name), query)

    def _refuse(self, handler: Handler, request: Request, status: int, code: str) -> None:
        handler.send(request, status, {}, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    def _list(self, handler: Handler, request: Request, bucket: str, query: dict[str, str]) -> None:
        after = query.get("continuation-token") or query.get("start-after", "")
        prefix = query.get("prefix", "")
        names = sorted(name for name in self._buckets[bucket] if name.startswith(prefix) and name > after)
        page = names[: self.page_items]
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><ETag>{escape(found.etag)}</ETag><Size>{len(found.content)}</Size>"
            f"<LastModified>{found.modified.isoformat().replace('+00:00', '.000Z')}</LastModified></Contents>"
            for name in page
            for found in [self._buckets[bucket][name]]
        )
        if len(names) > len(page):
            entries += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        handler.send(request, 200, {}, f"<?xml version='1.0'?><ListBucketResult>{entries}</ListBucketResult>".encode())

    def _read(self, handler: Handler, request: Request, found: _Object | None, query: dict[str, str]) -> None:
        if found is None or query.get("generation", str(found.generation)) != str(found.generation):
            self._refuse(handler, request, 404, "NoSuchKey")
        else:
            handler.send_part(request, found.content, found.headers)

    def _change(self, handler: Handler, request: Request, bucket: str, name: str, query: dict[str, str]) -> None:
        there = self._buckets[bucket].get(name)
        wanted = request.headers.get("X-Goog-If-Generation-Match")
        if wanted is not None and wanted != str(there.generation if there else 0):
            self._refuse(handler, request, 412, "PreconditionFailed")
        elif "uploads" in query:
            upload = str(len(self._uploads))
            self._uploads[upload] = {}
            answer = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            handler.send(request, 200, {}, answer.encode())
        elif "uploadId" in query and query["uploadId"] not in self._uploads:
            self._refuse(handler, request, 404, "NoSuchUpload")
        elif "partNumber" in query:
            self._uploads[query["uploadId"]][int(query["partNumber"])] = request.body
            handler.send(request, 200, {"ETag": f'"{_md5(request.body).hexdigest()}"'}, b"")
        elif request.method == "POST":
            parts = [part for _, part in sorted(self._uploads.pop(query["uploadId"]).items())]
            digest = f"{_md5(b''.join(_md5(part).digest() for part in parts)).hexdigest()}-{len(parts)}"
            written = self._write(bucket, name, b"".join(parts), digest)
            answer = f"<CompleteMultipartUploadResult><ETag>{written.etag}</ETag></CompleteMultipartUploadResult>"
            handler.send(request, 200, written.headers, answer.encode())
        elif request.method == "PUT":
            written = self._write(bucket, name, request.body, _md5(request.body).hexdigest())
            handler.send(request, 200, written.headers, b"")
        elif "uploadId" in query:
            self._uploads.pop(query["uploadId"])
            handler.send(request, 204, {}, b"")
        else:
            missing = self._buckets[bucket].pop(name, None) is None
            handler.send(request, 404 if missing else 204, {}, b"")


def _md5(data: bytes) -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)


@contextmanager
def gcs_server() -> Iterator[GcsServer]:
    """Start an empty Google Cloud Storage and point this process at it."""
    server = GcsServer()
    with serving(server.respond) as (url, log):
        server.url, server.log = url, log
        with pointed_at(server.environment()):
            yield server
