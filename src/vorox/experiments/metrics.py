"""Metric registry: name, unit, reduction and description of every metric; user-defined metrics.

In: a name. Out: its definition, or an error with the nearest names, so that a misspelled metric cannot start a second
curve. Families cover names with a variable part (``activation/3/mlp/std``). The reduction of a metric is how
``tracking.reduce`` combines the values of several steps or ranks into one. User functions take part in no decision; one
that fails is reported once and never stops the training.
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
from vorox.core.user_code.extensions import load_function
from vorox.records.log import RunLog

Reduction = Literal["mean", "sum", "last", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric.

    Attributes:
        name: As written to every sink; ``/`` groups.
        unit: Unit of the value; ``1`` for pure numbers.
        reduction: How several values are combined.
        description: Exact definition.
        better: Whether lower or higher is better, if either is.
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


_LOSS = (
    "Mean cross entropy in nats over the target tokens, without auxiliary terms; with loss.name=dpo, the mean loss of "
    "preference pairs."
)
_BITS = "Bits per byte of the original text: cross entropy in bits over all targets, divided by the bytes they encode."
_METRICS = (
    Metric("loss", "nats/token", "mean", f"{_LOSS} Of one step, over the global batch.", "lower"),
    Metric("perplexity", "1", "mean", "exp(loss) of the step.", "lower"),
    Metric("bits_per_byte", "bits/byte", "mean", _BITS, "lower"),
    Metric("accuracy", "fraction", "mean", "Share of target tokens with the highest logit.", "higher"),
    Metric("learning_rate", "1", "last", "Learning rate of the step."),
    Metric("weight_decay", "1", "last", "Decoupled weight decay of the step."),
    Metric("grad_norm", "1", "mean", "L2 norm of the whole gradient before clipping."),
    Metric("parameter_norm", "1", "last", "L2 norm of all parameters after the step."),
    Metric(
        "z_loss",
        "nats^2/token",
        "mean",
        "Contribution of the z-loss to the loss: its weight x the mean squared log of the softmax denominator.",
    ),
    Metric(
        "objective",
        "1/token",
        "mean",
        "User loss (loss.name) or distillation: mean over the targets.",
        "lower",
    ),
    Metric(
        "router/load_balancing_loss",
        "1",
        "mean",
        "Load-balancing loss of the routers of experts, before its weight, mean over layers: 1 if balanced.",
    ),
    Metric(
        "router/z_loss",
        "nats^2/token",
        "mean",
        "Squared log of the softmax denominator of the routers, mean over layers.",
    ),
    Metric(
        "router/load_max_to_mean",
        "1",
        "mean",
        "Target tokens of the busiest expert of a layer over those of an average one, mean over layers.",
        "lower",
    ),
    Metric(
        "router/load_entropy_fraction",
        "fraction",
        "mean",
        "Entropy of the load of the experts of a layer over its maximum, mean over layers: 1 if balanced.",
        "higher",
    ),
    Metric(
        "router/busiest_expert_fraction",
        "fraction",
        "max",
        "Share of the target tokens that use the busiest expert, in the layer where it is largest.",
        "lower",
    ),
    Metric("rewards/accuracy", "fraction", "mean", "DPO: pairs whose chosen answer has the higher reward.", "higher"),
    Metric("rewards/margin", "nats", "mean", "DPO: reward of the chosen answer minus that of the rejected.", "higher"),
    Metric("rewards/chosen", "nats", "mean", "DPO: beta x (log p - log p of the reference) of the chosen answer."),
    Metric("rewards/rejected", "nats", "mean", "DPO: the same of the rejected answer."),
    Metric("loss_scale", "1", "last", "Loss scale of fp16, which prevents gradient underflow."),
    Metric("nonfinite_steps", "steps", "sum", "Steps with a non-finite loss or gradient; they were skipped.", "lower"),
    Metric(
        "spike_steps", "steps", "sum", "Steps that were skipped because of a loss spike (train.spike_policy).", "lower"
    ),
    Metric("tokens_total", "tokens", "last", "Positions processed since the start of the run, over all ranks."),
    Metric("epoch", "epochs", "last", "Rows sampled since the start of the run, divided by the rows of one pass."),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "mean",
        "Positions processed per second of training, including waiting for data, excluding checkpoints and validation.",
        "higher",
    ),
    Metric("step_seconds", "s", "mean", "Seconds of training per step, excluding checkpoints and validation.", "lower"),
    Metric("data_wait_seconds", "s", "mean", "Seconds per step in which the loop waited for a batch.", "lower"),
    Metric("data_wait_fraction", "fraction", "mean", "Share of training time spent waiting for data.", "lower"),
    Metric("time/compute_fraction", "fraction", "mean", "Share of wall time spent in steps.", "higher"),
    Metric("time/data_fraction", "fraction", "mean", "Share of wall time spent waiting for data.", "lower"),
    Metric(
        "time/save_fraction",
        "fraction",
        "mean",
        "Share of wall time that training was blocked by checkpoints.",
        "lower",
    ),
    Metric("time/eval_fraction", "fraction", "mean", "Share of wall time spent on validation and tasks.", "lower"),
    Metric(
        "model_flops_per_second",
        "FLOP/s",
        "mean",
        "FLOPs of the steps (6N + 12LDT per token) per second of training.",
        "higher",
    ),
    Metric(
        "mfu_fraction",
        "fraction",
        "mean",
        "Model FLOPs utilisation: model_flops_per_second / data-sheet peak of the devices.",
        "higher",
    ),
    Metric("matmul_peak_fraction", "fraction", "mean", "model_flops_per_second / measured matmul peak.", "higher"),
    Metric("eval/loss", "nats/token", "last", f"{_LOSS} Over the fixed validation rows.", "lower"),
    Metric("eval/perplexity", "1", "last", "exp(eval/loss).", "lower"),
    Metric("eval/bits_per_byte", "bits/byte", "last", f"{_BITS} Over the fixed validation rows.", "lower"),
    Metric("eval/accuracy", "fraction", "last", "accuracy, or rewards/accuracy, of the validation rows.", "higher"),
    Metric("eval/pairs", "pairs", "last", "Preference pairs of the validation."),
    Metric("eval/tokens", "tokens", "last", "Target tokens of the validation."),
    Metric("eval_seconds", "s", "sum", "Duration of validation and its samples.", "lower"),
    Metric("tasks_seconds", "s", "sum", "Duration of an evaluation of tasks.", "lower"),
    Metric("checkpoint_seconds", "s", "sum", "Time that training was blocked by a checkpoint.", "lower"),
    Metric(
        "checkpoint_write_seconds",
        "s",
        "sum",
        "Time from the snapshot of a checkpoint until it is committed and old ones are removed. It blocks training for "
        "checkpoint_seconds only.",
        "lower",
    ),
    Metric("seconds_since_save", "s", "last", "Age of the state in the newest committed checkpoint."),
    Metric("mirror/step", "steps", "last", "Step of the newest complete checkpoint in the mirror.", "higher"),
    Metric("mirror/age_seconds", "s", "last", "Time since the newest checkpoint in the mirror was committed.", "lower"),
    Metric("mirror/waiting_checkpoints", "1", "last", "Checkpoints that are not yet in the mirror.", "lower"),
    Metric("queue_depth", "batches", "last", "Prefetched batches when the step started.", "higher"),
    Metric("runtime/compile_seconds", "s", "last", "Time spent compiling steps so far.", "lower"),
    Metric("ranks/slowest_seconds", "s", "mean", "Of several ranks: data wait and compute of the slowest.", "lower"),
    Metric("ranks/median_seconds", "s", "mean", "Of several ranks: the same, median of the ranks.", "lower"),
    Metric("memory/host_bytes", "bytes", "max", "Resident memory of a rank.", "lower"),
    Metric("memory/host_peak_bytes", "bytes", "max", "Peak resident memory of a rank.", "lower"),
    Metric("memory/host_available_bytes", "bytes", "min", "Memory available on the machine.", "higher"),
    Metric("memory/device_bytes", "bytes", "max", "Device memory allocated by tensors.", "lower"),
    Metric("memory/device_peak_bytes", "bytes", "max", "Peak device memory allocated by tensors.", "lower"),
    Metric("memory/device_reserved_bytes", "bytes", "max", "Device memory reserved by the framework.", "lower"),
    Metric("memory/parameter_bytes", "bytes", "max", "Parameters, and frozen weights, that a rank holds.", "lower"),
    Metric("memory/gradient_bytes", "bytes", "max", "Gradients that a rank holds between steps.", "lower"),
    Metric("memory/optimizer_bytes", "bytes", "max", "Optimizer state that a rank holds.", "lower"),
    Metric("memory/step_peak_bytes", "bytes", "max", "Peak device memory beyond the three parts above.", "lower"),
)

_STAGE = r"pipeline/[a-z]+"
_QUEUE = r"pipeline/[a-z]+_to_[a-z]+"

_FAMILIES = (
    Family(
        re.compile(rf"{_STAGE}/items"),
        Metric("pipeline/<stage>/items", "items", "last", "Items output by a build stage so far."),
    ),
    Family(
        re.compile(rf"{_STAGE}/bytes"),
        Metric("pipeline/<stage>/bytes", "bytes", "last", "Bytes output by a build stage so far."),
    ),
    Family(
        re.compile(rf"{_STAGE}/busy_seconds"),
        Metric(
            "pipeline/<stage>/busy_seconds", "s", "last", "Time that the threads of a build stage were busy so far."
        ),
    ),
    Family(
        re.compile(rf"{_STAGE}/wait_seconds"),
        Metric("pipeline/<stage>/wait_seconds", "s", "last", "Time that the threads of a build stage waited so far."),
    ),
    Family(
        re.compile(rf"{_QUEUE}/depth"),
        Metric("pipeline/<queue>/depth", "items", "last", "Items queued between two build stages."),
    ),
    Family(
        re.compile(rf"{_QUEUE}/held_bytes"),
        Metric("pipeline/<queue>/held_bytes", "bytes", "max", "Bytes queued between two build stages."),
    ),
    Family(
        re.compile(rf"{_QUEUE}/producer_wait_seconds"),
        Metric("pipeline/<queue>/producer_wait_seconds", "s", "last", "Time that producers waited for space so far."),
    ),
    Family(
        re.compile(rf"{_QUEUE}/consumer_wait_seconds"),
        Metric("pipeline/<queue>/consumer_wait_seconds", "s", "last", "Time that consumers waited for items so far."),
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
        Metric("custom/<function>", "1", "last", "Result of a function of log.metrics for a step."),
    ),
    Family(
        re.compile(rf"eval/custom/{_CUSTOM}"),
        Metric("eval/custom/<function>", "1", "last", "Result of a function of eval.functions at a validation."),
    ),
    Family(
        re.compile(r"eval/sources/[\w.-]+/loss"),
        Metric(
            "eval/sources/<source>/loss", "nats/token", "last", f"{_LOSS} Over validation rows of a source.", "lower"
        ),
    ),
    Family(
        re.compile(r"eval/sources/[\w.-]+/perplexity"),
        Metric("eval/sources/<source>/perplexity", "1", "last", "exp(eval/sources/<source>/loss).", "lower"),
    ),
    Family(
        re.compile(r"eval/sources/[\w.-]+/bits_per_byte"),
        Metric(
            "eval/sources/<source>/bits_per_byte",
            "bits/byte",
            "last",
            f"{_BITS} Over validation rows of a source.",
            "lower",
        ),
    ),
    Family(
        re.compile(r"eval/tasks/[\w.-]+/[\w.-]+"),
        Metric("eval/tasks/<task>/<metric>", "1", "last", "Metric of an lm-evaluation-harness task."),
    ),
)

_BY_NAME = {metric.name: metric for metric in _METRICS}


def registry() -> tuple[Metric, ...]:
    """Return all definitions, families under their pattern, in the order of this file."""
    return (*_METRICS, *(family.metric for family in _FAMILIES))


@functools.lru_cache(maxsize=4096)
def metric(name: str) -> Metric:
    """Return the definition of a metric.

    Raises:
        ConfigError: The metric is unknown; the hint has the nearest names.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    for family in _FAMILIES:
        if family.pattern.fullmatch(name):
            return family.metric
    near = difflib.get_close_matches(name, [known.name for known in registry()], n=3)
    raise ConfigError(
        f"Unknown metric {name}",
        where="experiments/metrics.py",
        hint=f"did you mean {' or '.join(near)}?" if near else "every metric has an entry there",
    )


