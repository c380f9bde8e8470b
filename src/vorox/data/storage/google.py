"""``gs://``: Google Cloud Storage by its JSON interface, with the credentials, endpoint and session of gcsfs.

Every object is pinned by its generation, which each read names: an object that was replaced is an error, or in a
bucket that keeps versions still the old bytes. Objects stored with ``Content-Encoding: gzip`` are read as stored.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

from vorox.core.errors import ConfigError, DataError
from vorox.data.storage import transport
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.remote import Asker, Keep
from vorox.data.storage.retry import RetryPolicy, TransientError
from vorox.data.storage.transport import NotThere, Receive, get_json, raise_for_status, receive_range, request

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
                raise DataError(
                    f"there is no bucket {bucket!r}", where=prefix, hint="check the name, or create the bucket"
                ) from None
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


def _file(bucket: str, item: Mapping[str, Any]) -> StoredFile:
    version = f"generation:{item['generation']}"
    md5 = item.get("md5Hash")
    modified = 0
    if "updated" in item:
        modified = int(datetime.fromisoformat(item["updated"]).timestamp()) * 1_000_000_000
    return StoredFile(
        f"gs://{bucket}/{item['name']}", int(item["size"]), version, modified, version, f"md5:{md5}" if md5 else None
    )


async def _file_system() -> Any:
    """gcsfs as the source of endpoint and credentials; created off the loop, since that may ask the machine's owner."""

    async def make() -> tuple[Any, Callable[[], Awaitable[None]]]:
        try:
            from gcsfs.core import GCSFileSystem  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise ConfigError(
                "reading gs:// needs gcsfs, which is not installed", hint="pip install 'vorox[gcs]'"
            ) from error

        def create() -> Any:
            return GCSFileSystem(
                asynchronous=True,
                loop=transport.event_loop(),
                skip_instance_cache=True,
                access="read_only",
                token="anon" if os.environ.get("STORAGE_EMULATOR_HOST") else None,
            )

        async def close() -> None:
            return None

        return await asyncio.to_thread(create), close

    return await transport.kept("gcs", make)


async def _credentials(system: Any, uri: str) -> dict[str, str]:
    import google.auth.exceptions as problems

    headers: dict[str, str] = {}
    try:
        await asyncio.to_thread(system.credentials.apply, headers)
    except problems.TransportError as error:
        raise TransientError(f"no credentials came ({type(error).__name__})") from None
    except problems.GoogleAuthError as error:
        raise DataError(
            f"the credentials for Google Cloud do not work ({type(error).__name__})", where=uri, hint=_CREDENTIALS_HINT
        ) from None
    return headers
