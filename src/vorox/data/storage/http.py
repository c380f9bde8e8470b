"""Requests over HTTP for ``https://`` and ``hf://``: one session per process, every answer checked.

A request comes in; bytes come out piece by piece as they arrive, or a failure (see ``failures``). Nothing is retried
here or in the library below. Invariants: bytes are never decompressed on the way, an answer that is shorter than
announced is a failure, a server with a public address cannot redirect into a private network, and neither addresses
that were redirected to nor headers get into messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import ipaddress
import json
from collections.abc import AsyncGenerator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from vorox.core.errors import ConfigError, DataError
from vorox.core.installation import install_command
from vorox.core.redaction import redact
from vorox.data.storage import background
from vorox.data.storage.failures import changed, gives_no_parts, raise_for_status
from vorox.data.storage.remote import Receive
from vorox.data.storage.retry import NoConnection, RetryPolicy, TransientError

if TYPE_CHECKING:
    import aiohttp


async def http_session() -> aiohttp.ClientSession:
    """The session of this process: certificates by the environment, credentials only by headers."""
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError(
            "reading over http needs aiohttp, which is not installed", hint=install_command("http")
        ) from error

    async def make() -> tuple[aiohttp.ClientSession, background.Close]:
        redirects = aiohttp.TraceConfig()
        redirects.on_request_redirect.append(_refuse_private_target)
        session = aiohttp.ClientSession(
            trace_configs=[redirects],
            auto_decompress=False,
            trust_env=False,  # it would also send what ~/.netrc holds
            headers={"Accept-Encoding": "identity", "User-Agent": "vorox"},
            connector=aiohttp.TCPConnector(limit=64, limit_per_host=32),
        )
        return session, session.close

    return await background.client("http", make)


class _PrivateTarget(Exception):
    """A server with a public address redirects into a private network."""


async def _refuse_private_target(
    session: aiohttp.ClientSession, context: SimpleNamespace, redirect: aiohttp.TraceRequestRedirectParams
) -> None:
    del session, context
    here, target = redirect.url, redirect.response.headers.get("Location", "")
    if await _is_private(here.join(type(here)(target)).host or "") and not await _is_private(here.host or ""):
        raise _PrivateTarget


async def _is_private(host: str) -> bool:
    """Return whether a host has an address that is not one of the public internet."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError:
        return False  # no connection to it, or only a proxy knows it
    return not all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_global for *_, address in found)


def _proxy_of(url: str) -> str | None:
    """The proxy that the environment (``HTTPS_PROXY``, ``NO_PROXY`` ...) names for an address."""
    parts = urlsplit(url)
    proxies = getproxies()
    if not proxies or proxy_bypass(parts.netloc):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")


@contextlib.asynccontextmanager
async def request(
    method: str,
    url: str,
    *,
    uri: str,
    policy: RetryPolicy,
    headers: Mapping[str, str] | None = None,
    form: Mapping[str, str] | None = None,
    body: bytes | memoryview | None = None,
    session: aiohttp.ClientSession | None = None,
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """One try of a request.

    Args:
        uri: What it is about, for messages; the address itself is never shown.
        form: Sent as the body, as forms are.
        body: Sent as it is.

    Raises:
        TransientError: No connection, no byte for too long, or a body that broke.
    """
    session = session or await http_session()
    import aiohttp
    from yarl import URL

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=policy.connect_seconds, sock_read=policy.stall_seconds)
    try:
        async with session.request(
            method,
            URL(url, encoded=True),
            headers=headers,
            data=form if body is None else io.BytesIO(body),
            timeout=timeout,
            max_redirects=8,
            proxy=_proxy_of(url),
        ) as response:
            yield response
    except aiohttp.InvalidURL:
        raise DataError("this is no address", where=uri, hint="check the uri") from None
    except _PrivateTarget:
        raise DataError(
            "the server redirects to a private address", where=uri,
            hint="name the private address itself if it is yours, or copy the file to this machine",
        ) from None  # fmt: skip
    except aiohttp.TooManyRedirects:
        raise DataError("the server sends from one address to the next", where=uri, hint="check the uri") from None
    except (aiohttp.SocketTimeoutError, aiohttp.ConnectionTimeoutError, TimeoutError) as error:
        late = isinstance(error, aiohttp.ConnectionTimeoutError)
        what = (
            f"no connection within {policy.connect_seconds:g} s" if late else f"no byte for {policy.stall_seconds:g} s"
        )
        raise (NoConnection if late else TransientError)(what) from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise DataError(
            f"the certificate of the server is not trusted: {redact(str(error.certificate_error))}", where=uri,
            hint="set SSL_CERT_FILE to the certificates of your network",
        ) from None  # fmt: skip
    except aiohttp.ClientPayloadError:
        raise TransientError("the body broke off") from None
    except aiohttp.ClientConnectorError as error:
        raise NoConnection(f"no connection to {error.host}:{error.port} ({error.strerror or error.os_error})") from None
    except (aiohttp.ClientError, OSError) as error:
        raise TransientError(f"the connection broke ({type(error).__name__})") from None


