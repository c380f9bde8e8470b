"""The one registry of what we measure: name, unit, reduction and meaning of every number that is written or shown.

In: a name. Out: its definition, or an error that names the nearest one, so that a misspelled metric cannot open a
second curve. Families cover names with a part that varies (``activation/3/mlp/std``). The reduction says how the values
of several steps, or of several processes at one step, become one value.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from vorox.core.errors import ConfigError
from vorox.core.extensions import load_function
from vorox.core.log import RunLog

Reduction = Literal["mean", "sum", "last", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number that a run can report.

    Attributes:
        name: As written to every sink; ``/`` groups.
        unit: Unit of the value; ``1`` for pure numbers.
        reduction: How several values become one.
        description: What exactly it is.
        better: Which way is good, if there is one.
    """

    name: str
    unit: str
    reduction: Reduction
    description: str
    better: Literal["lower", "higher"] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Metrics whose names share a pattern; ``metric.name`` has ``<part>`` where a name varies."""

    pattern: re.Pattern[str]
    metric: Metric


_LOSS = "Mean cross entropy in nats over the trained tokens, without auxiliary terms."
_BITS = (
    "Bits per byte of the original text: cross entropy in bits over all targets, divided by the bytes they stand for."
)
_METRICS = (
    Metric("loss", "nats/token", "mean", f"{_LOSS} Of one step, over the global batch.", "lower"),
    Metric("perplexity", "1", "mean", "exp(loss) of the step.", "lower"),
    Metric("bits_per_byte", "bits/byte", "mean", _BITS, "lower"),
    Metric("accuracy", "fraction", "mean", "Share of trained tokens that had the highest logit.", "higher"),
    Metric("learning_rate", "1", "last", "Learning rate that the step was made with."),
    Metric("weight_decay", "1", "last", "Decoupled weight decay that the step was made with."),
    Metric("grad_norm", "1", "mean", "L2 norm of the whole gradient before clipping."),
    Metric("parameter_norm", "1", "last", "L2 norm of all parameters after the step."),
    Metric(
        "z_loss",
        "nats^2/token",
        "mean",
        "What the z-loss adds to the loss: its weight x the mean squared log of the softmax denominator.",
    ),
    Metric("loss_scale", "1", "last", "Factor on the loss in fp16, against underflow of gradients."),
    Metric(
        "nonfinite_steps", "steps", "sum", "Steps whose loss or gradient was not finite; they changed nothing.", "lower"
    ),
    Metric("tokens_total", "tokens", "last", "Positions processed since the start of the run, over all processes."),
    Metric("epoch", "epochs", "last", "Rows drawn since the start of the run divided by the rows of one pass."),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "mean",
        "Positions processed per second of training; waiting for data counts, saving and validation do not.",
        "higher",
    ),
    Metric("step_seconds", "s", "mean", "Seconds of training per step; saving and validation do not count.", "lower"),
    Metric("data_wait_seconds", "s", "mean", "Seconds per step in which the loop waited for a batch.", "lower"),
    Metric(
        "data_wait_fraction", "fraction", "mean", "Share of the seconds of training spent waiting for data.", "lower"
    ),
    Metric("time/compute_fraction", "fraction", "mean", "Share of all time that went into steps.", "higher"),
    Metric("time/data_fraction", "fraction", "mean", "Share of all time that went into waiting for data.", "lower"),
    Metric(
        "time/save_fraction",
        "fraction",
        "mean",
        "Share of all time that training stood still for checkpoints.",
        "lower",
    ),
    Metric(
        "time/eval_fraction", "fraction", "mean", "Share of all time that went into validation and samples.", "lower"
    ),
    Metric(
        "model_flops_per_second",
        "FLOP/s",
        "mean",
        "FLOPs of the steps (6N + 12LDT per token) / training seconds.",
        "higher",
    ),
    Metric(
        "mfu_fraction", "fraction", "mean", "model_flops_per_second / the data-sheet peak of the devices.", "higher"
    ),
    Metric("ceiling_fraction", "fraction", "mean", "model_flops_per_second / the measured matmul rate.", "higher"),
    Metric("eval/loss", "nats/token", "last", f"{_LOSS} Over the fixed validation rows.", "lower"),
    Metric("eval/perplexity", "1", "last", "exp(eval/loss).", "lower"),
    Metric("eval/bits_per_byte", "bits/byte", "last", f"{_BITS} Over the fixed validation rows.", "lower"),
    Metric("eval/accuracy", "fraction", "last", "Share of validation targets that had the highest logit.", "higher"),
    Metric("eval/tokens", "tokens", "last", "Target tokens of the validation."),
    Metric("eval_seconds", "s", "sum", "Seconds that the validation and its samples took.", "lower"),
    Metric("checkpoint_seconds", "s", "sum", "Seconds that training stood still for a checkpoint.", "lower"),
    Metric(
        "checkpoint_write_seconds",
        "s",
        "sum",
        "Seconds from the moment that a checkpoint holds until it was committed and old ones had gone. Training stands "
        "still for checkpoint_seconds of them.",
        "lower",
    ),
    Metric("seconds_since_save", "s", "last", "Age of the state that the newest committed checkpoint holds."),
    Metric("mirror/step", "steps", "last", "Step of the newest checkpoint that is whole in the mirror.", "higher"),
    Metric("mirror/age_seconds", "s", "last", "Time since the newest checkpoint in the mirror was committed.", "lower"),
    Metric("mirror/waiting_checkpoints", "1", "last", "Checkpoints that are not in the mirror yet.", "lower"),
    Metric("queue_depth", "batches", "last", "Batches that were ready when the step began.", "higher"),
    Metric("runtime/compile_seconds", "s", "last", "Time spent compiling steps so far.", "lower"),
    Metric("memory/host_bytes", "bytes", "max", "Resident memory of this process.", "lower"),
    Metric("memory/host_peak_bytes", "bytes", "max", "Largest resident memory of this process so far.", "lower"),
    Metric("memory/host_available_bytes", "bytes", "min", "Memory that the machine still has for new work.", "higher"),
    Metric("memory/device_bytes", "bytes", "max", "Memory that tensors occupy on the device.", "lower"),
    Metric("memory/device_peak_bytes", "bytes", "max", "Largest memory that tensors occupied on the device.", "lower"),
    Metric("memory/device_reserved_bytes", "bytes", "max", "Memory that the framework holds on the device.", "lower"),
)

_STAGE = r"pipeline/[a-z]+"
_QUEUE = r"pipeline/[a-z]+_to_[a-z]+"

_FAMILIES = (
    Family(
        re.compile(rf"{_STAGE}/items"),
        Metric("pipeline/<stage>/items", "items", "last", "What a stage of building a cache gave out so far."),
    ),
    Family(
        re.compile(rf"{_STAGE}/bytes"),
        Metric("pipeline/<stage>/bytes", "bytes", "last", "Bytes that a stage of building a cache gave out so far."),
    ),
    Family(
        re.compile(rf"{_STAGE}/busy_seconds"),
        Metric("pipeline/<stage>/busy_seconds", "s", "last", "Time that the threads of a stage worked so far."),
    ),
    Family(
        re.compile(rf"{_STAGE}/wait_seconds"),
        Metric("pipeline/<stage>/wait_seconds", "s", "last", "Time that the threads of a stage waited so far."),
    ),
    Family(
        re.compile(rf"{_QUEUE}/depth"),
        Metric("pipeline/<queue>/depth", "items", "last", "Items that wait between two stages of building a cache."),
    ),
    Family(
        re.compile(rf"{_QUEUE}/held_bytes"),
        Metric("pipeline/<queue>/held_bytes", "bytes", "max", "Bytes that are held between two stages."),
    ),
    Family(
        re.compile(rf"{_QUEUE}/producer_wait_seconds"),
        Metric("pipeline/<queue>/producer_wait_seconds", "s", "last", "Time that makers waited for room so far."),
    ),
    Family(
        re.compile(rf"{_QUEUE}/consumer_wait_seconds"),
        Metric("pipeline/<queue>/consumer_wait_seconds", "s", "last", "Time that takers waited for items so far."),
    ),
    Family(
        re.compile(r"activation/\d+/[a-z][a-z0-9_]*/mean"),
        Metric("activation/<layer>/<point>/mean", "1", "mean", "Mean of the activations at a tap."),
    ),
    Family(
        re.compile(r"activation/\d+/[a-z][a-z0-9_]*/std"),
        Metric("activation/<layer>/<point>/std", "1", "mean", "Standard deviation of the activations at a tap."),
    ),
    Family(
        re.compile(r"activation/\d+/[a-z][a-z0-9_]*/absmax"),
        Metric("activation/<layer>/<point>/absmax", "1", "max", "Largest magnitude of the activations at a tap."),
    ),
)

_CUSTOM = r"[A-Za-z_][\w.-]*(/[\w.-]+)*"
_FAMILIES = (
    *_FAMILIES,
    Family(
        re.compile(rf"custom/{_CUSTOM}"),
        Metric("custom/<function>", "1", "last", "What a function of log.metrics returned for a step."),
    ),
    Family(
        re.compile(rf"eval/custom/{_CUSTOM}"),
        Metric("eval/custom/<function>", "1", "last", "What a function of eval.functions returned at a validation."),
    ),
)

_BY_NAME = {metric.name: metric for metric in _METRICS}


def registry() -> tuple[Metric, ...]:
    """Every definition, families under their pattern, in the order of this file."""
    return (*_METRICS, *(family.metric for family in _FAMILIES))


@functools.lru_cache(maxsize=4096)
def metric(name: str) -> Metric:
    """The definition of a metric.

    Raises:
        ConfigError: There is none; the nearest names are given.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    for family in _FAMILIES:
        if family.pattern.fullmatch(name):
            return family.metric
    near = difflib.get_close_matches(name, [known.name for known in registry()], n=3)
    raise ConfigError(
        f"there is no metric {name}",
        where="experiments/metrics.py",
        hint=f"did you mean {' or '.join(near)}?" if near else "every metric has an entry there",
    )


