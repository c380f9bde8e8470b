"""Choose the settings of the next trial with Optuna's tree-structured Parzen estimator (TPE).

A pure function of space, seed and the trials so far: no sampler lives longer than a suggestion, so a resumed sweep
suggests what the uninterrupted one would have. Optuna is imported only here.
"""

from __future__ import annotations

import hashlib
import math
import random
import warnings
from collections.abc import Sequence
from typing import Any

from vorox.core.config.yaml.reader import Json
from vorox.core.config.yaml.writer import write_inline
from vorox.sweeps.search_space import Parameter, all_combinations
from vorox.sweeps.trial_log import Trial

_MAX_LISTED = 10_000


def suggest(space: Sequence[Parameter], trials: Sequence[Trial], seed: int) -> dict[str, Json] | None:
    """Return the settings of the next trial. A finite space is never repeated; ``None`` if all of it was tried.

    Args:
        space: The parameters.
        trials: All earlier trials by number, running ones included. A diverged or refused trial counts as an infinite
            loss, a stopped one as worse than those that trained longer.
        seed: Seed of the search.
    """
    digest = hashlib.sha256(f"sweep {seed} {len(trials)}".encode()).digest()
    trial_seed = int.from_bytes(digest[:4], "big")
    taken = {_identity(trial.settings) for trial in trials}
    listed = all_combinations(space, _MAX_LISTED)
    if listed is None:
        return _ask(space, trials, trial_seed)
    left = [point for point in listed if _identity(point) not in taken]
    if not left:
        return None
    found = _ask(space, trials, trial_seed)
    return found if found in left else random.Random(trial_seed).choice(left)


def _identity(settings: dict[str, Json]) -> str:
    return write_inline(settings)


def _ask(space: Sequence[Parameter], trials: Sequence[Trial], seed: int) -> dict[str, Json]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {parameter.key: _distribution(parameter) for parameter in space}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        study = optuna.create_study(sampler=sampler)
        for trial in trials:
            study.add_trial(_frozen(space, trial, distributions))
        values = study.ask(distributions).params
    return {parameter.key: _setting(parameter, values[parameter.key]) for parameter in space}


def _distribution(parameter: Parameter) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.choices:
        return CategoricalDistribution(range(len(parameter.choices)))  # its values may be lists
    if parameter.is_integer:
        return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.is_log)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.is_log)


def _setting(parameter: Parameter, value: Any) -> Json:
    return parameter.choices[value] if parameter.choices else parameter.rounded(value)


def _frozen(space: Sequence[Parameter], trial: Trial, distributions: dict[str, Any]) -> Any:
    """Return a trial in the form of Optuna."""
    from optuna.trial import TrialState, create_trial

    params = {
        parameter.key: parameter.choices.index(value) if parameter.choices else value
        for parameter in space
        for value in [trial.settings[parameter.key]]
    }
    if trial.outcome is None:
        return create_trial(state=TrialState.RUNNING, params=params, distributions=distributions)
    if trial.outcome == "stopped":
        reached = {trial.step: trial.loss} if trial.step is not None and trial.loss is not None else {}
        return create_trial(
            state=TrialState.PRUNED, params=params, distributions=distributions, intermediate_values=reached
        )
    loss = math.inf if trial.loss is None else trial.loss
    return create_trial(state=TrialState.COMPLETE, value=loss, params=params, distributions=distributions)
