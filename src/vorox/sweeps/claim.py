"""A claim that one configuration beats another: pairs of runs until a sequential test decides, or the budget ends.

Two configurations and a sentence go in. They are registered (``claim_register.py``) before anything is trained. Every
pair is two ordinary runs with one seed, which follows from the claim: they read the same rows and start from the same
weights as far as the configurations agree, so that the noise of both is in both. After each pair, the test of
``experiments/paired_test.py`` decides whether to stop. The same command continues a claim that was interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vorox.core.config import Difference
from vorox.core.config.yaml.reader import Json
from vorox.core.errors import ConfigError, DataError, NumericalError
from vorox.core.files.atomic import canonical_json
from vorox.core.files.json_lines import read_history
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout
from vorox.core.schema import RunConfig
from vorox.core.version import __version__
from vorox.data.cache.building.report import PrepareProgress
from vorox.data.corpus.corpus import prepare
from vorox.experiments.paired_test import PairedTest, paired_test, smallest_effect
from vorox.records.log import time_stamp
from vorox.records.replay_chain import examine_chain, read_chain, read_states
from vorox.records.run_context import expected_directory
from vorox.run import train, with_states
from vorox.sweeps.claim_divergence import divergence_gap
from vorox.sweeps.claim_inputs import (
    arm_inputs,
    environment_difference,
    environment_facts,
    input_difference,
    inputs_of_run,
)
from vorox.sweeps.claim_register import (
    CLAIM_FORMAT,
    METRICS,
    ArmRun,
    Claim,
    ClaimText,
    Outcome,
    Pair,
    Register,
    level_of,
    question_of,
)
from vorox.sweeps.sweep import compared_settings
from vorox.training.materialize import StateNotices

ConfigLoader = Callable[[Sequence[str]], RunConfig]
"""Loads the configuration of an arm with further overrides."""
_NOTHING = "nothing was registered"


@dataclass(frozen=True, slots=True)
class Budget:
    """What a claim may take, its earlier pairs included.

    Attributes:
        num_pairs: Pairs in all; ``None``: no limit.
        seconds: Time of all runs; ``None``: no limit.
    """

    num_pairs: int | None = None
    seconds: float | None = None

    def allows(self, pairs: Sequence[Pair]) -> bool:
        """Whether another pair fits, if it takes as long as the longest so far; the first one always does."""
        spent, longest = sum(pair.seconds for pair in pairs), max((pair.seconds for pair in pairs), default=0.0)
        has_time = self.seconds is None or not pairs or spent + longest <= self.seconds
        return has_time and (self.num_pairs is None or len(pairs) < self.num_pairs)

    def pairs_in_all(self, pairs: Sequence[Pair]) -> int | None:
        """Return how many pairs fit; ``None`` while their time is unknown."""
        if self.seconds is None or not pairs:
            return self.num_pairs
        fitting = int(self.seconds // max(pair.seconds for pair in pairs))
        return fitting if self.num_pairs is None else min(fitting, self.num_pairs)


class ClaimedPair:
    """The two configurations of a claim.

    Args:
        text: The claim.
        loaders: Load the configurations of A and B.
        level: Probability at most that a claim on this question is decided although the arms are equal.

    Raises:
        ConfigError: The arms cannot be compared.

    Attributes:
        root: Parent directory of all runs.
        configs: The configurations of A and B.
    """

    def __init__(self, text: ClaimText, loaders: tuple[ConfigLoader, ConfigLoader], level: float) -> None:
        self.text, self._loaders, self.level = text, loaders, level
        self.root = Path(loaders[0]([]).run.directory).absolute()
        self.configs = self._load(0, []), self._load(1, [])
        for name, config in zip("AB", self.configs, strict=True):
            _check_arm(name, config)
        if not self.differences:
            raise ConfigError(
                "A and B are the same configuration: every pair would be bit-equal", where="vorox claim",
                hint="change the setting that the claim is about in one of them", saved=_NOTHING,
            )  # fmt: skip

    def _load(self, side: int, overrides: Sequence[str]) -> RunConfig:
        return self._loaders[side]([f"run.directory={canonical_json(str(self.root)).decode()}", *overrides])

    @property
    def differences(self) -> list[Difference]:
        """The settings in which the arms differ."""
        first, second = (settings_of(config) for config in self.configs)
        keys = dict.fromkeys([*first, *second])
        return [Difference(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]

    @property
    def question(self) -> str:
        return question_of([settings_of(config) for config in self.configs], self.text.metric)

    def stated(self) -> dict[str, Any]:
        """Return what a claim fixes that is known without its data."""
        return {
            "format": CLAIM_FORMAT, "claim": {**asdict(self.text), "text": str(self.text)}, "question": self.question,
            "wanted_level": self.level, "settings": [settings_of(config) for config in self.configs],
        }  # fmt: skip

    def known(self, register: Register) -> Claim | None:
        """Return this claim; the newest one if it was registered several times."""
        stated, claims = self.stated(), reversed(register.on_question(self.question))
        return next((one for one in claims if all(one.content.get(key) == stated[key] for key in stated)), None)

    def prepare(self, on_progress: PrepareProgress | None = None) -> list[dict[str, Any]]:
        """Build the caches; return what identifies the data of both arms.

        Raises:
            ConfigError: The arms cannot be compared.
        """
        data = [_prepared(config, on_progress) for config in self.configs]
        _check_comparable(data)
        return data

    def register(self, register: Register, data: Sequence[dict[str, Any]], *, again: bool) -> Claim:
        """Register the claim, unless it is in the register.

        Args:
            register: The register, locked.
            data: Of ``prepare``.
            again: Register it anew if it is decided.

        Raises:
            DataError: The data has changed since the claim was registered.
        """
        claim = self.known(register)
        if claim is not None and claim.is_decided and not again:
            return claim
        if claim is not None and not claim.is_decided and not again:
            for name, now, then in zip("AB", data, claim.content["data"], strict=True):
                if difference := input_difference(then, now):
                    raise DataError(
                        f"{difference} of {name} has changed since the claim was registered", where=claim.id[:12],
                        hint="restore it from a copy, and run the same command again",
                        saved=f"the claim, with {pluralize(len(claim.pairs), 'pair')}",
                    )  # fmt: skip
            self._check_environment(claim)
            return claim
        number = len(register.on_question(self.question)) + 1
        return register.add_claim(
            {
                **self.stated(), "data": data, "environment": environment_facts(), "number": number,
                "level": level_of(number, self.level), "version": __version__, "registered_at": time_stamp(),
            }
        )  # fmt: skip

    def environment_change(self, claim: Claim) -> str:
        """Return what has changed of the environment since a claim was registered; empty if nothing has."""
        return environment_difference(claim.content["environment"], environment_facts())

    def _check_environment(self, claim: Claim) -> None:
        if change := self.environment_change(claim):
            raise ConfigError(
                f"The environment has changed since the claim was registered: {change}", where=claim.id[:12],
                hint="continue it where it was registered; or add --again, which registers it anew",
                saved=f"the claim, with {pluralize(len(claim.pairs), 'pair')}",
            )  # fmt: skip

    def run_pair(self, claim: Claim, argv: Sequence[str]) -> Pair:
        """Train the next pair of a claim: A first in odd pairs, B first in even ones.

        Raises:
            VoroxError: A run failed otherwise than by a loss that is not finite, or was stopped; the same command
                continues it.
        """
        number, began = len(claim.pairs) + 1, time.perf_counter()
        found: dict[int, ArmRun] = {}
        for side in (0, 1) if number % 2 else (1, 0):
            found[side] = self._run_arm(claim, number, side, argv)
        runs = found[0], found[1]
        shared = in_common(self.root, runs)
        return Pair(number, claim.seed(number), runs, *shared, time.perf_counter() - began)

    def _run_arm(self, claim: Claim, number: int, side: int, argv: Sequence[str]) -> ArmRun:
        config = self._load(side, [f"run.seed={claim.seed(number)}", f"run.name={claim.run_name(number, side)}"])
        try:
            directory, has_diverged = train(config, argv=argv).run_directory, False
        except NumericalError:
            directory, has_diverged = expected_directory(config, "auto")[0], True
            if divergence_gap(directory):
                raise  # a device computed wrongly, or the loss is finite
        if difference := input_difference(claim.content["data"][side], inputs_of_run(directory, config)):
            raise DataError(
                f"{difference} has changed since the claim was registered", where=str(directory),
                hint="restore it from a copy, and run the same command again", saved=f"pair {number} is not registered",
            )  # fmt: skip
        return arm_run(directory, claim.text.metric, has_diverged=has_diverged)


def in_common(root: Path, runs: Sequence[ArmRun]) -> tuple[int, bool]:
    """Return how many steps of two runs read the same rows, and whether step 1 of both had the same loss."""
    first, second = (examine_chain(root / run.run).entries for run in runs)
    shared = first.keys() & second.keys()
    same_rows = sum(first[step].batch == second[step].batch for step in shared)
    return same_rows, 1 in shared and first[1].loss == second[1].loss


def arm_run(directory: Path, metric: str, *, has_diverged: bool) -> ArmRun:
    """Return what the records of a run say.

    Raises:
        DataError: They are damaged, or there is no validation after the last step.
    """
    if has_diverged:
        found = examine_chain(directory)
        return ArmRun(directory.name, found.last_step, found.entries[found.last_step].chain, "", None)
    chain = read_chain(directory)
    step = max(chain)
    state, value = read_states(directory).get(step), recorded_value(directory, step, metric)
    if value is None or state is None:
        raise DataError(
            f"The run has no {'validation' if value is None else 'state'} of its last step {step:,} on record",
            where=str(directory), hint="set eval.at_end=true, or restore the records from a copy",
        )  # fmt: skip
    finite = value if math.isfinite(value) else None
    return ArmRun(directory.name, step, chain[step].chain, state.states, finite)


def recorded_value(directory: Path, step: int, metric: str) -> float | None:
    """Return a metric of a recorded validation; ``None`` if there is none."""
    record = read_history(RunLayout(directory).evaluations).get(step)
    return None if record is None or METRICS[metric] not in record else float(record[METRICS[metric]])


def effect_of(claim: Claim) -> PairedTest:
    """Return the mean by which the claimed winner is better, without the margin of the claim, and its interval."""
    text = ClaimText(claim.text.winner, claim.text.metric)
    return paired_test([text.difference(claim.values(pair)) for pair in claim.pairs], claim.level)


def outcome_of(claim: Claim) -> Outcome:
    """Return what the pairs so far decide."""
    sign = claim.test().sign
    return "holds" if sign > 0 else "refuted" if sign else "undecided"


def verdict_of(claim: Claim, budget: Budget) -> dict[str, Any]:
    """Return the verdict on the pairs so far, as registered."""
    effect = effect_of(claim)
    loser = [claim.values(pair)[1 - claim.text.winner] for pair in claim.pairs]
    mean = math.fsum(loser) / len(loser) if loser else 0.0
    total = budget.pairs_in_all(claim.pairs) or len(claim.pairs)
    return {
        "verdict": outcome_of(claim), "num_pairs": len(claim.pairs), "effect": effect.mean,
        "interval": None if effect.interval is None else list(effect.interval), "other_mean": mean,
        "level": claim.level, "smallest_effect": smallest_visible(claim, total), "time": time_stamp(),
    }  # fmt: skip


def smallest_visible(claim: Claim, num_pairs: int) -> float | None:
    """Return the effect that so many pairs decide with a probability of about 0.8; ``None`` if it is unknown."""
    deviations = smallest_effect(max(num_pairs, 1), claim.level)
    deviation = claim.test().deviation
    return None if deviations is None or deviation is None else deviations * deviation


def settings_of(config: RunConfig) -> dict[str, Json]:
    """Return the settings that a claim fixes: all that decide results, without the seed, which follows from it."""
    return {key: value for key, value in compared_settings(config).items() if key != "run.seed"}


def _prepared(config: RunConfig, on_progress: PrepareProgress | None) -> dict[str, Any]:
    return with_states(lambda: _prepare(config, on_progress), StateNotices())


def _prepare(config: RunConfig, on_progress: PrepareProgress | None) -> dict[str, Any]:
    corpus = prepare(config, on_progress=on_progress)
    try:
        if not any(reader.num_rows for reader in corpus.validation):
            raise ConfigError(
                "No text is held out, so runs have no validation loss", where="data.validation.held_out_fraction",
                hint="hold out more text, or set data.validation.sources", saved=_NOTHING,
            )  # fmt: skip
        return arm_inputs(config, corpus)
    finally:
        corpus.close()


def _check_arm(name: str, config: RunConfig) -> None:
    """Check that the runs of an arm can be compared, and computed again."""
    problem: tuple[str, str, str] | None = None
    if not config.eval.at_end:
        problem = "is not validated at its end", "eval.at_end", "set eval.at_end=true"
    elif config.data.mode == "streaming" or config.data.growth.mode != "complete":
        problem = (
            "may read text that is not there yet, so no claim can name its data", "data.mode, data.growth.mode",
            "build the caches first: data.mode=cached data.growth.mode=complete",
        )  # fmt: skip
    elif config.train.micro_batch_sequences == "auto":
        problem = (
            "chooses its micro-batch by the memory of the machine", "train.micro_batch_sequences",
            "set train.micro_batch_sequences to a number",
        )  # fmt: skip
    elif config.loss.name == "dpo":
        problem = "has a loss of pairs, not of tokens", "loss.name", "compare its runs with `vorox runs compare`"
    if problem is not None:
        what, where, hint = problem
        raise ConfigError(f"Configuration {name} {what}", where=where, hint=hint, saved=_NOTHING)


def _check_comparable(data: Sequence[Mapping[str, Any]]) -> None:
    """Check that the validation losses of both arms are of the same tokens."""
    for key, what in (("tokenizer", "tokenizers"), ("evaluation", "validation rows")):
        if data[0][key] != data[1][key]:
            raise ConfigError(
                f"A and B have other {what}, so their values cannot be compared", where="data, tokenizer, eval",
                hint="let both configurations have the same tokenizer, data.validation and eval settings",
                saved=_NOTHING,
            )  # fmt: skip
