"""Evaluate a model on lm-evaluation-harness tasks.

In: a language model and task names. Out: the metrics of each finished task. The harness builds requests and computes
metrics; ``RequestScorer`` answers the requests in batches. A task that the time budget interrupts has no result,
because a score over part of a task is a different score.

Shape legend: T positions, V vocabulary.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.errors import ConfigError
from vorox.core.schema.train import Weights
from vorox.training.evaluation.task_loading import prints_aside
from vorox.training.inference.language_model import LanguageModel
from vorox.training.inference.sampling import generate

MAX_LOGIT_BYTES = 256 << 20
"""Logits of a batch in host memory."""
BATCH_SEQUENCES = 16
"""Largest number of sequences in a batch, by default."""
BOOTSTRAP_SAMPLES = 1000
"""Resamples for the standard error of a metric without a formula."""
MAX_NEW_TOKENS = 256
"""Length of a completion if the task names none, as in the harness."""

TokenPair = tuple[list[int], list[int]]


class OutOfTime(Exception):
    """The time budget ended before the task."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of one task.

    Attributes:
        task: Its name.
        version: Its version in the harness.
        num_samples: Evaluated documents.
        num_fewshot: Examples in each prompt.
        metrics: Values by ``metric``, or ``metric.filter``; standard errors as ``metric_stderr``.
    """

    task: str
    version: str
    num_samples: int
    num_fewshot: int
    metrics: Mapping[str, float]


class RequestScorer:
    """Log-likelihoods and completions of a model, in batches.

    Args:
        model: The model.
        batch_size: Largest number of sequences in a batch.
        check: Called before each batch; it raises an error to end the evaluation.
    """

    def __init__(self, model: LanguageModel, batch_size: int, check: Callable[[], None]) -> None:
        self.model, self._batch_size, self._check = model, batch_size, check
        self.max_tokens = model.spec.max_positions_tokens

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the ids of a text as transformers does, which the harness uses.

        Args:
            text: The text.
            add_special_tokens: Whether the tokenizer adds its tokens. ``None``: unless the text begins with BOS.
        """
        tokenizer = self.model.tokenizer
        if add_special_tokens is None:
            add_special_tokens = not text.startswith(tokenizer.token_text(tokenizer.prefix_id) or "\0")
        return tokenizer.encode_as_transformers(text, add_special_tokens=add_special_tokens)

    def log_likelihoods(self, pairs: Sequence[TokenPair]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether greedy decoding gives it.

        What does not fit is truncated on the left, as in the harness: of a continuation longer than the model's
        positions, the last tokens count. Pairs with the same inputs are computed once.
        """
        inputs = [tuple((context + continuation)[-(self.max_tokens + 1) :][:-1]) for context, continuation in pairs]
        pairs_of: dict[tuple[int, ...], list[int]] = {}
        for number, tokens in enumerate(inputs):
            pairs_of.setdefault(tokens, []).append(number)
        found: dict[int, tuple[float, bool]] = {}
        remaining = sorted(pairs_of, key=len, reverse=True)
        while remaining:
            self._check()
            row_bytes = 4 * len(remaining[0]) * self.model.spec.vocab_size
            size = max(1, min(self._batch_size, MAX_LOGIT_BYTES // row_bytes))
            batch, remaining = remaining[:size], remaining[size:]
            rows = np.zeros((len(batch), len(batch[0])), np.int32)  # padding is on the right: causal rows ignore it
            for row, tokens in zip(rows, batch, strict=True):
                row[: len(tokens)] = tokens
            for tokens, logits_TV in zip(batch, self.model.logits(rows), strict=True):
                for number in pairs_of[tokens]:
                    continuation = pairs[number][1][-self.max_tokens :]
                    start = len(tokens) - len(continuation)
                    found[number] = _score(logits_TV[start : len(tokens)], continuation)
        return [found[number] for number in range(len(pairs))]

    def rolling_log_likelihood(self, ids: list[int]) -> float:
        """Return the log-likelihood of a whole text, in windows that do not overlap if it is longer than the model's.

        The windows are the harness's.
        """
        windows_of: Any = import_module("lm_eval.utils")
        windows = windows_of.get_rolling_token_windows(
            token_list=ids, prefix_token=self.model.tokenizer.prefix_id, max_seq_len=self.max_tokens, context_len=1
        )
        disjoint = map(windows_of.make_disjoint_window, windows)
        return sum(
            value for value, _ in self.log_likelihoods([(list(before), list(target)) for before, target in disjoint])
        )

    def complete(self, prompts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        """Continue texts until a stop sequence, the end of the text, or the maximum length.

        Args:
            prompts: Texts; their left part is dropped if they do not fit.
            options: ``generation_kwargs`` of the harness, accepted by ``check_completions``.
        """
        num_tokens = _num_new_tokens(options)
        is_sampled = options.get("do_sample", float(options.get("temperature") or 0) > 0)
        temperature = float(options.get("temperature", 1.0)) if is_sampled else 0.0
        top_k, top_p = int(options.get("top_k") or 0), options.get("top_p")
        settings = self.model.sampling_settings(
            num_tokens, temperature, top_k, None, 1.0 if top_p is None else float(top_p)
        )
        penalty = options.get("repetition_penalty")  # without one, that of the model's generation_config.json
        settings = replace(
            settings, max_new_tokens=num_tokens, min_p=float(options.get("min_p") or 0),
            repetition_penalty=settings.repetition_penalty if penalty is None else float(penalty),
        )  # fmt: skip
        until: str | list[str] = options.get("until") or []
        stops = [until] if isinstance(until, str) else until
        texts: list[str] = []
        for start in range(0, len(prompts), self._batch_size):
            self._check()
            batch = [self.encode(text) for text in prompts[start : start + self._batch_size]]
            fitting = [
                (ids or [self.model.tokenizer.end_of_text_id])[-(self.max_tokens - num_tokens) :] for ids in batch
            ]
            for ids in generate(self.model.engine, fitting, settings):
                text = self.model.tokenizer.decode(self.model.tokenizer.without_special(ids))
                ends = [text.find(stop) for stop in stops if stop and stop in text]
                texts.append(text[: min(ends, default=len(text))])
        return texts


def _score(logits_TV: npt.NDArray[np.float32], continuation: Sequence[int]) -> tuple[float, bool]:
    logits = logits_TV.astype(np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    log_sums = largest[:, 0] + np.log(np.exp(logits - largest).sum(axis=-1))
    targets = np.asarray(continuation, np.int64)
    log_likelihoods = logits[np.arange(len(targets)), targets] - log_sums
    return float(log_likelihoods.sum()), bool((logits.argmax(axis=-1) == targets).all())


_NEUTRAL_OPTIONS: Mapping[str, Any] = {
    **dict.fromkeys(["bad_words_ids", "cache_implementation", "exponential_decay_length_penalty", "suppress_tokens"]),
    **dict.fromkeys(["encoder_repetition_penalty", "guidance_scale", "length_penalty"], 1),
    **dict.fromkeys(["num_beams", "num_beam_groups", "num_return_sequences", "typical_p"], 1),
    **dict.fromkeys(["diversity_penalty", "epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens"], 0),
    **dict.fromkeys(["frequency_penalty", "no_repeat_ngram_size", "penalty_alpha", "presence_penalty"], 0),
    **dict.fromkeys(["early_stopping", "renormalize_logits"], False),
    "use_cache": True,
}
"""Options of generation that are not supported, with the value that changes nothing."""
_MAX_TOKEN_OPTIONS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OPTIONS = ("until", *_MAX_TOKEN_OPTIONS, "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def check_completions(tasks: Mapping[str, Any], model: LanguageModel) -> None:
    """Check that the completions that tasks request are supported, and fit into the model's positions.

    Raises:
        ConfigError: A task's completions are not, or do not.
    """
    for name, task in tasks.items():
        if task.OUTPUT_TYPE != "generate_until":
            continue
        options: Mapping[str, Any] = task.get_config("generation_kwargs") or {}
        for option, value in options.items():
            is_neutral = option in _NEUTRAL_OPTIONS and value in (None, _NEUTRAL_OPTIONS[option])
            if option not in _OPTIONS and not is_neutral:
                raise ConfigError(
                    f"Task {name} sets generation_kwargs: {{{option}: {value}}}, which is not supported",
                    where=name, hint=f"remove it from the task; supported are {', '.join(_OPTIONS)}",
                )  # fmt: skip
        num_tokens = _num_new_tokens(options)
        max_tokens = model.spec.max_positions_tokens
        if num_tokens >= max_tokens:
            raise ConfigError(
                f"Task {name} requests {num_tokens:,} new tokens, but the model has {max_tokens:,} positions",
                where=name, hint="set generation_kwargs: {max_gen_toks: N} in the task",
            )  # fmt: skip


def _num_new_tokens(options: Mapping[str, Any]) -> int:
    given = (options[name] for name in _MAX_TOKEN_OPTIONS if options.get(name) is not None)
    return int(next(given, MAX_NEW_TOKENS))


def time_budget(seconds: float | None) -> Callable[[], None]:
    """Return a function that raises ``OutOfTime`` when some seconds from now have passed; ``None``: never."""
    deadline = None if seconds is None else time.monotonic() + seconds

    def check() -> None:
        if deadline is not None and time.monotonic() >= deadline:
            raise OutOfTime

    return check


@prints_aside()
def evaluate_tasks(
    model: LanguageModel,
    tasks: Mapping[str, Any],
    *,
    check: Callable[[], None],
    limit: int | None = None,
    batch_size: int = BATCH_SEQUENCES,
    on_result: Callable[[TaskResult], None] | None = None,
    on_samples: Callable[[str, Sequence[Mapping[str, Any]]], None] | None = None,
) -> tuple[list[TaskResult], list[str]]:
    """Evaluate a model on tasks in order.

    Args:
        model: The model.
        tasks: The tasks (``task_loading.load_tasks``).
        check: Called before each task and each batch; it raises ``OutOfTime`` to end the evaluation.
        limit: Documents per task. ``None``: all.
        batch_size: Largest number of sequences in a batch.
        on_result: Called with each finished task.
        on_samples: Called with the name of each finished task, and the results of its documents as the harness logs
            them: one for each document and filter.

    Returns:
        The results, and the names of the tasks that the time budget did not cover.
    """
    check_completions(tasks, model)
    run_harness = import_module("lm_eval.evaluator").evaluate
    harness_model = _harness_model(RequestScorer(model, batch_size, check))
    results: list[TaskResult] = []
    for position, (name, task) in enumerate(tasks.items()):
        try:
            check()
            found: Any = run_harness(
                lm=harness_model, task_dict={"tasks": {name: task}, "groups": {}, "group_map": {}}, limit=limit,
                bootstrap_iters=BOOTSTRAP_SAMPLES, log_samples=on_samples is not None,
            )  # fmt: skip
        except OutOfTime:
            return results, list(tasks)[position:]
        results.append(_result(name, found))
        if on_samples is not None:
            on_samples(name, found["samples"][name])
        if on_result is not None:
            on_result(results[-1])
    return results, []


def records_of(results: Sequence[TaskResult], limit: int | None, weights: Weights) -> dict[str, dict[str, Any]]:
    """Return results by task, as the run records them, with the settings that they depend on."""
    return {result.task: {**asdict(result), "limit": limit, "weights": weights} for result in results}


def metric_name(metric: str, filter_name: str) -> str:
    """Return the name of a metric under a filter of the harness, as results have it."""
    return re.sub(r"[^\w.-]", "_", metric if filter_name == "none" else f"{metric}.{filter_name}")


def _result(name: str, found: Mapping[str, Any]) -> TaskResult:
    metrics: dict[str, float] = {}
    for key, value in found["results"][name].items():
        metric, _, filter_name = key.partition(",")
        if filter_name and isinstance(value, int | float):
            metrics[metric_name(metric, filter_name)] = float(value)
    num_samples = int(found["n-samples"][name]["effective"])
    return TaskResult(name, str(found["versions"].get(name)), num_samples, int(found["n-shot"].get(name, 0)), metrics)


def _harness_model(scorer: RequestScorer) -> Any:
    """Return the scorer as a model of the harness, whose base class is imported only here."""
    base: Any = import_module("lm_eval.api.model").TemplateLM
    tokenizer = scorer.model.tokenizer

    class HarnessModel(base):
        @property
        def eot_token_id(self) -> int:
            return tokenizer.end_of_text_id

        @property
        def prefix_token_id(self) -> int:
            return tokenizer.prefix_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            del kwargs
            return scorer.encode(string, add_special_tokens)

        def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
            del kwargs
            return scorer.log_likelihoods([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            del disable_tqdm
            return [scorer.rolling_log_likelihood(scorer.encode(text)) for (text,) in (one.args for one in requests)]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            del disable_tqdm
            texts = [""] * len(requests)
            numbers_of: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                numbers_of.setdefault(repr(request.args[1]), []).append(number)
            for numbers in numbers_of.values():
                prompts = [requests[number].args[0] for number in numbers]
                for number, text in zip(numbers, scorer.complete(prompts, requests[numbers[0]].args[1]), strict=True):
                    texts[number] = text
            return texts

    return HarnessModel()
