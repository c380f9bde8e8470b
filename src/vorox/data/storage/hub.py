"""``hf://``: repositories of the Hugging Face Hub, or of the server in ``HF_ENDPOINT``, through its HTTP API.

``hf://datasets/OWNER/NAME[@REVISION]/PATH``, in short ``hf://OWNER/NAME/PATH``; models and spaces in the long form. A
revision is resolved to its commit once per listing and every file is read at that commit, so a push in between changes
nothing. A file's version is the hash of its content, the same at every commit that did not change it. The token comes
from ``HF_TOKEN`` or ``hf auth login``; it is sent to the endpoint only, never to the target of a redirect.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, unquote

from vorox.core.errors import ConfigError, DataError
from vorox.data.storage import failures, requests
from vorox.data.storage.failures import ObjectNotFound, raise_for_status
from vorox.data.storage.http import get_json, receive_range, request, unexpected_response
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.requests import RetryingClient, RetryPolicy, current_budget
from vorox.data.storage.store import Receive, UriFilter

if TYPE_CHECKING:
    import aiohttp

_CREDENTIALS_HINT = (
    "set HF_TOKEN to a token with access to it, and accept the repository's conditions on its page if it has any"
)
_URI = re.compile(
    r"hf://(?P<kind>datasets|models|spaces)/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?"
    r"(?:/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_PAGES = 100_000
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubUri:
    """``hf://datasets/OWNER/NAME@REVISION/PATH``, parsed."""

    kind: str
    name: str
    revision: str
    path: str
    root: str
    """The uri up to the path, including the slash."""


def parse_hub_uri(uri: str) -> HubUri:
    """Parse a canonical uri.

    Raises:
        ConfigError: It lacks a repository.
    """
    match = _URI.fullmatch(uri)
    if match is None:
        raise ConfigError(
            "The uri lacks a repository of the hub", where=uri,
            hint="write it as hf://OWNER/NAME or hf://datasets/OWNER/NAME@REVISION/PATH",
        )  # fmt: skip
    path = match["path"] or ""
    root = uri[: match.start("path")] if match["path"] is not None else uri + "/"
    return HubUri(match["kind"], match["name"], unquote(match["revision"] or "main"), path, root)


def resolve_commit(uri: str) -> str:
    """Return the current commit of a uri's revision, by default of the branch main.

    Raises:
        DataError: The repository or revision does not exist or is not readable.
    """
    budget = current_budget()
    return requests.run(_resolve(parse_hub_uri(uri), RetryingClient(uri, budget)), uri, budget)


async def _resolve(hub: HubUri, client: RetryingClient) -> str:
    if _COMMIT.fullmatch(hub.revision):
        return hub.revision
    try:
        response, _ = await client.run(
            lambda: _api_request(f"api/{hub.kind}/{hub.name}/revision/{quote(hub.revision, safe='')}", client)
        )
    except ObjectNotFound:
        raise DataError(
            f"The hub has no repository {hub.name!r} with revision {hub.revision!r}, or this user cannot read it",
            where=client.uri, hint=f"check the name; {_CREDENTIALS_HINT}",
        ) from None  # fmt: skip
    match response:
        case {"sha": str(commit)} if _COMMIT.fullmatch(commit):
            return commit
        case _:
            raise unexpected_response("its answer names no commit", client.uri)


