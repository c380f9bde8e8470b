"""Access to a local server: token, Host and Origin checks, and the security headers of every response.

A browser page elsewhere must neither read nor operate a server. Every request needs the token: as a bearer token, or
for the pages of the dashboard once in the URL that the command prints and afterwards as a cookie that scripts cannot
read and other sites cannot send. The Host check defeats DNS rebinding; the Origin check refuses requests of other
pages.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlencode, urlsplit

from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_COOKIE_SECONDS = 30 * 86400


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a server.

    Attributes:
        host: The address that the server listens on.
        port: Its port; part of the cookie's name, because cookies do not distinguish ports.
        token: Required of every request; ``None`` on a loopback address requires none.
        command: The command that started the server, for messages.
        has_pages: Whether browsers open it: the token is then accepted in the URL and as a cookie, too.
    """

    host: str
    port: int
    token: str | None
    command: str = "vorox dash"
    has_pages: bool = True

    @property
    def cookie(self) -> str:
        return f"vorox_dash_{self.port}"

    def cookie_value(self) -> str:
        """Return the cookie: not the token, because a browser sends it to every port of this host name."""
        return hmac.digest((self.token or "").encode(), self.cookie.encode(), "sha256").hex()

    def url(self) -> str:
        """Return the URL of the server; one that has pages opens with it."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        in_url = self.token is not None and self.has_pages
        return f"http://{shown}:{self.port}/" + (f"?{urlencode({'token': self.token})}" if in_url else "")

    def refusal(self, request: HTTPConnection) -> tuple[int, str] | None:
        """Return status and reason if a request is refused, else ``None``."""
        host = request.headers.get("host", "")
        printed = f"Use the {'URL' if self.has_pages else 'URL and the token'} that `{self.command}` printed."
        if not self._is_own_name(host):
            return 403, f"Host {host[:100]} is not this server. {printed}"
        if self._is_of_another_site(request, host):
            return 403, "Requests of other sites are refused."
        if not self._has_token(request):
            return 401, f"The token is missing or wrong. {printed}"
        return None

    def _is_of_another_site(self, request: HTTPConnection, host: str) -> bool:
        """Whether a page of another site makes a request; a browser sends no Origin with images and links."""
        origin = request.headers.get("origin")
        if origin is not None and ((found := _split(origin)) is None or found.netloc.lower() != host.lower()):
            return True
        site, mode = request.headers.get("sec-fetch-site", "none"), request.headers.get("sec-fetch-mode", "")
        return site in {"cross-site", "same-site"} and mode != "navigate"

    def _is_own_name(self, host: str) -> bool:
        """Whether a Host header names this server; a page that rebinds its DNS name to this address sends its own."""
        found = _split(f"//{host}")
        name = "" if found is None else (found.hostname or "").lower()
        if name == "localhost" or is_loopback(name):
            return True
        if is_loopback(self.host):
            return False
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return bool(name) and name in {self.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    def _has_token(self, request: HTTPConnection) -> bool:
        if self.token is None:
            return True
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        accepted = [(bearer, self.token)]
        if self.has_pages:
            accepted += [
                (request.query_params.get("token", ""), self.token),
                (request.cookies.get(self.cookie, ""), self.cookie_value()),
            ]
        return any(hmac.compare_digest(text.encode(), expected.encode()) for text, expected in accepted)


def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url)
    except ValueError:  # as of brackets without an address
        return None


def plain(status: int, reason: str) -> Response:
    """Return a refusal as plain text."""
    return PlainTextResponse(reason + "\n", status)


Message = dict[str, object]
Application = Callable[..., Awaitable[None]]


class AccessMiddleware:
    """ASGI middleware: refuses what ``Access`` refuses, exchanges a token in the URL for a cookie, sets headers.

    Args:
        app: The application.
        access: Who may use it.
        refuse: Makes the answer to a refused request, from status and reason.
    """

    def __init__(self, app: Application, access: Access, refuse: Callable[[int, str], Response] = plain) -> None:
        self._app, self._access, self._refuse = app, access, refuse

    async def __call__(self, scope: Message, receive: object, send: Callable[[Message], Awaitable[None]]) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = message.get("headers") or []
                assert isinstance(given, list)
                message["headers"] = [*given, *((k.lower().encode(), v.encode()) for k, v in _HEADERS.items())]
            await send(message)

        refused = self._access.refusal(HTTPConnection(scope))
        answer = self._login(Request(scope)) if refused is None else self._refuse(*refused)
        await (answer or self._app)(scope, receive, send_with_headers)  # type: ignore[arg-type]

    def _login(self, request: Request) -> Response | None:
        access = self._access
        is_login = access.has_pages and request.url.path == "/" and "token" in request.query_params
        if access.token is None or not is_login:
            return None
        response = RedirectResponse("/", 303)
        response.set_cookie(
            access.cookie, access.cookie_value(), max_age=_COOKIE_SECONDS, httponly=True, samesite="strict"
        )
        return response
