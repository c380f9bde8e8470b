"""Clients of ``obstore`` for S3, Google Cloud Storage and Azure: endpoints, credentials, time limits.

A scheme, a bucket and a retry policy go in; a client without retries comes out, because ``retry`` counts and reports
them. Credentials come from the environment: for S3 through botocore's chain and for Google through google-auth's where
these are installed, else through obstore's own. Invariant: no client is used in a process that was forked from one that
used obstore, because its threads do not survive a fork.
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
from vorox.data.storage import connections
from vorox.data.storage.requests import RetryPolicy

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_UPLOAD_RETRIES = 8
_CREDENTIAL_SECONDS = 300
_CREDENTIAL_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_")
_used_in_process = 0


@dataclass(slots=True)
class CloudClient:
    """A client of one bucket.

    Attributes:
        store: For single requests, without retries.
        upload_store: For multipart uploads, whose parts obstore retries itself.
        name: Its name in ``connections``.
        checks_bodies: Whether the store compares uploads with a SHA-256 that is sent along.
        identity: The environment variables its credentials come from; empty if a provider renews them.
        has_worked: Whether the store has accepted a request of this client.
    """

    store: Any
    upload_store: Any
    name: str
    checks_bodies: bool
    identity: str
    has_worked: bool = False


async def cloud_client(scheme: str, bucket: str, policy: RetryPolicy, uri: str) -> CloudClient:
    """Return this process's client of a bucket.

    Raises:
        ConfigError: The bucket name is not allowed, or this process was forked from one that used obstore.
        DataError: No credentials were found.
    """
    name = f"{scheme}://{bucket} {policy.connect_seconds} {policy.stall_seconds}"

    async def create() -> tuple[CloudClient, connections.Close]:
        async def close() -> None:
            return None

        return await asyncio.to_thread(_create, scheme, bucket, policy, uri, name), close

    return await connections.client(name, create)


async def drop_expired(client: CloudClient) -> bool:
    """Drop a client whose credentials expired; return whether a new one may get valid ones."""
    renewable = client.has_worked and (client.identity == "" or client.identity != _credential_environment())
    await connections.drop_client(client.name)
    return renewable


def _create(scheme: str, bucket: str, policy: RetryPolicy, uri: str, name: str) -> CloudClient:
    global _used_in_process
    if _used_in_process not in {0, os.getpid()}:
        raise ConfigError(
            "This process was forked from one that has used a store, which is not supported", where=uri,
            hint="start it by spawn or forkserver: multiprocessing_context='spawn' for a DataLoader",
        )  # fmt: skip
    _used_in_process = os.getpid()
    cloud = CLOUDS[scheme]
    if not _NAME.fullmatch(bucket):
        raise ConfigError(
            f"{cloud.name} does not allow this name", where=uri, hint="check the names of bucket and object"
        )  # fmt: skip
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
    no_retries = {"max_retries": 0, "retry_timeout": timedelta(seconds=policy.try_seconds)}
    part_retries = {
        "max_retries": min(_UPLOAD_RETRIES, policy.retries_per_unit),
        "retry_timeout": timedelta(seconds=policy.try_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=policy.first_backoff_seconds),
            "max_backoff": timedelta(seconds=policy.longest_backoff_seconds),
        },
    }
    try:
        store_class, settings = cloud.connect(bucket, uri)
        checks_bodies = "checksum_algorithm" in settings
        identity = "" if "credential_provider" in settings else _credential_environment()
        stores = [
            store_class(bucket, client_options=options, retry_config=retry, **settings)
            for retry in (no_retries, part_retries)
        ]
    except (ConfigError, DataError):
        raise
    except Exception as error:
        raise DataError(
            f"The client for {cloud.name} cannot be created: {type(error).__name__}",
            where=uri,
            hint=cloud.credentials_hint,
        ) from None
    return CloudClient(stores[0], stores[1], name, checks_bodies, identity)


def _credential_environment() -> str:
    """Return the environment variables of credentials and their values."""
    return "\n".join(
        f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_CREDENTIAL_PREFIXES)
    )


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
    """Request the region of a bucket from Amazon; ``None`` if it does not respond."""
    request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
            return response.headers.get("x-amz-bucket-region")
    except urllib.error.HTTPError as error:
        return error.headers.get("x-amz-bucket-region")
    except (OSError, ValueError):
        return None


def _aws_chain(uri: str) -> tuple[Callable[[], Any], str | None, str | None] | None:
    """Return botocore's credential provider, region and endpoint (profiles, SSO, roles); ``None`` without botocore."""
    try:
        session: Any = importlib.import_module("botocore.session").get_session()
    except ImportError:
        return None
    credentials: Any = session.get_credentials()
    if credentials is None:
        raise DataError("No credentials for S3 were found", where=uri, hint=CLOUDS["s3"].credentials_hint)

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
    raise LookupError("no credentials")


def _azure(bucket: str, uri: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    from obstore.store import AzureStore

    del bucket, uri
    endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT")
    return AzureStore, {"endpoint": endpoint} if endpoint else {}


@dataclass(frozen=True, slots=True)
class Cloud:
    """What is particular to the stores of a scheme.

    Attributes:
        name: The service, for messages.
        credentials_hint: How to provide credentials, for messages.
        connect: Returns the class of obstore for a bucket (and the URI, for messages), and its settings.
    """

    name: str
    credentials_hint: str
    connect: Callable[[str, str], tuple[Callable[..., Any], dict[str, Any]]]


CLOUDS = {
    "s3": Cloud(
        "S3",
        "set credentials with access to it in the environment: AWS_PROFILE, or AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; renew them if they expired",
        _s3,
    ),
    "gs": Cloud(
        "Google Cloud Storage",
        "set GOOGLE_APPLICATION_CREDENTIALS to a service account file, or run gcloud auth application-default login",
        _google,
    ),
    "az": Cloud(
        "Azure",
        "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY; or AZURE_CLIENT_ID, "
        "AZURE_CLIENT_SECRET and AZURE_TENANT_ID",
        _azure,
    ),
}
"""By scheme; those of ``core/schema/train.py: OBJECT_STORES``."""
