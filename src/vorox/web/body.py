"""The JSON body of a request: bounded while it arrives, whatever length it declares."""

from __future__ import annotations

from starlette.requests import Request


class BodyRefused(Exception):
    """A body that is not read.

    Attributes:
        status: The HTTP status of the answer.
        reason: Why.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


async def json_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request.

    Raises:
        BodyRefused: It is not declared as JSON, which a form of another site cannot do, or is too large.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BodyRefused(415, "The content type must be application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            size = f"{max_bytes >> 20} MiB" if max_bytes >= 1 << 20 else f"{max_bytes >> 10} KiB"
            raise BodyRefused(413, f"The body is larger than {size}")
    return bytes(body)
