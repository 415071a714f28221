"""Ranges, predicted bytes and what is left to do."""

from __future__ import annotations

import random
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from mtp_train.data.shards import ShardReader, ShardWriter, merge
from mtp_train.interfaces import TokenRow
from mtp_train.planner import state_bytes
from precompute.plan import Range, check_disk, remaining, split
from tests.test_shards import HEADER, make_sample


def check_split(ranges: list[Range], tokens: list[int], num_parts: int) -> None:
    """Contiguous, complete, and each cut as near to its ideal place as cuts between rows can be."""
    assert [(r.part, r.num_parts) for r in ranges] == [(part, num_parts) for part in range(num_parts)]
    assert ranges[0].start == 0
    assert ranges[-1].stop == len(tokens)
    assert all(a.stop == b.start and a.start <= a.stop for a, b in pairwise(ranges))
    sums = [sum(tokens[:i]) for i in range(len(tokens) + 1)]
    for part, r in enumerate(ranges[1:], start=1):
        bound = sums[-1] * part / num_parts
        assert abs(sums[r.start] - bound) == min(abs(value - bound) for value in sums)


@pytest.mark.parametrize("seed", range(40))
def test_split(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.choice([0, 1, 5, rng.randint(1, 1000)]) for _ in range(rng.choice([0, 1, 3, 11, 50]))]
    num_parts = rng.choice([1, 2, 3, 8])
    check_split(split(tokens, num_parts), tokens, num_parts)


def test_split_examples_and_faults() -> None:
    assert [(r.start, r.stop) for r in split(11, 2)] == [(0, 6), (6, 11)] == [(r.start, r.stop) for r in split([1] * 11, 2)]
    assert sum(r.stop - r.start for r in split(2, 4)) == 2
    assert [(r.start, r.stop) for r in split([100, 1, 1, 1], 2)] == [(0, 1), (1, 4)]
    with pytest.raises(ValueError, match="num_parts=0"):
        split(3, 0)
    for bad in ([Range(0, 2, 0, 5), Range(1, 2, 6, 11)], [Range(0, 2, 0, 6), Range(1, 2, 5, 11)], [Range(0, 2, 0, 2), Range(1, 2, 2, 11)]):
        with pytest.raises(AssertionError):
            check_split(bad, [1] * 11, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_predicted_bytes_are_those_written(tmp_path: Path, dtype: str) -> None:
    header = HEADER.__class__(HEADER.target, HEADER.taps, HEADER.engine, HEADER.corpus_fingerprint, dtype)
    writer = ShardWriter(tmp_path, header, 10_000)
    writer.add(make_sample(0, header, length=4000))
    writer.finish()
    merge(tmp_path)
    written = ShardReader(tmp_path).manifest.shards[0].bytes
    predicted = state_bytes(4000, 2, 8, dtype)
    assert predicted == 4000 * (2 * 8 * torch.zeros(0, dtype=getattr(torch, dtype)).element_size() + 9)
    assert 0 < written - predicted < 2000


def test_check_disk_names_both_numbers(tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "yet" / "there", 1000)
    needed = 2 * shutil.disk_usage(tmp_path).free + 2**40
    with pytest.raises(ValueError) as caught:
        check_disk(tmp_path, needed)
    wanted, free = (float(number) for number in re.findall(r"([\d.]+) GiB", str(caught.value)))
    assert wanted == round(needed / 2**30, 2)
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, abs=1)


def test_remaining() -> None:
    rows = [TokenRow(str(i), "d", [1], [True]) for i in range(5)]
    assert [row.id for row in remaining(rows, {"0", "3"})] == ["1", "2", "4"]
    assert remaining(rows, set()) == rows
    assert remaining(rows, {str(i) for i in range(5)}) == []
    with pytest.raises(ValueError, match="1 stored samples, such as '9', are not among the 5 rows"):
        remaining(rows, {"9", "1"})
