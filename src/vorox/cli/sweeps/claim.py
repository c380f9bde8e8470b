"""``vorox claim``: pairs of runs until a sequential test decides, or the budget ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from vorox.backends import check_installed
from vorox.cli.settings.arguments import ParsedArguments, parse_arguments
from vorox.cli.settings.config import source_and_overrides
from vorox.cli.terminal import humanize
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.cli.terminal.output import print_json, print_wrapped
from vorox.core.errors import ConfigError, VoroxError, set_saved
from vorox.core.pluralize import pluralize
from vorox.experiments.paired_test import fewest_pairs, smallest_effect
from vorox.planning.time_limit import check_minutes, parse_minutes
from vorox.sweeps.claim import Budget, ClaimedPair, ConfigLoader, effect_of, smallest_visible, verdict_of
from vorox.sweeps.claim_check import sign_verdict
from vorox.sweeps.claim_register import SIDES, Claim, Pair, Register, level_of, parse_claim
from vorox.training.checkpoints.signature import load_private_key
from vorox.training.origin.configuration import load_config

_OPTIONS = ("--budget", "--pairs", "--level", "--again", "--key", "--plan", "--json", "--help")


def claim(
    text: str,
    arguments: list[str],
    budget: str | None,
    pairs: int | None,
    level: float,
    again: bool,
    key: Path | None,
    plan: bool,
    as_json: bool,
) -> None:
    parsed = parse_arguments(arguments, options=_OPTIONS, max_positional=2)
    if len(parsed.positional) != 2:
        raise ConfigError(
            f"A claim is about two configurations; {pluralize(len(parsed.positional), 'one is', 'are')} named",
            where="vorox claim", hint="vorox claim 'A beats B on eval loss' A.yaml B.yaml --pairs 8",
        )  # fmt: skip
    said = parse_claim(text, [Path(name).stem for name in parsed.positional])
    if not 0 < level < 1:
        raise ConfigError(f"A level of {level:g} is no probability", where="--level", hint="write --level 0.05")
    limit = _budget(budget, pairs)
    arms = ClaimedPair(said, (_loader(parsed, 0), _loader(parsed, 1)), level)
    _check_length(arms, Register(arms.root), limit, again=again)
    if plan:
        _print_plan(arms, Register(arms.root), limit, parsed.positional, again=again, as_json=as_json)
        return
    private_key = None if key is None else load_private_key(key)
    for config in arms.configs:
        check_installed(config.backend)
    known = _known(arms, Register(arms.root), again=again)
    data = [] if known is not None and known.is_decided and not again else _prepare(arms)
    with Register(arms.root).locked() as register:
        registered = arms.register(register, data, again=again)
        _print_claim(arms, register, registered, parsed.positional, err=as_json)
        if not registered.is_decided:
            _run(arms, register, registered, limit, err=as_json)
        envelope = None if private_key is None else sign_verdict(register, registered, private_key)
    if as_json:
        print_json(claim_json(registered, register) | {"signature": None if envelope is None else str(envelope)})
        return
    print_wrapped(["", *verdict_lines(registered)])
    if known is not None and known.is_decided and not again:
        typer.echo("  again     it is decided; --again registers it anew, with other seeds and a stricter level")
    if envelope is not None:
        typer.echo(f"  signed    {envelope}")
    print_wrapped([f"  verify    vorox claims verify {registered.id[:12]}{_root_option(arms.root)}"])


def _budget(budget: str | None, pairs: int | None) -> Budget:
    if budget is None and pairs is None:
        raise ConfigError(
            "The claim has no budget", where="vorox claim", hint="add --budget 2h, or --pairs 8", saved="nothing ran"
        )
    seconds = None if budget is None else check_minutes(parse_minutes(budget, "--budget"), "--budget")
    return Budget(pairs, seconds)


def _loader(parsed: ParsedArguments, side: int) -> ConfigLoader:
    source, overrides = source_and_overrides(replace(parsed, positional=(parsed.positional[side],)))
    return lambda more: load_config(source, [*overrides, *more])


def _level(arms: ClaimedPair, register: Register, *, again: bool) -> tuple[Claim | None, float]:
    """Return the claim that the command continues, and the level of it or of the claim that it would register."""
    known = _known(arms, register, again=again)
    if known is not None and not again:
        return known, known.level
    return None, level_of(len(register.on_question(arms.question)) + 1, arms.level)


def _check_length(arms: ClaimedPair, register: Register, budget: Budget, *, again: bool) -> None:
    """Refuse a number of pairs that can decide nothing."""
    fewest = fewest_pairs(_level(arms, register, again=again)[1])
    if budget.num_pairs is not None and budget.num_pairs < fewest:
        raise ConfigError(
            f"{pluralize(budget.num_pairs, 'pair')} can decide nothing", where="--pairs",
            hint=f"write --pairs {fewest} or more", saved="nothing was registered",
        )  # fmt: skip


def _known(arms: ClaimedPair, register: Register, *, again: bool) -> Claim | None:
    """Return the claim if it is in the register.

    Raises:
        ConfigError: It is to be registered anew, and can be continued.
    """
    known = arms.known(register)
    if again and (known is None or not (known.is_decided or arms.environment_change(known))):
        raise ConfigError(
            "There is no decided claim to register again" if known is None else "The claim is not decided yet",
            where="--again", hint="leave it out", saved="nothing was registered",
        )  # fmt: skip
    return known


def _prepare(arms: ClaimedPair) -> list[dict[str, Any]]:
    display = BuildDisplay()
    try:
        return arms.prepare(display)
    finally:
        display.close()


def _run(arms: ClaimedPair, register: Register, claim: Claim, budget: Budget, *, err: bool) -> None:
    """Run pairs until the test decides or the budget ends, and register the verdict."""
    argv = ["vorox", *sys.argv[1:]]
    for pair in claim.pairs:
        print_wrapped([_pair_line(claim, pair)], err=err)
    while not claim.test().sign and budget.allows(claim.pairs):
        try:
            pair = arms.run_pair(claim, argv)
        except VoroxError as error:
            done = pluralize(len(claim.pairs), "pair")
            set_saved(error, f"claim {claim.id[:12]} with {done}; the same command continues it")
            raise
        register.add_pair(claim, pair)
        print_wrapped([_pair_line(claim, pair)], err=err)
    if not claim.verdicts or claim.verdicts[-1]["num_pairs"] != len(claim.pairs):
        register.add_verdict(claim, verdict_of(claim, budget))


def _print_claim(arms: ClaimedPair, register: Register, claim: Claim, names: Sequence[str], *, err: bool) -> None:
    earlier = register.on_question(arms.question)[: int(claim.content["number"]) - 1]
    lines = [f"Claim {claim.id[:12]}: {arms.text}", *_arm_lines(arms, names), *_earlier_lines(earlier)]
    print_wrapped([*lines, f"  level     {claim.level:.3g}", ""], err=err)


def _arm_lines(arms: ClaimedPair, names: Sequence[str]) -> list[str]:
    differing = "; ".join(f"{one.key} {one.before} / {one.after}" for one in arms.differences[:4])
    more = len(arms.differences) - 4
    return [
        *(f"  {side}         {humanize.printable_line(name)}" for side, name in zip(SIDES, names, strict=True)),
        f"  differ    {humanize.printable_line(differing)}{f'; {more} more' if more > 0 else ''}",
    ]


def _earlier_lines(earlier: Sequence[Claim]) -> list[str]:
    if not earlier:
        return ["  earlier   no claim on this question"]
    return [
        f"  earlier   {pluralize(len(earlier), 'claim')} on this question, so the level of this one is stricter:"
    ] + [
        f"            {one.id[:12]} {one.text}: {one.outcome or 'no verdict'} after {pluralize(len(one.pairs), 'pair')}"
        for one in earlier
    ]


def _pair_line(claim: Claim, pair: Pair) -> str:
    first, second = (
        f"{SIDES[side]} {value:.5f}{' (diverged)' if pair.runs[side].value is None else ''}"
        for side, value in enumerate(claim.values(pair))
    )
    values = claim.values(pair)
    rows = f"{pair.num_same_rows:,} of {min(run.step for run in pair.runs):,} steps on the same rows"
    start = ", same start" if pair.same_start else ""
    return (
        f"Pair {pair.number:<3} {first}   {second}   B-A {values[1] - values[0]:+.5f}   {rows}{start}   "
        f"{humanize.duration(pair.seconds)}"
    )


def verdict_lines(claim: Claim) -> list[str]:
    """Return the verdict in words; what is claimed comes first."""
    text, effect, verdict = claim.text, effect_of(claim), claim.verdicts[-1] if claim.verdicts else None
    if verdict is None:
        return [f"No verdict yet on: {text}"]
    winner, loser = SIDES[text.winner], SIDES[1 - text.winner]
    words = {
        "holds": f"The claim holds: {text}",
        "refuted": f"The claim is refuted: {winner} does not beat {loser} on {text.metric}"
        + (f" by {text.margin_percent:g}%" if text.margin_percent else f"; {loser} beats {winner}"),
        "undecided": f"Not decided: {text}",
    }
    lines = [f"{words[verdict['verdict']]}, after {pluralize(len(claim.pairs), 'pair')}"]
    if claim.pairs:
        lines.append(f"  effect    {winner} is better by {_effect(effect.mean, verdict['other_mean'])}")
    if effect.interval is not None:
        low, high = effect.interval
        confidence = f"{100 * (1 - claim.level):.4g}% confidence"
        lines.append(f"  interval  {low:+.5f} to {high:+.5f}, at {confidence}, whenever the claim stops")
    if verdict["verdict"] == "undecided" and verdict["smallest_effect"] is not None:
        seen = _effect(verdict["smallest_effect"], verdict["other_mean"]).lstrip("+")
        lines.append(f"  visible   this budget would most likely have seen an effect of {seen} or more")
    if verdict["verdict"] == "undecided":
        lines.append("  continue  the same command, with a larger budget")
    return lines


def _effect(effect: float, other: float) -> str:
    return f"{effect:+.5f}" + (f" ({effect / abs(other):+.2%})" if other else "")


def claim_json(claim: Claim, register: Register) -> dict[str, Any]:
    """Return a claim as JSON."""
    earlier = register.on_question(str(claim.content["question"]))[: int(claim.content["number"]) - 1]
    return {
        "claim": claim.id, "text": str(claim.text), "level": claim.level, "register": str(register.path),
        "earlier": [{"claim": one.id, "text": str(one.text), "verdict": one.outcome} for one in earlier],
        "pairs": [pair.to_json() for pair in claim.pairs],
        "verdict": dict(claim.verdicts[-1]) if claim.verdicts else None,
    }  # fmt: skip


def _print_plan(
    arms: ClaimedPair, register: Register, budget: Budget, names: Sequence[str], *, again: bool, as_json: bool
) -> None:
    """Print what the claim would take, and what its budget can see: in numbers if a claim on the question has pairs."""
    known, level = _level(arms, register, again=again)
    earlier = register.on_question(arms.question)
    measured = next((one for one in reversed(earlier) if len(one.pairs) > 1), None)
    pairs = [] if measured is None else measured.pairs
    total = Budget(budget.num_pairs, budget.seconds).pairs_in_all(pairs)
    deviations = None if total is None else smallest_effect(total, level)
    visible = None if measured is None or total is None else smallest_visible(replace_level(measured, level), total)
    found = {
        "claim": None if known is None else known.id, "text": str(arms.text), "level": level,
        "fewest_pairs": fewest_pairs(level), "pairs": total, "num_earlier": len(earlier) - (known is not None),
        "pair_seconds": max((pair.seconds for pair in pairs), default=None),
        "smallest_effect_deviations": deviations, "smallest_effect": visible,
    }  # fmt: skip
    if as_json:
        print_json(found)
        return
    others = [one for one in earlier if one is not known]
    lines = [f"Claim: {arms.text}", *_arm_lines(arms, names), *_earlier_lines(others), f"  level     {level:.3g}"]
    if known is not None:
        lines.append(
            f"  continues {known.id[:12]}: {known.outcome or 'no verdict'}, {pluralize(len(known.pairs), 'pair')}"
        )
    seconds = found["pair_seconds"]
    time = "of unknown time; the first one shows it" if seconds is None else f"of {humanize.duration(seconds)} each"
    lines.append(f"  pairs     {'as many as fit' if total is None else f'at most {total:,}'}, {time}")
    lines.append(f"  decides   with {fewest_pairs(level)} pairs at the earliest")
    if visible is not None:
        lines.append(f"  sees      effects of {visible:.5f} and more, from the deviation in {measured.id[:12]}")  # type: ignore[union-attr]
    elif deviations is not None:
        lines.append(f"  sees      effects of {deviations:.2f} standard deviations of a difference and more")
    print_wrapped(lines)


def replace_level(claim: Claim, level: float) -> Claim:
    """Return a claim as if it had another level."""
    return Claim(claim.id, {**claim.content, "level": level}, claim.pairs)


def _root_option(root: Path) -> str:
    return "" if root == Path("runs").absolute() else f" --root {root}"
