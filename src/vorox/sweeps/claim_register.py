"""The register of claims: an append-only, hash-chained log in ``<run.directory>/claims/register.jsonl``.

A claim is on disk before its first run starts; every pair of runs and every verdict follow. The id of a claim is the
hash of all that it fixes and of the register's head before it, and the seeds of its runs follow from the id. So nobody
chooses a seed, and a claim cannot be changed once its numbers are known.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from vorox.core.errors import ConfigError, DataError
from vorox.core.files import atomic
from vorox.core.files.atomic import canonical_json
from vorox.core.files.chained_log import HashChainedLog
from vorox.core.files.disk_errors import disk_error
from vorox.core.files.file_holder import FileLock
from vorox.experiments.paired_test import PairedTest, paired_test

CLAIM_FORMAT = "vorox-claim/1"
GRAMMAR = "X beats Y on METRIC [by P%]"
METRICS = {"eval loss": "loss", "eval accuracy": "accuracy"}
"""What can be claimed, and its name in ``evaluations.jsonl``."""
SIDES = ("A", "B")
_TEXT = re.compile(r"(?P<winner>\S+) beats (?P<loser>\S+) on (?P<metric>.+?)(?: by (?P<margin>[0-9]*\.?[0-9]+) ?%)?")
Outcome = Literal["holds", "refuted", "undecided"]


@dataclass(frozen=True, slots=True)
class ClaimText:
    """What a claim says.

    Attributes:
        winner: The arm that is claimed to be better: 0 for A, 1 for B.
        metric: A key of ``METRICS``.
        margin_percent: By how much at least, in percent of the other arm's value.
    """

    winner: int
    metric: str
    margin_percent: float = 0.0

    def __str__(self) -> str:
        margin = f" by {self.margin_percent:g}%" if self.margin_percent else ""
        return f"{SIDES[self.winner]} beats {SIDES[1 - self.winner]} on {self.metric}{margin}"

    def difference(self, values: Sequence[float]) -> float:
        """Return by how much the claimed winner is better than the claim says, from the values of A and B."""
        won, lost = values[self.winner], values[1 - self.winner]
        gain = lost - won if self.metric == "eval loss" else won - lost
        return gain - self.margin_percent / 100 * abs(lost)


def parse_claim(text: str, names: Sequence[str]) -> ClaimText:
    """Parse a claim.

    Args:
        text: As in ``GRAMMAR``.
        names: The names of A and B, which may stand for them.

    Raises:
        ConfigError: It is none.
    """
    words = " ".join(text.split())
    match, known = _TEXT.fullmatch(words), {name: side for side, name in enumerate(SIDES)}
    if len(set(names)) == len(names):
        known = {**{name: side for side, name in enumerate(names)}, **known}
    what = ""
    if match is None:
        what = f"{text!r} is no claim"
    elif unknown := [name for name in (match["winner"], match["loser"]) if name not in known]:
        what = f"The claim names {unknown[0]}, which is neither configuration"
    elif known[match["winner"]] == known[match["loser"]]:
        what = "The claim compares a configuration with itself"
    elif match["metric"] not in METRICS:
        what = f"{match['metric']!r} is no metric of a claim"
    elif float(match["margin"] or 0) >= 100:
        what = f"A margin of {match['margin']}% is no margin"
    if what or match is None:
        raise ConfigError(
            what, where="the claim", saved="nothing was registered",
            hint=f"write '{GRAMMAR}'; X and Y are {' and '.join(dict.fromkeys((*SIDES, *known)))}, METRIC is "
            f"{' or '.join(METRICS)}: vorox claim 'A beats B on eval loss' A.yaml B.yaml --pairs 8",
        )  # fmt: skip
    return ClaimText(known[match["winner"]], match["metric"], float(match["margin"] or 0))


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One run of a pair.

    Attributes:
        run: Its directory, inside ``run.directory``.
        step: Its last step.
        chain: Head of its replay chain there.
        states: Head of its chain of states; empty for a run that diverged.
        value: The metric after that step; ``None`` if the run diverged.
    """

    run: str
    step: int
    chain: str
    states: str
    value: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs with one seed.

    Attributes:
        number: From 1.
        seed: Of both.
        runs: Of A and B.
        num_same_rows: Steps that read the same rows in both.
        same_start: Whether both computed the same loss at step 1, bit for bit: the same initial weights and rows.
        seconds: What both took.
    """

    number: int
    seed: int
    runs: tuple[ArmRun, ArmRun]
    num_same_rows: int
    same_start: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        runs = [{name: getattr(run, name) for name in ArmRun.__slots__} for run in self.runs]
        return {
            "pair": self.number, "seed": self.seed, "runs": runs, "num_same_rows": self.num_same_rows,
            "same_start": self.same_start, "seconds": self.seconds,
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Pair:
        first, second = (
            ArmRun(str(run["run"]), int(run["step"]), str(run["chain"]), str(run["states"]),
                   None if run["value"] is None else float(run["value"]))
            for run in value["runs"]
        )  # fmt: skip
        return cls(
            int(value["pair"]), int(value["seed"]), (first, second), int(value["num_same_rows"]),
            bool(value["same_start"]), float(value["seconds"]),
        )  # fmt: skip


@dataclass(slots=True)
class Claim:
    """A registered claim.

    Attributes:
        id: SHA-256 of ``content``, hex.
        content: All that it fixes, as registered.
        pairs: Its pairs, in the order of the register.
        verdicts: Its verdicts, the newest last.
    """

    id: str
    content: Mapping[str, Any]
    pairs: list[Pair] = field(default_factory=list[Pair])
    verdicts: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])

    @property
    def text(self) -> ClaimText:
        said = self.content["claim"]
        return ClaimText(int(said["winner"]), str(said["metric"]), float(said["margin_percent"]))

    @property
    def level(self) -> float:
        return float(self.content["level"])

    @property
    def outcome(self) -> Outcome | None:
        return cast("Outcome", self.verdicts[-1]["verdict"]) if self.verdicts else None

    @property
    def is_decided(self) -> bool:
        return self.outcome in ("holds", "refuted")

    def seed(self, pair: int) -> int:
        """Return the seed of a pair: 60 bits of the hash of the claim's id and the number of the pair."""
        return int(hashlib.sha256(f"{self.id} {pair}".encode()).hexdigest()[:15], 16)

    def run_name(self, pair: int, side: int) -> str:
        return f"{self.run_prefix}{pair:03d}-{SIDES[side].lower()}"

    @property
    def run_prefix(self) -> str:
        return f"claim-{self.id[:8]}-"

    def values(self, pair: Pair) -> tuple[float, float]:
        """Return the metric of A and B. A run that diverged counts as a uniform guess: ln of the vocabulary, or 0."""
        worst = math.log(self.content["data"][0]["vocab_size"]) if self.text.metric == "eval loss" else 0.0
        first, second = (worst if run.value is None else run.value for run in pair.runs)
        return first, second

    def test(self) -> PairedTest:
        """Return the test of the pairs so far: of how much the claimed winner is better than claimed."""
        return paired_test([self.text.difference(self.values(pair)) for pair in self.pairs], self.level)


