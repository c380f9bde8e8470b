"""Redaction of secrets, recognised by form, name or value, in everything that is written or shown.

A text or plain JSON value goes in; the same with every secret replaced by ``[redacted]`` comes out. A secret is
recognised by its form (credentials in a URL, tokens with a known prefix, private keys), by its name (``api_key=...``,
``"password": "..."``, ``--hf-token ...``), or by its value: that of an environment variable with such a name, or one
that was registered with ``hold_secret``. Numbers under names such as ``num_tokens`` are not secrets. In doubt, the
text is redacted. ``redact`` is idempotent.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

MARK = "[redacted]"
MIN_ENVIRONMENT_SECRET = 8
"""Length of a secret; shorter values, such as the ``test`` of a local store, occur in ordinary text."""

# Credentials of a URL: up to the last @, because a password may contain / ? # and @ unescaped.
_ADDRESS = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]{0,30}+://)(?!USER:PASSWORD@HOST\b)(?:[^\s/?#\"'<>]*@(?:[^\s\"'<>]*@)?|[^\s/?#:\"'<>]*:(?!\d+(?:[/?#]|$))[^\s\"'<>]*@)"
)
# The same without a scheme, if no email address, such as Email:a@b.org: a port or a path follows, or the host is a
# number or localhost.
_BARE_ADDRESS = re.compile(
    r"(?<![\w@/:.+%\-])(?!(?:mailto|e-?mail|mail|from|to|b?cc|reply-to|contact|author|sip|xmpp|acct):)"
    r"[A-Z_][\w.+\-]{0,64}:[^\s:/\"'<>,;()\[\]{}]{1,128}@"
    r"(?=(?!sha\d)(?:(?:localhost|\d{1,3}(?:\.\d{1,3}){3})\b|[A-Z0-9][A-Z0-9.\-]{0,250}(?::\d{1,5}(?!\w)|/)))",
    re.IGNORECASE,
)
_FORMS = tuple(
    re.compile(pattern)
    for pattern in (
        r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)",
        r"https?://[\w.\-]+(?::\d+)?/hooks/[A-Za-z0-9_/\-]{16,}",
        r"https?://[\w.\-]+\.(?:webhook\.office|logic\.azure)\.com(?::\d+)?/[^\s\"'<>]+",
        r"(?<![A-Za-z0-9])(?:hf|api_org)_(?=[A-Za-z]*[0-9A-Z])[A-Za-z0-9]{6,}",
        r"(?<![A-Za-z0-9])(?:hf|api_org)_[A-Za-z0-9]{20,}",
        r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA|AROA|AIDA)[0-9A-Z]{12,}",
        r"(?<![A-Za-z0-9])sk-(?=[A-Za-z_\-]*[0-9A-Z])[A-Za-z0-9_\-]{6,}",
        r"(?<![A-Za-z0-9])(?:gh[opusr]|glpat|xox[abeprs]|npm|pypi|dop_v1|rk_live|sk_live|sk_test)[_\-][A-Za-z0-9_\-]{10,}",
        r"(?<![A-Za-z0-9])github_pat_[A-Za-z0-9_]{10,}",
        r"(?<![A-Za-z0-9])AIza[0-9A-Za-z_\-]{30,}",
        r"(?<![A-Za-z0-9])ya29\.[0-9A-Za-z_\-]{10,}",
        r"(?<=://)hooks\.slack\.com/[^\s\"'<>]+",
        r"(?<=://)(?:\w+\.)?discord(?:app)?\.com/api/webhooks/[^\s\"'<>]+",
        r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)?",
    )
)
_AUTHORIZATION = re.compile(
    r"(?i)(?P<name>\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer|token|digest|negotiate)\s+)?)"
    r"(?P<value>\[redacted\]|[^\s\"',]+)"
)
_WEBHOOK = re.compile(
    r"(?i)(?P<name>\bwebhook(?:[_-]?url)?[\"']?\s*[:=]\s*[\"']?)(?P<value>[a-z][a-z0-9+.\-]*://[^\s\"',]+)"
)
"""The address of a webhook is its secret."""
_BEARER = re.compile(r"(?i)(?P<name>\bbearer\s+)(?P<value>[A-Za-z0-9._~+/=\-]{6,})")
# Possessive: nothing that follows a name can start inside one, so backtracking to a shorter name is useless.
_NAME = re.compile(
    r"(?<!\w)(?P<flag>--)?(?P<name>\w[\w.\-]{0,200}+)\\{0,8}[\"']?"
    r"(?P<separator>\s{0,20}[!:=]{0,3}[=:]>?\s{0,20}|(?<=\w) {1,20}(?=[^\s\-]))"
)
_VALUE = re.compile(
    r"\[redacted\]|(?P<around>\\{0,8}[\"'])(?P<inner>(?:\\.|.)*?)(?P=around)|[^\s]+",
    re.DOTALL,
)

_ALWAYS = ("password", "passwd", "passphrase", "secret", "credential", "signature", "privatekey")
_UNLESS_PLAIN = ("apikey", "accesskey", "accountkey", "authkey", "encryptionkey", "signingkey", "subscriptionkey")
_CONSTANT = re.compile(r"[A-Z0-9]+(?:_[A-Z0-9]+)*_(?:PASS|PAT|COOKIE)")
"""Environment variables of passwords, personal access tokens and cookies."""
_PASSES = frozenset({"forward", "backward", "first", "second", "last", "next", "single", "one", "low", "high", "band"})
"""Words before a pass that is no password."""
_PLAIN_VALUE = re.compile(
    r"[-+]?[\d_,.]*\d(?:[eE][-+]?\d+)?[kKMGTB%]?|true|false|null|none|yes|no|~|<.*>|VALUE\.?|", re.IGNORECASE
)
_TOKEN_END = re.compile(r"[\s,;&)\]}\"']")


_held: dict[str, str] = {}


def hold_secret(name: str, value: str) -> None:
    """Keep a secret in memory for this process: it is never written, and redacted in all output.

    Args:
        name: The environment variable that would hold it.
        value: Such as a connection string from a configuration file.
    """
    _held[name] = value


def held_secret(name: str) -> str | None:
    """Return the secret kept under a name, if any."""
    return _held.get(name)


def redact(text: str) -> str:
    """Return the text without its secrets."""
    return _redact(text, _environment_secrets())


def _redact(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, MARK)
    text = _ADDRESS.sub(rf"\g<scheme>{MARK}@", text)
    text = _BARE_ADDRESS.sub(f"{MARK}@", text)
    for form in _FORMS:
        text = form.sub(MARK, text)
    text = _AUTHORIZATION.sub(rf"\g<name>{MARK}", text)
    text = _BEARER.sub(rf"\g<name>{MARK}", text)
    text = _WEBHOOK.sub(rf"\g<name>{MARK}", text)
    return _redact_named(text)


def redact_value(value: Any, name: str = "") -> Any:
    """Return a plain JSON value without its secrets; keys of mappings count as names.

    Args:
        value: Texts, numbers, lists and mappings; other objects become their (redacted) text.
        name: The key of the value, if any.
    """
    return _redact_value(value, name, _environment_secrets())


def _redact_value(value: Any, name: str, secrets: Sequence[str]) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return MARK if value is not None and not isinstance(value, bool) and _kind(name) == "always" else value
    if isinstance(value, Mapping):
        items = cast("Mapping[object, Any]", value).items()
        return {_redact(str(key), secrets): _redact_value(item, str(key), secrets) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redact_value(item, name, secrets) for item in cast("Sequence[Any]", value)]
    text = str(value)
    return MARK if name.lower() != "key" and _is_secret(name, text) else _redact(text, secrets)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without its secrets, including the value that follows ``--password``."""
    redacted: list[str] = []
    for index, argument in enumerate(arguments):
        before = arguments[index - 1] if index else ""
        named = before.startswith("-") and "=" not in before and not argument.startswith("-")
        redacted.append(MARK if named and _is_secret(before.lstrip("-"), argument) else redact(argument))
    return redacted


