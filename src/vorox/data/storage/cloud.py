"""``s3://``, ``gs://`` and ``az://``: object stores through ``obstore``, whose own retries are off.

An object is pinned by its S3 VersionId in a versioned bucket, by its generation on Google Cloud Storage, by its ETag
elsewhere. Listings of S3 and Google contain no versions, so each matching object of a versioned bucket costs one HEAD
request. Uploads are verified against the store: by a SHA-256 sent along where the store checks it, else by the ETag
where it is an MD5, else by reading the object back.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vorox.core.errors import ConfigError, DataError
from vorox.data.storage import failures
from vorox.data.storage.cloud_clients import CLOUDS, CloudClient, cloud_client, drop_expired
from vorox.data.storage.failures import (
    ObjectNotFound,
    PreconditionFailed,
    missing_bucket,
    raise_for_status,
    split_bucket,
)
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.requests import NoConnection, RetryingClient, RetryPolicy, TransientError
from vorox.data.storage.store import PART_BYTES, Content, PutMode, Receive, UriFilter, corrupt_upload

if TYPE_CHECKING:
    from obstore import ObjectMeta

T = TypeVar("T")

_TRANSIENT_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "InternalError",
     "ServiceUnavailable", "OperationAborted", "ConditionalRequestConflict", "ServerBusy", "OperationTimedOut"}
)  # fmt: skip
_EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"})
_CREDENTIAL_CODES = _EXPIRED_CODES | {
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "AllAccessDisabled", "AccountProblem",
    "AuthenticationFailed", "AuthenticationRequired", "AuthorizationFailure",
}  # fmt: skip
_CLOCK_CODES = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_NOT_FOUND_CODES = frozenset({"NoSuchKey", "NoSuchVersion", "BlobNotFound"})
_CLOCK_HINT = "set this machine's clock (NTP): the store accepts only requests of the last minutes"

_STATUS = re.compile(r'(?:inner: (?:Status|Response) \{\s*status: |\n\s*code: ")(\d{3})')
_CODE = re.compile(r"<Code>(\w+)</Code>")
_PROVIDER = re.compile(r"credential provider: (\w+)")
_TRANSIENT_PROVIDER_ERRORS = re.compile("Timeout|Connection|Transport|Retrieval")
_METADATA_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
_NEVER = datetime.fromtimestamp(0, UTC)
_MD5 = re.compile(r"[0-9a-f]{32}")

_PAGE_ITEMS = 1000
_MAX_CONCURRENT_HEADS = 32
_MAX_PARTS = 9_000
_MAX_CONCURRENT_PARTS = 2


class CloudStore:
    """Buckets of one of the three clouds, or of a compatible server."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._is_sorted = scheme != "az"
        """Whether listings are sorted by name and can start after a name."""

    async def describe(self, uri: str, client: RetryingClient) -> StoredFile | None:
        _, key = split_bucket(uri)
        if not key:
            return None
        try:
            return await self._head(uri, client)
        except ObjectNotFound:
            return None
        except DataError as error:
            if self._scheme != "s3" or not re.search(r"HTTP 40[03]", error.what):
                raise
        # The response to a HEAD request has no body that explains the refusal; that of a listing has.
        found = await self.list_prefix(uri, lambda found: found == uri, client)
        return found[0] if found else None

    async def _head(self, uri: str, client: RetryingClient) -> StoredFile:
        async def head(cloud: CloudClient) -> StoredFile:
            import obstore

            return self._stored_file(uri, await obstore.head_async(cloud.store, split_bucket(uri)[1]))

        return await client.run(lambda: self._call(uri, client.policy, head))

    async def list_prefix(self, prefix: str, matches: UriFilter, client: RetryingClient) -> list[StoredFile]:
        bucket, key = split_bucket(prefix)
        found: list[StoredFile] = []
        last = key[:-1] if self._is_sorted and not key.endswith("/") else ""

        async def list_pages(cloud: CloudClient) -> None:
            """List the names after the last one that arrived."""
            nonlocal last
            import obstore

            folder = key.rpartition("/")[0] or None
            if not self._is_sorted:
                found.clear()
            listing = cast("Any", obstore.list)  # pyright: ignore[reportUnknownMemberType] - an overload for pyarrow
            pages: AsyncIterator[Sequence[ObjectMeta]] = listing(
                cloud.store, folder, offset=last or None, chunk_size=_PAGE_ITEMS
            )
            async for page in pages:
                for meta in page:
                    uri = f"{self._scheme}://{bucket}/{meta['path']}"
                    if uri.startswith(prefix) and matches(uri):
                        found.append(self._stored_file(uri, meta))
                    elif self._is_sorted and meta["path"] > key and not uri.startswith(prefix):
                        return
                    if self._is_sorted:
                        last = meta["path"]

        try:
            await client.run(lambda: self._call(prefix, client.policy, list_pages))
        except ObjectNotFound:
            raise missing_bucket(prefix) from None
        return await self._with_versions(found, client)

    async def _with_versions(self, found: list[StoredFile], client: RetryingClient) -> list[StoredFile]:
        """Complete a listing with what only HEAD reports: versions, and whether empty objects exist.

        A folder marker ``a/b/`` is listed as an empty object ``a/b``, which does not exist.
        """
        slots = asyncio.Semaphore(_MAX_CONCURRENT_HEADS)
        heads: dict[str, StoredFile | None] = {}

        async def head(file: StoredFile) -> None:
            async with slots:
                try:
                    heads[file.uri] = await self._head(file.uri, client)
                except ObjectNotFound:
                    heads[file.uri] = None

        probe = next((file for file in found if file.size_bytes), None)
        has_versions = self._scheme == "gs"
        if probe is not None and self._scheme == "s3":
            try:
                await head(probe)
                has_versions = (heads[probe.uri] or probe).version != probe.version
            except DataError:  # listed but not readable now: its ETag pins it
                heads[probe.uri] = probe
        remaining = [file for file in found if file.uri not in heads and (has_versions or not file.size_bytes)]
        await asyncio.gather(*(head(file) for file in remaining))
        complete = (heads.get(file.uri, file) for file in found)
        return [file for file in complete if file is not None]

    async def stream_range(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        assert file.version is not None
        kind, _, value = file.version.partition(":")
        pin = {"if_match": value} if kind == "etag" else {"version": value}
        position = start_byte

        async def get(cloud: CloudClient) -> None:
            nonlocal position
            import obstore

            options: Any = {"range": (start_byte, end_byte), **pin}
            response = await obstore.get_async(cloud.store, split_bucket(file.uri)[1], options=options)
            now = self._stored_file(file.uri, response.meta)
            if now.size_bytes != file.size_bytes:
                failures.raise_changed(file.uri, f"it has {now.size_bytes:,} bytes instead of {file.size_bytes:,}")
            if kind != "version" and now.version != file.version:
                failures.raise_changed(file.uri, f"{file.version} became {now.version}")
            async for data in response.stream(min_chunk_size=1):  # keeps every byte that precedes a failure
                receive(data)
                position += len(data)

        try:
            await self._call(file.uri, policy, get)
        except ObjectNotFound:
            failures.raise_deleted(file.uri)
        except PreconditionFailed:
            failures.raise_changed(file.uri)
        if position != end_byte:
            raise TransientError(f"the body ended {end_byte - position:,} bytes early")

    async def put(self, uri: str, content: Content, mode: PutMode, client: RetryingClient) -> StoredFile:
        part_bytes = PART_BYTES * max(1, -(-content.size_bytes // (PART_BYTES * _MAX_PARTS)))
        in_parts = content.size_bytes > PART_BYTES
        etag, md5 = await asyncio.to_thread(content.checksums, part_bytes if in_parts else None)
        condition: Any = mode
        if isinstance(mode, StoredFile):
            value = str(mode.content if self._scheme == "s3" else mode.version).partition(":")[2]
            condition = {"version": value} if self._scheme == "gs" else {"e_tag": value}

        async def put(cloud: CloudClient) -> tuple[StoredFile, bool]:
            """Return the object, and whether its content is already verified."""
            import obstore

            result = await obstore.put_async(
                cloud.upload_store if in_parts else cloud.store, split_bucket(uri)[1],
                content.data if in_parts else await asyncio.to_thread(content.read),
                mode=condition, use_multipart=in_parts, chunk_size=part_bytes, max_concurrency=_MAX_CONCURRENT_PARTS,
            )  # fmt: skip
            meta: Any = {**result, "size": content.size_bytes, "last_modified": _NEVER}
            is_verified = cloud.checks_bodies or (result["e_tag"] or "").strip('"') == etag
            return self._stored_file(uri, meta), is_verified

        async def attempt() -> StoredFile:
            try:
                written, is_verified = await self._call(uri, client.policy, put)
            except ObjectNotFound as error:
                if str(error) == "NoSuchKey":
                    raise PreconditionFailed from None
                if str(error) == "NoSuchUpload":  # an earlier try completed it and its response was lost
                    written, is_verified = await self._head(uri, client), False
                else:
                    raise missing_bucket(uri) from None
            if not is_verified and not await self.verify_upload(written, md5, client.policy):
                raise corrupt_upload(uri)
            return written

        return await client.run(attempt, has_deadline=not in_parts)

    async def verify_upload(self, file: StoredFile, md5: bytes, policy: RetryPolicy) -> bool:
        """Read an object back; return whether its content has the expected MD5."""
        stored = hashlib.md5(usedforsecurity=False)
        if file.size_bytes:
            await self.stream_range(file, 0, file.size_bytes, stored.update, policy)
        return stored.digest() == md5

    async def remove(self, uri: str, client: RetryingClient) -> None:
        async def delete(cloud: CloudClient) -> None:
            import obstore

            await obstore.delete_async(cloud.store, split_bucket(uri)[1])

        with contextlib.suppress(ObjectNotFound):
            await client.run(lambda: self._call(uri, client.policy, delete))

    async def _call(self, uri: str, policy: RetryPolicy, work: Callable[[CloudClient], Awaitable[T]]) -> T:
        """Run one try with the client of the bucket; translate its errors."""
        cloud = await cloud_client(self._scheme, split_bucket(uri)[0], policy, uri)
        try:
            result = await work(cloud)
        except (DataError, ConfigError, TransientError, ObjectNotFound, PreconditionFailed):
            raise
        except Exception as error:
            failure = self._translate_error(error, uri, policy, cloud)
            if isinstance(failure, _ExpiredError):
                if await drop_expired(cloud):
                    raise TransientError("the credentials expired and were reloaded") from None
                raise failure.refusal from None
            raise failure from None
        cloud.has_worked = True
        return result

    def _translate_error(self, error: Exception, uri: str, policy: RetryPolicy, cloud: CloudClient) -> Exception:
        """Translate an error of obstore, whose own text may contain keys and signed urls."""
        text = str(error)
        message, _, detail = text.partition("\n\nDebug source:")
        hint, name = CLOUDS[self._scheme].credentials_hint, CLOUDS[self._scheme].name
        if (provider := _PROVIDER.search(message)) is not None:
            if _TRANSIENT_PROVIDER_ERRORS.search(provider[1]):
                return NoConnection(f"the credential provider did not respond ({provider[1]})")
            return DataError(f"The credentials for {name} do not work ({provider[1]})", where=uri, hint=hint)
        if any(server in message for server in _METADATA_SERVERS):
            if cloud.has_worked:
                return TransientError("this machine's metadata server provided no new credentials")
            return DataError(f"No credentials for {name} were found", where=uri, hint=hint)
        if (status := _STATUS.search(detail)) is not None:
            code = _CODE.search(message)
            return self._translate_status(int(status[1]), code[1] if code else "", uri, error)
        if "BareRedirect" in detail:
            return DataError("The bucket is in another region", where=uri, hint="set AWS_REGION to its region")
        if "NotPartial" in detail:
            return failures.no_range_support(uri)
        if isinstance(error, ValueError) or "invalid path" in message:
            return ConfigError(
                f"{name} does not allow this name, or obstore cannot read it (//, . and .. in names)", where=uri,
                hint="check the names of bucket and object; use patterns that exclude such objects",
            )  # fmt: skip
        if "certificate" in detail:
            return DataError(
                "The certificate of the server is not trusted", where=uri,
                hint="set SSL_CERT_FILE to the CA certificates of your network",
            )  # fmt: skip
        connects = "Connect" in detail
        if "Timeout" in detail or "TimedOut" in detail:
            if connects:
                return NoConnection(f"no connection within {policy.connect_seconds:g} s")
            return TransientError(f"no byte for {policy.stall_seconds:g} s")
        if connects:
            return NoConnection(f"no connection to the endpoint of {name}")
        return TransientError("the connection closed before the response was complete")

    def _translate_status(self, status: int, code: str, uri: str, error: Exception) -> Exception:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        hint = CLOUDS[self._scheme].credentials_hint
        if code in _TRANSIENT_CODES:
            return TransientError(f"HTTP {status} ({code})")
        if isinstance(error, AlreadyExistsError | PreconditionError) and status in {409, 412}:
            return PreconditionFailed(code)
        if code in _CLOCK_CODES:
            return DataError(f"The store refuses access: {code} (HTTP {status})", where=uri, hint=_CLOCK_HINT)
        if code in _CREDENTIAL_CODES:
            refusal = DataError(f"The store refuses access: {code} (HTTP {status})", where=uri, hint=hint)
            return _ExpiredError(refusal) if code in _EXPIRED_CODES else refusal
        if status in {404, 405, 410} or code in _NOT_FOUND_CODES:
            return ObjectNotFound(code)
        try:
            raise_for_status(status, {}, uri=uri, credentials_hint=hint, message=code)
        except (TransientError, DataError) as failure:
            return _ExpiredError(failure) if status == 401 and isinstance(failure, DataError) else failure
        return TransientError(f"unexpected response (HTTP {status} {code})")

    def _stored_file(self, uri: str, meta: ObjectMeta) -> StoredFile:
        etag = '"' + (meta["e_tag"] or "").strip('"') + '"'
        version, modified = meta["version"], meta["last_modified"]
        nanoseconds = int(modified.timestamp()) * 1_000_000_000
        content: str | None = f"etag:{etag}"
        pin = f"etag:{etag}"
        if self._scheme == "gs":
            if version is not None:
                pin = f"generation:{version}"
            digest = etag.strip('"')
            content = f"md5:{base64.b64encode(bytes.fromhex(digest)).decode()}" if _MD5.fullmatch(digest) else None
        elif self._scheme == "az":
            content = None  # its ETags identify writes, not contents
        elif version not in {None, "null"}:
            pin = f"version:{version}"
        return StoredFile(uri, meta["size"], pin, nanoseconds, pin, content)


class _ExpiredError(Exception):
    """A refusal that new credentials may resolve."""

    def __init__(self, refusal: DataError) -> None:
        self.refusal = refusal
