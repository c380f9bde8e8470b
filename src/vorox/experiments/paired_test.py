"""A sequential test of paired differences: valid whenever one stops, and for any unknown variance.

In: the differences of the pairs so far. Out: their mean with a confidence interval, and how many pairs a difference
takes. The test is the scale-invariant mixture of t statistics (Lai, Annals of Statistics 4, 1976; Wang and Ramdas,
"Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance", arXiv 2310.03722). With a
normal prior of variance g on mean / deviation and the right Haar prior on the deviation, the likelihood ratio of n
differences against mean 0 is

    e = (1 + g n)^(-1/2) * ((1 + s) / (1 + s / (1 + g n)))^(n / 2),    s = n mean^2 / sum of squares about the mean.

For independent normal differences of mean 0, it exceeds 1 / level at any n with a probability of at most ``level``
(Ville). The interval has all means that this test does not reject; it holds at all n at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

EFFECT_VARIANCE = 10.0
"""g: wide, because pairs share rows and initial weights, so that effects are several of their deviations. A simulation
(``tests/experiments/test_paired_test.py``) shows the errors and the lengths that it leads to."""
FEWEST_PAIRS = 5
"""No test is decided by fewer: the shape of their distribution is unknown."""
_POWER_QUANTILE = statistics.NormalDist().inv_cdf(0.8)


@dataclass(frozen=True, slots=True)
class PairedTest:
    """The test after some pairs.

    Attributes:
        num_pairs: Pairs so far.
        mean: Mean difference; 0 of no pair.
        deviation: Standard deviation of a difference; ``None`` of fewer than two.
        interval: Means that are not rejected; ``None`` while every mean is possible.
    """

    num_pairs: int
    mean: float
    deviation: float | None
    interval: tuple[float, float] | None

    @property
    def sign(self) -> int:
        """1 or -1 if the mean is decided to be above or below 0, else 0."""
        if self.interval is None or self.num_pairs < FEWEST_PAIRS:
            return 0
        return (self.interval[0] > 0) - (self.interval[1] < 0)


def paired_test(differences: Sequence[float], level: float) -> PairedTest:
    """Return the test of differences, all finite.

    Args:
        differences: One per pair, in their order.
        level: Probability at most of deciding if the mean is 0.
    """
    count = len(differences)
    mean = statistics.fmean(differences) if count else 0.0
    deviation = statistics.stdev(differences) if count > 1 else None
    width = None if deviation is None else _half_width(count, level)
    if deviation is None or width is None:
        return PairedTest(count, mean, deviation, None)
    return PairedTest(count, mean, deviation, (mean - width * deviation, mean + width * deviation))


def log_evidence(differences: Sequence[float]) -> float:
    """Return the natural logarithm of ``e``, the evidence against mean 0."""
    count = len(differences)
    if count < 2:
        return 0.0
    mean, spread = statistics.fmean(differences), 1 + EFFECT_VARIANCE * count
    squares = math.fsum((one - mean) ** 2 for one in differences)
    if not squares:
        return -0.5 * math.log(spread) + (count / 2 * math.log(spread) if mean else 0.0)
    s = count * mean**2 / squares
    return -0.5 * math.log(spread) + count / 2 * (math.log1p(s) - math.log1p(s / spread))


def fewest_pairs(level: float) -> int:
    """Return how many pairs can decide at all."""
    count = FEWEST_PAIRS
    while _half_width(count, level) is None:
        count += 1
    return count


def smallest_effect(num_pairs: int, level: float) -> float | None:
    """Return the mean difference that this many pairs decide with a probability of about 0.8, in standard deviations
    of a difference; ``None`` if they can decide nothing.
    """
    width = _half_width(num_pairs, level) if num_pairs >= FEWEST_PAIRS else None
    return None if width is None else width + _POWER_QUANTILE / math.sqrt(num_pairs)


def _half_width(count: int, level: float) -> float | None:
    """Return half the width of the interval in standard deviations; ``None`` while every mean is possible."""
    if count < 2:
        return None
    spread = 1 + EFFECT_VARIANCE * count
    ratio = (math.sqrt(spread) / level) ** (2 / count)
    if ratio >= spread:
        return None
    largest = (ratio - 1) / (1 - ratio / spread)  # of s
    return math.sqrt(largest * (count - 1) / count)
