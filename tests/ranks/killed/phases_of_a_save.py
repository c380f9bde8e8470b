"""Kills within a save of sharded ranks: ``RANK-PHASE-STEP`` (see ``sitecustomize``).

Phases: ``snapshot`` before the copy, ``rows`` within the file of the rank, ``shard`` after it, ``commit`` before the
commit of rank 0, ``committed`` after it.
"""

from __future__ import annotations

from typing import Any

from sitecustomize import _die_at

from vorox.backends.torch_engine.engine import TorchEngine
from vorox.core.files.staged_directory import StagedDirectory
from vorox.models.stored import sharded_snapshot
from vorox.models.stored.sharded_snapshot import ShardedSnapshot
from vorox.training.checkpoints import writer as checkpoint_writer

_snapshot, _commit = TorchEngine.snapshot, StagedDirectory.commit
_write_weights, _write_part, _save = (
    sharded_snapshot.write_weights, ShardedSnapshot.write_part, checkpoint_writer.CheckpointWriter.save,
)  # fmt: skip
_saving = {"step": 0}


def save(self: Any, engine: Any, progress: Any, *arguments: Any, **options: Any) -> None:
    self.wait()  # the background thread has finished with the step below
    _saving["step"] = progress.step
    _save(self, engine, progress, *arguments, **options)


def snapshot(self: Any, **options: Any) -> Any:
    _die_at(f"snapshot-{_saving['step']}")
    return _snapshot(self, **options)


def write_weights(sink: Any, rows: Any, arrays: Any) -> None:
    def some() -> Any:
        for number, array in enumerate(arrays):
            if number == len(rows) // 2:
                _die_at(f"rows-{_saving['step']}")
            yield array

    _write_weights(sink, rows, some())


def write_part(self: Any, directory: Any) -> Any:
    report = _write_part(self, directory)
    _die_at(f"shard-{_saving['step']}")
    return report


def commit(self: Any, *arguments: Any, **options: Any) -> Any:
    is_checkpoint = self.target.name == f"step-{_saving['step']:08d}"
    if is_checkpoint:
        _die_at(f"commit-{_saving['step']}")
    committed = _commit(self, *arguments, **options)
    if is_checkpoint:
        _die_at(f"committed-{_saving['step']}")
    return committed


checkpoint_writer.CheckpointWriter.save = save
TorchEngine.snapshot, StagedDirectory.commit = snapshot, commit
sharded_snapshot.write_weights, ShardedSnapshot.write_part = write_weights, write_part
