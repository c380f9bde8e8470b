"""The secret that the ranks of a run share, and the seal by which they recognise each other's messages.

``vorox train --nproc`` draws one for every start and passes it on in the environment; the SLURM script of ``vorox
launch`` draws one for every job. Elsewhere, set ``VOROX_RANK_SECRET`` to the same value on all machines. Without a
secret, seals protect from other programs on the network and from damage, not from an attacker who knows Vorox.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping

SECRET = "VOROX_RANK_SECRET"  # noqa: S105
_SEAL_CHARACTERS = 64


def new_secret() -> str:
    """Draw a secret."""
    return secrets.token_hex(32)


def seal(message: bytes, purpose: str, environment: Mapping[str, str] | None = None) -> bytes:
    """Prepend an HMAC-SHA-256 of a message and its purpose (RFC 2104).

    Args:
        message: The message.
        purpose: What it is for, such as its key in a store: a message is valid for no other purpose.
        environment: Holds the secret. Default: the environment of this process.
    """
    return f"{_code(message, purpose, environment)} ".encode() + message


def unseal(sealed: bytes, purpose: str, environment: Mapping[str, str] | None = None) -> bytes | None:
    """Return the message that ``seal`` protected; ``None`` if it was changed, or sealed with another secret."""
    code, space, message = (
        sealed[:_SEAL_CHARACTERS],
        sealed[_SEAL_CHARACTERS : _SEAL_CHARACTERS + 1],
        sealed[_SEAL_CHARACTERS + 1 :],
    )
    if space != b" " or not hmac.compare_digest(code, _code(message, purpose, environment).encode()):
        return None
    return message


def _code(message: bytes, purpose: str, environment: Mapping[str, str] | None) -> str:
    secret = (os.environ if environment is None else environment).get(SECRET, "")
    return hmac.new(secret.encode(), f"vorox {purpose}\n".encode() + message, hashlib.sha256).hexdigest()
