"""Choose what an audit computes again: the segments of a run, their order under a challenge, and what a sample proves.

In: the recorded states of a run, the heads of its records, and a text that the auditor brings. Out: segments, the order
in which they are taken, and the chance that a sample meets a forged one.

    seed = sha256(["vorox-audit/1", chain, states, plan, challenge])
    rank of segment i = sha256(seed | i), i as 8 bytes, big-endian, from 1

The segments of the lowest ranks that can be audited are the sample. So a larger sample contains a smaller one, and a
state that is withheld once the challenge is known moves no other segment.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vorox.core.files.atomic import canonical_json

_PURPOSE = "vorox-audit/1"
SHARES_PERCENT = (1, 5, 20)
"""Forged shares for which the chance of a sample is stated."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What the records of a run commit to, up to a step.

    Attributes:
        step: The last step that counts.
        chain: Head of the replay chain there.
        states: Head of the chain of states at the last recorded state up to there; empty without any.
        plan: Digest of the data plan.
        plan_events: The events of the plan that it covers.
        key_id: SHA-256 of the public key that signed the heads; ``None``: no signature was verified.
    """

    step: int
    chain: str
    states: str
    plan: str
    plan_events: int
    key_id: str | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """The steps between two neighbouring recorded states.

    Attributes:
        number: From 1, in the order of the steps.
        start: The state before its first step, in finished steps.
        end: The state after its last step.
        origin: The state that its computation starts from: ``start``, or an earlier one from which that is rebuilt.
        obstacle: Why it cannot be audited; empty if it can.
    """

    number: int
    start: int
    end: int
    origin: int
    obstacle: str = ""

    @property
    def num_steps(self) -> int:
        return self.end - self.start


class Chance(NamedTuple):
    """What a sample would have shown.

    Attributes:
        percent: Share of the auditable segments that is forged, at least.
        num_forged: The segments that this is.
        probability: That the sample has one of them.
    """

    percent: int
    num_forged: int
    probability: float


def in_order(segments: Sequence[Segment], heads: Heads, challenge: str) -> list[Segment]:
    """Return segments in the order that a challenge gives them."""
    body = [_PURPOSE, heads.chain, heads.states, heads.plan, challenge]
    seed = hashlib.sha256(canonical_json(body)).digest()
    return sorted(segments, key=lambda one: hashlib.sha256(seed + one.number.to_bytes(8, "big")).digest())


def chance_of_meeting(num_segments: int, num_forged: int, num_sampled: int) -> float:
    """Return the probability that a sample without replacement has at least one forged segment (hypergeometric)."""
    honest = math.comb(num_segments - num_forged, num_sampled) / math.comb(num_segments, num_sampled)
    return 1.0 - honest


def chances(num_segments: int, num_sampled: int) -> list[Chance]:
    """Return the chances of a sample for each share of ``SHARES_PERCENT``."""
    counts = {percent: -(-percent * num_segments // 100) for percent in SHARES_PERCENT}
    return [
        Chance(percent, count, chance_of_meeting(num_segments, count, num_sampled)) for percent, count in counts.items()
    ]


def group_into_passes(sample: Collection[Segment]) -> list[list[Segment]]:
    """Divide a sample into parts that are computed in one pass each, from the first one's origin to the last one's end.

    A segment that the pass before it reaches, or whose origin lies within that pass, is computed by it.
    """
    passes: list[list[Segment]] = []
    for segment in sorted(sample, key=lambda one: one.start):
        if passes and segment.origin <= passes[-1][-1].end:
            passes[-1].append(segment)
        else:
            passes.append([segment])
    return passes
