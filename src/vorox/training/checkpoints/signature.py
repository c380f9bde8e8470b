"""Sign checkpoints, and verify their signatures: DSSE envelopes around in-toto statements.

A statement lists the SHA-256 of every file of a checkpoint, because the xxh3 hashes of its manifest detect damage but
not a forger, and binds them to run, step and the heads of the replay chain and of the chain of states. Keys are Ed25519
or ECDSA P-256 in PEM files. Formats: DSSE 1.0 (https://github.com/secure-systems-lab/dsse), in-toto Statement 1
(https://in-toto.io).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files import atomic
from vorox.core.files.atomic import MANIFEST_NAME, canonical_json
from vorox.core.files.json_reader import MalformedJson, open_regular, parse_json, read_json
from vorox.core.files.staged_directory import read_manifest, unreadable_error, verify_directory
from vorox.core.platform.installation import install_command
from vorox.core.run_layout import RunLayout
from vorox.records.replay_chain import RecordedState, examine_chain, read_states

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    PrivateKey = Ed25519PrivateKey | EllipticCurvePrivateKey
    PublicKey = Ed25519PublicKey | EllipticCurvePublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:vorox:checkpoint:2"
UNLEARNED_TYPE = "urn:vorox:unlearned:1"
AUDIT_TYPE = "urn:vorox:audit:1"
_KINDS = "an Ed25519 or ECDSA P-256 key in PEM, as of `openssl genpkey -algorithm ed25519`"


@dataclass(frozen=True, slots=True)
class Signature:
    """The signature of one checkpoint.

    Attributes:
        step: Step of the checkpoint.
        path: The envelope.
        key_id: SHA-256 of the public key in DER, hex.
    """

    step: int
    path: Path
    key_id: str


@dataclass(frozen=True, slots=True)
class WrittenStatement:
    """An in-toto statement in a file.

    Attributes:
        path: The file.
        content: The statement, without its envelope.
        subjects: Digests of what it is about, hex, by name.
        predicate_type: What it states.
        key_ids: SHA-256 of the public keys that the envelope names as signers, hex; not verified.
    """

    path: Path
    content: Mapping[str, Any]
    subjects: Mapping[str, Collection[str]]
    predicate_type: str
    key_ids: tuple[str, ...]


def sign_checkpoint(run_directory: Path, step: int, key: PrivateKey) -> Signature:
    """Verify a checkpoint against its manifest and both chains, and write its signature.

    Raises:
        CheckpointError: It is damaged, or a chain has another head or state at its step.
        DataError: A chain has a state that does not follow from the previous one.
    """
    checkpoint = RunLayout(run_directory).checkpoint(step)
    _, state = recorded_state(run_directory, step)
    subjects = [{"name": name, "digest": {"sha256": digest}} for name, digest in file_digests(checkpoint).items()]
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": subjects,
        "predicateType": PREDICATE_TYPE,
        "predicate": {"run": run_directory.resolve().name, "step": step, "chain": state.chain, "states": state.states},
    }
    path = RunLayout(run_directory).signature(step)
    write_statement(path, statement, key)
    return Signature(step, path, _key_id(key.public_key()))


def recorded_state(run_directory: Path, step: int) -> tuple[dict[str, Any], RecordedState]:
    """Verify a checkpoint against its manifest and both chains; return its metadata, and what the chains record.

    Raises:
        CheckpointError: It is damaged, or a chain has another head or state at its step.
        DataError: A chain has a state that does not follow from the previous one.
    """
    metadata = verify_directory(RunLayout(run_directory).checkpoint(step), step=step)
    _check_chain(run_directory, step, metadata.get("chain"))
    state = read_states(run_directory, step).get(step)
    if state is None or state[:2] != (metadata.get("chain"), metadata.get("fingerprint")):
        raise _other_states(run_directory, step)
    return metadata, state


def write_statement(path: Path, statement: Mapping[str, Any], key: PrivateKey | None) -> None:
    """Write an in-toto statement: with a key in a signed DSSE envelope, otherwise as it is."""
    content = statement
    if key is not None:
        payload = canonical_json(statement)
        signature = _encode(_sign(key, _encoded_for_signature(PAYLOAD_TYPE, payload)))
        signatures = [{"keyid": _key_id(key.public_key()), "sig": signature}]
        content = {"payload": _encode(payload), "payloadType": PAYLOAD_TYPE, "signatures": signatures}
    atomic.make_directory(path.parent)
    atomic.write_file(path, atomic.pretty_json(content))


def read_statement(path: Path) -> WrittenStatement:
    """Read a file of ``write_statement``; no signature is verified, which takes the public key of the signer.

    Raises:
        CheckpointError: The file is damaged or cannot be read.
    """
    try:
        content, key_ids = read_json(path, dict), tuple[str, ...]()
        if "payload" in content:
            key_ids = tuple(str(entry["keyid"]) for entry in content["signatures"])
            content = parse_json(base64.b64decode(content["payload"], validate=True), path, dict)
        subjects = {str(one["name"]): {*map(str, one["digest"].values())} for one in content["subject"]}
        return WrittenStatement(path, content, subjects, str(content["predicateType"]), key_ids)
    except OSError as error:
        raise unreadable_error(error, path) from error
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise CheckpointError("The statement is damaged", where=str(path), hint="restore it from a copy") from error


def verify_signature(run_directory: Path, step: int, key: PublicKey) -> Signature:
    """Verify the signature of a checkpoint, every byte of its files, and both chains up to its step.

    Raises:
        CheckpointError: It is not signed, not by this key, or differs from what was signed.
        DataError: A chain has a state that does not follow from the previous one.
    """
    layout = RunLayout(run_directory)
    path, checkpoint = layout.signature(step), layout.checkpoint(step)
    key_id = _key_id(key)
    statement = _signed_statement(path, key)
    name = run_directory.resolve().name
    if statement.step == step and statement.run != name:
        raise CheckpointError(
            f"The signature is for run {statement.run}, but this directory is {name}: it was renamed, or the "
            "signature was copied here",
            where=str(path), saved="nothing was changed",
            hint=f"if you renamed it, give it its old name: mv {shlex.quote(str(run_directory))} "
            f"{shlex.quote(str(run_directory.parent / statement.run))}",
        )  # fmt: skip
    if statement.step != step:
        raise CheckpointError(
            f"The signature is for step {statement.step} of run {statement.run}", where=str(path),
            hint="a signature belongs to one checkpoint; it cannot be moved or renamed",
        )  # fmt: skip
    read_manifest(checkpoint)
    signed, found = statement.files, file_digests(checkpoint)
    for name in sorted(signed.keys() | found.keys(), key=lambda name: (name == MANIFEST_NAME, name)):
        if signed.get(name) != found.get(name):
            what = "was added" if name not in signed else "is missing" if name not in found else "has changed"
            raise CheckpointError(
                f"File {name} {what} since step {step:,} was signed", where=str(checkpoint / name),
                hint="restore the checkpoint from a copy; do not use it",
            )  # fmt: skip
    _check_chain(run_directory, step, statement.chain)
    state = read_states(run_directory, step).get(step)
    if state is None or state.states != statement.states:
        raise _other_states(run_directory, step)
    return Signature(step, path, key_id)


def verify_newest_is_present(run_directory: Path) -> None:
    """Check that the checkpoint of the newest signature exists, under its own name.

    Raises:
        CheckpointError: It was removed or renamed, so that an older one would be used in its place.
    """
    layout, newest = RunLayout(run_directory), _newest_signature(run_directory)
    if newest is None or layout.checkpoint(newest).is_dir():
        return
    raise CheckpointError(
        f"The newest signed checkpoint, of step {newest:,}, is missing", where=str(layout.checkpoint(newest)),
        hint=f"restore it from a copy; if you removed it yourself, remove {layout.signature(newest)} too",
    )  # fmt: skip


def newest_signed_step(run_directory: Path) -> int:
    """Return the step of the newest signature, whose checkpoint must be there; the signature is not verified.

    Raises:
        CheckpointError: Nothing is signed, or the checkpoint is missing.
    """
    verify_newest_is_present(run_directory)
    newest = _newest_signature(run_directory)
    if newest is None:
        raise CheckpointError(
            "No checkpoint of the run is signed", where=str(RunLayout(run_directory).signatures),
            hint="its owner signs it with `vorox checkpoints sign`; without --public-key, nothing signed is needed",
        )  # fmt: skip
    return newest


def _newest_signature(run_directory: Path) -> int | None:
    paths = RunLayout(run_directory).signatures.glob("*.json")
    names = (re.fullmatch(r"step-([0-9]{8,16})\.json", path.name) for path in paths)
    return max((int(name[1]) for name in names if name), default=None)


def recorded_key_ids(run_directory: Path, step: int) -> tuple[str, ...]:
    """Return the ids of the keys that a checkpoint's signature names, unverified; empty if it is not signed.

    Raises:
        MalformedJson: The signature file is damaged.
    """
    path = RunLayout(run_directory).signature(step)
    if not path.exists():
        return ()
    return tuple(entry["keyid"] for entry in read_json(path, {"signatures": [{"keyid": str}]})["signatures"])


def load_private_key(path: Path) -> PrivateKey:
    """Read a private key.

    Raises:
        ConfigError: The file cannot be read or has another kind of key, or the extra `sign` is not installed.
    """
    serialization, kinds = _cryptography()
    try:
        found = serialization.load_pem_private_key(_read_key(path), None)
    except TypeError as error:
        raise ConfigError(
            "The private key is encrypted", where=str(path),
            hint="decrypt it into a protected file, as by `openssl pkey -in KEY -out PLAIN`",
        ) from error  # fmt: skip
    except ValueError as error:
        raise ConfigError("The file has no private key", where=str(path), hint=f"give {_KINDS}") from error
    return _checked(found, kinds[0], path)


def load_public_key(path: Path) -> PublicKey:
    """Read a public key.

    Raises:
        ConfigError: The file cannot be read or has another kind of key, or the extra `sign` is not installed.
    """
    serialization, kinds = _cryptography()
    try:
        found = serialization.load_pem_public_key(_read_key(path))
    except ValueError as error:
        raise ConfigError(
            "The file has no public key", where=str(path), hint="write it by `openssl pkey -in KEY -pubout -out PUBLIC`"
        ) from error
    return _checked(found, kinds[1], path)


class _Statement(NamedTuple):
    run: str
    step: int
    chain: str
    states: str
    files: Mapping[str, str]
    """SHA-256 of every file, by name."""


def read_envelope(path: Path, key: PublicKey, predicate_type: str, *, what: str, hint: str) -> dict[str, Any]:
    """Return the statement of an envelope if the key has signed it.

    Args:
        path: The envelope.
        key: The public key of the signer.
        predicate_type: What the statement must be.
        what: The word for what is signed, for messages.
        hint: How it is signed.

    Raises:
        CheckpointError: There is none, it is damaged, or the key has not signed it.
    """
    try:
        envelope = read_json(path, dict)
        payload_type, payload = envelope["payloadType"], base64.b64decode(envelope["payload"], validate=True)
        signatures = [base64.b64decode(entry["sig"], validate=True) for entry in envelope["signatures"]]
        message = _encoded_for_signature(payload_type, payload)
    except FileNotFoundError as error:
        raise CheckpointError(f"The {what} is not signed", where=str(path), hint=hint) from error
    except OSError as error:
        raise unreadable_error(error, path) from error
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise CheckpointError("The signature file is damaged", where=str(path), hint=hint) from error
    if not any(_is_valid(key, one, message) for one in signatures):
        raise CheckpointError(
            f"The signature is not by this key, or was changed (key {_key_id(key)[:16]})", where=str(path),
            hint=f"use the public key of the signer; if it is the right one, do not use the {what}",
        )  # fmt: skip
    body: dict[str, Any] = parse_json(payload, path, dict) if payload_type == PAYLOAD_TYPE else {}
    if body.get("predicateType") != predicate_type:
        raise CheckpointError(f"The signature is not for a {what} of this format", where=str(path), hint=hint)
    return body


def _signed_statement(path: Path, key: PublicKey) -> _Statement:
    """Return the statement on a checkpoint if the key has signed it."""
    hint = "sign it with `vorox checkpoints sign`"
    body = read_envelope(path, key, PREDICATE_TYPE, what="checkpoint", hint=hint)
    try:
        files = {str(entry["name"]): str(entry["digest"]["sha256"]) for entry in body["subject"]}
        facts = body["predicate"]
        return _Statement(str(facts["run"]), facts["step"], facts["chain"], facts["states"], files)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            "The signed statement lacks what a checkpoint has", where=str(path), hint="sign the checkpoint"
        ) from error


def _check_chain(run_directory: Path, step: int, head: str | None) -> None:
    """Check that the replay chain records every step up to this one, link by link, and ends in the head.

    A link is verified by the one before it, so a missing line hides a changed one: both are refused.
    """
    chain = examine_chain(run_directory, step)
    if damage := chain.damage(step):
        raise CheckpointError(
            f"The replay chain is not intact up to step {step:,}: {damage}", where=str(chain.path),
            hint="restore the file from a copy",
        )  # fmt: skip
    if chain.entries[step].chain != head:
        raise CheckpointError(
            f"The replay chain differs from the checkpoint at step {step:,}", where=str(chain.path),
            hint="restore the file from a copy",
        )  # fmt: skip


def _other_states(run_directory: Path, step: int) -> CheckpointError:
    return CheckpointError(
        f"The chain of states differs from the checkpoint at step {step:,}",
        where=str(RunLayout(run_directory).states), hint="restore the file from a copy",
    )  # fmt: skip


def file_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a directory, by name.

    Raises:
        CheckpointError: A file is not a regular file, or cannot be read.
    """
    found: dict[str, str] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        try:
            with open_regular(path) as file:
                found[path.relative_to(directory).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
        except MalformedJson as error:
            raise CheckpointError("A file of the checkpoint is not a regular file", where=str(path)) from error
        except OSError as error:
            raise unreadable_error(error, path) from error
    return found


def _encoded_for_signature(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that DSSE signs: type and payload with their lengths (PAE)."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _sign(key: Any, message: bytes) -> bytes:
    return key.sign(message, *_algorithm(key))


def _is_valid(key: Any, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, message, *_algorithm(key))
    except InvalidSignature:
        return False
    return True


def _algorithm(key: Any) -> tuple[Any, ...]:
    """Return the arguments of a key's ``sign`` and ``verify``: none for Ed25519."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return (ec.ECDSA(hashes.SHA256()),) if is_ecdsa(key) else ()


def is_ecdsa(key: PrivateKey | PublicKey) -> bool:
    """Whether a key is of ECDSA, not Ed25519."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey)


def public_pem(key: PrivateKey) -> bytes:
    """Return the public key of a private one, in PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _key_id(key: PublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _cryptography() -> tuple[Any, tuple[Any, Any]]:
    """Return the module that reads keys, and the supported kinds of private and public keys."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    except ImportError as error:
        raise ConfigError(
            "Signatures need the package cryptography", where="--key", hint=install_command("sign")
        ) from error
    private = (ed25519.Ed25519PrivateKey, ec.EllipticCurvePrivateKey)
    return serialization, (private, (ed25519.Ed25519PublicKey, ec.EllipticCurvePublicKey))


def _checked(key: Any, kinds: Any, path: Path) -> Any:
    if not isinstance(key, kinds) or getattr(getattr(key, "curve", None), "name", "secp256r1") != "secp256r1":
        raise ConfigError("The key is of another kind", where=str(path), hint=f"give {_KINDS}")
    return key


def _read_key(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"The key cannot be read: {error.strerror or error}", where=str(path), hint=f"give {_KINDS}"
        ) from error


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
