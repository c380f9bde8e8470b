"""The read API of the Hugging Face Hub: commits, trees, small files, large files behind a signed redirect."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from servers.environment import pointed_at
from servers.recorded import Handler, Log, Request, serving

SIGNATURE = "c2lnbmVkLWJ5LXRoZS1jZG4"
"""Part of the url that large files are redirected to; it must not appear in a message."""


@dataclass
class HubServer:
    """The running server.

    Attributes:
        token: Required in requests; ``None`` requires none.
        gated: Repositories whose files are refused, though they are listed.
        large_from_bytes: Files of at least this size are large.
        page_items: Entries in one page of a tree.
    """

    url: str = ""
    log: Log = field(default_factory=Log)
    token: str | None = None
    gated: set[str] = field(default_factory=set[str])
    large_from_bytes: int = 1024
    page_items: int = 1000
    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    references: dict[str, dict[str, str]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)

    def environment(self, url: str | None = None) -> dict[str, str]:
        """Variables that point at this server, or at a proxy in front of it."""
        return {
            "HF_ENDPOINT": url or self.url, "HF_TOKEN": self.token or "", "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip

    def commit(self, name: str, files: Mapping[str, bytes | None], *, reference: str = "main") -> str:
        """Write files (``None`` removes one) to a dataset as a new commit, and move the branch there."""
        before = self.references.setdefault(name, {}).get(reference)
        content = dict(self.commits.setdefault(name, {}).get(before or "", {}))
        for path, data in files.items():
            if data is None:
                content.pop(path)
            else:
                content[path] = data
        described = json.dumps([before, sorted((path, _blob(data)) for path, data in content.items())])
        sha = hashlib.sha1(described.encode()).hexdigest()
        self.commits[name][sha] = content
        self.references[name][reference] = sha
        return sha

    def respond(self, handler: Handler, request: Request) -> None:
        address = urlsplit(request.path)
        path = unquote(address.path)
        if path.startswith("/cdn/"):
            self._send_large(handler, request, path.removeprefix("/cdn/"), parse_qs(address.query))
            return
        match = re.fullmatch(r"/(?P<api>api/)?(?:(?:datasets|models)/)?(?P<name>[^/]+/[^/]+)(?P<rest>/.*)?", path)
        allowed = self.token is None or request.headers.get("Authorization") == f"Bearer {self.token}"
        if match is None or match["name"] not in self.commits or not allowed:
            handler.send(request, 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b"")
            return
        verb, _, rest = (match["rest"] or "/").lstrip("/").partition("/")
        name = match["name"]
        reference, rest = self._reference(name, rest) if verb else ("main", "")
        sha = self.references[name].get(reference, reference)
        if sha not in self.commits[name]:
            handler.send(request, 404, {"X-Error-Code": "RevisionNotFound"}, b"")
        elif match["api"] is None and verb == "resolve" and name in self.gated:
            text = f"Access to model {name} is restricted. You must have access to it and be authenticated."
            handler.send(request, 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": text}, b"")
        elif match["api"] is None and verb == "resolve":
            self._send_file(handler, request, self.commits[name][sha].get(rest), sha)
        elif verb in {"", "revision"}:
            files = [{"rfilename": file} for file in sorted(self.commits[name][sha])]
            answer = {"id": name, "sha": sha, "siblings": files, "private": False, "tags": [], "downloads": 0}
            self._send_json(handler, request, answer)
        elif verb == "tree":
            self._send_tree(handler, request, self.commits[name][sha], rest, parse_qs(address.query))
        elif verb == "paths-info":
            wanted = _wanted_paths(request)
            entries = [_entry(self, file, data) for file, data in self.commits[name][sha].items() if file in wanted]
            self._send_json(handler, request, entries)
        else:
            handler.send(request, 404, {}, b"")

    def _reference(self, name: str, rest: str) -> tuple[str, str]:
        """Revisions may contain slashes, so the longest known one counts."""
        known = [*self.references[name], *self.commits[name]]
        for candidate in sorted(known, key=len, reverse=True):
            if rest == candidate or rest.startswith(candidate + "/"):
                return candidate, rest[len(candidate) + 1 :]
        first, _, after = rest.partition("/")
        return first, after

    def _send_json(
        self, handler: Handler, request: Request, value: Any, headers: Mapping[str, str] | None = None
    ) -> None:
        handler.send(
            request, 200, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode()
        )  # fmt: skip

    def _send_tree(
        self, handler: Handler, request: Request, files: dict[str, bytes], folder: str, query: dict[str, list[str]]
    ) -> None:
        prefix = folder.rstrip("/") + "/" if folder else ""
        found = sorted(path for path in files if path.startswith(prefix))
        if not found:
            handler.send(request, 404, {"X-Error-Code": "EntryNotFound"}, b"")
            return
        entries: list[dict[str, Any]] = []
        for path in found:
            deeper, slash, _ = path[len(prefix) :].partition("/")
            directory = {"type": "directory", "oid": "0" * 40, "size": 0, "path": prefix + deeper}
            if slash and directory not in entries:
                entries.append(directory)
            if not slash or query.get("recursive", ["false"])[0].lower() in {"true", "1"}:
                entries.append(_entry(self, path, files[path]))
        first = int(query.get("cursor", ["0"])[0])
        headers = {}
        if first + self.page_items < len(entries):
            address = re.sub(r"&cursor=\d+", "", request.path)
            headers["Link"] = f'<{self.url}{address}&cursor={first + self.page_items}>; rel="next"'
        self._send_json(handler, request, entries[first : first + self.page_items], headers)

    def _send_file(self, handler: Handler, request: Request, data: bytes | None, sha: str) -> None:
        if data is None:
            handler.send(request, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}, b"")
            return
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_blob(data)}"'}
        if len(data) < self.large_from_bytes:
            handler.send_part(request, data, headers)
            return
        digest = _digest(data)
        self.large[digest] = data
        headers |= {
            "X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data)), "ETag": f'"{digest}"',
            "Location": f"{self.url}/cdn/{digest}?Expires=9&X-Signature={SIGNATURE}",
        }  # fmt: skip
        handler.send(request, 302, headers, b"")

    def _send_large(
        self, handler: Handler, request: Request, digest: str, query: dict[str, list[str]]
    ) -> None:  # fmt: skip
        if query.get("X-Signature") != [SIGNATURE]:
            handler.send(request, 403, {}, b"")
            return
        data = self.large[digest]
        handler.send_part(request, data, {"ETag": f'"{digest[:32]}"'})


@functools.lru_cache(maxsize=4096)
def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.lru_cache(maxsize=4096)
def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(server: HubServer, path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": _blob(data), "size": len(data), "path": path}
    if len(data) >= server.large_from_bytes:
        entry["lfs"] = {"oid": _digest(data), "size": len(data), "pointerSize": 134}
    return entry


def _wanted_paths(request: Request) -> set[str]:
    if request.headers.get("Content-Type", "").startswith("application/json"):
        return set(json.loads(request.body)["paths"])
    return set(parse_qs(request.body.decode()).get("paths", []))


@contextmanager
def hub_server(root: Path | None = None) -> Iterator[HubServer]:
    """Start a hub and point this process at it.

    Args:
        root: Folder of datasets, ``OWNER/NAME/...``, that become the first commits.
    """
    server = HubServer()
    with serving(server.respond) as (url, log):
        server.url, server.log = url, log
        for repository in sorted(root.glob("*/*")) if root is not None else []:
            files = sorted(path for path in repository.rglob("*") if path.is_file())
            name = repository.relative_to(root).as_posix() if root is not None else ""
            server.commit(name, {path.relative_to(repository).as_posix(): path.read_bytes() for path in files})
        with pointed_at(server.environment()):
            yield server


@contextmanager
def model_hub(cache: Path) -> Iterator[HubServer]:
    """Start a hub, point this process at it, and keep what ``huggingface_hub`` fetches in a folder."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch, hub_server() as hub:
        patch.setenv("HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        hub.url = hub.url.replace("127.0.0.1", "localhost")  # large files are on another host, as the client expects
        yield hub
