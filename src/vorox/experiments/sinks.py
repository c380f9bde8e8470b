"""Metric sinks: their interface, TensorBoard event files, and user-defined sinks.

A sink receives the values of a step and may raise any exception; ``tracking.Tracker`` keeps it from the training. Sinks
take part in no decision, and the run never reads them. The sink that every run has, ``metrics.jsonl``, is in
``tracking`` beside its reader; those that need a client have modules of their own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from vorox.core.errors import ConfigError, VoroxError
from vorox.core.platform.installation import install_command
from vorox.core.run_layout import RunLayout
from vorox.core.user_code.extensions import load_function


class Sink(Protocol):
    """Receives metric values. ``name`` is for messages."""

    @property
    def name(self) -> str: ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step. If it raises, the values are lost to this sink, unless it buffers them."""
        ...

    def flush(self) -> None:
        """Write buffered values."""
        ...

    def close(self) -> None:
        """Flush and release resources. Called once."""
        ...


class TensorBoardSink:
    """Writes event files into ``<run>/tensorboard``, without TensorFlow or PyTorch."""

    name = "tensorboard"

    def __init__(self, run_directory: Path, *, resume_step: int) -> None:
        require_tensorboard()
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(RunLayout(run_directory).tensorboard))
        if resume_step:
            # Makes TensorBoard discard what an earlier attempt wrote for later steps.
            session = SessionLog(status=SessionLog.SessionStatus.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=session))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        entries = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=entries)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def require_tensorboard() -> None:
    """Check that the package of ``log.tensorboard`` can be imported.

    Raises:
        ConfigError: It cannot.
    """
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"log.tensorboard=true needs the tensorboard package ({error})",
            where="log.tensorboard",
            hint=install_command("tensorboard"),
        ) from error


def open_custom_sink(path: str, where: str, run_directory: Path, resume_step: int, settings: Mapping[str, Any]) -> Sink:
    """Open a user-defined sink.

    Args:
        path: Import path of a function that returns the sink, called with ``run_directory``, ``resume_step`` and
            ``settings``.
        where: The setting, for messages.
        run_directory: The run.
        resume_step: Steps finished when this attempt started; values of later steps by earlier attempts are void.
        settings: The run's configuration by dotted key, without secrets.

    Raises:
        ConfigError: The function cannot be imported, fails, or does not return a sink.
    """
    function = load_function(path, kind="sink", where=where)
    try:
        sink = function(run_directory=run_directory, resume_step=resume_step, settings=settings)
    except VoroxError:
        raise
    except Exception as error:
        raise ConfigError(
            f"Sink {path} cannot be opened: {type(error).__name__}: {error}", where=where,
            hint="it is called as f(run_directory=..., resume_step=..., settings=...)",
        ) from error  # fmt: skip
    missing = [name for name in ("name", "write", "flush", "close") if not hasattr(sink, name)]
    if missing:
        raise ConfigError(
            f"Sink {path} has no {' and no '.join(missing)}", where=where,
            hint="return an object with name, write(step, values), flush() and close()",
        )  # fmt: skip
    return sink
