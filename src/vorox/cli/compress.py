"""``vorox compress``: prune and quantise a checkpoint, and show what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vorox.cli import humanize
from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, RunName, print_json, print_table

if TYPE_CHECKING:
    from vorox.api.compression import Measurement


def compress(
    run: RunName,
    to: Annotated[Path, typer.Option("--to", help="New directory.")],
    quantize: Annotated[
        Literal["int8-weight-only", "int8-dynamic", "int4"] | None,
        typer.Option(
            "--quantize",
            help="Linear layers of the blocks in 8 bits, weights only or with 8-bit activations; or in 4 bits. "
            "Writes a directory that transformers loads.",
        ),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(
            "--prune",
            metavar="magnitude:F|2:4",
            help="Zero the fraction F of each matrix, or two of every four inputs.",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Checkpoint to compress. Default: the newest valid one.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device, instead of the run's runtime.device.")] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Prune and quantise a checkpoint, and compare loss, size and speed on the run's validation set."""
    from vorox.api import compression
    from vorox.cli.generate import report_skipped
    from vorox.models.pruning import Pruning

    done = compression.compress(
        run, to, pruning=None if prune is None else Pruning.parse(prune), quantization=quantize, step=step, root=root,
        device=device, on_corrupt=report_skipped,
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
