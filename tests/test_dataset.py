"""Packing, resuming and sharing of batches, against slow and obvious oracles."""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mtp_train.data.dataset import PackedBatches, collate, pack, prefetch
from mtp_train.data.shards import ShardReader, ShardWriter, merge
from mtp_train.interfaces import Batch, Sample
from mtp_train.setup import Progress
from mtp_train.train import steps
from tests.test_shards import HEADER, make_sample


def make_reader(directory: Path, samples: list[Sample], shard_tokens: int = 40) -> ShardReader:
    writer = ShardWriter(directory, HEADER, shard_tokens)
    for sample in samples:
        writer.add(sample)
    writer.finish()
    merge(directory)
    return ShardReader(directory)


def check_packing(rows: list[list[int]], lengths: list[int], seq_len: int) -> None:
    """Every sample once, no row too full, and no two rows that could be one (what first fit, best fit and better ones all give)."""
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    sizes = sorted(sum(min(lengths[i], seq_len) for i in row) for row in rows)
    assert all(0 < size <= seq_len for size in sizes)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > seq_len


def best_fit(lengths: list[int], seq_len: int, order: list[int]) -> set[tuple[int, ...]]:
    """Best fit, the slow way; of rows with equally little room the one that got there last."""
    rows: list[list[int]] = []
    touched: list[int] = []
    for clock, i in enumerate(order):
        room = [seq_len - sum(min(lengths[j], seq_len) for j in row) for row in rows]
        fitting = [(left, -touched[r], r) for r, left in enumerate(room) if left >= min(lengths[i], seq_len)]
        r = min(fitting)[2] if fitting else len(rows)
        if r == len(rows):
            rows.append([])
            touched.append(0)
        rows[r].append(i)
        touched[r] = clock
    return {tuple(row) for row in rows}


@pytest.mark.parametrize("seed", range(60))
def test_pack(seed: int) -> None:
    rng = random.Random(seed)
    seq_len = rng.choice([1, 5, 16, 64])
    lengths = [rng.randint(1, rng.choice([3, seq_len, 2 * seq_len])) for _ in range(rng.choice([0, 1, 2, 30, 100]))]
    rows = pack(lengths, seq_len, random.Random(f"{seed}:3"))
    check_packing(rows, lengths, seq_len)
    assert rows == pack(lengths, seq_len, random.Random(f"{seed}:3"))
    order = list(range(len(lengths)))
    random.Random(f"{seed}:3").shuffle(order)
    assert {tuple(row) for row in rows} == best_fit(lengths, seq_len, sorted(order, key=lambda i: -lengths[i]))
    if len(lengths) > 20:
        assert rows != pack(lengths, seq_len, random.Random(f"{seed}:4"))


def test_check_packing_sees_faults() -> None:
    lengths = [4, 3, 2, 5, 1]
    good = [[0, 4], [1, 2], [3]]
    check_packing(good, lengths, 5)
    for bad in ([[0, 4], [1, 2]], [[0, 4], [1, 2], [3], [3]], [[0, 1], [2], [3], [4]], [[0, 4], [1], [2], [3]], [*good, []]):
        with pytest.raises(AssertionError):
            check_packing(bad, lengths, 5)


LENGTHS = {  # of samples, as conversations have them; rows of 2048
    "chat": lambda rng: rng.lognormvariate(6.0, 0.8),
    "long answers": lambda rng: rng.lognormvariate(7.0, 0.6),
    "long tail": lambda rng: 60 * rng.paretovariate(1.1),
    "two kinds": lambda rng: rng.uniform(40, 300) if rng.random() < 0.8 else rng.uniform(1100, 2000),
    "even": lambda rng: rng.uniform(10, 3000),
}


def fill(rows: list[list[int]], lengths: list[int], seq_len: int) -> float:
    """Share of the rows' tokens that are not padding."""
    return sum(min(lengths[i], seq_len) for row in rows for i in row) / (len(rows) * seq_len)


