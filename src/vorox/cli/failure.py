"""Error reports of commands: four lines for people, an exit code for programs, a traceback in a file.

The exception that ended the command goes in. Its exit code comes out, after four lines on standard error: what
happened, where, what is saved, what to do. The traceback of an unexpected error goes into a file. All output passes
``redact``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from vorox.cli.launch.rank_launcher import nproc_option
from vorox.cli.terminal import humanize
from vorox.core.errors import ConfigError, Preempted, VoroxError, saved_of, set_saved
from vorox.core.files.atomic import make_directory, write_file
from vorox.core.files.disk_errors import disk_error, exhausts_memory, memory_error
from vorox.core.redaction import redact, redact_arguments
from vorox.core.user_code.extensions import refused_call
from vorox.records.run_lookup import short_path


def report_failure(error: BaseException, arguments: Sequence[str]) -> int:
    """Print an exception as four lines and return the exit code.

    Args:
        error: What ended the command.
        arguments: The command line, without the program's name.
    """
    known = _explained(error, arguments)
    lines = [humanize.printable(line) for line in _four_lines(known, arguments)]
    red, reset = ("\x1b[1;31m", "\x1b[0m") if _wants_colour() and not isinstance(error, Preempted) else ("", "")
    columns = shutil.get_terminal_size().columns
    what = humanize.wrap(lines[0], columns, indent_columns=2) if sys.stderr.isatty() else lines[0]
    sys.stderr.write(f"{red}{what}{reset}\n" + "\n".join(lines[1:]) + "\n")
    return known.exit_code


def _explained(error: BaseException, arguments: Sequence[str]) -> VoroxError:
    """Return the error itself, its explanation, or for a crash an error that names the traceback's file."""
    known = error if isinstance(error, VoroxError) else _usage_error(error, arguments) or _machine_error(error)
    if known is not None:
        set_saved(known, saved_of(error))
        return known
    path = _write_traceback(error, _command(arguments))
    if (own := refused_call(error)) is not None:
        return ConfigError(
            f"The function of {own} is called with other arguments than it takes: {error}",
            where=_last_frame(error), saved=saved_of(error),
            hint="docs/extending.md shows what each kind of function takes; the traceback is in "
            f"{path or 'no file, because none could be written'}",
        )  # fmt: skip
    return VoroxError(
        f"{type(error).__name__}: {error}",
        where=_last_frame(error),
        saved=saved_of(error),
        hint=f"the traceback is in {path}; please report it" if path else "please report this",
    )


def _command(arguments: Sequence[str]) -> str:
    return " ".join(["vorox", *redact_arguments(arguments)]) + nproc_option()


def _four_lines(known: VoroxError, arguments: Sequence[str]) -> list[str]:
    again = "correct it and run the same command again" if isinstance(known, ConfigError) else "-"
    mark = "-" if isinstance(known, Preempted) else "x"
    return [
        f"{mark} {known.kind}: {redact(known.what)}  [exit {known.exit_code}]",
        f"  where   {redact(short_path(known.where)) if known.where else _command(arguments)}",
        f"  saved   {redact(known.saved) or '-'}",
        f"  do      {redact(known.hint) or again}",
    ]


def _usage_error(error: BaseException, arguments: Sequence[str]) -> VoroxError | None:
    """Return the explained error of a command line that typer cannot parse, such as an unknown command."""
    message: Callable[[], str] | None = getattr(error, "format_message", None)
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    command = " ".join(["vorox", *arguments[:1]]) if context is None else str(context.command_path)
    text = re.sub(r"[\t\n]+", " ", message()).replace(": Value error, ", ": ")  # of lists of choices, and of pydantic
    what, *suggested = re.split(r" Did you mean | \(Possible options: ", text)
    meant = [f"`{command} {word}`" for word in re.findall(r"[\w-]+", " ".join(suggested)) if word != "or"]
    unknown = re.fullmatch(r"No such command '(.+)'\.?", what)
    option = re.fullmatch(r"No such option: (.+?)\.?", what)
    wrong = unknown or option
    if wrong and (other := _OTHERS.get(f"{command} {wrong[1]}".removeprefix("vorox "))):
        hint = f"use `{other}`"
    elif meant:
        hint = f"write {' or '.join(meant)}; see `{command} --help`"
    else:
        hint = f"see `{command} --help`"
    return ConfigError(what.rstrip("."), where=_command(arguments), hint=hint)


