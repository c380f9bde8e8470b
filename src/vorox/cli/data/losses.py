"""``vorox data losses``: the loss of each document of some steps under a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer

from vorox.api.model import find_model
from vorox.api.runs import open_run
from vorox.cli.data.provenance import chosen_steps
from vorox.cli.terminal.output import print_json, print_table
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.pluralize import pluralize
from vorox.core.schema.train import Weights
from vorox.training.steps.document_losses import DocumentLoss

Losses = list[DocumentLoss]
Key = tuple[str, str, int, int]
"""Source, file and index of a document."""
_DEFAULT_STEPS = 10
_MOST_STEPS = 4


def losses(
    run: str,
    steps: str | None,
    step: int | None,
    checkpoint: int | None,
    against: int | None,
    easiest: bool,
    limit: int,
    weights: Weights,
    device: str | None,
    root: str,
    as_json: bool,
) -> None:
    with open_run(run, root=root) as opened:

        def losses_at(number: int | None, chosen: tuple[int, int] | None) -> tuple[int, tuple[int, int], Losses]:
            model = find_model(
                str(opened.directory), step=number, root=root, device=device, weights=weights, notices=PrintedNotices()
            )
            first, last = chosen or (max(1, model.step - _DEFAULT_STEPS + 1), model.step)
            return model.step, (first, last), opened.document_losses(model, first, last - first + 1)

        number, chosen, found = losses_at(checkpoint, chosen_steps(step, steps))
        before: dict[Key, float] = {}
        if against is not None:
            before = {_key(one): one.loss for one in losses_at(against, chosen)[2]}
            found.sort(key=lambda one: before[_key(one)] - one.loss)
        if easiest:
            found.reverse()
    records = [_record(one, before) for one in found]
    if as_json:
        run_id = opened.directory.name
        print_json({"run": run_id, "step": number, "against": against, "steps": chosen, "documents": records})
        return
    _print_losses(found[:limit], before)
    num_tokens = sum(one.num_target_tokens for one in found)
    mean = sum(one.loss * one.num_target_tokens for one in found) / max(1, num_tokens)
    typer.echo(
        f"{pluralize(len(found), 'document')} of steps {chosen[0]:,} to {chosen[1]:,} under the weights of step "
        f"{number:,}: mean loss {mean:.4f} over {pluralize(num_tokens, 'token')}"
    )


def _key(one: DocumentLoss) -> Key:
    return one.source, one.uri, one.ordinal, one.copy


def _record(one: DocumentLoss, before: Mapping[Key, float]) -> dict[str, Any]:
    change = {"loss_before": before[_key(one)]} if before else {}
    return {**asdict(one), **change, "text_xxh3": f"{one.text_xxh3:016x}"}


def _print_losses(found: Losses, before: Mapping[Key, float]) -> None:
    rows = [
        [
            f"{one.loss:.4f}",
            *([f"{one.loss - before[_key(one)]:+.4f}"] if before else []),
            f"{one.num_target_tokens:,}",
            ", ".join(map(str, one.steps[:_MOST_STEPS])) + (", ..." if len(one.steps) > _MOST_STEPS else ""),
            one.source,
            f"{one.uri}, record {one.ordinal:,}" + (f", text {one.copy + 1:,} of it" if one.copy else ""),
        ]
        for one in found
    ]
    titles = ["LOSS", *(["CHANGE"] if before else []), "TOKENS", "STEPS", "SOURCE", "DOCUMENT"]
    print_table(titles, rows, right="LOSS CHANGE TOKENS")
