"""HTTP requests for ``https://`` and ``hf://``: one session per process, every response checked.

A request goes in; bytes come out as they arrive, or an error (see ``failures``). Neither this module nor aiohttp
retries. Invariants: response bodies are not decompressed, a response that is shorter than announced is an error, a
server with a public address cannot redirect into a private network, and messages contain neither headers nor the
targets of redirects.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.json_reader import parse_json
from vorox.core.platform.installation import install_command
from vorox.core.redaction import redact
from vorox.data.storage import connections
from vorox.data.storage.failures import no_range_support, raise_changed, raise_for_status
from vorox.data.storage.requests import NoConnection, RetryPolicy, TransientError
from vorox.data.storage.store import Receive

if TYPE_CHECKING:
    import aiohttp

_CONTENT_RANGE = re.compile(r"bytes\s+([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
MAX_JSON_BYTES = 1 << 26
"""A page of the hub's file list has about 300 kB."""


async def http_session() -> aiohttp.ClientSession:
    """Return this process's session. Certificates come from the environment, credentials only from headers."""
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError(
            "Reading over http needs aiohttp, which is not installed", hint=install_command("http")
        ) from error

    async def create() -> tuple[aiohttp.ClientSession, connections.Close]:
        redirects = aiohttp.TraceConfig()
        redirects.on_request_redirect.append(_refuse_private_target)
        session = aiohttp.ClientSession(
            trace_configs=[redirects],
            auto_decompress=False,
            trust_env=False,  # True would also send credentials from ~/.netrc
            headers={"Accept-Encoding": "identity", "User-Agent": "vorox"},
            connector=aiohttp.TCPConnector(
                limit=64, limit_per_host=32, use_dns_cache=False, resolver=_public_resolver(aiohttp.ThreadedResolver())
            ),
        )
        return session, session.close

    return await connections.client("http", create)


class _PrivateTarget(Exception):
    """A server with a public address redirected into a private network."""


_redirected_by_public: ContextVar[bool] = ContextVar("_redirected_by_public", default=False)
"""Whether the request of this task follows a redirect of a server with a public address."""