def reduce(name: str, values: Sequence[float]) -> float:
    """One value for several steps or processes, by the metric's reduction.

    Args:
        name: A registered name.
        values: At least one, in the order in which they were measured.
    """
    match metric(name).reduction:
        case "mean":
            return sum(values) / len(values)
        case "sum":
            return float(sum(values))
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]


class MetricFunctions:
    """Functions that a configuration names by import path.

    Args:
        paths: As configured.
        kind: What they are, for messages: ``metric`` or ``evaluation``.
        key: The setting.
        prefix: Beginning of the names of their numbers.
        log: Takes their failures.

    Raises:
        ConfigError: One cannot be imported, or two have the same name.
    """

    def __init__(self, paths: Sequence[str], *, kind: str, key: str, prefix: str, log: RunLog) -> None:
        self._kind, self._prefix, self._log = kind, prefix, log
        self._failed: set[str] = set()
        self._functions: dict[str, Callable[..., object]] = {}
        names = [path.rpartition(":")[2] for path in paths]
        for number, (name, path) in enumerate(zip(names, paths, strict=True)):
            if Counter(names)[name] > 1:
                raise ConfigError(
                    f"{key} names {Counter(names)[name]} functions called {name}", where=f"{key}.{number}",
                    hint="give each a name of its own: their numbers are named after them",
                )  # fmt: skip
            self._functions[name] = load_function(path, kind=kind, where=f"{key}.{number}")

    def __call__(self, *arguments: Any) -> dict[str, float]:
        """Return the numbers of all functions: ``<prefix><function>``, or ``<prefix><function>/<key>`` of a mapping."""
        found: dict[str, float] = {}
        for name, function in self._functions.items():
            try:
                found.update(self._numbers(self._prefix + name, function(*arguments)))
            except Exception as error:  # whatever a function of the user does, the training goes on
                if name not in self._failed:
                    self._failed.add(name)
                    text = f"The {self._kind} {name} failed ({type(error).__name__}: {error}); reported once"
                    self._log.event(f"{self._kind}_failed", text, level="warning", function=name)
        return found

    def _numbers(self, name: str, value: object) -> dict[str, float]:
        values = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {"": value}
        numbers = {f"{name}/{key}" if key else name: float(cast("float", number)) for key, number in values.items()}
        for full_name in numbers:
            metric(full_name)
        return numbers
