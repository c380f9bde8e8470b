"""Verification of a claim: its entries in the register, the records of its runs, and their values computed again.

A claim and the runs go in; what does not agree comes out. Of every run: the seed is the one that the claim gives, the
settings of all steps, the inputs and the environment are the registered ones, both chains are intact and end in the
registered heads, the state of the last step has every byte of its manifest, and its validation, computed again, has the
registered value. Step 1 of a run that started from weights, and all steps of one that diverged, are computed again too.
A run of the claim that the register does not have is named, unless it has the same bits.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vorox.api.model import find_model
from vorox.api.runs import open_run
from vorox.core.errors import CheckpointError, ConfigError, VoroxError
from vorox.core.files.atomic import canonical_json
from vorox.core.pluralize import pluralize
from vorox.core.run_layout import RunLayout, step_directories
from vorox.data.order.plan import DataPlan
from vorox.experiments.tracking import read_metrics
from vorox.records.replay_chain import examine_chain, read_states
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import is_run, run_directories
from vorox.records.step_environments import StepEnvironments
from vorox.run import workload_of_run
from vorox.sweeps.claim import Budget, in_common, recorded_value, settings_of, verdict_of
from vorox.sweeps.claim_divergence import compared_steps, divergence_findings
from vorox.sweeps.claim_inputs import environment_difference, environments_of_run, input_difference, inputs_of_run
from vorox.sweeps.claim_register import (
    METRICS,
    SIDES,
    ArmRun,
    Claim,
    Pair,
    Register,
    level_of,
    question_of,
)
from vorox.training.checkpoints.signature import read_envelope, write_statement
from vorox.training.checkpoints.store import Checkpoint, verify
from vorox.training.materialize import StateNotices
from vorox.training.re_execution import MakeWorkload, ReExecution
from vorox.training.replay import replay
from vorox.training.resume.resume_settings import config_in_force
from vorox.training.user_functions import changed_functions, recorded_taps

if TYPE_CHECKING:
    from vorox.training.checkpoints.signature import PrivateKey, PublicKey

PREDICATE_TYPE = "urn:vorox:claim:1"
_CLAIM_RUN = re.compile(r"claim-(?P<claim>[0-9a-f]{8})-[0-9]{3,}-[ab]-[0-9a-f]{8}(-[0-9]+)?")
_TOLERANCE = 1e-5
"""Relative difference of a value that is computed again, of runs without ``runtime.determinism: bitwise``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not agree with the register.

    Attributes:
        where: The run or the entry.
        what: What is wrong.
    """

    where: str
    what: str


def check_claim(
    register: Register, claim: Claim, *, replays: bool, on_run: Callable[[str], None] = lambda _: None
) -> list[Finding]:
    """Return all that does not agree; empty if the claim is as registered.

    Args:
        register: Its register.
        claim: The claim.
        replays: Also compute every step of every run again.
        on_run: Called before each run.
    """
    root = register.directory.parent
    found = [*_entry_findings(register, claim)]
    for pair in claim.pairs:
        found += _pair_findings(claim, pair, root)
        for side, run in enumerate(pair.runs):
            on_run(run.run)
            directory = root / run.run
            if run.run != Path(run.run).name or not is_run(directory):
                found.append(Finding(run.run, "the run is gone, so it cannot be checked"))
                continue
            try:
                found += [Finding(run.run, what) for what in _run_findings(claim, pair, side, directory, replays)]
                if (
                    replays
                    and run.states  # all steps of one that diverged are computed again as it is
                    and not (report := replay(directory, functools.partial(workload_of_run, directory))).is_exact
                ):
                    found.append(Finding(run.run, f"computed again, the run {report}"))
            except VoroxError as error:
                found.append(Finding(run.run, error.what))
    return [*found, *_unlisted_runs(register, claim)]


def sign_verdict(register: Register, claim: Claim, key: PrivateKey) -> Path:
    """Sign the newest verdict, with the runs that it rests on; return the path of the envelope."""
    path = _envelope(register, claim)
    write_statement(path, _statement(register, claim), key)
    return path


def check_signature(register: Register, claim: Claim, key: PublicKey) -> None:
    """Check that the key has signed the newest verdict and the pairs it rests on.

    Raises:
        CheckpointError: It has not, or the register is another one than was signed.
    """
    path, hint = _envelope(register, claim), "sign the verdict: repeat the command of the claim with --key FILE"
    signed = read_envelope(path, key, PREDICATE_TYPE, what="verdict", hint=hint)
    now = _statement(register, claim)
    if canonical_json(signed) != canonical_json(now):
        raise CheckpointError(
            "The register has other pairs or another verdict than were signed", where=str(path),
            hint="restore the register from a copy; if the claim went on since, sign its new verdict",
        )  # fmt: skip


def _envelope(register: Register, claim: Claim) -> Path:
    return register.directory / f"{claim.id[:16]}.verdict.json"


def _statement(register: Register, claim: Claim) -> dict[str, Any]:
    """Return the in-toto statement on a claim: the chains of its runs are its subjects."""
    if not claim.verdicts:
        raise ConfigError("The claim has no verdict yet", where=claim.id[:12], hint="repeat the command of the claim")
    earlier = register.on_question(str(claim.content["question"]))[: int(claim.content["number"]) - 1]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": run.run, "digest": {"blake2b": run.chain}} for pair in claim.pairs for run in pair.runs
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "claim": claim.id, "content": claim.content, "pairs": [pair.to_json() for pair in claim.pairs],
            "verdict": claim.verdicts[-1], "earlier": {one.id: one.outcome for one in earlier},
        },
    }  # fmt: skip


def _entry_findings(register: Register, claim: Claim) -> Iterator[Finding]:
    """Yield what is wrong with the entries of a claim by themselves."""
    before = register.on_question(str(claim.content["question"])).index(claim)
    level = level_of(before + 1, float(claim.content["wanted_level"]))
    if claim.content["number"] != before + 1 or not math.isclose(claim.level, level):
        yield Finding(
            claim.id[:12],
            f"it is claim {before + 1} on its question, with a level of {level:g}; it is registered as claim "
            f"{claim.content['number']}, with {claim.level:g}",
        )
    if claim.content["question"] != question_of(claim.content["settings"], claim.text.metric):
        yield Finding(claim.id[:12], "its question is not that of its settings, so earlier claims were not counted")
    if claim.content["claim"]["text"] != str(claim.text):
        yield Finding(
            claim.id[:12], f"its sentence is {claim.content['claim']['text']!r}; what is tested is: {claim.text}"
        )
    if not register.is_head(claim.content["after"]):
        yield Finding(claim.id[:12], "entries before it were changed or left out since it was registered")
    numbers = [pair.number for pair in claim.pairs]
    repeated = sorted({number for number in numbers if numbers.count(number) > 1})
    if repeated:
        yield Finding(claim.id[:12], f"pair {repeated[0]} was registered {numbers.count(repeated[0])} times")
    elif numbers != [*range(1, len(numbers) + 1)]:
        yield Finding(claim.id[:12], f"its pairs are {', '.join(map(str, numbers))}: one was left out")
    decisions = (Claim(claim.id, claim.content, claim.pairs[:count]) for count in range(len(claim.pairs)))
    if early := next((one for one in decisions if one.test().sign), None):
        decided = pluralize(len(early.pairs), "pair")
        yield Finding(claim.id[:12], f"it was decided after {decided}, and {len(claim.pairs)} are registered")
    if claim.verdicts:
        yield from _verdict_findings(claim, claim.verdicts[-1], verdict_of(claim, Budget()))


def _verdict_findings(claim: Claim, verdict: Mapping[str, Any], computed: Mapping[str, Any]) -> Iterator[Finding]:
    if any(verdict[key] != computed[key] for key in ("num_pairs", "verdict")):
        yield Finding(
            claim.id[:12],
            f"the verdict is {verdict['verdict']} after {pluralize(verdict['num_pairs'], 'pair')}; its "
            f"{pluralize(len(claim.pairs), 'pair')} say {computed['verdict']}",
        )
        return
    for key in ("effect", "interval", "other_mean", "level"):
        said, found = (np.array(one[key] or 0.0, dtype=float) for one in (verdict, computed))
        if said.shape != found.shape or not np.allclose(said, found, rtol=1e-9, atol=0):
            yield Finding(claim.id[:12], f"the verdict has {key} {verdict[key]}; its pairs give {computed[key]}")


def _pair_findings(claim: Claim, pair: Pair, root: Path) -> Iterator[Finding]:
    if pair.seed != claim.seed(pair.number):
        yield Finding(
            f"pair {pair.number}", f"the seed {pair.seed} was chosen: the claim gives {claim.seed(pair.number)}"
        )
    if all(run.run == Path(run.run).name and is_run(root / run.run) for run in pair.runs):
        num_same_rows, same_start = in_common(root, pair.runs)
        if (num_same_rows, same_start) != (pair.num_same_rows, pair.same_start):
            start = "the same start" if same_start else "another start"
            yield Finding(
                f"pair {pair.number}", f"its runs have {pluralize(num_same_rows, 'step')} on the same rows and {start}"
            )


def _run_findings(claim: Claim, pair: Pair, side: int, directory: Path, replays: bool) -> Iterator[str]:
    """Yield what is wrong with a run of a claim."""
    run, config, seed = pair.runs[side], recorded_config(directory), claim.seed(pair.number)
    if config.run.seed != seed:
        yield f"the seed {config.run.seed} was chosen: the claim gives {seed}"
    yield from _settings_findings(claim.content["settings"][side], directory)
    if difference := input_difference(claim.content["data"][side], inputs_of_run(directory, config)):
        yield f"{difference[0].lower()}{difference[1:]} is not the registered one"
    yield from _environment_findings(claim, side, directory)
    chain = examine_chain(directory, run.step)
    if damage := chain.damage(run.step):
        yield f"the replay chain is not intact: {damage}"
    elif chain.last_step != run.step or (run.step and chain.entries[run.step].chain != run.chain):
        yield "the replay chain does not end in the registered head: the run was trained again or changed"
    make_workload = functools.partial(workload_of_run, directory)
    if not run.states:
        if run.value is not None:
            yield "the run is registered as diverged, and with a value"
        yield from divergence_findings(directory, make_workload)
        return
    if not replays:
        yield from _start_findings(claim.content["data"][side], directory, make_workload)
    state = read_states(directory).get(run.step)
    if state is None or state.states != run.states:
        yield "the chain of states does not end in the registered head"
        return
    yield from _value_findings(claim, run, directory, state.fingerprint)


def _value_findings(claim: Claim, run: ArmRun, directory: Path, fingerprint: str) -> Iterator[str]:
    """Yield what is wrong with the value of a run: on record, and computed again from the state of its last step."""
    name, recorded = METRICS[claim.text.metric], recorded_value(directory, run.step, claim.text.metric)
    if _finite(recorded) != run.value:
        yield f"evaluations.jsonl says {name} {recorded} at step {run.step:,}, the register {run.value}"
    logged = read_metrics(directory).get(run.step, {}).get(f"eval/{name}")
    if logged is not None and _finite(logged) != run.value:
        yield f"metrics.jsonl says {name} {logged} at step {run.step:,}, the register {run.value}"
    kept = step_directories(directory).get(run.step)
    if kept is not None and verify(kept).metadata["fingerprint"] != fingerprint:
        yield "the checkpoint of the last step has another fingerprint than the chain of states"
        return
    model = find_model(str(directory), step=run.step, root=directory.parent, device=None, notices=StateNotices())
    value = _finite(getattr(model.evaluate(open_run(directory).validation_batches()), name))
    is_bitwise = model.config.runtime.determinism == "bitwise"
    is_close = value is not None and run.value is not None and math.isclose(value, run.value, rel_tol=_TOLERANCE)
    if value != run.value and (is_bitwise or not is_close):
        yield f"computed again, {name} is {value}; the register has {run.value}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _settings_findings(wanted: Mapping[str, Any], directory: Path) -> Iterator[str]:
    """Yield settings and events of the plan that any step of a run had, and the claim does not."""
    for step in (0, *sorted(RunLayout(directory).configs_by_step())):
        settings = settings_of(config_in_force(directory, step)[0])
        changed = [key for key in dict.fromkeys([*wanted, *settings]) if wanted.get(key) != settings.get(key)]
        if changed:
            when = f" after step {step:,}" if step else ""
            yield f"{changed[0]} is {settings.get(changed[0])}{when}, the claim has {wanted.get(changed[0])}"
            return
    if DataPlan.open(RunLayout(directory).plan).state.masks:
        yield "documents are masked in its data, which the claim does not say"
    if any(recorded_taps(directory)):
        yield "a tap was attached to it, which the claim does not say"


def _environment_findings(claim: Claim, side: int, directory: Path) -> Iterator[str]:
    """Yield what differs of the environment of a run from the registered one, and of its engine from the first pair."""
    for found in environments_of_run(directory):
        if difference := environment_difference(claim.content["environment"], found):
            yield f"it ran in another environment than the claim was registered in: {difference}"
            return
    others = (directory.parent / Path(pair.runs[side].run).name for pair in claim.pairs)
    first = next(path for path in others if is_run(path))  # at least its own
    engines = [[*StepEnvironments.of_run(path).by_start.values()] for path in (first, directory)]
    if len(engines[1]) > 1 or engines[0] != engines[1]:
        yield f"its engine computed in another environment than that of {first.name}"
    for step, path in step_directories(directory).items():
        if changed := changed_functions(Checkpoint.read(path).metadata, recorded_config(directory)):
            yield f"the code of its checkpoint of step {step:,} is not the registered one: {changed[0]}"
            return


def _start_findings(inputs: Mapping[str, Any], directory: Path, make_workload: MakeWorkload) -> Iterator[str]:
    """Yield why step 1 is not that of the registered weights; nothing if the seed gives all weights.

    Raises:
        OtherWeightsError: The run has recorded that it started from others.
    """
    if inputs.get("weights") is not None or inputs.get("teacher") is not None:
        for _, difference in compared_steps(ReExecution(directory, 0, 1), make_workload):
            if difference is not None:
                yield f"it did not start from the registered weights: computed again, {difference}"


def _unlisted_runs(register: Register, claim: Claim) -> Iterator[Finding]:
    """Yield runs of the claim with other bits than the registered ones, and runs of claims that are not registered."""
    root = register.directory.parent
    listed = {run.run: run for pair in claim.pairs for run in pair.runs}
    heads = {run.chain for run in listed.values()}
    seeds: Mapping[int, int] = {claim.seed(number): number for number in range(1, len(claim.pairs) + 2)}
    registered = {one.id[:8] for one in register.claims}
    for directory in run_directories(root):
        if directory.name in listed:
            continue
        name = _CLAIM_RUN.fullmatch(directory.name)
        if name is not None and name["claim"] not in registered:
            yield Finding(directory.name, "it is a run of a claim that the register does not have")
            continue
        try:
            config = recorded_config(directory)
            entries = examine_chain(directory).entries
        except VoroxError:
            continue
        number = seeds.get(config.run.seed)
        if number is None or settings_of(config) not in claim.content["settings"]:
            continue
        side = SIDES[claim.content["settings"].index(settings_of(config))]
        if number <= len(claim.pairs) and entries and entries[max(entries)].chain not in heads:
            yield Finding(
                directory.name, f"arm {side} of pair {number} ran again, with other bits than the registered run"
            )
