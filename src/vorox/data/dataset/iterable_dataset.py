"""``RemoteIterableDataset``: samples of a streamed corpus, resumable at any position.

A configuration, or a few arguments, go in; dictionaries of arrays come out, one per training row, in the order in which
a run of that configuration reads them. The state is the index of the next sample: about 200 bytes, valid for any number
of ranks and workers, and resuming reads nothing twice. Invariant: the sample at a position is a function of the
configuration and the text alone.
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
from vorox.data.cache.building.report import PrepareProgress
from vorox.data.corpus.corpus import plan_start, prepare
from vorox.data.dataset.dataset_config import Sources, Transforms, dataset_config
from vorox.data.dataset.sample_reader import BLOCK_SAMPLES, Sample, SampleReader, Share, order_before
from vorox.data.order.growth import PlanGrower
from vorox.data.order.loader import RowSource
from vorox.data.order.plan import DataPlan
from vorox.data.prefetch import Prefetcher

if TYPE_CHECKING:
    from vorox.data.dataset.torch_adapter import TorchStream

_STATE_VERSION = 1


class RemoteIterableDataset:
    """An iterable dataset over streamed text. It can be pickled; each iterator opens and closes its files and threads.

    Args:
        data: A run's configuration; or the location of the text: one, several, or a mapping of source names to
            locations or to settings of ``data.sources``.
        tokenizer: Path of a ``tokenizer.json``, or ``byte``. Default: the configuration's.
        sequence_length_tokens: Positions of a sample. Default: the configuration's, else 1,024.
        weights: Exact weight of each source by name. Default: the configuration's, else equal weights.
        transforms: Functions that filter or change documents, as in ``data.transforms``.
        seed: Seed of the order. Default: the configuration's.
        shuffle: Whether to permute rows. Default: the configuration's, else true.
        shuffle_buffer_rows: Approximate number of rows permuted together, rounded to whole units. Default:
            ``data.growth``.
        prefetch_samples: Number of samples that a thread keeps ready; 0 reads each sample on request.
        metadata: Whether samples name their documents.
        epochs: Number of passes over a source after which iteration ends. ``None`` repeats indefinitely.
        rank: Rank of this process, which reads every ``world_size``-th sample.
        world_size: Number of ranks.
        cache_directory: Directory of chunks and unit records. Default: the configuration's.
        retention_bytes: Disk budget of the chunks. Default: the configuration's.
        unit_bytes: Bytes of text per unit. Default: the configuration's, else 8 MiB.
        on_progress: Called with the progress of data preparation.

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
            raise ConfigError(f"Rank {rank} is not in [0, {world_size})", where="rank, world_size")
        if prefetch_samples < 0 or (epochs is not None and epochs < 1):
            raise ConfigError(f"Invalid prefetch_samples={prefetch_samples} or epochs={epochs}: too small")
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
        self._plan: DataPlan | None = None

    def __iter__(self) -> Iterator[Sample]:
        """Yield samples, starting from the loaded state."""
        self._position = start = self._start
        for position, sample in self.samples(start, Share(self.rank, self.world_size)):
            self._position = position - self.rank + self.world_size
            yield sample

    def samples(self, start: int, share: Share) -> Generator[tuple[int, Sample]]:
        """Yield (position, sample) for a share of the positions from ``start`` on.

        Raises:
            DataError: The text has changed since the loaded state was saved, or cannot be read.
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
        """Return the state of the latest iterator, which can be resumed with any number of ranks.

        All ranks must have read the same number of samples.
        """
        if self._position == self._start or self._plan is None:
            return self.start_state
        return {**self.start_state, "position": self._position, "order": order_before(self._plan, self._position)}

    @property
    def start_state(self) -> dict[str, Any]:
        """The state that the next iterator starts from."""
        return {"v": _STATE_VERSION, "position": self._start, "seed": self.config.run.seed, "order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iterator from a state.

        Raises:
            DataError: The state is not of a ``RemoteIterableDataset``, or has a different seed.
        """
        is_valid = isinstance(state.get("position"), int) and isinstance(state.get("order"), str)
        if state.get("v") != _STATE_VERSION or not is_valid:
            raise DataError(f"Not a state of a RemoteIterableDataset: {dict(state)}")
        if state.get("seed") != self.config.run.seed:
            raise DataError(
                f"The state was saved with seed {state.get('seed')}, the dataset has seed {self.config.run.seed}",
                hint="create the dataset with the seed of the state",
            )
        self._start = self._position = int(state["position"])
        self._order = str(state["order"])

    def as_torch(self, *, batch_size: int = 1) -> TorchStream:
        """Return this dataset as a ``torch.utils.data.IterableDataset`` of tensors.

        Args:
            batch_size: Batch size of the ``DataLoader``. Workers take turns of this many samples, so the order of the
                batches does not depend on the number of workers. Use 1 for a loader without batching.
        """
        from vorox.data.dataset.torch_adapter import TorchStream

        return TorchStream(self, batch_size=batch_size)

    def __getstate__(self) -> dict[str, Any]:
        """Omit the plan and the callback: an unpickled dataset opens its own plan."""
        return {**self.__dict__, "_plan": None, "_on_progress": None}

    def _check_order(self, source: RowSource) -> None:
        """Refuse a loaded state if the samples before its position have changed."""
        self._plan, position = source.plan, self._start
        if not position or not self._order:
            return
        source.cover(position)
        if order_before(source.plan, position) != self._order:
            raise DataError(
                f"The samples before position {position:,} have changed since the state was saved",
                where=", ".join(source.name for source in self.config.data.sources),
                hint="restore the text and the settings of that time, or start without a state",
            )

    @contextlib.contextmanager
    def _opened(self) -> Generator[RowSource]:
        config = self.config
        with (
            contextlib.closing(prepare(config, on_progress=self._on_progress)) as corpus,
            tempfile.TemporaryDirectory(prefix="vorox-stream-") as directory,
        ):
            readers = [source.train for source in corpus.sources]
            plan = DataPlan.create(RunLayout(Path(directory)).plan, plan_start(config, corpus), readers)
            yield RowSource(plan, readers, grower=PlanGrower(plan, readers, config.data.growth))


def _check_supported(config: RunConfig) -> None:
    unsupported = [
        f"data.sources.{index}.split_by" for index, one in enumerate(config.data.sources) if one.split_by is not None
    ]
    unsupported += ["data.stages"] if config.data.stages else []
    if unsupported:
        raise ConfigError(
            f"{unsupported[0]} is not supported: a RemoteIterableDataset has one constant mixture of whole sources",
            where=unsupported[0], hint="remove the setting, or use `vorox train`",
        )  # fmt: skip
