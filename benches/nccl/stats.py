"""Medians and their intervals from few samples, without assuming a distribution.

The interval of a median is a pair of order statistics; its true confidence follows from the binomial distribution and
is reported with it, since few samples cannot reach the confidence asked for.
"""

from dataclasses import dataclass
from math import comb
from statistics import median


@dataclass
class Interval:
    """A median, the order statistics around it, and the confidence that they really have."""

    median: float
    low: float
    high: float
    confidence: float
    samples: int


def median_interval(values, confidence=0.95):
    """The median with the narrowest symmetric order-statistic interval of at least `confidence`.

    With fewer than six values no such interval reaches 95 %: then it runs from the smallest to the largest value and
    `confidence` says what that is worth (93.75 % for five).
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    count = len(ordered)
    best = 0
    for outside in range((count - 1) // 2 + 1):
        if _coverage(count, outside) >= confidence:
            best = outside
    return Interval(median(ordered), ordered[best], ordered[count - 1 - best], _coverage(count, best), count)


def _coverage(count, outside):
    """The chance that the true median lies between the values with `outside` others beyond them on each side."""
    tail = sum(comb(count, k) for k in range(outside + 1)) / 2**count
    return max(0.0, 1 - 2 * tail)


def paired_ratio(above, below, confidence=0.95):
    """The interval of above/below over the blocks in which both were measured, or None when there is no such block.

    Both arguments map a block to a time. Pairing within a block takes out whatever drifts from block to block.
    """
    shared = sorted(above.keys() & below.keys())
    ratios = [above[block] / below[block] for block in shared if below[block] > 0]
    return median_interval(ratios, confidence) if ratios else None