class MetricFunctions:
    """User functions that compute metrics, configured by import path.

    Args:
        paths: Import paths.
        kind: ``metric`` or ``evaluation``, for messages.
        key: The setting that names them.
        prefix: Prefix of the metric names.
        log: Reports their failures.

    Raises:
        ConfigError: A function cannot be imported, or two have the same name.
    """

    def __init__(self, paths: Sequence[str], *, kind: str, key: str, prefix: str, log: RunLog) -> None:
        self._kind, self._key, self._prefix, self._log = kind, key, prefix, log
        self._failed: set[str] = set()
        self._functions: dict[str, Callable[..., object]] = {}
        names = [path.rpartition(":")[2] for path in paths]
        for number, (name, path) in enumerate(zip(names, paths, strict=True)):
            if Counter(names)[name] > 1:
                raise ConfigError(
                    f"{key} has {Counter(names)[name]} functions named {name}", where=f"{key}.{number}",
                    hint="give each function a unique name; metrics are named after them",
                )  # fmt: skip
            self._functions[name] = load_function(path, kind=kind, where=f"{key}.{number}")

    def __call__(self, *arguments: Any) -> dict[str, float]:
        """Call all functions; return ``<prefix><function>``, or ``<prefix><function>/<key>`` for a mapping."""
        found: dict[str, float] = {}
        for name, function in self._functions.items():
            try:
                found.update(self._numbers(self._prefix + name, function(*arguments)))
            except Exception as error:  # an error in a user function must not stop the training
                if name not in self._failed:
                    self._failed.add(name)
                    text = f"The {self._kind} {name} failed ({type(error).__name__}: {error}); reported once"
                    if isinstance(error, KeyError) and isinstance(arguments[-1], Mapping):
                        names = cast("Mapping[str, object]", arguments[-1])
                        text += f"; the values are {', '.join(sorted(names))}"
                    self._log.event(f"{self._kind}_failed", text, level="warning", function=name)
        return found

    def rehearse(self, *arguments: Any) -> None:
        """Call all functions, of which none may fail.

        Raises:
            ConfigError: One fails, or returns no numbers.
        """
        for name, function in self._functions.items():
            try:
                self._numbers(self._prefix + name, function(*arguments))
            except Exception as error:
                raise ConfigError(
                    f"The {self._kind} {name} fails: {type(error).__name__}: {error}", where=f"{self._key}: {name}",
                    saved="no step was trained", hint="correct the function; with runtime.rehearsal=false the run "
                    "trains without its values",
                ) from error  # fmt: skip

    def _numbers(self, name: str, value: object) -> dict[str, float]:
        values = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {"": value}
        numbers = {f"{name}/{key}" if key else name: float(cast("float", number)) for key, number in values.items()}
        for full_name in numbers:
            metric(full_name)
        return numbers
