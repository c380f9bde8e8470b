"""``http://`` and ``https://``: single files by url, folders by the links of their index page.

A strong ETag pins a file (``If-Match``, and the ETag of every response is compared). Without one, Last-Modified and
length do, which is weaker: two changes within one second look the same. A file with neither is refused.
"""

from __future__ import annotations

import asyncio
import email.utils
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urldefrag, urljoin

from vorox.core.errors import DataError
from vorox.data.storage import failures
from vorox.data.storage.failures import ObjectNotFound, raise_for_status
from vorox.data.storage.http import content_range, receive_range, request, unexpected_response
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.requests import RetryingClient, RetryPolicy
from vorox.data.storage.store import Receive, UriFilter

if TYPE_CHECKING:
    import aiohttp

_CREDENTIALS_HINT = "http:// does not support logins; copy the files to this machine, or use s3://, gs://, hf://"
_MAX_INDEX_BYTES = 16 << 20
_MAX_CONCURRENT_REQUESTS = 8
_MAX_FOLDERS = 10_000


def quoted_url(uri: str) -> str:
    """Return a uri as a url: characters that a url cannot contain become %XX, existing %XX stay."""
    return quote(uri, safe="%/:=&?~+!$,;'@()*[]#")


def version_of(headers: Mapping[str, str]) -> str | None:
    """Return the version that response headers pin; ``None`` if they pin none."""
    etag, modified = headers.get("ETag"), headers.get("Last-Modified")
    if etag and not etag.startswith("W/"):
        return f"etag:{etag}"
    if modified:
        return f"modified:{modified}"
    return f"weak:{etag}" if etag else None


def modified_nanoseconds(value: str | None) -> int:
    """Parse a Last-Modified header; 0 if it is missing or malformed."""
    try:
        return int(email.utils.parsedate_to_datetime(value or "").timestamp()) * 1_000_000_000
    except (ValueError, TypeError):
        return 0


class WebStore:
    """Plain web servers."""

    async def describe(self, uri: str, client: RetryingClient) -> StoredFile | None:
        try:
            return await client.run(lambda: self._describe(uri, client.policy))
        except ObjectNotFound:
            return None

    async def _describe(self, uri: str, policy: RetryPolicy) -> StoredFile:
        async with request(
            "GET", quoted_url(uri), uri=uri, policy=policy, headers={"Range": "bytes=0-0"}
        ) as response:  # fmt: skip
            if response.status != 416:
                raise_for_status(response.status, response.headers, uri=uri, credentials_hint=_CREDENTIALS_HINT)
            if response.url.path.endswith("/"):
                raise ObjectNotFound("a folder")
            version = version_of(response.headers)
            if version is None:
                raise DataError(
                    "The server sends neither ETag nor Last-Modified, so changes would go undetected",
                    where=uri, hint="copy the file to this machine and read it there",
                )  # fmt: skip
            size = _size_of(response, uri)
        modified = modified_nanoseconds(response.headers.get("Last-Modified"))
        return StoredFile(uri, size, version, modified, version)

    async def list_prefix(self, prefix: str, matches: UriFilter, client: RetryingClient) -> list[StoredFile]:
        folder = prefix.rpartition("/")[0] + "/"
        pending, seen, wanted = [folder], {folder}, set[str]()
        while pending:
            here = pending.pop(0)
            if len(seen) > _MAX_FOLDERS:
                raise DataError(
                    f"There are more than {_MAX_FOLDERS:,} folders below {folder}", where=prefix,
                    hint="name the folders with the files, or list the urls of the files",
                )  # fmt: skip

            async def attempt(here: str = here) -> list[str]:
                return await self._links(here, client.policy)

            try:
                links = await client.run(attempt)
            except ObjectNotFound:
                continue
            for link in links:
                if not link.startswith(prefix) and not prefix.startswith(link):
                    continue
                if link.endswith("/") and link not in seen:
                    seen.add(link)
                    pending.append(link)
                elif not link.endswith("/") and matches(link):
                    wanted.add(link)
        slots = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)

        async def describe(uri: str) -> StoredFile | None:
            async with slots:
                return await self.describe(uri, client)

        described = await asyncio.gather(*(describe(uri) for uri in sorted(wanted)))
        return [file for file in described if file is not None]

    async def _links(self, folder: str, policy: RetryPolicy) -> list[str]:
        """Return the links of an index page that are inside its folder."""
        async with request("GET", quoted_url(folder), uri=folder, policy=policy) as response:
            raise_for_status(response.status, response.headers, uri=folder, credentials_hint=_CREDENTIALS_HINT)
            if "html" not in response.headers.get("Content-Type", ""):
                raise ObjectNotFound("no index page")
            page = await response.content.read(_MAX_INDEX_BYTES)
            while len(page) < _MAX_INDEX_BYTES and (more := await response.content.read(1 << 16)):
                page += more
            base = str(response.url)
        parser = _Links()
        parser.feed(page.decode("utf-8", "replace"))
        links: list[str] = []
        for href in parser.found:
            link = urldefrag(urljoin(base, href)).url
            name = unquote(link[len(base) :]) if link.startswith(base) else ""
            if name and "?" not in link and not name.startswith(".") and "/" not in name.rstrip("/"):
                if not name.isprintable():
                    raise unexpected_response(f"its index page has the file name {name!r}", folder)
                links.append(folder + name)
        return links

    async def stream_range(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        assert file.version is not None
        kind, _, value = file.version.partition(":")
        pin = {"etag": {"If-Match": value}, "modified": {"If-Unmodified-Since": value}}.get(kind, {})
        headers = {"Range": f"bytes={start_byte}-{end_byte - 1}", **pin}
        async with request("GET", quoted_url(file.uri), uri=file.uri, policy=policy, headers=headers) as response:
            try:
                raise_for_status(
                    response.status, response.headers, uri=file.uri, credentials_hint=_CREDENTIALS_HINT
                )  # fmt: skip
            except ObjectNotFound:
                failures.raise_deleted(file.uri)
            if (now := version_of(response.headers)) != file.version:
                failures.raise_changed(file.uri, f"{file.version} became {now}")
            await receive_range(response, start_byte, end_byte, file.size_bytes, uri=file.uri, receive=receive)


def _size_of(response: aiohttp.ClientResponse, uri: str) -> int:
    part = content_range(response.headers)
    if response.status == 416:
        return 0
    size = part[2] if response.status == 206 and part is not None else response.content_length
    if response.status == 206 and part is None:
        raise unexpected_response(f"Content-Range is {response.headers.get('Content-Range')!r}", uri)
    if size is None:
        raise DataError(
            "The server does not report the length of the file", where=uri,
            hint="copy the file to this machine and read it there",
        )  # fmt: skip
    return size


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]
