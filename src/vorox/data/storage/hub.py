"""``hf://``: repositories of the Hugging Face Hub, or of the server that ``HF_ENDPOINT`` names, by their web interface.

``hf://datasets/OWNER/NAME[@REVISION]/PATH``, in short ``hf://OWNER/NAME/PATH``; models and spaces by their full form.
A revision is resolved to its commit once per listing and every file is read at that commit, so that a push in between
changes nothing. A file's version is the hash of its content, the same at every commit that did not touch it. The token
is that of ``HF_TOKEN`` or of ``hf auth login``; it goes to the endpoint only, never to where that redirects.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from vorox.core.errors import ConfigError, DataError
from vorox.data.storage import background, failures
from vorox.data.storage.failures import NotThere, raise_for_status
from vorox.data.storage.http import get_json, receive_range, request
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.remote import Asker, Keep, Receive
from vorox.data.storage.retry import RetryPolicy, current_budget

if TYPE_CHECKING:
    import aiohttp

_CREDENTIALS_HINT = (
    "set HF_TOKEN to a token that may read it, and accept the conditions of the repository on its page where it asks"
)
_URI = re.compile(
    r"hf://(?P<kind>datasets|models|spaces)/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?"
    r"(?:/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A place in a repository: ``hf://datasets/OWNER/NAME@REVISION/PATH`` in its parts."""

    kind: str
    name: str
    revision: str
    path: str
    root: str
    """The uri up to the path, with the slash."""


def split_hub(uri: str) -> HubPlace:
    """The parts of a canonical uri.

    Raises:
        ConfigError: It names no repository.
    """
    match = _URI.fullmatch(uri)
    if match is None:
        raise ConfigError(
            "the uri names no repository of the hub", where=uri,
            hint="write it as hf://OWNER/NAME or hf://datasets/OWNER/NAME@REVISION/PATH",
        )  # fmt: skip
    path = match["path"] or ""
    root = uri[: match.start("path")] if match["path"] is not None else uri + "/"
    return HubPlace(match["kind"], match["name"], unquote(match["revision"] or "main"), path, root)


def resolve_commit(uri: str) -> str:
    """The commit that the revision of a uri stands for now (the branch main, if it names none).

    Raises:
        DataError: There is no such repository or revision, or it may not be read.
    """
    budget = current_budget()
    ask = Asker(uri, budget)
    return background.run(_resolve(split_hub(uri), ask), uri, budget)


async def _resolve(place: HubPlace, ask: Asker) -> str:
    if _COMMIT.fullmatch(place.revision):
        return place.revision
    try:
        answer, _ = await ask(
            lambda: _ask(f"api/{place.kind}/{place.name}/revision/{quote(place.revision, safe='')}", ask)
        )
    except NotThere:
        raise DataError(
            f"the hub has no repository {place.name!r} with a revision {place.revision!r} that may be read here",
            where=ask.uri, hint=f"check the name; {_CREDENTIALS_HINT}",
        ) from None  # fmt: skip
    return str(answer["sha"])


class HubStore:
    """Repositories of the hub."""

    async def describe(self, uri: str, ask: Asker) -> StoredFile | None:
        place = split_hub(uri)
        if not place.path:
            return None
        commit = await _resolve(place, ask)
        path = f"api/{place.kind}/{place.name}/paths-info/{commit}"
        try:
            entries, _ = await ask(lambda: _ask(path, ask, form={"paths": place.path, "expand": "false"}))
        except NotThere:
            return None
        files = [_file(place, commit, entry) for entry in entries if entry["type"] == "file"]
        return files[0] if files else None

    async def search(self, prefix: str, keep: Keep, ask: Asker) -> list[StoredFile]:
        place = split_hub(prefix)
        commit = await _resolve(place, ask)
        folder = place.path.rpartition("/")[0]
        url = f"api/{place.kind}/{place.name}/tree/{commit}" + (f"/{quote(folder)}" if folder else "")
        url += "?recursive=true&expand=false"
        found: list[StoredFile] = []
        while url:

            async def attempt(url: str = url) -> tuple[Any, Mapping[str, str]]:
                return await _ask(url, ask)

            try:
                entries, headers = await ask(attempt)
            except NotThere:
                return []  # no such folder; the repository and the revision are there
            files = (entry for entry in entries if entry["type"] == "file")
            wanted = (entry for entry in files if (place.root + entry["path"]).startswith(prefix))
            found += [_file(place, commit, entry) for entry in wanted if keep(place.root + entry["path"])]
            url = _next_page(headers)
        return found

    async def send(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        assert file.version is not None
        place = split_hub(file.uri)
        kind = "" if place.kind == "models" else f"{place.kind}/"
        url = f"{_endpoint()}/{kind}{place.name}/resolve/{file.stamp}/{quote(place.path)}"
        headers = {**_token(), "Range": f"bytes={start_byte}-{end_byte - 1}"}
        async with request("GET", url, uri=file.uri, policy=policy, headers=headers) as response:
            try:
                raise_for_status(
                    response.status, response.headers, uri=file.uri, credentials_hint=_CREDENTIALS_HINT
                )  # fmt: skip
            except NotThere:
                failures.gone(file.uri)
            for told in map(_blob_of, [*response.history, response]):
                if told is not None and told != file.version:
                    failures.changed(file.uri, f"{file.version} became {told}")
            await receive_range(response, start_byte, end_byte, file.size_bytes, uri=file.uri, receive=receive)


def _blob_of(answer: aiohttp.ClientResponse) -> str | None:
    """Which content the hub itself says that it sends; where it redirected to, the ETag is another store's."""
    told = answer.headers.get("X-Linked-ETag") or ("" if answer.history else answer.headers.get("ETag", ""))
    match = _BLOB.fullmatch(told.removeprefix("W/").strip('"'))
    return f"blob:{match[0]}" if match else None


def _file(place: HubPlace, commit: str, entry: Mapping[str, Any]) -> StoredFile:
    large: Mapping[str, Any] = entry.get("lfs") or {}
    version = f"blob:{large.get('oid') or entry['oid']}"
    return StoredFile(place.root + entry["path"], int(large.get("size", entry["size"])), commit, 0, version, version)


def _next_page(headers: Mapping[str, str]) -> str:
    """The address of the next page without the endpoint, empty at the end."""
    match = re.search(r'<([^>]+)>\s*;\s*rel="?next"?', headers.get("Link", ""))
    if match is None:
        return ""
    address = match[1]
    return address[address.index("/api/") + 1 :] if "/api/" in address else ""


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _token() -> dict[str, str]:
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token:
        with contextlib.suppress(ImportError):
            from huggingface_hub import get_token

            token = get_token() or ""
    return {"Authorization": f"Bearer {token}"} if token else {}


async def _ask(path: str, ask: Asker, *, form: Mapping[str, str] | None = None) -> tuple[Any, Mapping[str, str]]:
    """One try of a question to the hub's interface."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise DataError(
            "HF_HUB_OFFLINE forbids to ask the hub", where=ask.uri,
            hint="unset it, or read a copy on this machine",
        )  # fmt: skip
    return await get_json(
        f"{_endpoint()}/{path}", uri=ask.uri, policy=ask.policy, headers=_token(), credentials_hint=_CREDENTIALS_HINT,
        method="GET" if form is None else "POST", form=form,
    )  # fmt: skip