def _public_resolver(inner: Any) -> Any:
    """Return a resolver that finds no private addresses for a request that a public server has redirected.

    The addresses of the connection itself are checked: a name may have others than when its redirect was checked.
    """
    from aiohttp.abc import AbstractResolver

    class PublicResolver(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> Any:
            found = await inner.resolve(host, port, family)
            if _redirected_by_public.get() and not all(_is_public(one["host"]) for one in found):
                raise _PrivateTarget
            return found

        async def close(self) -> None:
            await inner.close()

    return PublicResolver()


def _is_public(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_global


async def _refuse_private_target(
    session: aiohttp.ClientSession, context: SimpleNamespace, redirect: aiohttp.TraceRequestRedirectParams
) -> None:
    del session, context
    here, target = redirect.url, redirect.response.headers.get("Location", "")
    if _redirected_by_public.get() or not await _is_private(here.host or ""):
        _redirected_by_public.set(True)
        if await _is_private(here.join(type(here)(target)).host or ""):
            raise _PrivateTarget


async def _is_private(host: str) -> bool:
    """Return whether any address of a host is outside the public internet."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError:
        return False  # unreachable, or known only to a proxy
    return not all(_is_public(str(address[0])) for *_, address in found)


def _proxy_of(url: str) -> str | None:
    """Return the proxy for a url from the environment (``HTTPS_PROXY``, ``NO_PROXY`` ...)."""
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
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """Send a request, without retries.

    Args:
        method: HTTP method.
        url: Its target, which is never shown.
        uri: The requested object, for messages.
        policy: Time limits.
        headers: Request headers.
        form: Body, sent url-encoded.

    Raises:
        TransientError: No connection, no byte for too long, or an incomplete body.
        DataError: The url is invalid, its redirects are refused, or the certificate is not trusted.
    """
    session = await http_session()
    import aiohttp
    from yarl import URL

    _redirected_by_public.set(False)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=policy.connect_seconds, sock_read=policy.stall_seconds)
    try:
        async with session.request(
            method,
            URL(url, encoded=True),
            headers=headers,
            data=form,
            timeout=timeout,
            max_redirects=8,
            proxy=_proxy_of(url),
        ) as response:
            yield response
    except (aiohttp.InvalidURL, ValueError):  # of the uri, or of a redirect
        raise DataError("The url is invalid, or the server redirects to one", where=uri, hint="check the uri") from None
    except _PrivateTarget:
        raise DataError(
            "The server redirects to a private address", where=uri,
            hint="use the private address itself if you trust it, or copy the file to this machine",
        ) from None  # fmt: skip
    except aiohttp.TooManyRedirects:
        raise DataError("The server redirects too many times", where=uri, hint="check the uri") from None
    except (aiohttp.SocketTimeoutError, aiohttp.ConnectionTimeoutError, TimeoutError) as error:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            raise NoConnection(f"no connection within {policy.connect_seconds:g} s") from None
        raise TransientError(f"no byte for {policy.stall_seconds:g} s") from None
    except aiohttp.ClientConnectorCertificateError as error:
        raise DataError(
            f"The certificate of the server is not trusted: {redact(str(error.certificate_error))}", where=uri,
            hint="set SSL_CERT_FILE to the CA certificates of your network",
        ) from None  # fmt: skip
    except aiohttp.ClientPayloadError:
        raise TransientError("the response ended early") from None
    except aiohttp.ClientConnectorError as error:
        raise NoConnection(f"no connection to {error.host}:{error.port} ({error.strerror or error.os_error})") from None
    except (aiohttp.ClientError, OSError) as error:
        raise TransientError(f"the connection broke ({type(error).__name__})") from None


def content_range(headers: Mapping[str, str]) -> tuple[int, int, int | None] | None:
    """Return ``(start, end, size)`` from a Content-Range header; ``None`` if it is missing or malformed."""
    found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if found is None:
        return None
    start, last, size = found.groups()
    return int(start), int(last) + 1, None if size == "*" else int(size)


async def receive_range(
    response: aiohttp.ClientResponse, start_byte: int, end_byte: int, size_bytes: int, *, uri: str, receive: Receive
) -> None:
    """Receive the bytes ``[start, end)`` from a response, after checking that it contains them.

    Raises:
        TransientError: The body is too short.
        DataError: The response contains another range or another file.
    """
    position = 0
    if response.status == 206:
        part = content_range(response.headers)
        if part is None or part[0] != start_byte:
            raise DataError(
                f"The server returned {response.headers.get('Content-Range')!r} instead of byte {start_byte:,}",
                where=uri, hint="copy the file to this machine and read it there",
            )  # fmt: skip
        if part[2] is not None and part[2] != size_bytes:
            raise_changed(uri, f"it has {part[2]:,} bytes instead of {size_bytes:,}")
        position = start_byte
    elif start_byte > 0 or size_bytes > end_byte:
        raise no_range_support(uri)
    elif response.content_length is not None and response.content_length != size_bytes:
        raise_changed(uri, f"it has {response.content_length:,} bytes instead of {size_bytes:,}")
    async for data in response.content.iter_any():
        receive(data[: end_byte - position])
        position += len(data)
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
) -> tuple[Any, Mapping[str, str]]:
    """Send a request, without retries; return the JSON of its response and the headers."""
    async with request(method, url, uri=uri, policy=policy, headers=headers, form=form) as response:
        content = await _bounded_body(response, uri)
        message = _error_message(response, content)
        raise_for_status(
            response.status, response.headers, uri=uri, credentials_hint=credentials_hint, message=message
        )  # fmt: skip
        try:
            return parse_json(content, uri), response.headers
        except ValueError:
            raise TransientError("the response is not JSON") from None


async def _bounded_body(response: aiohttp.ClientResponse, uri: str) -> bytes:
    """Return the body of a response.

    Raises:
        DataError: It is longer than ``MAX_JSON_BYTES``.
    """
    parts: list[bytes] = []
    left = MAX_JSON_BYTES
    async for part in response.content.iter_any():
        left -= len(part)
        if left < 0:
            raise unexpected_response(f"its answer has more than {MAX_JSON_BYTES:,} bytes", uri)
        parts.append(part)
    return b"".join(parts)


def unexpected_response(why: str, uri: str) -> DataError:
    """Return the error of a server whose answer is none of its protocol."""
    return DataError(
        f"Unexpected response from the server: {why}", where=uri,
        hint="check that the address (HF_ENDPOINT, a proxy) is that of the server",
    )  # fmt: skip


def _error_message(response: aiohttp.ClientResponse, content: bytes) -> str:
    """Return the store's explanation of an error: a header on the hub, JSON elsewhere."""
    if response.status < 400:
        return ""
    if message := response.headers.get("X-Error-Message"):
        return message
    try:
        error = parse_json(content, str(response.url))["error"]
        return str(error["message"] if isinstance(error, dict) else error)  # pyright: ignore[reportUnknownArgumentType]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
