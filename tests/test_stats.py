"""Counters and rates against a loop over drafts, intervals against an enumeration of all resamples."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from mtp_train.spec_decode import stats as module
from mtp_train.spec_decode.stats import AcceptanceStats, bootstrap, paired_bootstrap, summarise

K = 3


def drafts(num, seed, num_draft=K):
    """How many tokens each of `num` drafts had accepted."""
    rng = random.Random(seed)
    return [rng.choice([0, 0, 1, 1, 2, num_draft]) for _ in range(num)]


def count(accepted, num_draft=K):
    return sum((AcceptanceStats.of(one, num_draft) for one in accepted), AcceptanceStats())


@pytest.mark.parametrize("num_draft", [1, 2, 5])
def test_rates_equal_a_loop_over_drafts(num_draft):
    accepted = [min(one, num_draft) for one in drafts(200, num_draft, num_draft)]
    total = count(accepted, num_draft)
    assert total.num_drafts == 200
    assert total.num_draft_tokens == 200 * num_draft
    assert total.num_accepted_tokens == sum(accepted)
    assert total.acceptance_length == pytest.approx(np.mean([one + 1 for one in accepted]))
    assert total.acceptance_rate == pytest.approx(sum(accepted) / (200 * num_draft))
    assert total.num_committed_tokens == sum(one + 1 for one in accepted)
    for i in range(num_draft):
        got, reached = [one for one in accepted if one > i], [one for one in accepted if one >= i]
        assert total.num_accepted_tokens_per_pos[i] == len(got)
        assert total.acceptance_rate_at[i] == pytest.approx(len(got) / 200)
        assert total.conditional_acceptance_rate_at[i] == pytest.approx(len(got) / len(reached))


def test_what_follows_the_first_rejection_is_not_counted():
    assert AcceptanceStats.of(1, 3).num_accepted_tokens_per_pos == (1, 0, 0)  # matches 1, 0, 1 accept one token
    with pytest.raises(ValueError, match="cannot rise"):
        AcceptanceStats(1, 3, 2, (1, 0, 1))


@pytest.mark.parametrize("seed", range(5))
def test_identity_holds_for_any_order_and_grouping(seed):
    rng = random.Random(seed)
    parts = [AcceptanceStats.of(one, K, num_cut=rng.randint(0, 1)) for one in drafts(60, seed)]
    whole = sum(parts, AcceptanceStats())
    assert 1 + sum(whole.acceptance_rate_at) == pytest.approx(whole.acceptance_length)
    while len(parts) > 1:  # merge at random, as batches and processes would, empty ones among them
        rng.shuffle(parts)
        a, b = parts.pop(), parts.pop()
        parts.append(rng.choice([a + b, b + a, a + AcceptanceStats() + b]))
        merged = parts[-1]
        assert 1 + sum(merged.acceptance_rate_at) == pytest.approx(merged.acceptance_length)
    assert parts[0] == whole


def test_averaging_rates_instead_of_adding_counters_would_break_the_identity_check():
    one, other = count([3, 3, 3]), count([0] * 9)
    averaged = (one.acceptance_length + other.acceptance_length) / 2
    assert averaged != pytest.approx((one + other).acceptance_length)


def test_different_k_is_refused_but_the_empty_one_merges():
    with pytest.raises(ValueError, match="2 and of 3"):
        AcceptanceStats.of(1, 2) + AcceptanceStats.of(1, 3)
    with pytest.raises(ValueError, match="positions"):
        summarise([AcceptanceStats.of(1, 2), AcceptanceStats.of(1, 3)])
    cut = AcceptanceStats(num_cut_tokens=2)
    assert cut + AcceptanceStats.of(1, 2) == AcceptanceStats.of(1, 2, num_cut=2) == AcceptanceStats.of(1, 2) + cut
    assert AcceptanceStats.of(0, 0) == AcceptanceStats()  # plain decoding


@pytest.mark.parametrize(
    "fields",
    [(2, 6, 3, (2, 0, 0)), (2, 6, 1, (2, 0, 0)), (2, 1, 2, (2, 0, 0)), (1, 6, 2, (2, 0, 0)), (2, 6, 3, (1, 2, 0))],
)
def test_counters_that_contradict_each_other_are_refused(fields):
    with pytest.raises(ValueError, match="position"):
        AcceptanceStats(*fields)


@pytest.mark.parametrize(("accepted", "drafted"), [(4, 3), (-1, 3), (1, 0)])
def test_impossible_drafts_are_refused(accepted, drafted):
    with pytest.raises(ValueError, match=f"{accepted} accepted of {drafted}"):
        AcceptanceStats.of(accepted, drafted)


def test_cut_tokens_change_no_rate():
    with_cut, without = AcceptanceStats.of(2, K, num_cut=2), AcceptanceStats.of(2, K)
    assert with_cut.acceptance_length == without.acceptance_length == 3
    assert with_cut.num_cut_tokens == 2
    assert with_cut.num_committed_tokens == 3  # before the cut


def test_zero_denominators_are_nan():
    empty = AcceptanceStats()
    assert math.isnan(empty.acceptance_length)
    assert math.isnan(empty.acceptance_rate)
    assert empty.acceptance_rate_at == ()
    rejected = AcceptanceStats.of(0, K)
    assert rejected.acceptance_length == 1
    assert rejected.acceptance_rate_at == (0, 0, 0)
    assert rejected.conditional_acceptance_rate_at[0] == 0
    assert all(math.isnan(one) for one in rejected.conditional_acceptance_rate_at[1:])


@pytest.mark.parametrize(
    "per_prompt", [[], [AcceptanceStats()], [AcceptanceStats()] * 3, [AcceptanceStats.of(0, K)] * 3, [AcceptanceStats.of(1, K), AcceptanceStats()]]
)
@pytest.mark.filterwarnings("error")
def test_summaries_of_almost_nothing(per_prompt):
    row = summarise(per_prompt)
    assert row["num_prompts"] == len(per_prompt)
    assert len(row["acceptance_rate_at"]) == len(row["counters"]["num_accepted_tokens_per_pos"])


# ---------------------------------------------------------------- intervals


def exact_interval(values):
    """The 95 % percentile interval of an equally likely, wholly enumerated list of resamples."""
    ordered = sorted(values)
    return ordered[math.ceil(0.025 * len(ordered)) - 1], ordered[math.ceil(0.975 * len(ordered)) - 1]


def prompts(seed=0, num=5):
    return [count(drafts(4 + 3 * index, seed=seed + index)) for index in range(num)]


STATISTICS = {
    "length": (module.acceptance_length, lambda total: total.acceptance_length),
    "rate": (module.acceptance_rate, lambda total: total.acceptance_rate),
    "at 1": (module.acceptance_rate_at(1), lambda total: total.acceptance_rate_at[1]),
    "2 given 1": (module.conditional_acceptance_rate_at(2), lambda total: total.conditional_acceptance_rate_at[2]),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_bootstrap_equals_all_resamples(name):
    statistic, of_total = STATISTICS[name]
    per_prompt = prompts()
    every = [sum(picked, AcceptanceStats()) for picked in itertools.product(per_prompt, repeat=len(per_prompt))]
    values = [value for value in map(of_total, every) if not math.isnan(value)]
    assert bootstrap(per_prompt, statistic, num_resamples=100_000) == pytest.approx(exact_interval(values), abs=0.01)


def test_paired_bootstrap_equals_all_resamples():
    first, second = prompts(0, 4), prompts(50, 4)
    values = []
    for picks in itertools.product(range(4), repeat=4):
        one, other = (sum((group[i] for i in picks), AcceptanceStats()) for group in (first, second))
        values.append(other.acceptance_length - one.acceptance_length)
    interval = paired_bootstrap(first, second, module.acceptance_length, num_resamples=100_000)
    assert interval == pytest.approx(exact_interval(values), abs=0.01)


def test_pairing_takes_out_what_prompts_have_in_common():
    first = [count([index % 4] * 20 + [0]) for index in range(12)]
    second = [count([index % 4] * 20 + [1]) for index in range(12)]  # always a little better
    low, high = paired_bootstrap(first, second, module.acceptance_length)
    assert 0 < low <= high < 0.1
    shuffled = second[5:] + second[:5]  # the fault: pairs that do not belong together
    assert paired_bootstrap(first, shuffled, module.acceptance_length)[0] < 0
    assert paired_bootstrap(first, first, module.acceptance_length) == (0, 0)
    with pytest.raises(ValueError, match="12 and 11"):
        paired_bootstrap(first, second[1:], module.acceptance_length)


def test_intervals_are_over_prompts_and_not_over_drafts():
    per_prompt = [count([K] * 200), count([0] * 200)] * 5
    low, high = bootstrap(per_prompt, module.acceptance_rate)
    assert high - low > 0.4
    by_draft = [AcceptanceStats.of(one, K) for one in ([K] * 200 + [0] * 200) * 5]  # the fault
    low, high = bootstrap(by_draft, module.acceptance_rate)
    assert high - low < 0.1


def test_interval_is_repeatable_and_encloses_the_value():
    per_prompt = prompts(7, 20)
    assert summarise(per_prompt) == summarise(per_prompt)
    assert bootstrap(per_prompt, module.acceptance_length, seed=1) != bootstrap(per_prompt, module.acceptance_length, seed=2)
    row = summarise(per_prompt)
    for entry in (row["acceptance_length"], row["acceptance_rate"], *row["acceptance_rate_at"], *row["conditional_acceptance_rate_at"]):
        assert entry["low"] < entry["value"] < entry["high"]
    assert row["counters"] == {
        "num_drafts": row["counters"]["num_drafts"], "num_draft_tokens": row["counters"]["num_drafts"] * K,
        "num_accepted_tokens": sum(row["counters"]["num_accepted_tokens_per_pos"]),
        "num_accepted_tokens_per_pos": list(sum(per_prompt, AcceptanceStats()).num_accepted_tokens_per_pos), "num_cut_tokens": 0,
        "num_committed_tokens": row["counters"]["num_drafts"] + row["counters"]["num_accepted_tokens"],
    }  # fmt: skip


def test_one_prompt_has_no_interval():
    row = summarise(prompts(num=1))
    assert row["acceptance_length"]["value"] > 1
    assert math.isnan(row["acceptance_length"]["low"])
    assert math.isnan(paired_bootstrap(prompts(num=1), prompts(num=1), module.acceptance_length)[0])