def content_range(headers: Mapping[str, str]) -> tuple[int, int, int | None] | None:
    """``(start, end, size)`` of the part that an answer holds; ``None`` if it does not say."""
    value = headers.get("Content-Range", "")
    try:
        span, _, size = value.removeprefix("bytes").strip().partition("/")
        start, _, last = span.partition("-")
        return int(start), int(last) + 1, None if size == "*" else int(size)
    except ValueError:
        return None


async def receive_range(
    response: aiohttp.ClientResponse, start_byte: int, end_byte: int, size_bytes: int, *, uri: str, receive: Receive
) -> None:
    """Take the bytes ``[start, end)`` out of an answer, and make sure that they are these.

    Raises:
        TransientError: Too few bytes came.
        DataError: The server gives something else than it was asked for.
    """
    position = 0
    if response.status == 206:
        part = content_range(response.headers)
        if part is None or part[0] != start_byte:
            raise DataError(
                f"the server was asked for byte {start_byte:,} and gives {response.headers.get('Content-Range')!r}",
                where=uri, hint="copy the file to this machine and read it there",
            )  # fmt: skip
        if part[2] is not None and part[2] != size_bytes:
            changed(uri, f"it has {part[2]:,} bytes instead of {size_bytes:,}")
        position = start_byte
    elif start_byte > 0 or size_bytes > end_byte:
        raise gives_no_parts(uri)
    elif response.content_length is not None and response.content_length != size_bytes:
        changed(uri, f"it has {response.content_length:,} bytes instead of {size_bytes:,}")
    async for piece in response.content.iter_any():
        receive(piece[: end_byte - position])
        position += len(piece)
        if position >= end_byte:
            return
    raise TransientError(f"the body ended {end_byte - position:,} bytes early")


async def get_json(
    url: str,
    *,
    uri: str,
    policy: RetryPolicy,
    credentials_hint: str,
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
    form: Mapping[str, str] | None = None,
    session: aiohttp.ClientSession | None = None,
) -> tuple[Any, Mapping[str, str]]:
    """One try of a question that is answered in JSON: the answer and its headers."""
    async with request(
        method, url, uri=uri, policy=policy, headers=headers, form=form, session=session
    ) as response:  # fmt: skip
        content = await response.read()
        message = _message(response, content)
        raise_for_status(
            response.status, response.headers, uri=uri, credentials_hint=credentials_hint, message=message
        )  # fmt: skip
        try:
            return json.loads(content), response.headers
        except ValueError:
            raise TransientError("the answer is no JSON") from None


def _message(response: aiohttp.ClientResponse, content: bytes) -> str:
    """What a store says about its refusal: a header of the hub, or the JSON of the others."""
    if response.status < 400:
        return ""
    if told := response.headers.get("X-Error-Message"):
        return told
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)  # pyright: ignore[reportUnknownArgumentType]
    except (ValueError, KeyError, TypeError):
        return ""
