"""``gs://``: Google Cloud Storage by its JSON interface, with the credentials, endpoint and session of gcsfs.

Every object is pinned by its generation, which each read names: an object that was replaced is an error, or in a
bucket that keeps versions still the old bytes. Objects stored with ``Content-Encoding: gzip`` are read as stored. What
is put is held against the MD5 and size that the store answers with.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urlencode

from vorox.core.errors import ConfigError, DataError
from vorox.core.installation import install_command
from vorox.data.storage import transport
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.remote import Asker, Keep
from vorox.data.storage.retry import NoConnection, RetryPolicy, TransientError
from vorox.data.storage.transport import NotThere, Receive, get_json, raise_for_status, receive_range, request
from vorox.data.storage.writing import PART_BYTES, Content, Over, RefusedByCondition, received_other_bytes

if TYPE_CHECKING:
    import aiohttp

_CREDENTIALS_HINT = (
    "set GOOGLE_APPLICATION_CREDENTIALS to a service account's file, or run gcloud auth application-default login"
)
_FIELDS = "name,size,generation,md5Hash,updated"


class GoogleStore:
    """Buckets of Google Cloud Storage, or of the emulator that ``STORAGE_EMULATOR_HOST`` names."""

    async def describe(self, uri: str, ask: Asker) -> StoredFile | None:
        bucket, name = split_bucket(uri)
        if not name:
            return None
        try:
            item = await ask(
                lambda: self._ask(f"b/{bucket}/o/{quote(name, safe='')}", {"fields": _FIELDS}, uri, ask.policy)
            )
        except NotThere:
            return None
        return _file(bucket, item)

    async def search(self, prefix: str, keep: Keep, ask: Asker) -> list[StoredFile]:
        bucket, name = split_bucket(prefix)
        found: list[StoredFile] = []
        query: dict[str, str] = {"prefix": name, "maxResults": "1000", "fields": f"nextPageToken,items({_FIELDS})"}
        while True:

            async def attempt(query: Mapping[str, str] = query) -> Any:
                return await self._ask(f"b/{bucket}/o", query, prefix, ask.policy)

            try:
                page: Mapping[str, Any] = await ask(attempt)
            except NotThere:
                raise no_bucket(prefix) from None
            files = (item for item in page.get("items", []) if not item["name"].endswith("/"))
            found += [_file(bucket, item) for item in files if keep(f"gs://{bucket}/{item['name']}")]
            if not page.get("nextPageToken"):
                return found
            query = {**query, "pageToken": page["nextPageToken"]}

    async def send(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        assert file.version is not None
        bucket, name = split_bucket(file.uri)
        generation = file.version.removeprefix("generation:")
        system = await _file_system()
        url = system.url(f"{bucket}/{name}", generation=generation)
        headers = {
            **await _credentials(system, file.uri),
            "Range": f"bytes={start_byte}-{end_byte - 1}",
            "Accept-Encoding": "gzip",  # else what is stored compressed is decompressed on the way, without ranges
        }
        async with request("GET", url, uri=file.uri, policy=policy, headers=headers) as response:
            try:
                raise_for_status(
                    response.status, response.headers, uri=file.uri, credentials_hint=_CREDENTIALS_HINT
                )  # fmt: skip
            except NotThere:
                transport.gone(file.uri)
            now = response.headers.get("x-goog-generation", generation)
            if now != generation:
                transport.changed(file.uri, f"generation {generation} became {now}")
            await receive_range(response, start_byte, end_byte, file.size_bytes, uri=file.uri, receive=receive)

    async def put(self, uri: str, content: Content, over: Over, ask: Asker) -> StoredFile:
        try:
            return await self._put(uri, content, over, ask)
        except NotThere:
            raise no_bucket(uri) from None

    async def _put(self, uri: str, content: Content, over: Over, ask: Asker) -> StoredFile:
        if content.size_bytes > PART_BYTES:
            return await _put_in_parts(uri, content, over, ask)
        data, digest = await content.part(0, content.size_bytes)

        async def attempt() -> StoredFile:
            async with _change("POST", await _upload_address(uri, "media", over), uri, ask.policy, data) as response:
                return _proven(uri, await _item(response), content.size_bytes, digest)

        return await ask(attempt)

    async def remove(self, uri: str, ask: Asker) -> None:
        bucket, name = split_bucket(uri)

        async def attempt() -> None:
            system = await _file_system("read_write")
            async with _change(
                "DELETE", f"{system.base}b/{bucket}/o/{quote(name, safe='')}", uri, ask.policy, may_lack=True
            ):
                pass

        await ask(attempt)

    async def _ask(self, path: str, query: Mapping[str, str], uri: str, policy: RetryPolicy) -> Any:
        system = await _file_system()
        answer, _ = await get_json(
            f"{system.base}{path}?{urlencode(query)}", uri=uri, policy=policy,
            headers=await _credentials(system, uri), credentials_hint=_CREDENTIALS_HINT,
        )  # fmt: skip
        return answer


def split_bucket(uri: str) -> tuple[str, str]:
    """Bucket and name of an object."""
    bucket, _, name = uri.partition("://")[2].partition("/")
    if not bucket:
        raise ConfigError(
            "the uri names no bucket", where=uri, hint="write it as gs://BUCKET/FOLDER or s3://BUCKET/FOLDER"
        )
    return bucket, name


def no_bucket(uri: str) -> DataError:
    bucket, _ = split_bucket(uri)
    return DataError(f"there is no bucket {bucket!r}", where=uri, hint="check the name, or create the bucket")


def _file(bucket: str, item: Mapping[str, Any]) -> StoredFile:
    version = f"generation:{item['generation']}"
    md5 = item.get("md5Hash")
    modified = 0
    if "updated" in item:
        modified = int(datetime.fromisoformat(item["updated"]).timestamp()) * 1_000_000_000
    return StoredFile(
        f"gs://{bucket}/{item['name']}", int(item["size"]), version, modified, version, f"md5:{md5}" if md5 else None
    )


async def _put_in_parts(uri: str, content: Content, over: Over, ask: Asker) -> StoredFile:
    """Resumable uploads until one comes to its end: a store may forget one that was interrupted."""
    while True:
        digest, upload = hashlib.md5(usedforsecurity=False), _ResumableUpload(uri, content.size_bytes, ask)
        try:
            await ask(lambda upload=upload: upload.begin(over))
            for start in range(0, content.size_bytes, PART_BYTES):
                data, _ = await content.part(start, min(start + PART_BYTES, content.size_bytes))
                await asyncio.to_thread(digest.update, data)
                await upload.send(start, data)
            return _proven(uri, upload.item, content.size_bytes, digest.digest())
        except TransientError as error:
            ask.budget.spend(uri, error.reason)


class _ResumableUpload:
    """One upload in parts: after a failure it goes on behind what the store says that it has."""

    def __init__(self, uri: str, size_bytes: int, ask: Asker) -> None:
        self.item: Mapping[str, Any] = {}
        self._uri, self._size_bytes, self._ask = uri, size_bytes, ask
        self._session, self._position, self._in_doubt = "", 0, False

    async def begin(self, over: Over) -> None:
        address = await _upload_address(self._uri, "resumable", over)
        async with _change("POST", address, self._uri, self._ask.policy) as response:
            self._session = response.headers["Location"]

    async def send(self, start: int, data: bytes) -> None:
        """Send the part that begins at ``start``.

        Raises:
            TransientError: The store forgot the upload.
        """
        end, forgotten = start + len(data), False

        async def attempt() -> None:
            nonlocal forgotten
            if self._in_doubt:
                await self._exchange(f"*/{self._size_bytes}", b"")
            while self._position < end and not self.item and not forgotten:
                if self._position < start:
                    forgotten = True
                    return
                span = f"{self._position}-{end - 1}/{self._size_bytes}"
                await self._exchange(span, memoryview(data)[self._position - start :])

        try:
            await self._ask(attempt)
        except NotThere:
            forgotten = True
        if forgotten or (end == self._size_bytes and not self.item):
            raise TransientError("the store forgot an upload that had begun")

    async def _exchange(self, span: str, data: bytes | memoryview) -> None:
        """Send some bytes, or only ask how far the upload is."""
        self._in_doubt = True
        headers = {"Content-Range": f"bytes {span}"}
        async with _change("PUT", self._session, self._uri, self._ask.policy, data, headers) as response:
            if response.status == 308:
                self._position = int(response.headers.get("Range", "bytes=0--1").partition("-")[2]) + 1
            else:
                self.item = await _item(response)
        self._in_doubt = False


@contextlib.asynccontextmanager
async def _change(
    method: str, url: str, uri: str, policy: RetryPolicy, body: bytes | memoryview = b"",
    headers: Mapping[str, str] | None = None, *, may_lack: bool = False,
) -> AsyncGenerator[aiohttp.ClientResponse]:  # fmt: skip
    """One try of a request that changes the store."""
    credentials = await _credentials(await _file_system("read_write"), uri)
    headers = {"Content-Type": "application/octet-stream", **credentials, **(headers or {})}
    async with request(method, url, uri=uri, policy=policy, headers=headers, body=body) as response:
        if response.status == 412:
            raise RefusedByCondition
        if not (may_lack and response.status == 404):
            raise_for_status(response.status, response.headers, uri=uri, credentials_hint=_CREDENTIALS_HINT)
        yield response


async def _item(response: aiohttp.ClientResponse) -> Mapping[str, Any]:
    try:
        return json.loads(await response.read())
    except ValueError:
        raise TransientError("the answer is no JSON") from None


def _proven(uri: str, item: Mapping[str, Any], size_bytes: int, digest: bytes) -> StoredFile:
    """The object that was put, if the store has what was sent."""
    if int(item["size"]) != size_bytes or item.get("md5Hash") != base64.b64encode(digest).decode():
        raise received_other_bytes(uri)
    return _file(split_bucket(uri)[0], item)


async def _upload_address(uri: str, kind: str, over: Over) -> str:
    bucket, name = split_bucket(uri)
    system = await _file_system("read_write")
    query = {"uploadType": kind, "name": name, "fields": _FIELDS}
    if over != "anything":
        query["ifGenerationMatch"] = "0" if over == "nothing" else str(over.version).removeprefix("generation:")
    return f"{system.base.replace('/storage/v1/', '/upload/storage/v1/')}b/{bucket}/o?{urlencode(query)}"


async def _file_system(access: Literal["read_only", "read_write"] = "read_only") -> Any:
    """gcsfs as the source of endpoint and credentials; created off the loop, since that may ask the machine's owner."""

    async def make() -> tuple[Any, Callable[[], Awaitable[None]]]:
        try:
            from gcsfs.core import GCSFileSystem  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise ConfigError("gs:// needs gcsfs, which is not installed", hint=install_command("gcs")) from error

        def create() -> Any:
            return GCSFileSystem(
                asynchronous=True,
                loop=transport.event_loop(),
                skip_instance_cache=True,
                access=access,
                token="anon" if os.environ.get("STORAGE_EMULATOR_HOST") else None,
            )

        async def close() -> None:
            return None

        return await asyncio.to_thread(create), close

    return await transport.kept(f"gcs {access}", make)


async def _credentials(system: Any, uri: str) -> dict[str, str]:
    import google.auth.exceptions as problems

    headers: dict[str, str] = {}
    try:
        await asyncio.to_thread(system.credentials.apply, headers)
    except problems.TransportError as error:
        raise NoConnection(f"no credentials came ({type(error).__name__})") from None
    except problems.GoogleAuthError as error:
        raise DataError(
            f"the credentials for Google Cloud do not work ({type(error).__name__})", where=uri, hint=_CREDENTIALS_HINT
        ) from None
    return headers
