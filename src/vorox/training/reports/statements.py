"""The statements in the folder of a run: what they state, and whether it is about what lies there now.

A signed statement names its key. Whether the key has signed it takes the public key of the signer, which nobody should
take from the run itself (``checkpoints/signature.py: read_envelope``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vorox.core.errors import VoroxError
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.json_reader import mapping
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout
from vorox.data.order.plan import DataPlan
from vorox.records.replay_chain import examine_chain, read_states
from vorox.records.run_lookup import run_id_of
from vorox.training.checkpoints.signature import AUDIT_TYPE, UNLEARNED_TYPE, WrittenStatement, read_statement


@dataclass(frozen=True, slots=True)
class StatementReport:
    """A statement in the folder of a run.

    Attributes:
        name: Its file.
        text: What it states, in a sentence; empty if it cannot be read.
        is_current: Whether it is about the checkpoint, or the head of the replay chain, that the run has now; ``None``
            if that is not known.
        key_ids: SHA-256 of the public keys that the envelope names as signers, hex; not verified.
        problem: Why it cannot be read.
    """

    name: str
    text: str
    is_current: bool | None
    key_ids: tuple[str, ...]
    problem: str


def statements_of(run_directory: Path) -> list[StatementReport]:
    """Return the statements in the folder of a run, by name."""
    return [_report(run_directory, path) for path in sorted(RunLayout(run_directory).statements.glob("*.json"))]


def _report(run_directory: Path, path: Path) -> StatementReport:
    try:
        statement = read_statement(path)
        describe = _KINDS.get(statement.predicate_type)
        if describe is None:
            text = f"A statement of the type {statement.predicate_type}"
            return StatementReport(path.name, text, None, statement.key_ids, "")
        text, is_current = describe(run_directory, statement, mapping(statement.content.get("predicate")))
    except VoroxError as error:
        return StatementReport(path.name, "", None, (), error.what)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return StatementReport(path.name, "", None, (), "The statement is damaged")
    return StatementReport(path.name, text, is_current, statement.key_ids, "")


def _unlearned(run_directory: Path, statement: WrittenStatement, predicate: Mapping[str, Any]) -> tuple[str, bool]:
    step, documents = int(predicate["step"]), pluralize(len(predicate["documents"]), "document")
    acting = [str(one["place"]) for one in predicate["acts"] if one["answer"] != "no"]
    text = f"No update up to step {step:,} read the content of {documents}"
    text += f"; they may still act through {', '.join(acting)}" if acting else ""
    return text, _has_manifest(RunLayout(run_directory).checkpoint(step), statement)


def _has_manifest(checkpoint: Path, statement: WrittenStatement) -> bool:
    """Whether a statement is about a checkpoint, by its manifest, which has the hashes of the other files."""
    path = checkpoint / MANIFEST_NAME
    if not path.is_file():
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() in statement.subjects.get(MANIFEST_NAME, ())


def _audited(run_directory: Path, statement: WrittenStatement, predicate: Mapping[str, Any]) -> tuple[str, bool]:
    heads, segments = predicate["heads"], pluralize(int(predicate["num_segments"]), "segment")
    step = int(heads["step"])
    computed = f"{int(predicate['num_sampled']):,} of {segments} up to step {step:,} computed again"
    text = f"Audit: {predicate['verdict']}; {computed}"
    run, chain = run_id_of(run_directory), examine_chain(run_directory)
    states = [
        state.states for at, state in read_states(run_directory, step).items()
        if at in chain.entries and state.chain == chain.entries[at].chain
    ]  # fmt: skip
    here = {
        f"{run}/chain@{step}": chain.entries[step].chain if step in chain.entries and not chain.damage(step) else None,
        f"{run}/states@{step}": states[-1] if states else "",
        f"{run}/plan@{step}": DataPlan.open(RunLayout(run_directory).plan).digest_at(int(heads["plan_events"])),
    }
    stated = {name: set(found) for name, found in statement.subjects.items()}
    return text, stated == {name: {digest} for name, digest in here.items() if digest != ""}


_KINDS: Mapping[str, Callable[[Path, WrittenStatement, Mapping[str, Any]], tuple[str, bool]]] = {
    UNLEARNED_TYPE: _unlearned,
    AUDIT_TYPE: _audited,
}
