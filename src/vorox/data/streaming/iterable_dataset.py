"""``RemoteIterableDataset``: samples of a streamed corpus, resumable at any position.

A run's configuration, or a few arguments, go in; dictionaries of arrays come out, one per training row, in the order
in which a run of that configuration would read them. The state is the number of the next sample: about 200 bytes that
mean the same for any number of ranks and workers, and nothing is skipped to resume. Invariant: the sample at a position
is a function of the configuration and the text alone.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vorox.core.errors import ConfigError, DataError
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.data.corpus import PrepareProgress, plan_start, prepare
from vorox.data.growth import PlanGrower
from vorox.data.plan import Plan
from vorox.data.prefetch import Prefetcher
from vorox.data.row_source import RowSource
from vorox.data.streaming.dataset_config import Sources, Transforms, dataset_config
from vorox.data.streaming.sample_reader import BLOCK_SAMPLES, Sample, SampleReader, Share, order_before

if TYPE_CHECKING:
    from vorox.data.streaming.torch_adapter import TorchStream

_STATE_VERSION = 1


class RemoteIterableDataset:
    """An iterable dataset over streamed text. An iterator opens files and threads and closes them; it can be pickled.

    Args:
        data: A run's configuration; or the location of the text: one, several, or a mapping of source names to
            locations or to settings as under ``data.sources``.
        tokenizer: A ``tokenizer.json``, or ``byte``. None: that of the configuration.
        sequence_length_tokens: Positions of a sample. None: those of the configuration, or 1,024.
        weights: Share of each source by name, exact. None: those of the configuration, or equal ones.
        transforms: Functions that filter or change documents, as under ``data.transforms``.
        seed: Seed of the order. None: that of the configuration.
        shuffle: Whether rows are permuted. None: as the configuration says, or yes.
        shuffle_buffer_rows: About how many rows are permuted together, in whole units. None: ``data.growth``.
        prefetch_samples: Samples kept ready by a thread; 0 makes each when it is asked for.
        metadata: Whether samples name their documents.
        epochs: Passes over a source after which the samples end. None: never end.
        rank: Rank of this process; it reads every ``world_size``-th sample.
        world_size: Number of ranks.
        cache_directory: Directory of chunks and of the record of units. None: as the configuration says.
        retention_bytes: Disk budget of the chunks. None: as the configuration says.
        unit_bytes: Text of a unit. None: as the configuration says, or 8 MiB.
        on_progress: Called with what is being prepared.

    Raises:
        ConfigError: The arguments contradict each other.
    """

    def __init__(
        self,
        data: RunConfig | Sources,
        *,
        tokenizer: str | None = None,
        sequence_length_tokens: int | None = None,
        weights: Mapping[str, float | str] | None = None,
        transforms: Transforms | None = None,
        seed: int | None = None,
        shuffle: bool | None = None,
        shuffle_buffer_rows: int | None = None,
        prefetch_samples: int = 64,
        metadata: bool = False,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        cache_directory: str | Path | None = None,
        retention_bytes: int | None = None,
        unit_bytes: int | None = None,
        on_progress: PrepareProgress | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"there is no rank {rank} of {world_size}", where="rank, world_size")
        if prefetch_samples < 0 or (epochs is not None and epochs < 1):
            raise ConfigError(f"prefetch_samples={prefetch_samples} or epochs={epochs} is too small")
        self.config = dataset_config(
            data, tokenizer=tokenizer, sequence_length_tokens=sequence_length_tokens, weights=weights,
            transforms=transforms, seed=seed, shuffle=shuffle, shuffle_buffer_rows=shuffle_buffer_rows,
            cache_directory=cache_directory, retention_bytes=retention_bytes, unit_bytes=unit_bytes,
        )  # fmt: skip
        _check_supported(self.config)
        self.epochs, self.rank, self.world_size = epochs, rank, world_size
        self._prefetch_samples, self._metadata, self._on_progress = prefetch_samples, metadata, on_progress
        self._start = self._position = 0
        self._order = ""
        self._plan: Plan | None = None

    def __iter__(self) -> Iterator[Sample]:
        """Yield samples from the loaded state on, or from the first."""
        self._position = start = self._start
        for position, sample in self.samples(start, Share(self.rank, self.world_size)):
            self._position = position - self.rank + self.world_size
            yield sample

    def samples(self, start: int, share: Share) -> Generator[tuple[int, Sample]]:
        """Generate the samples of a share of the positions from ``start`` on, each with its position.

        Raises:
            DataError: The text has changed since the loaded state was made, or cannot be read.
        """
        with self._opened() as source:
            self._check_order(source)
            reader = SampleReader(
                source, start, share, document_mask=self.config.data.document_mask, metadata=self._metadata,
                max_epochs=self.epochs,
            )  # fmt: skip
            depth = -(-self._prefetch_samples // BLOCK_SAMPLES)
            blocks = Prefetcher(
                reader.read, reader.num_blocks, num_threads=min(depth, 1), depth=depth, on_close=source.close
            )
            with blocks:
                while len(block := next(blocks)) == BLOCK_SAMPLES:
                    yield from block
                yield from block

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest iterator: all it takes to resume there, at any number of ranks.

        Every rank must have read as many samples as the others.
        """
        if self._position == self._start or self._plan is None:
            return self.start_state
        return {**self.start_state, "position": self._position, "order": order_before(self._plan, self._position)}

    @property
    def start_state(self) -> dict[str, Any]:
        """The state that the next iterator starts from."""
        return {"v": _STATE_VERSION, "position": self._start, "seed": self.config.run.seed, "order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the next iterator from a state.

        Raises:
            DataError: It is not the state of such a dataset, or has another seed.
        """
        known = isinstance(state.get("position"), int) and isinstance(state.get("order"), str)
        if state.get("v") != _STATE_VERSION or not known:
            raise DataError(f"this is not the state of a RemoteIterableDataset: {dict(state)}")
        if state.get("seed") != self.config.run.seed:
            raise DataError(
                f"the state was made with seed {state.get('seed')}, the dataset has {self.config.run.seed}",
                hint="make the dataset with the seed that the state was made with",
            )
        self._start = self._position = int(state["position"])
        self._order = str(state["order"])

    def as_torch(self, *, batch_size: int = 1) -> TorchStream:
        """Return this dataset as a ``torch.utils.data.IterableDataset`` of tensors.

        Args:
            batch_size: That of the ``DataLoader``: workers take turns of so many samples, so batches come in one order
                for any number of workers. 1 for a loader without batching, whose items are samples.
        """
        from vorox.data.streaming.torch_adapter import TorchStream

        return TorchStream(self, batch_size=batch_size)

    def __getstate__(self) -> dict[str, Any]:
        """Drop what is open: another process opens its own."""
        return {**self.__dict__, "_plan": None, "_on_progress": None}

    def _check_order(self, source: RowSource) -> None:
        """Refuse a loaded state if the samples before it have changed."""
        self._plan, position = source.plan, self._start
        if not position or not self._order:
            return
        source.cover(position)
        if order_before(source.plan, position) != self._order:
            raise DataError(
                f"the samples before position {position:,} are not those that the state was made after",
                where=", ".join(source.name for source in self.config.data.sources),
                hint="restore the text and the settings that it was made with, or start anew",
            )

    @contextlib.contextmanager
    def _opened(self) -> Generator[RowSource]:
        config = self.config
        with (
            contextlib.closing(prepare(config, on_progress=self._on_progress)) as corpus,
            tempfile.TemporaryDirectory(prefix="vorox-stream-") as directory,
        ):
            readers = [source.train for source in corpus.sources]
            plan = Plan.create(RunLayout(Path(directory)).plan, plan_start(config, corpus), readers)
            yield RowSource(plan, readers, grower=PlanGrower(plan, readers, config.data.growth))


def _check_supported(config: RunConfig) -> None:
    asked = [
        f"data.sources.{index}.split_by" for index, one in enumerate(config.data.sources) if one.split_by is not None
    ]
    asked += ["data.stages"] if config.data.stages else []
    if asked:
        raise ConfigError(
            f"{asked[0]} is for the steps of a run; a RemoteIterableDataset has one mixture of whole sources",
            where=asked[0], hint="leave it out, or use `vorox train`",
        )  # fmt: skip