def in_order_of_arrival(lengths: list[int], seq_len: int) -> list[list[int]]:
    """What a loader without a packer does: a row is closed where the next sample does not fit."""
    rows: list[list[int]] = [[]]
    for i, length in enumerate(lengths):
        if sum(min(lengths[j], seq_len) for j in rows[-1]) + min(length, seq_len) > seq_len:
            rows.append([])
        rows[-1].append(i)
    return rows


@pytest.mark.parametrize("kind", LENGTHS)
def test_rows_of_a_window_are_filled(kind: str) -> None:
    rng = random.Random(kind)
    lengths: list[int] = []
    while sum(lengths) < 2**20:  # a window of 16 shards of 65,536 tokens
        lengths.append(max(1, int(LENGTHS[kind](rng))))
    assert fill(pack(lengths, 2048, rng), lengths, 2048) > 0.95
    assert fill(in_order_of_arrival(lengths, 2048), lengths, 2048) < 0.9  # the threshold is not met by itself


def documents(batch: Batch) -> list[tuple[tuple[int, ...], tuple[bool, ...], bytes]]:
    """The samples of a batch, read back from document ids alone, with the layout checked on the way."""
    found = []
    for row in range(len(batch.input_ids)):
        ids = batch.document_ids[row]
        padding = ids == -1
        assert not batch.loss_mask[row][padding].any()
        assert not batch.position_ids[row][padding].any()
        assert not batch.hidden_states[row][padding].any()
        for document in ids[~padding].unique_consecutive().tolist():
            at = ids == document
            assert torch.equal(batch.position_ids[row][at], torch.arange(int(at.sum())))
            assert at.nonzero().flatten().diff().eq(1).all()  # one piece, so the id is not used twice
            found.append((tuple(batch.input_ids[row][at].tolist()), tuple(batch.loss_mask[row][at].tolist()), batch.hidden_states[row][at].numpy().tobytes()))
    return found


def as_document(sample: Sample, seq_len: int) -> tuple[tuple[int, ...], tuple[bool, ...], bytes]:
    return tuple(sample.input_ids[:seq_len].tolist()), tuple(sample.loss_mask[:seq_len].tolist()), sample.hidden_states[:seq_len].numpy().tobytes()


def test_collate_worked_example() -> None:
    a, b, c = (make_sample(i, length=size) for i, size in enumerate((3, 2, 9)))
    batch = collate([[a, b], [c], []], 6)
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, -1], [0] * 6, [-1] * 6]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0] * 6]
    assert documents(batch) == [as_document(sample, 6) for sample in (a, b, c)]
    assert batch.hidden_states.shape == (3, 6, 2, 8)
    assert batch.hidden_states.dtype == a.hidden_states.dtype
    with pytest.raises(ValueError, match="of 6 tokens does not fit, 3 of seq_len=6 are taken"):
        collate([[a, c]], 6)
    empty = collate([[]], 4, like=torch.zeros(2, 8, dtype=torch.bfloat16))
    assert empty.hidden_states.shape == (1, 4, 2, 8)
    assert empty.hidden_states.dtype == torch.bfloat16
    assert (empty.document_ids == -1).all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_once_an_epoch_over_all_ranks(tmp_path: Path, world_size: int) -> None:
    samples = [make_sample(i) for i in range(23)]
    reader = make_reader(tmp_path, samples)
    seen = []
    counts = set()
    for rank in range(world_size):
        data = PackedBatches(reader, 12, 2, seed=1, rank=rank, world_size=world_size)
        batches = list(data.batches(epoch=0))
        counts.add(len(batches))
        assert len(batches) == math.ceil(len(list(data.rows(0))) / (2 * world_size))
        assert all(1 <= len(batch.input_ids) <= 2 for batch in batches)
        seen += [document for batch in batches for document in documents(batch)]
    assert len(counts) == 1
    assert sorted(seen) == sorted(as_document(sample, 12) for sample in samples)


