"""Requests over HTTP: one background loop, one session per process, and what an answer means.

A request comes in; bytes come out piece by piece as they arrive, or a ``TransientError`` (may pass), a ``NotThere`` or
a ``DataError`` (will not). Nothing is retried here and nothing is retried by the libraries below. Invariants: bytes
are never decoded or decompressed on the way, an answer that is shorter than announced is a failure, and neither
addresses that were redirected to nor headers get into messages.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import io
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from vorox.core.errors import ConfigError, DataError
from vorox.core.installation import install_command
from vorox.core.redaction import redact
from vorox.data.storage.retry import NoConnection, RetryBudget, RetryPolicy, TransientError, retry_after_seconds

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

Receive = Callable[[bytes], None]
"""Takes the next bytes of a body."""

_TRANSIENT = frozenset({408, 425, 429})
_LASTING_SERVER_ERRORS = frozenset({501, 505})
_HUB_MISSING = frozenset({"RepoNotFound", "RevisionNotFound", "EntryNotFound"})


class NotThere(Exception):
    """The store says that there is no such object."""


class _Connections:
    def __init__(self) -> None:
        self.process = 0
        self.session: Any = None
        self.closers: dict[str, Callable[[], Awaitable[None]]] = {}
        self.kept: dict[str, Any] = {}


_connections = _Connections()
_inherited: list[_Connections] = []


def _of_this_process() -> _Connections:
    global _connections
    if _connections.process != os.getpid():
        # After a fork these are the parent's. They are never closed here, not even by the garbage collector: that
        # would take the parent's sockets out of the poll set that both processes share.
        _inherited.append(_connections)
        _connections = _Connections()
        _connections.process = os.getpid()
        atexit.register(_close_at_exit, os.getpid())
    return _connections


def _close_at_exit(process: int) -> None:
    if process == os.getpid():
        with contextlib.suppress(Exception):
            close_connections()


def event_loop() -> asyncio.AbstractEventLoop:
    """The background loop of this process, fsspec's own."""
    from fsspec import asyn  # pyright: ignore[reportMissingTypeStubs]

    return asyn.get_loop()


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin work on the background loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop())


def finish(future: Future[T], uri: str, budget: RetryBudget) -> T:
    """The result of begun work; that it is late is told as failed tries are."""
    try:
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=budget.policy.late_seconds)
        if future.done():
            return future.result()
        with budget.waits(uri) as wait:
            wait.because(f"no answer for {budget.policy.late_seconds:g} s", failed=False)
            return future.result()
    except BaseException:
        future.cancel()
        raise


def run(coroutine: Coroutine[Any, Any, T], uri: str, budget: RetryBudget) -> T:
    """Do work on the background loop and wait for it."""
    return finish(start(coroutine), uri, budget)


async def kept(name: str, make: Callable[[], Awaitable[tuple[T, Callable[[], Awaitable[None]]]]]) -> T:
    """An object that lives as long as the connections of this process: a client with its credentials.

    Args:
        name: What it is called.
        make: Makes it, and says how to close it.
    """
    connections = _of_this_process()
    if name not in connections.kept:
        made, close = await make()
        if name in connections.kept:  # somebody was faster while this waited
            await close()
        else:
            connections.kept[name], connections.closers[name] = made, close
    return connections.kept[name]


def close_connections() -> None:
    """Close every connection of this process. The next request opens new ones, with the environment as it is then."""
    connections = _of_this_process()
    if not connections.closers:
        return

    async def close() -> None:
        for name in list(connections.closers):
            connections.kept.pop(name, None)
            await connections.closers.pop(name)()

    start(close()).result(timeout=10)


async def http_session() -> aiohttp.ClientSession:
    """The session of this process: certificates by the environment, credentials only by headers."""
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError(
            "reading over http needs aiohttp, which is not installed", hint=install_command("http")
        ) from error

    async def make() -> tuple[aiohttp.ClientSession, Callable[[], Awaitable[None]]]:
        session = aiohttp.ClientSession(
            auto_decompress=False,
            trust_env=False,  # it would also send what ~/.netrc holds
            headers={"Accept-Encoding": "identity", "User-Agent": "vorox"},
            connector=aiohttp.TCPConnector(limit=64, limit_per_host=32),
        )
        return session, session.close

    return await kept("http", make)


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


def raise_for_status(
    status: int, headers: Mapping[str, str], *, uri: str, credentials_hint: str, message: str = ""
) -> None:
    """Pass a good answer, raise what the others mean.

    Args:
        message: What the server says about it, as far as it is known.
    """
    if status < 400:
        return
    said = f"HTTP {status}" + (f" ({redact(message)[:200]})" if message else "")
    if status in _TRANSIENT or (status >= 500 and status not in _LASTING_SERVER_ERRORS):
        raise TransientError(said, retry_after_seconds(headers.get("Retry-After")))
    if status in {404, 410} or headers.get("X-Error-Code") in _HUB_MISSING:
        raise NotThere(said)
    if status in {401, 403}:
        raise DataError(f"the store refuses access: {said}", where=uri, hint=credentials_hint)
    if status in {412, 416}:
        changed(uri)
    raise DataError(f"the store refuses the request: {said}", where=uri, hint="check the uri")


def changed(uri: str, what: str = "") -> NoReturn:
    """Refuse an object that is no longer the one that was listed."""
    raise DataError(
        f"the object changed after it was listed{f': {what}' if what else ''}", where=uri,
        hint="put the old object back, or run the same command again to use the new one; what was built from "
        "unchanged files is kept",
    )  # fmt: skip


def gone(uri: str) -> NoReturn:
    """Refuse an object that was listed and is no longer there."""
    changed(uri, "it is gone, or this version of it is")


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
        raise DataError(
            "the server gives no parts of files (it ignores Range)", where=uri,
            hint="copy the file to this machine and read it there",
        )  # fmt: skip
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