class HubStore:
    """Repositories of the hub."""

    async def describe(self, uri: str, client: RetryingClient) -> StoredFile | None:
        hub = parse_hub_uri(uri)
        if not hub.path:
            return None
        commit = await _resolve(hub, client)
        path = f"api/{hub.kind}/{hub.name}/paths-info/{commit}"
        try:
            entries, _ = await client.run(
                lambda: _api_request(path, client, form={"paths": hub.path, "expand": "false"})
            )
        except ObjectNotFound:
            return None
        files = _files(hub, commit, entries, client.uri)
        return files[0] if files else None

    async def list_prefix(self, prefix: str, matches: UriFilter, client: RetryingClient) -> list[StoredFile]:
        hub = parse_hub_uri(prefix)
        commit = await _resolve(hub, client)
        folder = hub.path.rpartition("/")[0]
        url = f"api/{hub.kind}/{hub.name}/tree/{commit}" + (f"/{quote(folder)}" if folder else "")
        url += "?recursive=true&expand=false"
        found: list[StoredFile] = []
        pages = set[str]()
        while url:
            if url in pages or len(pages) >= _MAX_PAGES:
                raise unexpected_response("its list of files does not end", client.uri)
            pages.add(url)

            async def attempt(url: str = url) -> tuple[Any, Mapping[str, str]]:
                return await _api_request(url, client)

            try:
                entries, headers = await client.run(attempt)
            except ObjectNotFound:
                return []  # the folder is missing; repository and revision exist
            files = _files(hub, commit, entries, client.uri)
            found += [file for file in files if file.uri.startswith(prefix) and matches(file.uri)]
            url = _next_page(headers)
            if not entries and url:
                raise unexpected_response("its list of files has an empty page", client.uri)
        return found

    async def stream_range(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        assert file.version is not None
        hub = parse_hub_uri(file.uri)
        kind = "" if hub.kind == "models" else f"{hub.kind}/"
        url = f"{_endpoint()}/{kind}{hub.name}/resolve/{file.stat_signature}/{quote(hub.path)}"
        headers = {**_token(), "Range": f"bytes={start_byte}-{end_byte - 1}"}
        async with request("GET", url, uri=file.uri, policy=policy, headers=headers) as response:
            try:
                raise_for_status(
                    response.status, response.headers, uri=file.uri, credentials_hint=_CREDENTIALS_HINT
                )  # fmt: skip
            except ObjectNotFound:
                failures.raise_deleted(file.uri)
            for version in map(_blob_version, [*response.history, response]):
                if version is not None and version != file.version:
                    failures.raise_changed(file.uri, f"{file.version} became {version}")
            await receive_range(response, start_byte, end_byte, file.size_bytes, uri=file.uri, receive=receive)


def _blob_version(response: aiohttp.ClientResponse) -> str | None:
    """Return the version that the hub reports for a response. Behind a redirect, the ETag is another store's."""
    etag = response.headers.get("X-Linked-ETag") or ("" if response.history else response.headers.get("ETag", ""))
    match = _BLOB.fullmatch(etag.removeprefix("W/").strip('"'))
    return f"blob:{match[0]}" if match else None


def _files(hub: HubUri, commit: str, entries: Any, uri: str) -> list[StoredFile]:
    """Return the files of an answer that lists entries of a repository.

    Raises:
        DataError: It is no such answer.
    """
    if not isinstance(entries, list):
        raise unexpected_response("its list of files is none", uri)
    found: list[StoredFile] = []
    for entry in cast("list[Any]", entries):
        match entry:
            case {"type": "file", "path": str(path), "lfs": {"oid": str(oid), "size": int(size)}}:
                pass
            case {"type": "file", "path": str(path), "oid": str(oid), "size": int(size)}:
                pass
            case {"type": str(kind)} if kind != "file":
                continue
            case _:
                raise unexpected_response("an entry of its list of files has no path, size or hash", uri)
        if not path.isprintable():
            raise unexpected_response(f"{path!r} in its list of files is not a safe name", uri)
        if not 0 <= size < 1 << 63 or _BLOB.fullmatch(oid) is None:
            raise unexpected_response(f"its list of files has an invalid size or hash of {path!r}", uri)
        found.append(StoredFile(hub.root + path, size, commit, 0, f"blob:{oid}", f"blob:{oid}"))
    return found


def _next_page(headers: Mapping[str, str]) -> str:
    """Return the path of the next page, without the endpoint; empty at the end."""
    match = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', headers.get("Link", ""))
    if match is None:
        return ""
    url = match[1]
    return url[url.index("/api/") + 1 :] if "/api/" in url else ""


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _token() -> dict[str, str]:
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        with contextlib.suppress(ImportError):
            from huggingface_hub import get_token

            token = get_token() or ""
    return {"Authorization": f"Bearer {token}"} if token else {}


async def _api_request(
    path: str, client: RetryingClient, *, form: Mapping[str, str] | None = None
) -> tuple[Any, Mapping[str, str]]:
    """Send a request to the hub's API, without retries."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise DataError(
            "HF_HUB_OFFLINE forbids requests to the hub", where=client.uri,
            hint="unset it, or read a local copy",
        )  # fmt: skip
    return await get_json(
        f"{_endpoint()}/{path}", uri=client.uri, policy=client.policy, headers=_token(),
        credentials_hint=_CREDENTIALS_HINT, method="GET" if form is None else "POST", form=form,
    )  # fmt: skip