def _redact_named(text: str) -> str:
    """Replace the values of sensitive names. Scans step by step: a value that is kept may itself contain a name."""
    pieces: list[str] = []
    kept, position = 0, 0
    while (match := _NAME.search(text, position)) is not None:
        position = match.end("name")  # a name that is not sensitive may be followed by another name
        found = _VALUE.match(text, match.end()) if _is_sensitive(match) else None
        if found is None or not _is_secret(match["name"], value := _cut(found[0], match["name"])):
            continue
        around = found["around"] or ""
        pieces += [text[kept : match.end()], around, MARK, around]
        kept = position = match.end() + len(value)
    return "".join([*pieces, text[kept:]])


def _is_sensitive(match: re.Match[str]) -> bool:
    """Whether a secret follows a name and its separator; after a blank, only if the name is a flag."""
    if not match["separator"].strip():
        return bool(match["flag"] and _kind(match["name"]))
    is_word = match["name"].lower() == "key" or _ends_in_pass(match["name"])
    is_quoted = match.string[match.end("name") : match.start("separator")].endswith(("'", '"'))
    is_prose = is_word and "=" not in match["separator"] and not (is_quoted and match["name"].lower() != "key")
    return bool(_kind(match["name"])) and not is_prose


def _cut(value: str, name: str) -> str:
    """Truncate a bare value at a bracket or comma, except where these may be part of a password."""
    if value[0] in "\"'\\" or value.startswith(MARK) or _kind(name) == "always":
        return value
    end = _TOKEN_END.search(value)
    return value[: end.start()] if end else value


