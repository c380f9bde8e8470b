"""``vorox claims``: list and verify registered claims."""

from __future__ import annotations

from pathlib import Path

import typer

from vorox.cli.sweeps.claim import claim_json, verdict_lines
from vorox.cli.terminal.output import print_json, print_table, print_wrapped
from vorox.core.errors import CheckpointError
from vorox.core.pluralize import pluralize
from vorox.sweeps.claim_check import check_claim, check_signature
from vorox.sweeps.claim_register import Register
from vorox.training.checkpoints.signature import load_public_key


def list_(root: str, as_json: bool) -> None:
    register = Register(Path(root).absolute())
    if as_json:
        print_json([claim_json(claim, register) for claim in register.claims])
        return
    if not register.claims:
        typer.echo(f"No claim is registered in {register.path}")
        return
    rows = [
        [claim.id[:12], str(claim.text), claim.outcome or "no verdict", str(len(claim.pairs)), f"{claim.level:.3g}"]
        for claim in register.claims
    ]
    print_table(["ID", "CLAIM", "VERDICT", "PAIRS", "LEVEL"], rows, right="PAIRS LEVEL")


def verify(claim: str | None, replay: bool, public_key: Path | None, root: str, as_json: bool) -> None:
    key = None if public_key is None else load_public_key(public_key)
    register = Register(Path(root).absolute())
    found = register.find(claim)
    findings = check_claim(register, found, replays=replay, on_run=lambda run: typer.echo(f"Verifying {run}", err=True))
    if key is not None:
        check_signature(register, found, key)
    if as_json:
        listed = [{"where": one.where, "what": one.what} for one in findings]
        print_json({"claim": found.id, "is_valid": not findings, "is_signed": key is not None, "findings": listed})
    else:
        print_wrapped([f"{one.where}: {one.what}" for one in findings])
    if findings:
        raise CheckpointError(
            f"Claim {found.id[:12]} does not verify: {findings[0].where}: {findings[0].what}", where=str(register.path),
            hint="do not rely on its verdict; restore what was changed from a copy, or claim again with --again",
        )  # fmt: skip
    if not as_json:
        what = "seeds, settings, data, chains, checkpoints and values" + (
            ", every step computed again" if replay else ""
        )
        signed = ", signed by this key" if key is not None else ""
        print_wrapped([f"Claim {found.id[:12]} verifies: {pluralize(len(found.pairs), 'pair')}, {what}{signed}"])
        print_wrapped(verdict_lines(found))
