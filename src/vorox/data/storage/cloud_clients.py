"""Clients of ``obstore`` for S3, Google Cloud Storage and Azure: endpoints, credentials, time limits.

A scheme, a bucket and a retry policy go in; a client that never retries comes out, because retries are counted and
reported by ``retry``. Credentials come from the environment: for S3 by the chain of botocore and for Google by that of
google-auth where these are installed, else by obstore's own. Invariant: no client is used in a process that was forked
from one that used obstore, because its threads do not survive a fork.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError, DataError
from vorox.data.storage import background
from vorox.data.storage.retry import RetryPolicy

CREDENTIALS_HINTS = {
    "s3": "give credentials that may read it by the environment: AWS_PROFILE, or AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; new ones if they expired",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a service account's file, or run gcloud auth application-default "
    "login",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY; or AZURE_CLIENT_ID, "
    "AZURE_CLIENT_SECRET and AZURE_TENANT_ID",
}
STORE_NAMES = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure"}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_UPLOAD_RETRIES = 8
_CREDENTIAL_SECONDS = 300
_IDENTITY = ("AWS_", "GOOGLE_", "AZURE_")
_used_in_process = 0


@dataclass(slots=True)
class CloudClient:
    """A bucket as obstore reaches it.

    Attributes:
        store: For single requests, each tried once.
        upload_store: For uploads in parts, each part of which obstore sends again by itself.
        name: What it is kept under.
        checks_bodies: Whether the store compares what it receives with a SHA-256 that is sent along.
        identity: What the credentials come from: other ones may work where these do not.
        is_proven: Whether the store has accepted a request of this client.
    """

    store: Any
    upload_store: Any
    name: str
    checks_bodies: bool
    identity: str
    is_proven: bool = False


async def cloud_client(scheme: str, bucket: str, policy: RetryPolicy, uri: str) -> CloudClient:
    """Return the client of this process for a bucket.

    Raises:
        ConfigError: The bucket's name is not allowed, or this process was forked from one that used obstore.
        DataError: There are no credentials.
    """
    name = f"{scheme}://{bucket} {policy.connect_seconds} {policy.stall_seconds}"

    async def make() -> tuple[CloudClient, background.Close]:
        async def close() -> None:
            return None

        return await asyncio.to_thread(_make, scheme, bucket, policy, uri, name), close

    return await background.client(name, make)


async def renew(client: CloudClient) -> bool:
    """Drop a client whose credentials expired; return whether a new one may have better ones."""
    renewable = client.is_proven and (client.identity == "" or client.identity != _environment())
    await background.drop_client(client.name)
    return renewable


def _make(scheme: str, bucket: str, policy: RetryPolicy, uri: str, name: str) -> CloudClient:
    global _used_in_process
    if _used_in_process not in {0, os.getpid()}:
        raise ConfigError(
            "this process was forked from one that has used a store, which cannot work", where=uri,
            hint="start it by spawn or forkserver: multiprocessing_context='spawn' for a DataLoader",
        )  # fmt: skip
    _used_in_process = os.getpid()
    if not _NAME.fullmatch(bucket):
        raise ConfigError(
            f"{STORE_NAMES[scheme]} allows no such name", where=uri, hint="check the names of bucket and object"
        )  # fmt: skip
    make = {"s3": _s3, "gs": _google, "az": _azure}[scheme]
    options: dict[str, Any] = {
        "allow_http": True,
        "connect_timeout": timedelta(seconds=policy.connect_seconds),
        "read_timeout": timedelta(seconds=policy.stall_seconds),
        "timeout": timedelta(seconds=policy.try_seconds),
        "user_agent": "vorox",
    }
    certificates = os.environ.get("SSL_CERT_FILE", "")
    if certificates and Path(certificates).is_file():
        options["root_certificate"] = Path(certificates).read_bytes()
    once = {"max_retries": 0, "retry_timeout": timedelta(seconds=policy.try_seconds)}
    again = {
        "max_retries": min(_UPLOAD_RETRIES, policy.retries_per_unit),
        "retry_timeout": timedelta(seconds=policy.try_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=policy.first_backoff_seconds),
            "max_backoff": timedelta(seconds=policy.longest_backoff_seconds),
        },
    }
    try:
        maker, settings = make(bucket, uri)
        checks_bodies = "checksum_algorithm" in settings
        identity = "" if "credential_provider" in settings else _environment()
        stores = [maker(bucket, client_options=options, retry_config=retry, **settings) for retry in (once, again)]
    except (ConfigError, DataError):
        raise
    except Exception as error:
        raise DataError(
            f"{STORE_NAMES[scheme]} cannot be used: {type(error).__name__}", where=uri, hint=CREDENTIALS_HINTS[scheme]
        ) from None
    return CloudClient(stores[0], stores[1], name, checks_bodies, identity)


def _environment() -> str:
    """Return what the environment says about credentials."""
    return "\n".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_IDENTITY))


def _is_set(*names: str) -> bool:
    return any(os.environ.get(name, "").lower() in {"1", "true", "yes", "on"} for name in names)


def _s3(bucket: str, uri: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    from obstore.store import S3Store

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    settings: dict[str, Any] = {"disable_bulk_delete": True}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if _is_set("AWS_SKIP_SIGNATURE", "FSSPEC_S3_ANON"):
        settings["skip_signature"] = True
    elif not (os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY")):
        chain = _aws_chain(uri)
        if chain is not None:
            settings["credential_provider"], configured_region, configured_endpoint = chain
            region, endpoint = region or configured_region, endpoint or configured_endpoint
    if endpoint:
        settings["endpoint"] = endpoint
    else:
        settings["checksum_algorithm"] = "sha256"
        region = _bucket_region(bucket) or region
    return S3Store, {**settings, "region": region or "us-east-1"}


def _bucket_region(bucket: str) -> str | None:
    """Ask Amazon where a bucket lies; ``None`` if it does not answer."""
    request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return answer.headers.get("x-amz-bucket-region")
    except urllib.error.HTTPError as error:
        return error.headers.get("x-amz-bucket-region")
    except (OSError, ValueError):
        return None


def _aws_chain(uri: str) -> tuple[Callable[[], Any], str | None, str | None] | None:
    """Credentials, region and endpoint by botocore: profiles, SSO, roles; ``None`` where it is not installed."""
    try:
        session: Any = importlib.import_module("botocore.session").get_session()
    except ImportError:
        return None
    credentials: Any = session.get_credentials()
    if credentials is None:
        raise DataError("there are no credentials for S3", where=uri, hint=CREDENTIALS_HINTS["s3"])

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_CREDENTIAL_SECONDS),
        }

    return provide, session.get_config_variable("region"), session.get_scoped_config().get("endpoint_url")


def _google(bucket: str, uri: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    from obstore.store import GCSStore

    del bucket, uri
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        address = emulator if "://" in emulator else f"http://{emulator}"
        return GCSStore, {"base_url": address, "skip_signature": True, "credential_provider": _no_token}
    try:
        auth: Any = importlib.import_module("google.auth")
        request: Any = importlib.import_module("google.auth.transport.requests").Request()
    except ImportError:
        return GCSStore, {}
    try:
        credentials: Any = auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])[0]
    except auth.exceptions.DefaultCredentialsError:
        return GCSStore, {"skip_signature": True, "credential_provider": _no_google_credentials}  # public buckets

    def provide() -> dict[str, Any]:
        if not credentials.valid:
            credentials.refresh(request)
        expiry: datetime | None = credentials.expiry
        return {"token": credentials.token, "expires_at": expiry and expiry.replace(tzinfo=UTC)}

    return GCSStore, {"credential_provider": provide}


def _no_token() -> dict[str, Any]:
    return {"token": "emulator", "expires_at": None}


def _no_google_credentials() -> dict[str, Any]:
    raise LookupError("there are no credentials")


def _azure(bucket: str, uri: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    from obstore.store import AzureStore

    del bucket, uri
    endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT")
    return AzureStore, {"endpoint": endpoint} if endpoint else {}