def _is_secret(name: str, value: str) -> bool:
    kind = _kind(name)
    if kind == "always":
        return not (name.upper() in {"PWD", "OLDPWD"} and value.startswith("/"))
    bare = value.strip("\"'\\")
    return kind == "unless_plain" and _PLAIN_VALUE.fullmatch(bare) is None


@functools.lru_cache(maxsize=4096)
def _kind(name: str) -> str:
    """Return ``always`` if any value of a name is secret, ``unless_plain`` if a number is not, else an empty string."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    joined = re.sub(r"tokeni[sz]\w*", "", "".join(words))
    if any(part in joined for part in _ALWAYS) or {"pwd", "sig"} & set(words):
        return "always"
    if _CONSTANT.fullmatch(name):
        return "unless_plain"
    if any(part in joined for part in _UNLESS_PLAIN) or joined.endswith("key") or words[-2:] == ["key", "id"]:
        return "unless_plain"
    if _ends_in_pass(name):
        return "unless_plain"
    if "tokens" in words and not {"access", "auth", "api", "refresh", "bearer"} & set(words):
        return ""  # a number of tokens
    return "unless_plain" if "token" in joined else ""


@functools.lru_cache(maxsize=4096)
def _ends_in_pass(name: str) -> bool:
    """Whether a name is ``pass`` or ``pw``, or one such as ``smtp_pass``, but not a pass over something."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]
    return words[-1:] in (["pass"], ["pw"]) and not _PASSES.intersection(words)


def _environment_secrets() -> list[str]:
    """Return the held secrets and the values of environment variables with a sensitive name, longest first."""
    found = {
        value
        for name, value in os.environ.items()
        if len(value) >= MIN_ENVIRONMENT_SECRET and _is_secret(name, value) and not _is_path(value)
    }
    return sorted({*found, *_held.values()}, key=len, reverse=True)


def _is_path(value: str) -> bool:
    return value.startswith(("/", "~")) and len(value) < 4096 and Path(value).expanduser().exists()