def test_a_rank_left_over_gets_an_empty_row(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, [make_sample(0, length=5)])
    shares = [list(PackedBatches(reader, 8, 2, 0, rank, 3).batches(0)) for rank in range(3)]
    assert [len(share) for share in shares] == [1, 1, 1]
    assert sum(len(documents(share[0])) for share in shares) == 1
    assert all(share[0].input_ids.shape == (1, 8) for share in shares)


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_once_where_the_number_of_ranks_changes_within_an_epoch(tmp_path: Path, world_size: int) -> None:
    samples = [make_sample(i) for i in range(23)]
    reader = make_reader(tmp_path, samples)
    num_rows = len(list(PackedBatches(reader, 12, 2, seed=1).rows(0)))
    for place in range(0, num_rows + 1, 4):  # where two ranks of two rows can stop
        before = [batch for rank in range(2) for batch in islice(PackedBatches(reader, 12, 2, 1, rank, 2).batches(0), place // 4)]
        after = [batch for rank in range(world_size) for batch in PackedBatches(reader, 12, 2, 1, rank, world_size).batches(0, start=place)]
        seen = [document for batch in before + after for document in documents(batch)]
        assert sorted(seen) == sorted(as_document(sample, 12) for sample in samples)


def test_resuming_at_any_batch_gives_the_same_batches(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, [make_sample(i) for i in range(20)])
    data = PackedBatches(reader, 12, 2, seed=5)
    whole, num_rows = list(data.batches(epoch=2)), len(list(data.rows(2)))
    for start in range(len(whole) + 1):
        rest = list(PackedBatches(ShardReader(tmp_path), 12, 2, seed=5).batches(epoch=2, start=min(2 * start, num_rows)))
        assert len(rest) == len(whole) - start
        assert all(map(equal, rest, whole[start:]))
    assert not equal(whole[0], next(PackedBatches(reader, 12, 2, seed=6).batches(epoch=2)))  # the comparison can fail
    assert not equal(whole[0], next(PackedBatches(reader, 12, 2, seed=5).batches(epoch=3)))
    assert sum(num for _, num in data.numbered(epoch=2)) == num_rows
    assert data.plan != PackedBatches(reader, 11, 2, seed=5).plan, "a place in other rows means nothing: the plan tells"


# ---------------------------------------------------------------- the order of an epoch


class Recorder(ShardReader):
    """Notes which samples are read."""

    reads: list[int] = []

    def __getitem__(self, i: int) -> Sample:
        self.reads.append(i)
        return super().__getitem__(i)


def shard_of(reader: ShardReader, i: int) -> int:
    return max(number for number, first in enumerate(reader.first[:-1]) if first <= i)


def ascending(reads: list[int]) -> float:
    """Share of reads that go on to a later place of the same shard, or of a later shard, than the one before."""
    return sum(a < b for a, b in pairwise(reads)) / (len(reads) - 1)


def shards_in_use(shards: list[int]) -> int:
    """The most shards of which, at one moment, some samples are read already and others not yet."""
    return max(sum(shard in shards[at:] for shard in set(shards[:at])) for at in range(len(shards)))


def spread(epochs: list[list[int]]) -> float:
    """How far a sample's mean place in the epochs (0 first, 1 last) is from the middle, for the sample that is farthest."""
    places = torch.tensor([[epoch.index(i) for i in range(len(epoch))] for epoch in epochs], dtype=torch.float)
    return float((places.mean(0) / (len(epochs[0]) - 1) - 0.5).abs().max())


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """30 shards of 6 samples."""
    directory = tmp_path_factory.mktemp("shards")
    make_reader(directory, [make_sample(i, length=7) for i in range(180)], shard_tokens=42)
    reader = Recorder(directory)
    assert len(reader.manifest.shards) == 30
    return reader


@pytest.mark.parametrize(("window", "least", "most"), [(3, 3, 6), (30, 20, 30)])  # a batch may end one window and begin the next
def test_reads_stay_in_a_few_files_and_go_forward(many_shards: Recorder, window: int, least: int, most: int) -> None:
    many_shards.reads = []
    data = PackedBatches(many_shards, 28, 6, seed=0, window_shards=window)
    assert sum(len(documents(batch)) for batch in data.batches(0)) == 180
    assert sorted(many_shards.reads) == list(range(180))
    assert least <= shards_in_use([shard_of(many_shards, i) for i in many_shards.reads]) <= most
    assert ascending(many_shards.reads) > 0.9
    as_packed = [i for row in data.rows(0) for i in row]
    assert ascending(as_packed) < 0.7  # seeded fault: read in the order of the rows


def test_the_shuffle_is_global_over_the_epochs(many_shards: Recorder) -> None:
    data = PackedBatches(many_shards, 28, 6, seed=0, window_shards=3)
    epochs = [list(data.rows(epoch)) for epoch in range(200)]
    flat = [[i for row in rows for i in row] for rows in epochs]
    assert spread(flat) < 0.1  # five standard deviations of a mean of 200 uniform places
    neighbours = {i for rows in epochs for row in rows if 0 in row for i in row}
    assert len({shard_of(many_shards, i) for i in neighbours}) == 30, "a sample meets samples of every shard in its row"
    fixed = [sorted(epoch, key=lambda i: shard_of(many_shards, i) // 3) for epoch in flat]  # seeded fault: shards stay in their order
    assert spread(fixed) > 0.4


def test_cut_and_dropped_samples_are_counted(tmp_path: Path) -> None:
    late = make_sample(1, length=40)  # supervised from token 20 on: nothing within 16
    early = replace(make_sample(2, length=40), loss_mask=torch.arange(40) < 3)
    unsupervised = replace(make_sample(3, length=6), loss_mask=torch.zeros(6, dtype=torch.bool))
    normal = make_sample(4, length=16)
    reader = make_reader(tmp_path, [late, early, unsupervised, normal])
    data = PackedBatches(reader, 16, 4, seed=0)
    assert (data.num_cut, data.num_dropped) == (1, 2)
    seen = [document for batch in data.batches(0) for document in documents(batch)]
    assert sorted(seen) == sorted(as_document(sample, 16) for sample in (early, normal))
    with pytest.raises(ValueError, match=r"0 supervised tokens within seq_len=8 in 1 samples"):
        PackedBatches(make_reader(tmp_path / "late", [late]), 8, 1, seed=0)
    with pytest.raises(ValueError, match="rank=2 of world_size=2"):
        PackedBatches(reader, 16, 4, seed=0, rank=2, world_size=2)


def test_an_error_of_the_reading_thread_reaches_the_consumer(tmp_path: Path) -> None:
    reader = make_reader(tmp_path, [make_sample(i) for i in range(12)], shard_tokens=10)
    data = PackedBatches(ShardReader(tmp_path, max_open=1), 12, 1, seed=0)
    path = tmp_path / reader.manifest.shards[0].file
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=path.name):
        list(data.batches(0))


class Counted(PackedBatches):
    """Says how many batches have been read."""

    num_read = 0

    def _read(self, rows: list[list[int]]) -> Batch:
        self.num_read += 1
        return super()._read(rows)


@pytest.mark.parametrize("accumulation", [1, 4, 8])
def test_the_whole_next_step_is_read_while_one_is_computed(tmp_path: Path, accumulation: int) -> None:
    data = Counted(make_reader(tmp_path, [make_sample(i, length=10) for i in range(40)]), 10, 1, seed=0)
    feed = steps(cast(Any, SimpleNamespace(data=data, at=Progress(), device=torch.device("cpu"))), accumulation)
    assert len(next(feed)) == accumulation
    end = time.monotonic() + 20
    while data.num_read < 2 * accumulation and time.monotonic() < end:
        time.sleep(0.01)
    assert data.num_read >= 2 * accumulation
    time.sleep(0.2)
    assert data.num_read <= 2 * accumulation + 2, "one step ahead, not the corpus"
    feed.close()  # type: ignore[attr-defined]


def test_prefetch_reads_no_further_than_it_must_and_ends_with_its_consumer(tmp_path: Path) -> None:
    made: list[int] = []

    def endless():
        while True:
            made.append(1)
            yield collate([[make_sample(0)]], 10)

    before = threading.active_count()
    batches = prefetch(endless(), 2)
    next(batches)
    time.sleep(0.3)
    assert len(made) <= 4  # one taken, two ready, one in hand
    batches.close()
    assert threading.active_count() == before
