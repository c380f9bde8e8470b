"""``vorox data``: build, verify and inspect token caches; provenance queries.

One module per group of commands; each command is a function registered here.
"""

from __future__ import annotations

import typer

from vorox.cli.arguments import OVERRIDES_CONTEXT
from vorox.cli.data.build import build, fill, grow, repair
from vorox.cli.data.contamination import contamination
from vorox.cli.data.inspect import peek, stats, verify
from vorox.cli.data.losses import losses
from vorox.cli.data.provenance import sql, where
from vorox.cli.data.teacher_logits import teacher_logits
from vorox.cli.data.transfer import download, export
from vorox.cli.data.upkeep import gc, pin, unpin
from vorox.cli.data.when import when

app = typer.Typer(
    name="data",
    help="Build, verify, inspect and export token caches; query provenance.",
    no_args_is_help=True,
    add_completion=False,
)

for _command in (build, fill, grow, repair, verify, stats, peek, export, gc, pin, unpin, teacher_logits):
    app.command(context_settings=OVERRIDES_CONTEXT)(_command)

for _command in (where, when, losses, contamination, sql, download):
    app.command()(_command)