def question_of(settings: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Return what claims have in common that ask the same: the arms, in any order, and the metric.

    Settings of the validation are not part of it: another validation set is another try at the same question.
    """
    trained = ({key: value for key, value in arm.items() if not key.startswith("eval.")} for arm in settings)
    arms = sorted(hashlib.sha256(canonical_json(arm)).hexdigest() for arm in trained)
    return hashlib.sha256(canonical_json([*arms, metric])).hexdigest()


def level_of(number: int, level: float) -> float:
    """Return the level of the n-th claim on a question. All of them together have ``level``: sum of 1 / (n (n + 1))."""
    return level / (number * (number + 1))


class Register:
    """An open register.

    Args:
        root: Parent directory of the runs.

    Raises:
        DataError: It is damaged.

    Attributes:
        directory: Its directory.
        claims: All claims, in the order of the register.
        head: Hash of the last entry.
    """

    def __init__(self, root: Path) -> None:
        self.directory = root / "claims"
        self._log = HashChainedLog(self.directory / "register.jsonl")
        self.claims: list[Claim] = []
        self.head = ""
        try:
            bodies, self.head = self._log.read()
        except OSError as error:
            raise disk_error(error, str(self.path)) or DataError(
                f"The register of claims cannot be read: {error.strerror}", where=str(self.path),
                hint="make the file readable",
            ) from error  # fmt: skip
        for number, body in enumerate(bodies, start=1):
            try:
                self._apply(body)
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"Entry {number} of the register is no entry of a claim", where=f"{self.path}:{number}",
                    hint="restore the file from a copy", saved="nothing was written",
                ) from error  # fmt: skip

    @property
    def path(self) -> Path:
        return self._log.path

    def is_head(self, head: str) -> bool:
        """Whether the register ever ended in an entry of this hash."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        return not head or any(hashlib.sha256(line).hexdigest() == head for line in lines)

    @contextlib.contextmanager
    def locked(self) -> Generator[Register]:
        """Hold the register, and yield it as it is now.

        Raises:
            ConfigError: Another process holds it.
        """
        atomic.make_directory(self.directory)
        with FileLock(self.directory / "register.lock", blocking=False, purpose="the register of claims"):
            yield Register(self.directory.parent)

    def find(self, name: str | None) -> Claim:
        """Return the claim with an id or the beginning of one; by default the newest.

        Raises:
            ConfigError: There is none, or there are several.
        """
        found = [claim for claim in self.claims if claim.id.startswith(name or "")]
        if not self.claims or not found or (name is not None and len(found) > 1):
            several = ", ".join(claim.id[:12] for claim in found)
            what = (
                f"Several claims begin with {name}: {several}" if found else f"There is no claim {name or ''}".strip()
            )
            hint = "list them with `vorox claims list`" if self.claims else "register one with `vorox claim`"
            raise ConfigError(what, where=str(self.path), hint=hint)
        return found[-1]

    def on_question(self, question: str) -> list[Claim]:
        """Return the claims on a question, the mirrored ones too, oldest first."""
        return [claim for claim in self.claims if claim.content["question"] == question]

    def add_claim(self, content: Mapping[str, Any]) -> Claim:
        """Register a claim, durably."""
        self._append({"kind": "claim", "content": {**content, "after": self.head}})
        return self.claims[-1]

    def add_pair(self, claim: Claim, pair: Pair) -> None:
        self._append({"kind": "pair", "claim": claim.id, **pair.to_json()})

    def add_verdict(self, claim: Claim, verdict: Mapping[str, Any]) -> None:
        self._append({"kind": "verdict", "claim": claim.id, **verdict})

    def _append(self, body: Mapping[str, Any]) -> None:
        try:
            self.head = self._log.append([body]).head
        except OSError as error:
            raise disk_error(error, str(self.path)) or ConfigError(
                f"The register of claims cannot be written: {error.strerror}", where=str(self.path),
                hint="make the folder of the runs writable",
            ) from error  # fmt: skip
        self._apply(body)

    def _apply(self, body: Mapping[str, Any]) -> None:
        if body["kind"] == "claim":
            content = body["content"]
            claim = Claim(hashlib.sha256(canonical_json(content)).hexdigest(), content)
            if not (0 < claim.level < 1 and claim.text.metric in METRICS and isinstance(content["question"], str)):
                raise ValueError(claim.id)
            if content["format"] != CLAIM_FORMAT or not isinstance(content["environment"], dict):
                raise ValueError(claim.id)
            self.claims.append(claim)
            return
        (claim,) = (one for one in self.claims if one.id == body["claim"])
        if body["kind"] == "pair":
            claim.pairs.append(Pair.from_json(body))
        elif body["kind"] == "verdict" and body["verdict"] in ("holds", "refuted", "undecided"):
            claim.verdicts.append({key: value for key, value in body.items() if key not in ("kind", "claim")})
        else:
            raise ValueError(body["kind"])
