"""Acceptance counters, in vLLM's convention, and their intervals.

Counters count what verification accepted BEFORE any cut by a stop token or a budget; what was cut is counted apart. Every rate is derived
from them, so the counters of prompts, batches and processes simply add up. An interval is a bootstrap over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Sums = NDArray[np.float64]
"""(…, 3 + K): drafts, draft tokens, accepted tokens, then those accepted at each position."""
Statistic = Callable[[Sums], NDArray[np.float64]]
"""(…, 3 + K) -> (…); nan where its denominator is 0."""


def _ratio(part: Sums, whole: Sums) -> NDArray[np.float64]:
    return np.divide(part, whole, out=np.full(np.shape(part), math.nan), where=whole != 0)


def acceptance_length(sums: Sums) -> NDArray[np.float64]:
    """Tokens committed a draft: 1 + accepted / drafts. Includes the target's own next token, as vLLM counts."""
    return 1 + _ratio(sums[..., 2], sums[..., 0])


def acceptance_rate(sums: Sums) -> NDArray[np.float64]:
    """Accepted / drafted tokens."""
    return _ratio(sums[..., 2], sums[..., 1])


def acceptance_rate_at(position: int) -> Statistic:
    """Drafts in which `position` (from 0) was accepted / drafts; over all positions they sum to acceptance_length - 1."""
    return lambda sums: _ratio(sums[..., 3 + position], sums[..., 0])


def conditional_acceptance_rate_at(position: int) -> Statistic:
    """Drafts in which `position` was accepted / drafts accepted up to the one before."""
    return lambda sums: _ratio(sums[..., 3 + position], sums[..., 2 + position if position else 0])


@dataclass(frozen=True)
class AcceptanceStats:
    """What happened in a number of drafts. `+` merges, in any order; the empty one is its zero."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_cut_tokens: int = 0  # committed by verification, then cut by a stop token or the budget

    def __post_init__(self) -> None:
        per_pos = self.num_accepted_tokens_per_pos
        if sum(per_pos) != self.num_accepted_tokens or self.num_accepted_tokens > self.num_draft_tokens:
            raise ValueError(f"{self.num_accepted_tokens} accepted of {self.num_draft_tokens} drafted tokens, but by position {per_pos}")
        if any(later > earlier for earlier, later in zip((self.num_drafts, *per_pos), per_pos, strict=False)):
            raise ValueError(f"accepted by position {per_pos} in {self.num_drafts} drafts: a draft stops at its first rejection, so these cannot rise")

    @classmethod
    def of(cls, num_accepted: int, num_drafted: int, num_cut: int = 0) -> AcceptanceStats:
        """One draft of `num_drafted` tokens. Plain decoding (none drafted) counts nothing."""
        if not 0 <= num_accepted <= num_drafted:
            raise ValueError(f"{num_accepted} accepted of {num_drafted} drafted tokens")
        per_pos = tuple(int(position < num_accepted) for position in range(num_drafted))
        return cls(int(num_drafted > 0), num_drafted, num_accepted, per_pos, num_cut)

    def __add__(self, other: AcceptanceStats) -> AcceptanceStats:
        mine, theirs = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        if mine and theirs and len(mine) != len(theirs):
            raise ValueError(f"counters of {len(mine)} and of {len(theirs)} draft positions cannot be merged: a rate would mix both")
        return AcceptanceStats(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            tuple(a + b for a, b in zip(mine, theirs, strict=True)) if mine and theirs else mine or theirs,
            self.num_cut_tokens + other.num_cut_tokens,
        )

    @property
    def num_committed_tokens(self) -> int:
        """Accepted tokens and the next token of each draft, before any cut."""
        return self.num_accepted_tokens + self.num_drafts

    @property
    def sums(self) -> Sums:
        """(3 + K,), what a `Statistic` takes."""
        return np.array([self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, *self.num_accepted_tokens_per_pos], dtype=np.float64)

    @property
    def acceptance_length(self) -> float:
        """See the function of this name; so for all below."""
        return float(acceptance_length(self.sums))

    @property
    def acceptance_rate(self) -> float:
        return float(acceptance_rate(self.sums))

    @property
    def acceptance_rate_at(self) -> tuple[float, ...]:
        return tuple(float(acceptance_rate_at(i)(self.sums)) for i in range(len(self.num_accepted_tokens_per_pos)))

    @property
    def conditional_acceptance_rate_at(self) -> tuple[float, ...]:
        return tuple(float(conditional_acceptance_rate_at(i)(self.sums)) for i in range(len(self.num_accepted_tokens_per_pos)))

    def counters(self) -> dict[str, Any]:
        """For a report."""
        per_pos = list(self.num_accepted_tokens_per_pos)
        return {**asdict(self), "num_accepted_tokens_per_pos": per_pos, "num_committed_tokens": self.num_committed_tokens}


# ---------------------------------------------------------------- intervals


def _resample(per_prompt: Sequence[AcceptanceStats], num_resamples: int, seed: int) -> Sums:
    """(resamples, 3 + K): sums over as many prompts as there are, drawn with replacement."""
    width = len(sum(per_prompt, AcceptanceStats()).num_accepted_tokens_per_pos)  # refuses a mixture of K
    table = np.zeros((len(per_prompt), 3 + width))
    for row, one in zip(table, per_prompt, strict=True):
        row[: len(one.sums)] = one.sums  # a prompt without drafts has no positions
    picks = np.random.default_rng(seed).multinomial(len(table), np.full(len(table), 1 / len(table)), size=num_resamples)
    return picks @ table


def _percentiles(values: NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95 %; resamples in which the statistic is undefined are left out."""
    low, high = np.percentile(values, [2.5, 97.5]) if len(values := values[np.isfinite(values)]) else (math.nan, math.nan)
    return float(low), float(high)


def bootstrap(per_prompt: Sequence[AcceptanceStats], statistic: Statistic, num_resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of a statistic over PROMPTS: drafts of one prompt are not independent.

    Returns nan for fewer than two prompts, which say nothing about how prompts differ.
    """
    if len(per_prompt) < 2:
        return math.nan, math.nan
    return _percentiles(statistic(_resample(per_prompt, num_resamples, seed)))


def paired_bootstrap(
    first: Sequence[AcceptanceStats], second: Sequence[AcceptanceStats], statistic: Statistic, num_resamples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of statistic(second) - statistic(first) over the same prompts, in the same order: each resample draws one set for both."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} prompts cannot be paired")
    if len(first) < 2:
        return math.nan, math.nan
    one, other = (statistic(_resample(each, num_resamples, seed)) for each in (first, second))  # one seed: the same picks
    return _percentiles(other - one)


def summarise(per_prompt: Sequence[AcceptanceStats]) -> dict[str, Any]:
    """Counters, rates and their 95 % intervals of a group of prompts: one row of a report."""
    total = sum(per_prompt, AcceptanceStats())

    def interval(statistic: Statistic) -> dict[str, float]:
        low, high = bootstrap(per_prompt, statistic)
        return {"value": float(statistic(total.sums)), "low": low, "high": high}

    positions = range(len(total.num_accepted_tokens_per_pos))
    return {
        "num_prompts": len(per_prompt),
        "counters": total.counters(),
        "acceptance_length": interval(acceptance_length),
        "acceptance_rate": interval(acceptance_rate),
        "acceptance_rate_at": [interval(acceptance_rate_at(i)) for i in positions],
        "conditional_acceptance_rate_at": [interval(conditional_acceptance_rate_at(i)) for i in positions],
    }
