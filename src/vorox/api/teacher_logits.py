"""Write the logits of a teacher for all rows of a run, so that students train without the teacher

In: a configuration with ``train.distillation.teacher`` and ``top_k``. Out: a directory of stored logits
(``training/steps/teacher_logits.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vorox.api.checkpoints import WarningNotices
from vorox.core.batch import Batch
from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.data.cache.building.report import PrepareProgress
from vorox.data.corpus.corpus import prepare
from vorox.models.decoder.spec import DecoderSpec
from vorox.planned_run import choose_micro_batch, resolve_model
from vorox.planning.auto_micro_batch import with_micro_batch
from vorox.run import with_states
from vorox.training.steps.dataloading import planned_batches
from vorox.training.steps.teacher_logits import LogitsHeader, LogitsWriter, Precision
from vorox.training.weights.init_from import open_weights
from vorox.training.weights.teacher import as_initial, find_teacher


@dataclass(frozen=True, slots=True)
class WrittenLogits:
    """What a command wrote.

    Attributes:
        path: The directory.
        num_steps: Steps whose rows were visited.
        num_new_rows: Rows whose logits were computed.
        num_rows: Rows in the directory.
        size_bytes: Bytes of the directory.
    """

    path: Path
    num_steps: int
    num_new_rows: int
    num_rows: int
    size_bytes: int


def write_teacher_logits(
    config: RunConfig,
    directory: Path,
    *,
    precision: Precision = "fp16",
    on_progress: PrepareProgress | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> WrittenLogits:
    """Compute the top-k logits of the teacher for every row of a run that the directory lacks.

    Args:
        config: The run, with ``train.distillation.teacher`` and ``train.distillation.top_k``.
        directory: A new directory, or one that this function wrote with the same teacher.
        precision: Number format of the logits.
        on_progress: Called with the progress of preparing the data.
        on_step: Called with (finished steps, all steps).

    Raises:
        ConfigError: The configuration has no teacher or no ``top_k``, or the directory holds other logits.
        DataError: A source is exhausted before the end of the run.
    """
    top_k = config.train.distillation.top_k
    if config.train.distillation.teacher is None or top_k is None:
        raise ConfigError(
            "Stored logits need a teacher and a number of logits", where="train.distillation",
            hint="set train.distillation.teacher=RUN and, for example, train.distillation.top_k=64",
        )  # fmt: skip
    for index, stage in enumerate(config.data.stages):
        if stage.sequence_length_tokens is not None:
            raise ConfigError(
                "Stored logits cover whole rows", where=f"data.stages.{index}.sequence_length_tokens",
                hint="remove it, or train with the teacher in memory",
            )  # fmt: skip
    find_teacher(config)
    config = with_micro_batch(config, choose_micro_batch(config, "never", DistributedContext()))
    with closing(prepare(config, on_progress=on_progress)) as corpus:
        tokenizer = corpus.tokenizer
        spec = find_teacher(config, resolve_model(config, tokenizer.vocab_size), tokenizer)
        assert spec is not None
        teacher, compute = with_states(lambda: _open_teacher(config, spec), WarningNotices())
        header = LogitsHeader(
            teacher.fingerprint, spec.vocab_size, tokenizer.fingerprint, config.data.sequence_length_tokens, top_k,
            precision, config.data.document_mask, _devices().environment(compute),
        )  # fmt: skip
        with LogitsWriter(directory, header) as writer:
            before = writer.num_rows
            with planned_batches(config, corpus) as (batches, num_steps):
                for number, batch in enumerate(islice(batches, num_steps), 1):
                    _add_rows(writer, teacher, batch, top_k)
                    if on_step is not None:
                        on_step(number, num_steps)
            after = writer.num_rows
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return WrittenLogits(directory, num_steps, after - before, after, size)


def _open_teacher(config: RunConfig, spec: DecoderSpec) -> Any:
    with open_weights(as_initial(config), spec) as weights:
        return _teachers().open_teacher(config, spec, weights)


def _add_rows(writer: LogitsWriter, teacher: Any, batch: Batch, top_k: int) -> None:
    """Compute the micro-batches with a row that is missing."""
    for index, digests_B in enumerate(batch.row_digests_AB):
        missing = writer.missing(digests_B)
        if not missing.size:
            continue
        ids_BTK, logits_BTK = teacher.top_logits(batch, index, top_k)
        for row in missing.tolist():
            writer.add(int(digests_B[row]), np.ascontiguousarray(ids_BTK[row]), logits_BTK[row].copy())


def _teachers() -> Any:
    return importlib.import_module("vorox.backends.torch_engine.networks.teacher")


def _devices() -> Any:
    return importlib.import_module("vorox.backends.torch_engine.device.devices")
