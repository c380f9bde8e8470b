"""A run opened for reading: configuration, metrics, batches, and the documents behind each step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from vorox.api.arguments import check_argument
from vorox.core.batch import Batch, DataCursor, DataShard
from vorox.core.errors import ConfigError
from vorox.core.run_layout import RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.data.corpus.corpus import Corpus, prepare_recorded
from vorox.data.images.decoding import ImageInput, PatchInput
from vorox.data.images.layout import image_layout
from vorox.data.order.loader import open_batches
from vorox.data.provenance import queries as provenance_queries
from vorox.data.provenance.queries import Occurrence, RowOrigin
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.data.tokenizers.loading import load as load_tokenizer
from vorox.experiments.tracking import read_metrics
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import find_run
from vorox.training.inference.language_model import LanguageModel
from vorox.training.resume.resume_settings import config_in_force
from vorox.training.steps.dataloading import image_input, validation_set
from vorox.training.steps.document_losses import DocumentLoss, document_losses

__all__ = ["DocumentLoss", "Occurrence", "RowOrigin", "Run", "open_run"]


def open_run(run: str | Path = "latest", *, root: str | Path = "runs") -> Run:
    """Open a run for reading. The run may still be training.

    Args:
        run: Path of the run directory; the run id or a unique part of it; or ``latest``.
        root: Directory of the runs, where an id or ``latest`` is looked up.

    Raises:
        ConfigError: No run matches, or several do; the message lists the candidates.
    """
    check_argument("vorox.open_run", "run", run, (str, Path))
    check_argument("vorox.open_run", "root", root, (str, Path))
    return Run(find_run(root, str(run)))


class Run:
    """A run on disk, opened read-only by ``open_run``.

    The data plan is opened on first use, and closed by ``close`` or at the end of a ``with`` block.

    Attributes:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the data plan and caches. The run remains usable and reopens them when needed."""
        if "_data" in self.__dict__:
            self._data.close()
            del self._data

    @property
    def id(self) -> str:
        """The run id: the name of its directory."""
        return self.directory.name

    @functools.cached_property
    def config(self) -> RunConfig:
        """The configuration recorded in the run directory."""
        return recorded_config(self.directory)

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The path of every checkpoint on disk, by ascending step."""
        return dict(sorted(step_directories(self.directory).items()))

    def metrics(self) -> dict[int, dict[str, float]]:
        """Return all metrics as ``{step: {name: value}}``, by ascending step.

        Values of steps that a resume rolled back are omitted. ``experiments/metrics.py`` defines the names.
        """
        return read_metrics(self.directory)

    def batches(self, first_step: int = 1, num_steps: int | None = None) -> Iterator[Batch]:
        """Yield the training batches of consecutive steps, exactly as the run reads them.

        Args:
            first_step: First step, from 1.
            num_steps: Number of steps. ``None``: all steps up to the last one that the plan covers.

        Returns:
            Batches of int32 arrays ``[micro-batch, row, position]``: ``tokens_ABT``, ``labels_ABT`` and, with a
            document mask, ``segment_ids_ABT`` and ``position_ids_ABT``; ``images_A`` if the model reads images. Stored
            logits of a teacher are not read. ``batch.step`` counts from 1, as every step does.

        Raises:
            ConfigError: The plan does not cover one of the steps.
            DataError: A cache is missing or damaged.
        """
        return _counted_from_1(self._batches(*self._step_range(first_step, num_steps, "Run.batches")))

    def document_losses(
        self, model: LanguageModel, first_step: int = 1, num_steps: int | None = None
    ) -> list[DocumentLoss]:
        """Return the mean loss of every document in the batches of consecutive steps under a model, highest first.

        Args:
            model: The model, such as ``load_model(run, step=1000)``.
            first_step: First step, from 1.
            num_steps: Number of steps. ``None``: all steps up to the last one that the plan covers.

        Raises:
            ConfigError: The plan does not cover one of the steps, or the run trains on preference pairs or images.
            DataError: A cache is missing or damaged.
        """
        refused = "preference pairs" if self.config.loss.name == "dpo" else ""
        refused = "images" if image_layout(self.config.model) is not None else refused
        if refused:
            what = f"Losses of single documents are not computed for a run on {refused}"
            raise ConfigError(what, where=str(RunLayout(self.directory).config))
        steps = self._step_range(first_step, num_steps, "Run.document_losses")
        return document_losses(model.engine, self._batches(*steps, micro_batch_sequences=1), self.where)

    def _step_range(self, first_step: int, num_steps: int | None, where: str) -> tuple[int, int]:
        """Return first and last step, which the plan covers."""
        check_argument(where, "first_step", first_step, (int,), least=1)
        check_argument(where, "num_steps", num_steps, (int, type(None)))
        data = self._data
        last_step = data.num_steps if num_steps is None else first_step + num_steps - 1
        if last_step < first_step:
            raise ConfigError(f"num_steps={num_steps} is too small", where=where, hint="use 1 or more")
        for step in (first_step, last_step):
            data.positions_of_step(step)
        return first_step, last_step

    def _batches(self, first_step: int, last_step: int, micro_batch_sequences: int | None = None) -> Generator[Batch]:
        first_position = self._data.positions_of_step(first_step)[0]
        plan, config = self._data.plan, config_in_force(self.directory, first_step - 1)[0]
        cursor = DataCursor(plan.digest, plan.num_events, first_step - 1, first_position, plan.start.seed)
        with open_batches(
            plan,
            self._data.readers,
            shard=DataShard(),
            cursor=cursor,
            global_batch_sequences=config.train.global_batch_sequences,
            micro_batch_sequences=micro_batch_sequences or config.train.micro_batch_rows,
            document_mask=config.data.document_mask,
            num_threads=0,
            image_input=self._image_input,
        ) as batches:
            for _ in range(first_step, last_step + 1):
                yield next(batches)

    @functools.cached_property
    def _image_input(self) -> ImageInput | PatchInput | None:
        if image_layout(self.config.model) is None:
            return None
        return image_input(self.config, load_tokenizer(RunLayout(self.directory).tokenizer))

    def validation_batches(self) -> Iterator[Batch]:
        """Yield the run's validation set: the same rows in the same order every time, except after growth.

        Raises:
            ConfigError: The run has no validation set.
            DataError: A cache is missing or damaged.
        """
        corpus = prepare_recorded(self.directory, self.config)
        batches = validation_set(self.config, corpus)
        if batches is None:
            corpus.close()
            raise ConfigError(
                f"Run {self.id} has no validation set: data.validation.held_out_fraction is 0",
                where=str(RunLayout(self.directory).config),
            )  # fmt: skip
        return _closing(corpus, batches())

    def where(self, step: int, slot: int | None = None) -> tuple[RowOrigin, ...]:
        """Return the documents behind the rows of a step.

        Args:
            step: The step, from 1.
            slot: Index of one row in the global batch, from 0. ``None``: all rows, in order.

        Returns:
            One entry per row: its source, epoch and documents, each with file, byte range and the range of its tokens
            in the row.

        Raises:
            ConfigError: The step or slot does not exist.
            DataError: A cache is missing or damaged.
        """
        check_argument("Run.where", "step", step, (int,), least=1)
        check_argument("Run.where", "slot", slot, (int, type(None)), least=0)
        return provenance_queries.where(self._data, step, slot)

    def when(self, uri: str, byte: int | None = None, *, ordinal: int | None = None) -> tuple[Occurrence, ...]:
        """Return every step that trains on a file, or on one of its documents, with the state of that step.

        Args:
            uri: The file, or a unique ending of its name.
            byte: Only the document whose record contains this byte of the (decompressed) file.
            ordinal: Only the document with this index in the file, from 0.

        Raises:
            ConfigError: No file matches, or several do.
            DataError: A cache is missing or damaged.
        """
        check_argument("Run.when", "uri", uri, (str, Path))
        check_argument("Run.when", "byte", byte, (int, type(None)), least=0)
        check_argument("Run.when", "ordinal", ordinal, (int, type(None)), least=0)
        return provenance_queries.when(self._data, str(uri), byte, ordinal=ordinal)

    @functools.cached_property
    def _data(self) -> RunDataIndex:
        return RunDataIndex.open(self.directory)


def _counted_from_1(batches: Generator[Batch]) -> Iterator[Batch]:
    """Yield batches with the numbers of steps that logs and queries have; engines count from 0."""
    with contextlib.closing(batches):
        for batch in batches:
            yield replace(batch, step=batch.step + 1)


def _closing(corpus: Corpus, batches: Iterator[Batch]) -> Iterator[Batch]:
    with contextlib.closing(corpus):
        yield from batches
