"""The listening socket and the token of a local server, from the options of its command."""

from __future__ import annotations

import secrets
import socket

from vorox.core.errors import ConfigError
from vorox.web.access import Access, is_loopback

_MIN_TOKEN_CHARACTERS = 8


def check_token(host: str, token: str | None, no_token: bool) -> None:
    """Refuse a server that others can reach without a token, and a token that is easy to guess.

    Raises:
        ConfigError: The options do not go together.
    """
    if no_token and not is_loopback(host):
        raise ConfigError(
            f"--host {host} is reachable from other machines and needs a token", where="--no-token",
            hint="remove --no-token, or listen on 127.0.0.1 and forward the port with ssh -L",
        )  # fmt: skip
    if token is not None and (no_token or len(token) < _MIN_TOKEN_CHARACTERS):
        raise ConfigError("The token has fewer than 8 characters" if not no_token else "A token contradicts --no-token",
                          where="--token", hint="leave it out for a random one")  # fmt: skip


def listen(
    host: str, port: int, token: str | None, no_token: bool, *, command: str, has_pages: bool
) -> tuple[socket.socket, Access]:
    """Listen on an address; return the socket and who may use the server.

    Raises:
        ConfigError: Nothing can listen there.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)  # clients can connect before the server has started
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {error.strerror}", where="--port", hint="use --port 0 for a free one"
        ) from error
    required = None if no_token else token or secrets.token_urlsafe(24)
    return listener, Access(host, listener.getsockname()[1], required, command, has_pages)
