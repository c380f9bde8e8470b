"""``vorox compress``: prune and quantise a checkpoint, and show what that costs."""

from __future__ import annotations

from pathlib import Path

import typer

from vorox.api import compression
from vorox.api.compression import Measurement
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_json, print_table
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.schema.train import QuantizationScheme
from vorox.models.pruning import Pruning


def compress(
    run: str,
    to: Path,
    quantize: QuantizationScheme | None,
    prune: str | None,
    step: int | None,
    device: str | None,
    root: str,
    as_json: bool,
) -> None:
    done = compression.compress(
        run, to, pruning=None if prune is None else Pruning.parse(prune), quantization=quantize, step=step, root=root,
        device=device, notices=PrintedNotices(),
    )  # fmt: skip
    if as_json:
        print_json(done.to_json())
        return
    rows = [_row("before", done.before), _row("after", done.after)]
    print_table(["", "LOSS", "BITS/BYTE", "SIZE", "TOKENS/S"], rows, right="LOSS BITS/BYTE SIZE TOKENS/S")
    typer.echo(f"{done.path}: step {done.step:,}, {', '.join(filter(None, (done.prune, done.quantize)))}")
    if done.quantize == "int4":
        typer.echo(f'Load it with: vorox.load_quantized("{done.path}")')
    elif done.quantize:
        typer.echo(f'Load it with: transformers.AutoModelForCausalLM.from_pretrained("{done.path}", dtype="auto")')
    else:
        typer.echo(f"Fine-tune it with: vorox train --from-weights {done.path} train.keep_zeros=true")


def _row(name: str, measured: Measurement) -> list[str]:
    loss, bits = humanize.number(measured.loss, 4), humanize.number(measured.bits_per_byte, 4)
    return [name, loss, bits, humanize.size(measured.size_bytes), f"{measured.tokens_per_second:,.0f}"]
