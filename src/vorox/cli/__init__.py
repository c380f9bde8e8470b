"""The command line ``vorox``: parsing and printing only.

Arguments go in, an exit code comes out. ``commands`` declares what can be typed; the rooms beside it do the work.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from vorox.cli.commands import app, declares_option
from vorox.cli.environment_variables import unknown_variables
from vorox.cli.terminal.standard_streams import resilient_streams
from vorox.core.errors import INTERRUPTED_EXIT_CODE, ConfigError, VoroxError
from vorox.core.platform.telemetry import disable_telemetry
from vorox.core.platform.windows_variables import set_windows_variables
from vorox.core.user_code.trusted_code import FLAG, take_flag

_MOST_OPEN_FILES = 65_536


def _allow_open_files() -> None:
    """Raise this process's soft limit of open files: every chunk of a cache that is being read is one."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run() -> NoReturn:
    """Run the command line of this process and end it."""
    code = main()
    liveness = sys.modules.get("vorox.core.ranks.rank_liveness")
    if liveness is not None and liveness.HAS_LOST_RANK.is_set():  # JAX would wait minutes for the other rank
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    gc.collect()
    gc.freeze()  # otherwise the interpreter searches all objects of PyTorch for cycles again, which takes 0.3 s
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    _allow_open_files()
    os.umask(os.umask(0o077) | 0o022)  # files of other libraries too are for this user alone to change
    set_windows_variables(os.environ, Path())
    disable_telemetry()
    argv = list(sys.argv[1:] if arguments is None else arguments)
    with resilient_streams(survives_reader=argv[:1] == ["train"]):
        for line in unknown_variables(os.environ):
            sys.stderr.write(f"warning: {line}\n")
        try:
            argv = take_flag(argv, lambda words: declares_option(words, FLAG))
            code = app(args=argv, prog_name="vorox", standalone_mode=False)
            return code if isinstance(code, int) else 0
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except typer.Abort:  # a question at the end of the input
            sys.stderr.write("Aborted.\n")
            return VoroxError.exit_code
        except KeyboardInterrupt:
            return INTERRUPTED_EXIT_CODE
        except Exception as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # the help was printed
                return ConfigError.exit_code
            from vorox.cli.failure import report_failure  # too slow for the start of every command

            return report_failure(error, argv)
        finally:
            take_flag((), lambda _: False)  # it is for this command alone
