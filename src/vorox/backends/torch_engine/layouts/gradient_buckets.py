"""Sum the gradients of replicas in buckets while the backward pass computes the rest.

In: the gradient buffers of whole replicas (``FlatParameters``). Out: their sums over all ranks, in the same buffers.
Each buffer is cut at parameters into buckets of about ``parallel.gradient_bucket_bytes``. In the last backward pass of
a step, a bucket is summed once the gradients of all its parameters are complete; earlier micro-batches communicate
nothing. Buckets start in a fixed order, from the last layers to the first, so all ranks issue the same collectives even
if a model uses other parameters on one of them; the rest start after the backward pass.

Invariant: the buckets and their order are a function of model and configuration, and so are the bits of the sums.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vorox.backends.torch_engine.layouts.parameters import FlatParameters, Parameters, register_gradient_hooks
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.errors import ConfigError
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig

_log = logging.getLogger("vorox.torch_engine")


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object: ...


StartSum = Callable[[Tensor], Work]
"""Start to add the tensors of all ranks, in place."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A contiguous range of a gradient buffer.

    Attributes:
        names: Its parameters, as the modules name them, in table order.
        gradients: The range.
    """

    names: tuple[str, ...]
    gradients: Tensor

    @property
    def num_bytes(self) -> int:
        return self.gradients.nbytes


class GradientBuckets:
    """Sums over ranks that start within the backward pass.

    Args:
        parameters: The parameters of a whole replica.
        start_sum: Starts the sum of one bucket.
        bucket_bytes: Least size of a bucket, except for the first parameters of a buffer.

    Attributes:
        buckets: In the order of their sums.
    """

    def __init__(self, parameters: FlatParameters, start_sum: StartSum, bucket_bytes: int) -> None:
        self.buckets = cut(parameters, bucket_bytes)
        self._start_sum = start_sum
        self._is_open, self._is_logged = False, False
        self._missing: list[set[str]] = []
        self._works: list[Work] = []
        self._numbers = {name: number for number, bucket in enumerate(self.buckets) for name in bucket.names}
        self._nodes = register_gradient_hooks(
            {name: parameters.modules[name] for name in self._numbers}, self._complete
        )

    def open(self, *, overlaps: bool) -> None:
        """Begin a step's sums; with ``overlaps``, the next backward pass starts them, as the last of the step."""
        if not self._is_logged:
            self._log()
        self._missing, self._works, self._is_open = [set(bucket.names) for bucket in self.buckets], [], overlaps

    def finish(self) -> None:
        """Start the sums that have not started, and wait for all."""
        self._is_open = False
        for bucket in self.buckets[len(self._works) :]:
            self._works.append(self._start_sum(bucket.gradients))
        for work in self._works:
            work.wait()
        self._works = []

    def _log(self) -> None:
        self._is_logged = True
        fields = [[bucket.names[0], bucket.names[-1], bucket.num_bytes] for bucket in self.buckets]
        extra = {"event_kind": "gradient_buckets", "event_fields": {"buckets": fields}}
        _log.info("Gradients are summed over ranks in %s", pluralize(len(self.buckets), "bucket"), extra=extra)

    def _complete(self, name: str) -> None:
        """Note that a gradient is complete; start the sums whose turn it is."""
        if not self._is_open:
            return
        number = self._numbers[name]
        if name not in self._missing[number]:
            raise ConfigError(
                f"Backward pass adds to the gradient of {name} more than once", where="parallel.gradient_bucket_bytes",
                hint="set parallel.gradient_bucket_bytes=0, or checkpoint with use_reentrant=False",
            )  # fmt: skip
        self._missing[number].remove(name)
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            self._works.append(self._start_sum(self.buckets[len(self._works)].gradients))


def cut(parameters: FlatParameters, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets in the order of their sums: by their first parameter, the last of the model first."""
    places = {name: place for place, name in enumerate(parameters.modules)}
    buckets: list[Bucket] = []
    for group, (buffer,) in parameters.gradients.items():
        names: list[str] = []
        end = buffer.numel()
        starts = [(name, start) for name, (of, start) in parameters.starts.items() if of == group]
        for name, start in reversed(starts):
            names.insert(0, name)
            if (end - start) * buffer.element_size() >= bucket_bytes or name == starts[0][0]:
                buckets.append(Bucket(tuple(names), buffer[start:end]))
                names, end = [], start
    return tuple(sorted(buckets, key=lambda bucket: -places[bucket.names[0]]))


def create(config: RunConfig, parameters: Parameters, ranks: Ranks) -> GradientBuckets | None:
    """Return the buckets of replicas of whole models; ``None`` if the configuration or the layout has none."""
    is_whole = ranks.num_shards == 1 and ranks.context_parallel_size == 1 and ranks.num_replicas > 1
    size = config.parallel.gradient_bucket_bytes
    if size == 0 or not is_whole or ranks.is_exact or not isinstance(parameters, FlatParameters):
        return None
    return GradientBuckets(parameters, ranks.start_sum, size)
