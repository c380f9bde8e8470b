"""``s3://``: Amazon S3 and what speaks like it, with the client, credentials and endpoint of s3fs.

In a bucket that keeps versions an object is pinned by its VersionId, and old bytes are read even after it was
replaced; elsewhere by its ETag with ``If-Match``, and a replaced object is an error. Neither s3fs nor the client below
it retries: that is done here, within the budget. What is put is sent with its MD5, which the store checks, and held
against the ETag that it answers with where that is one.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, cast

from vorox.core.errors import ConfigError, DataError
from vorox.core.installation import install_command
from vorox.core.redaction import redact
from vorox.data.storage import transport
from vorox.data.storage.google import no_bucket, split_bucket
from vorox.data.storage.locations import StoredFile
from vorox.data.storage.remote import Asker, Keep
from vorox.data.storage.retry import NoConnection, RetryPolicy, TransientError, retry_after_seconds
from vorox.data.storage.transport import NotThere, Receive, content_range
from vorox.data.storage.writing import PART_BYTES, Content, Over, RefusedByCondition, md5, received_other_bytes

_CREDENTIALS_HINT = (
    "give credentials that may read it by the environment: AWS_PROFILE, or AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
    "and AWS_SESSION_TOKEN; new ones if they expired"
)
_TRANSIENT_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "InternalError",
     "ServiceUnavailable", "OperationAborted"}
)  # fmt: skip
_CREDENTIAL_CODES = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId",
     "SignatureDoesNotMatch", "AccessDenied", "AllAccessDisabled", "AccountProblem", "RequestTimeTooSkewed", "401",
     "403"}
)  # fmt: skip
_MISSING_CODES = frozenset({"404", "NoSuchKey", "NoSuchVersion", "NoSuchBucket", "NotFound"})
_UNTOLD_CODES = frozenset({"AccessDenied", "403", "NotImplemented", "MethodNotAllowed"})
_CONDITION_CODES = frozenset({"PreconditionFailed", "412"})
_MOST_PARTS = 9_000
_READ_BYTES = 1 << 20
_PAGE_ITEMS = 1000


class AmazonStore:
    """Buckets of S3, or of the endpoint that ``AWS_ENDPOINT_URL_S3`` names."""

    async def describe(self, uri: str, ask: Asker) -> StoredFile | None:
        bucket, key = split_bucket(uri)
        if not key:
            return None

        async def attempt() -> Mapping[str, Any] | None:
            async with _client(uri, ask.policy) as client:
                try:
                    return await client.head_object(Bucket=bucket, Key=key)
                except client.exceptions.ClientError as error:
                    if error.response.get("Error", {}).get("Code") in {"400", "403"}:
                        return None  # a HEAD does not say why; the search below does, or finds it
                    raise

        try:
            head = await ask(attempt)
        except NotThere:
            return None
        if head is None:
            found = await self.search(uri, lambda found: found == uri, ask)
            return found[0] if found else None
        return _file(uri, head["ContentLength"], head["ETag"], head.get("VersionId"), head.get("LastModified"))

    async def search(self, prefix: str, keep: Keep, ask: Asker) -> list[StoredFile]:
        bucket, key = split_bucket(prefix)
        versions = await self._has_versions(bucket, prefix, ask)
        found: list[StoredFile] = []
        after: dict[str, str] = {}
        while True:

            async def attempt(after: dict[str, str] = after) -> Mapping[str, Any]:
                async with _client(prefix, ask.policy) as client:
                    listing = client.list_object_versions if versions else client.list_objects_v2
                    return await listing(Bucket=bucket, Prefix=key, MaxKeys=_PAGE_ITEMS, **after)

            try:
                page: Mapping[str, Any] = await ask(attempt)
            except NotThere:
                raise no_bucket(prefix) from None
            for item in page.get("Versions" if versions else "Contents", []):
                uri = f"s3://{bucket}/{item['Key']}"
                if item.get("IsLatest", True) and not uri.endswith("/") and keep(uri):
                    found.append(
                        _file(uri, item["Size"], item["ETag"], item.get("VersionId"), item.get("LastModified"))
                    )
            if not page.get("IsTruncated"):
                return found
            if versions:
                after = {"KeyMarker": page["NextKeyMarker"], "VersionIdMarker": page["NextVersionIdMarker"]}
            else:
                after = {"ContinuationToken": page["NextContinuationToken"]}

    async def _has_versions(self, bucket: str, uri: str, ask: Asker) -> bool:
        """Whether the bucket keeps versions; one that does not tell is pinned by ETags."""

        async def attempt() -> bool:
            async with _client(uri, ask.policy) as client:
                try:
                    answer = await client.get_bucket_versioning(Bucket=bucket)
                except client.exceptions.ClientError as error:
                    if error.response.get("Error", {}).get("Code") in _UNTOLD_CODES:
                        return False
                    raise
                return answer.get("Status") in {"Enabled", "Suspended"}

        try:
            return await ask(attempt)
        except NotThere:
            raise no_bucket(uri) from None

    async def send(
        self, file: StoredFile, start_byte: int, end_byte: int, receive: Receive, policy: RetryPolicy
    ) -> None:
        assert file.version is not None
        bucket, key = split_bucket(file.uri)
        kind, _, value = file.version.partition(":")
        pin = {"VersionId": value} if kind == "version" else {"IfMatch": value}
        async with _client(file.uri, policy) as client:
            try:
                answer = await client.get_object(
                    Bucket=bucket, Key=key, Range=f"bytes={start_byte}-{end_byte - 1}", **pin
                )
            except client.exceptions.ClientError as error:
                if error.response.get("Error", {}).get("Code") in {*_MISSING_CODES, "MethodNotAllowed", "405"}:
                    transport.gone(file.uri)
                raise
            async with answer["Body"] as body:
                part = content_range({"Content-Range": answer.get("ContentRange", "")})
                if part != (start_byte, end_byte, file.size_bytes):
                    transport.changed(file.uri, f"asked for bytes {start_byte:,}-{end_byte:,}, it gives {part}")
                if kind == "etag" and answer["ETag"] != value:
                    transport.changed(file.uri, f"its ETag {value} became {answer['ETag']}")
                position = start_byte
                while piece := await body.read(_READ_BYTES):
                    receive(piece)
                    position += len(piece)
        if position != end_byte:
            raise TransientError(f"the body ended {end_byte - position:,} bytes early")

    async def put(self, uri: str, content: Content, over: Over, ask: Asker) -> StoredFile:
        size = content.size_bytes
        if size > PART_BYTES:
            return await _put_in_parts(uri, content, over, ask)
        data, digest = await content.part(0, size)

        async def attempt() -> Mapping[str, Any]:
            bucket, key = split_bucket(uri)
            async with _client(uri, ask.policy) as client, _conditions_told(client):
                return await client.put_object(
                    Bucket=bucket, Key=key, Body=data, ContentMD5=_base64(digest), **_condition(over)
                )

        return await ask(lambda: _proven(uri, attempt, digest.hex(), size))

    async def remove(self, uri: str, ask: Asker) -> None:
        bucket, key = split_bucket(uri)

        async def attempt() -> None:
            async with _client(uri, ask.policy) as client:
                await client.delete_object(Bucket=bucket, Key=key)

        with contextlib.suppress(NotThere):
            await ask(attempt)


async def _put_in_parts(uri: str, content: Content, over: Over, ask: Asker) -> StoredFile:
    """A multipart upload, whose parts are tried again one by one; what is not completed is taken back."""
    size, place = content.size_bytes, dict[str, str](zip(("Bucket", "Key"), split_bucket(uri), strict=True))
    part_bytes = PART_BYTES * -(-size // (PART_BYTES * _MOST_PARTS))

    async def call(verb: str, **arguments: Any) -> Mapping[str, Any]:
        async with _client(uri, ask.policy) as client, _conditions_told(client):
            return await getattr(client, verb)(**place, **arguments)

    place["UploadId"] = (await ask(lambda: call("create_multipart_upload")))["UploadId"]
    parts: list[dict[str, Any]] = []
    digests: list[bytes] = []
    try:
        for number, start in enumerate(range(0, size, part_bytes), start=1):
            data, digest = await content.part(start, min(start + part_bytes, size))

            async def send(number: int = number, data: bytes = data, digest: bytes = digest) -> Mapping[str, Any]:
                return await call("upload_part", PartNumber=number, Body=data, ContentMD5=_base64(digest))

            answer = await ask(lambda send=send, digest=digest: _checked(uri, send, digest.hex()))
            parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            digests.append(digest)
        whole = f"{md5(b''.join(digests)).hex()}-{len(parts)}"

        async def complete() -> Mapping[str, Any]:
            try:
                return await call("complete_multipart_upload", MultipartUpload={"Parts": parts}, **_condition(over))
            except NotThere:  # perhaps because a try whose answer was lost has completed it
                async with _client(uri, ask.policy) as client:
                    there = await client.head_object(Bucket=place["Bucket"], Key=place["Key"])
                if there["ETag"].strip('"') == whole:
                    return there
                raise DataError("the store forgot an upload that had begun", where=uri) from None

        return await ask(lambda: _proven(uri, complete, whole, size))
    except BaseException:
        with contextlib.suppress(Exception):
            await call("abort_multipart_upload")
        raise


Call = Callable[[], Awaitable[Mapping[str, Any]]]


async def _checked(uri: str, call: Call, etag: str) -> Mapping[str, Any]:
    """The answer to a write, unless its ETag is a checksum and another one."""
    try:
        answer = await call()
    except NotThere:
        raise no_bucket(uri) from None
    told = answer["ETag"].strip('"')
    keyed = str(answer.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in answer
    if not keyed and re.fullmatch(r"[0-9a-f]{32}(-\d+)?", told) and told != etag:
        raise received_other_bytes(uri)
    return answer


async def _proven(uri: str, call: Call, etag: str, size_bytes: int) -> StoredFile:
    """The object that a write made."""
    answer = await _checked(uri, call, etag)
    return _file(uri, size_bytes, answer["ETag"], answer.get("VersionId"), None)


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _condition(over: Over) -> dict[str, str]:
    if isinstance(over, StoredFile):
        return {"IfMatch": str(over.content).removeprefix("etag:")}
    return {"IfNoneMatch": "*"} if over == "nothing" else {}


@contextlib.asynccontextmanager
async def _conditions_told(client: Any) -> AsyncGenerator[None]:
    """Tell a condition that does not hold from other failures."""
    try:
        yield
    except client.exceptions.ClientError as error:
        code = error.response.get("Error", {}).get("Code")
        if code in _CONDITION_CODES:
            raise RefusedByCondition from None
        if code == "ConditionalRequestConflict":
            raise TransientError("two writes met") from None
        raise


def _file(uri: str, size_bytes: int, etag: str, version: str | None, modified: Any) -> StoredFile:
    pin = f"version:{version}" if version not in {None, "null"} else f"etag:{etag}"
    nanoseconds = int(modified.timestamp()) * 1_000_000_000 if modified else 0
    return StoredFile(uri, size_bytes, pin, nanoseconds, pin, f"etag:{etag}")


@contextlib.asynccontextmanager
async def _client(uri: str, policy: RetryPolicy) -> AsyncGenerator[Any]:
    """The client of this process for one try, whose failures become ours."""
    client = await transport.kept(f"s3 {policy.connect_seconds} {policy.stall_seconds}", lambda: _make(policy))
    import aiohttp
    from botocore import exceptions, parsers  # pyright: ignore[reportMissingTypeStubs]

    try:
        yield client
    except exceptions.ClientError as error:
        raise _meaning(cast("Mapping[str, Any]", error.response), uri) from None  # its own words may hold keys
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.CredentialRetrievalError):
        raise DataError("there are no credentials for S3", where=uri, hint=_CREDENTIALS_HINT) from None
    except (exceptions.TokenRetrievalError, exceptions.SSOError, exceptions.ProfileNotFound) as error:
        raise DataError(
            f"the credentials for S3 do not work ({type(error).__name__})", where=uri, hint=_CREDENTIALS_HINT
        ) from None
    except exceptions.ParamValidationError:
        raise ConfigError("S3 allows no such name", where=uri, hint="check the names of bucket and object") from None
    except (exceptions.ConnectTimeoutError, aiohttp.ConnectionTimeoutError):
        raise NoConnection(f"no connection within {policy.connect_seconds:g} s") from None
    except (exceptions.ReadTimeoutError, aiohttp.SocketTimeoutError, TimeoutError):
        raise TransientError(f"no byte for {policy.stall_seconds:g} s") from None
    except exceptions.ConnectionError:
        raise NoConnection("no connection to the endpoint of S3") from None
    except (exceptions.HTTPClientError, exceptions.IncompleteReadError, aiohttp.ClientPayloadError):
        raise TransientError("the body or the connection broke off") from None
    except (parsers.ResponseParserError, aiohttp.ClientError, OSError) as error:
        raise TransientError(f"the connection broke ({type(error).__name__})") from None
    except exceptions.BotoCoreError as error:
        raise DataError(
            f"S3 cannot be used: {type(error).__name__}: {redact(str(error))}", where=uri,
            hint="check the AWS_ variables of the environment and ~/.aws",
        ) from None  # fmt: skip


def _meaning(response: Mapping[str, Any], uri: str) -> Exception:
    """What an answer that is an error stands for."""
    code = str(response.get("Error", {}).get("Code", ""))
    metadata = response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    if code in _CREDENTIAL_CODES:
        return DataError(f"the store refuses access: {code} (HTTP {status})", where=uri, hint=_CREDENTIALS_HINT)
    if code in _MISSING_CODES:
        return NotThere(code)
    headers = {name.title(): value for name, value in metadata.get("HTTPHeaders", {}).items()}
    if code in _TRANSIENT_CODES:
        return TransientError(f"HTTP {status} ({code})", retry_after_seconds(headers.get("Retry-After")))
    message = "" if code.isdigit() else code
    try:
        transport.raise_for_status(status, headers, uri=uri, credentials_hint=_CREDENTIALS_HINT, message=message)
    except (TransientError, NotThere, DataError) as error:
        return error
    return TransientError(f"an answer that makes no sense (HTTP {status} {code})")


async def _make(policy: RetryPolicy) -> tuple[Any, Callable[[], Awaitable[None]]]:
    try:
        from s3fs import S3FileSystem  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise ConfigError("s3:// needs s3fs, which is not installed", hint=install_command("s3")) from error
    system: Any = S3FileSystem(
        asynchronous=True,
        loop=transport.event_loop(),
        skip_instance_cache=True,
        config_kwargs={
            "retries": {"total_max_attempts": 1},
            "connect_timeout": policy.connect_seconds,
            "read_timeout": policy.stall_seconds,
            "max_pool_connections": 32,
        },
    )
    client: Any = await system.set_session()
    return client, client.close