_OTHERS = {
    **dict.fromkeys(("resume", "continue", "restart"), "vorox train --resume latest"),
    **dict.fromkeys(("pretrain", "finetune", "fit", "run", "start", "quickstart"), "vorox train quickstart"),
    **dict.fromkeys(("sample", "infer", "complete"), "vorox generate latest -p TEXT"),
    **dict.fromkeys(("ls", "list", "ps", "show", "status"), "vorox runs list"),
    **dict.fromkeys(("plot", "report", "compare"), "vorox runs plot|report|compare RUN"),
    **dict.fromkeys(("ui", "board", "webui", "tensorboard"), "vorox dash"),
    **dict.fromkeys(("evaluate", "lm_eval"), "vorox eval latest --tasks TASKS"),
    **dict.fromkeys(("ckpt", "verify"), "vorox checkpoints list|verify RUN"),
    "init": "vorox train --menu",
    "menu": "vorox train --menu",
    **dict.fromkeys(("data show", "data info", "data inspect", "data list"), "vorox data stats CONFIG"),
    **dict.fromkeys(("data rows", "data sample", "data view"), "vorox data peek CONFIG"),
    **dict.fromkeys(("data import", "data prepare", "data tokenize"), "vorox data build CONFIG"),
    **dict.fromkeys(("k8s", "kube", "launch k8s", "launch kube"), "vorox launch kubernetes"),
    **dict.fromkeys(("slurm", "sbatch", "launch sbatch"), "vorox launch slurm"),
    "data steps": "vorox data where RUN --step STEP",
    **dict.fromkeys(("data losses --from", "data losses --to"), "vorox data losses RUN --steps A:B"),
    **dict.fromkeys(
        ("data where --from", "data where --to", "data where --steps"),
        "vorox data where RUN --step STEP, or vorox data losses RUN --steps A:B",
    ),
    "data where --by": "vorox data losses RUN",
    **dict.fromkeys(
        ("eval --data", "eval --dataset", "eval --file", "eval --text", "eval --config"),
        "vorox eval RUN --tasks TASK.yaml` with a task that reads the file, or measure its loss while training: `vorox "
        "train CONFIG 'data.validation.sources=[{name: held-out, format: txt, paths: [FILE]}]'",
    ),
}
"""Commands of other trainers, and options that are commands of their own, to what to write instead."""


def _machine_error(error: BaseException) -> VoroxError | None:
    """Return an explained error of the machine, which needs no traceback."""
    if exhausts_memory(error):
        return memory_error(error)
    if isinstance(error, OSError) and (explained := disk_error(error, "")) is not None:
        return explained
    if (
        isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError | IsADirectoryError)
        and error.filename
    ):
        where = str(error.filename)
        return VoroxError(f"{error.strerror}", where=where, hint="check the path and its permissions")
    return None


def _last_frame(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}vorox{os.sep}" in frame.filename] or list(frames)
    return f"{ours[-1].filename}:{ours[-1].lineno} in {ours[-1].name}" if ours else ""


def _write_traceback(error: BaseException, command: str) -> Path | None:
    """Write the traceback next to the caches, or into the directory of temporary files."""
    text = redact(f"{command}\n\n" + "".join(traceback.format_exception(error)))
    name = f"crash-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.txt"
    cache = Path(os.environ.get("VOROX_CACHE") or "~/.cache/vorox").expanduser()
    for directory in (cache / "crashes", Path(tempfile.gettempdir())):
        try:
            make_directory(directory)
            write_file(directory / name, text.encode("utf-8", "backslashreplace"), private=True)
            return directory / name
        except OSError:
            continue
    return None


def _wants_colour() -> bool:
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
