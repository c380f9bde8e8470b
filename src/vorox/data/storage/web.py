"""``http://`` and ``https://``: single files by their address, folders by the links of their index page.

A strong ETag pins a file (``If-Match``, and the ETag of every answer is compared); without one, Last-Modified and
length do: that guarantee is weaker, since two changes within one second look alike. A file with neither is refused.
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
from vorox.data.storage.failures import NotThere, raise_for_status
from vorox.data.storage.http import content_range, receive_range, request
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.remote import Asker, Keep, Receive
from vorox.data.storage.retry import RetryPolicy

if TYPE_CHECKING:
    import aiohttp

_CREDENTIALS_HINT = (
    "files that need a login are not read over http; copy them to this machine, or use s3://, gs://, hf://"
)
_LARGEST_INDEX_BYTES = 16 << 20
_MOST_AT_ONCE = 8


def address(uri: str) -> str:
    """The uri with what an address cannot hold written as %XX; what is written so already stays."""
    return quote(uri, safe="%/:=&?~+!$,;'@()*[]#")


def version_of(headers: Mapping[str, str]) -> str | None:
    """What pins the content that an answer tells of."""
    etag, modified = headers.get("ETag"), headers.get("Last-Modified")
    if etag and not etag.startswith("W/"):
        return f"etag:{etag}"
    if modified:
        return f"modified:{modified}"
    return f"weak:{etag}" if etag else None


def modified_nanoseconds(value: str | None) -> int:
    """The time that a header tells, 0 where it tells none."""
    try:
        return int(email.utils.parsedate_to_datetime(value or "").timestamp()) * 1_000_000_000
    except (ValueError, TypeError):
        return 0


class WebStore:
    """Plain web servers."""

    async def describe(self, uri: str, ask: Asker) -> StoredFile | None:
        try:
            return await ask(lambda: self._describe(uri, ask.policy))
        except NotThere:
            return None

    async def _describe(self, uri: str, policy: RetryPolicy) -> StoredFile:
        async with request(
            "GET", address(uri), uri=uri, policy=policy, headers={"Range": "bytes=0-0"}
        ) as response:  # fmt: skip
            if response.status != 416:
                raise_for_status(response.status, response.headers, uri=uri, credentials_hint=_CREDENTIALS_HINT)
            if response.url.path.endswith("/"):
                raise NotThere("a folder")
            version = version_of(response.headers)
            if version is None:
                raise DataError(
                    "the server tells neither ETag nor Last-Modified, so that a change could not be noticed",
                    where=uri, hint="copy the file to this machine and read it there",
                )  # fmt: skip
            size = _size_of(response, uri)
        modified = modified_nanoseconds(response.headers.get("Last-Modified"))
        return StoredFile(uri, size, version, modified, version)

    async def search(self, prefix: str, keep: Keep, ask: Asker) -> list[StoredFile]:
        folder = prefix.rpartition("/")[0] + "/"
        waiting, seen, wanted = [folder], {folder}, set[str]()
        while waiting:
            here = waiting.pop()

            async def attempt(here: str = here) -> list[str]:
                return await self._links(here, ask.policy)

            try:
                links = await ask(attempt)
            except NotThere:
                continue
            for link in links:
                if not link.startswith(prefix) and not prefix.startswith(link):
                    continue
                if link.endswith("/") and link not in seen:
                    seen.add(link)
                    waiting.append(link)
                elif not link.endswith("/") and keep(link):
                    wanted.add(link)
        places = asyncio.Semaphore(_MOST_AT_ONCE)

        async def describe(uri: str) -> StoredFile | None:
            async with places:
                return await self.describe(uri, ask)

        described = await asyncio.gather(*(describe(uri) for uri in sorted(wanted)))
        return [file for file in described if file is not None]

    async def _links(self, folder: str, policy: RetryPolicy) -> list[str]:
        """What an index page leads to inside of its folder."""
        async with request("GET", address(folder), uri=folder, policy=policy) as response:
            raise_for_status(response.status, response.headers, uri=folder, credentials_hint=_CREDENTIALS_HINT)
            if "html" not in response.headers.get("Content-Type", ""):
                raise NotThere("no index page")
            page = await response.content.read(_LARGEST_INDEX_BYTES)
            while len(page) < _LARGEST_INDEX_BYTES and (more := await response.content.read(1 << 16)):
                page += more
            base = str(response.url)
        parser = _Links()
        parser.feed(page.decode("utf-8", "replace"))
        links: list[str] = []
        for href in parser.found:
            link = urldefrag(urljoin(base, href)).url
            name = unquote(link[len(base) :]) if link.startswith(base) else ""
            if name and "?" not in link and not name.startswith(".") and "/" not in name.rstrip("/"):
                links.append(folder + name)
        return links

    async def send(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        assert file.version is not None
        kind, _, value = file.version.partition(":")
        pin = {"etag": {"If-Match": value}, "modified": {"If-Unmodified-Since": value}}.get(kind, {})
        headers = {"Range": f"bytes={start_byte}-{end_byte - 1}", **pin}
        async with request("GET", address(file.uri), uri=file.uri, policy=policy, headers=headers) as response:
            try:
                raise_for_status(
                    response.status, response.headers, uri=file.uri, credentials_hint=_CREDENTIALS_HINT
                )  # fmt: skip
            except NotThere:
                failures.gone(file.uri)
            if (now := version_of(response.headers)) != file.version:
                failures.changed(file.uri, f"{file.version} became {now}")
            await receive_range(response, start_byte, end_byte, file.size_bytes, uri=file.uri, receive=receive)


def _size_of(response: aiohttp.ClientResponse, uri: str) -> int:
    part = content_range(response.headers)
    if response.status == 416:
        return 0
    size = part[2] if response.status == 206 and part is not None else response.content_length
    if size is None:
        raise DataError(
            "the server does not tell the length of the file", where=uri,
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
