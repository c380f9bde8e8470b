"""``s3://``, ``gs://`` and ``az://``: object stores by ``obstore``, which never retries here.

An object is pinned by its S3 VersionId in a bucket that keeps versions, by its generation on Google Cloud Storage, and
by its ETag elsewhere. Listings of S3 and Google do not hold versions, so each wanted object of such a bucket is queried
for its own. What is put is compared with what the store says it has: by SHA-256 sent along where the store checks it,
else by the ETag where that is an MD5, else by reading the object back.
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
from vorox.data.storage.cloud_clients import CREDENTIALS_HINTS, STORE_NAMES, CloudClient, cloud_client, renew
from vorox.data.storage.failures import NotThere, RefusedByCondition, no_bucket, raise_for_status, split_bucket
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.remote import Asker, Keep, Receive
from vorox.data.storage.retry import NoConnection, RetryPolicy, TransientError
from vorox.data.storage.writing import PART_BYTES, Content, Over, received_other_bytes

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
_MISSING_CODES = frozenset({"NoSuchKey", "NoSuchVersion", "BlobNotFound"})
_CLOCK_HINT = "set this machine's clock (NTP): the store accepts requests of the last minutes only"

_STATUS = re.compile(r'(?:inner: (?:Status|Response) \{\s*status: |\n\s*code: ")(\d{3})')
_CODE = re.compile(r"<Code>(\w+)</Code>")
_FROM_PROVIDER = re.compile(r"credential provider: (\w+)")
_PASSING_PROVIDER_ERRORS = re.compile("Timeout|Connection|Transport|Retrieval")
_METADATA_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
_NEVER = datetime.fromtimestamp(0, UTC)
_MD5 = re.compile(r"[0-9a-f]{32}")

_PAGE_ITEMS = 1000
_MOST_AT_ONCE = 32
_MOST_PARTS = 9_000
_PARTS_AT_ONCE = 2


class CloudStore:
    """Buckets of one of the three clouds, or of what speaks like it."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._is_sorted = scheme != "az"
        """Whether listings come in the order of the names, and begin behind a name without reading up to it."""

    async def describe(self, uri: str, ask: Asker) -> StoredFile | None:
        _, key = split_bucket(uri)
        if not key:
            return None
        try:
            return await self._head(uri, ask)
        except NotThere:
            return None
        except DataError as error:
            if self._scheme != "s3" or not re.search(r"HTTP 40[03]", error.what):
                raise
        found = await self.search(uri, lambda found: found == uri, ask)  # a HEAD does not say why; this does
        return found[0] if found else None

    async def _head(self, uri: str, ask: Asker) -> StoredFile:
        async def head(client: CloudClient) -> StoredFile:
            import obstore

            return self._file(uri, await obstore.head_async(client.store, split_bucket(uri)[1]))

        return await ask(lambda: self._call(uri, ask.policy, head))

    async def search(self, prefix: str, keep: Keep, ask: Asker) -> list[StoredFile]:
        bucket, key = split_bucket(prefix)
        found: list[StoredFile] = []
        last = key[:-1] if self._is_sorted and not key.endswith("/") else ""

        async def list_on(client: CloudClient) -> None:
            """List from the last name that arrived on."""
            nonlocal last
            import obstore

            folder = key.rpartition("/")[0] or None
            if not self._is_sorted:
                found.clear()
            listing = cast("Any", obstore.list)  # pyright: ignore[reportUnknownMemberType] - a form for pyarrow
            pages: AsyncIterator[Sequence[ObjectMeta]] = listing(
                client.store, folder, offset=last or None, chunk_size=_PAGE_ITEMS
            )
            async for page in pages:
                for meta in page:
                    uri = f"{self._scheme}://{bucket}/{meta['path']}"
                    if uri.startswith(prefix) and keep(uri):
                        found.append(self._file(uri, meta))
                    elif self._is_sorted and meta["path"] > key and not uri.startswith(prefix):
                        return
                    if self._is_sorted:
                        last = meta["path"]

        try:
            await ask(lambda: self._call(prefix, ask.policy, list_on))
        except NotThere:
            raise no_bucket(prefix) from None
        return await self._with_versions(found, ask)

    async def _with_versions(self, found: list[StoredFile], ask: Asker) -> list[StoredFile]:
        """Complete a listing by what only each object itself tells: its version, and whether an empty one is there.

        A folder's empty marker ``a/b/`` is listed as an object ``a/b``, which there is not.
        """
        places = asyncio.Semaphore(_MOST_AT_ONCE)
        heads: dict[str, StoredFile | None] = {}

        async def head(file: StoredFile) -> None:
            async with places:
                try:
                    heads[file.uri] = await self._head(file.uri, ask)
                except NotThere:
                    heads[file.uri] = None

        probe = next((file for file in found if file.size_bytes), None)
        has_versions = self._scheme == "gs"
        if probe is not None and self._scheme == "s3":
            try:
                await head(probe)
                has_versions = (heads[probe.uri] or probe).version != probe.version
            except DataError:  # listed, but not allowed to be read just now: its ETag pins it
                heads[probe.uri] = probe
        left = [file for file in found if file.uri not in heads and (has_versions or not file.size_bytes)]
        await asyncio.gather(*(head(file) for file in left))
        complete = (heads.get(file.uri, file) for file in found)
        return [file for file in complete if file is not None]

    async def send(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        assert file.version is not None
        kind, _, value = file.version.partition(":")
        pin = {"if_match": value} if kind == "etag" else {"version": value}
        position = start_byte

        async def get(client: CloudClient) -> None:
            nonlocal position
            import obstore

            options: Any = {"range": (start_byte, end_byte), **pin}
            answer = await obstore.get_async(client.store, split_bucket(file.uri)[1], options=options)
            now = self._file(file.uri, answer.meta)
            if now.size_bytes != file.size_bytes:
                failures.changed(file.uri, f"it has {now.size_bytes:,} bytes instead of {file.size_bytes:,}")
            if kind != "version" and now.version != file.version:
                failures.changed(file.uri, f"{file.version} became {now.version}")
            async for piece in answer.stream(min_chunk_size=1):  # every byte counts when the next one fails
                receive(piece)
                position += len(piece)

        try:
            await self._call(file.uri, policy, get)
        except NotThere:
            failures.gone(file.uri)
        except RefusedByCondition:
            failures.changed(file.uri)
        if position != end_byte:
            raise TransientError(f"the body ended {end_byte - position:,} bytes early")

    async def put(self, uri: str, content: Content, over: Over, ask: Asker) -> StoredFile:
        part_bytes = PART_BYTES * max(1, -(-content.size_bytes // (PART_BYTES * _MOST_PARTS)))
        in_parts = content.size_bytes > PART_BYTES
        etag, digest = await asyncio.to_thread(content.checksums, part_bytes if in_parts else None)
        mode: Any = "overwrite" if over == "anything" else "create"
        if isinstance(over, StoredFile):
            value = str(over.content if self._scheme == "s3" else over.version).partition(":")[2]
            mode = {"version": value} if self._scheme == "gs" else {"e_tag": value}

        async def put(client: CloudClient) -> tuple[StoredFile, bool]:
            """Return the object, and whether it is proven to be what was sent."""
            import obstore

            result = await obstore.put_async(
                client.upload_store if in_parts else client.store, split_bucket(uri)[1],
                content.data if in_parts else await asyncio.to_thread(content.read),
                mode=mode, use_multipart=in_parts, chunk_size=part_bytes, max_concurrency=_PARTS_AT_ONCE,
            )  # fmt: skip
            meta: Any = {**result, "size": content.size_bytes, "last_modified": _NEVER}
            proven = client.checks_bodies or (result["e_tag"] or "").strip('"') == etag
            return self._file(uri, meta), proven

        async def attempt() -> StoredFile:
            try:
                written, is_proven = await self._call(uri, ask.policy, put)
            except NotThere as missing:
                if str(missing) == "NoSuchKey":
                    raise RefusedByCondition from None
                if str(missing) == "NoSuchUpload":  # a try whose answer was lost has completed it
                    written, is_proven = await self._head(uri, ask), False
                else:
                    raise no_bucket(uri) from None
            if not is_proven and not await self.holds(written, digest, ask.policy):
                raise received_other_bytes(uri)
            return written

        return await ask(attempt, has_deadline=not in_parts)

    async def holds(self, file: StoredFile, digest: bytes, policy: RetryPolicy) -> bool:
        """Return whether an object has the content with an MD5, by reading it."""
        there = hashlib.md5(usedforsecurity=False)
        if file.size_bytes:
            await self.send(file, 0, file.size_bytes, there.update, policy)
        return there.digest() == digest

    async def remove(self, uri: str, ask: Asker) -> None:
        async def delete(client: CloudClient) -> None:
            import obstore

            await obstore.delete_async(client.store, split_bucket(uri)[1])

        with contextlib.suppress(NotThere):
            await ask(lambda: self._call(uri, ask.policy, delete))

    async def _call(self, uri: str, policy: RetryPolicy, work: Callable[[CloudClient], Awaitable[T]]) -> T:
        """Make one try, whose failures become ours."""
        client = await cloud_client(self._scheme, split_bucket(uri)[0], policy, uri)
        try:
            result = await work(client)
        except (DataError, ConfigError, TransientError, NotThere, RefusedByCondition):
            raise
        except Exception as error:
            failure = self._meaning(error, uri, policy, client)
            if isinstance(failure, _ExpiredError):
                if await renew(client):
                    raise TransientError("the credentials expired; they are read again") from None
                raise failure.refusal from None
            raise failure from None
        client.is_proven = True
        return result

    def _meaning(self, error: Exception, uri: str, policy: RetryPolicy, client: CloudClient) -> Exception:
        """Translate an error of obstore, whose own words may hold keys and signed addresses."""
        text = str(error)
        message, _, detail = text.partition("\n\nDebug source:")
        hint, name = CREDENTIALS_HINTS[self._scheme], STORE_NAMES[self._scheme]
        if (provider := _FROM_PROVIDER.search(message)) is not None:
            if _PASSING_PROVIDER_ERRORS.search(provider[1]):
                return NoConnection(f"no credentials came ({provider[1]})")
            return DataError(f"the credentials for {name} do not work ({provider[1]})", where=uri, hint=hint)
        if any(server in message for server in _METADATA_SERVERS):
            if client.is_proven:
                return TransientError("no new credentials came from this machine's metadata server")
            return DataError(f"there are no credentials for {name}", where=uri, hint=hint)
        if (status := _STATUS.search(detail)) is not None:
            code = _CODE.search(message)
            return self._meaning_of_status(int(status[1]), code[1] if code else "", uri, error)
        if "BareRedirect" in detail:
            return DataError("the bucket lies in another region", where=uri, hint="set AWS_REGION to its region")
        if "NotPartial" in detail:
            return failures.gives_no_parts(uri)
        if isinstance(error, ValueError) or "invalid path" in message:
            return ConfigError(
                f"{name} allows no such name, or obstore cannot read it (//, . and .. in names)", where=uri,
                hint="check the names of bucket and object; name files by patterns that leave such objects out",
            )  # fmt: skip
        if "certificate" in detail:
            return DataError(
                "the certificate of the server is not trusted", where=uri,
                hint="set SSL_CERT_FILE to the certificates of your network",
            )  # fmt: skip
        connects = "Connect" in detail
        if "Timeout" in detail or "TimedOut" in detail:
            late = f"no connection within {policy.connect_seconds:g} s"
            return NoConnection(late) if connects else TransientError(f"no byte for {policy.stall_seconds:g} s")
        if connects:
            return NoConnection(f"no connection to the endpoint of {name}")
        return TransientError("the body or the connection broke off")

    def _meaning_of_status(self, status: int, code: str, uri: str, error: Exception) -> Exception:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        hint = CREDENTIALS_HINTS[self._scheme]
        if code in _TRANSIENT_CODES:
            return TransientError(f"HTTP {status} ({code})")
        if isinstance(error, AlreadyExistsError | PreconditionError) and status in {409, 412}:
            return RefusedByCondition(code)
        if code in _CLOCK_CODES:
            return DataError(f"the store refuses access: {code} (HTTP {status})", where=uri, hint=_CLOCK_HINT)
        if code in _CREDENTIAL_CODES:
            refusal = DataError(f"the store refuses access: {code} (HTTP {status})", where=uri, hint=hint)
            return _ExpiredError(refusal) if code in _EXPIRED_CODES else refusal
        if status in {404, 405, 410} or code in _MISSING_CODES:
            return NotThere(code)
        try:
            raise_for_status(status, {}, uri=uri, credentials_hint=hint, message=code)
        except (TransientError, DataError) as failure:
            return _ExpiredError(failure) if status == 401 and isinstance(failure, DataError) else failure
        return TransientError(f"an answer that makes no sense (HTTP {status} {code})")

    def _file(self, uri: str, meta: ObjectMeta) -> StoredFile:
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
            content = None  # its ETags tell one write from another, not one content from another
        elif version not in {None, "null"}:
            pin = f"version:{version}"
        return StoredFile(uri, meta["size"], pin, nanoseconds, pin, content)


class _ExpiredError(Exception):
    """A refusal that other credentials may not meet."""

    def __init__(self, refusal: DataError) -> None:
        self.refusal = refusal
