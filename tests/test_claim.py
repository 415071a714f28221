"""One writer: of two attempts at one piece of work the later one goes on, and the former, wherever it stands, writes nothing more."""

from __future__ import annotations

import os

import pytest
import torch

from mtp_train.checkpoint import checkpoints
from mtp_train.config import compose
from mtp_train.data.shards import ShardReader, ShardWriter, merge, verify
from mtp_train.metrics import Metrics, read_metrics
from mtp_train.provenance import Claim, atomic_dir, atomic_path, is_later
from mtp_train.setup import set_up
from mtp_train.train import save
from precompute.regenerate import Journal
from tests.test_shards import HEADER, make_sample


@pytest.fixture
def attempt(monkeypatch):
    """What is made after a call of this belongs to that attempt of that job; without a job, to no job at all."""

    def become(job=None, restart=0, cluster="here"):
        for name, value in (("JOB_ID", job), ("RESTART_COUNT", restart or None), ("CLUSTER_NAME", cluster)):
            monkeypatch.delenv(f"SLURM_{name}", raising=False) if value is None else monkeypatch.setenv(f"SLURM_{name}", str(value))

    return become


def files(folder):
    """Every file and its bytes."""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---------------------------------------------------------------- the claim


@pytest.mark.parametrize("job", [None, 7])
def test_a_second_process_is_refused_while_the_first_lives(attempt, tmp_path, job):
    attempt(job)
    with Claim(tmp_path / "lock") as first:
        with pytest.raises(ValueError, match=r"another process.*lock"):
            Claim(tmp_path / "lock")
        first.check()
    Claim(tmp_path / "lock").close()


@pytest.mark.parametrize(
    ("former", "later"),
    [((7,), (7, 1)), ((7, 2), (7, 10)), ((9,), (10,)), ((7, 3), (8,))],
)
def test_the_later_attempt_takes_over_and_the_former_never_again(attempt, tmp_path, former, later):
    attempt(*former)
    orphan = Claim(tmp_path / "lock")
    orphan.check()
    attempt(*later)
    replacement = Claim(tmp_path / "lock")
    for _ in range(2):
        replacement.check()
        with pytest.raises(ValueError, match=r"slurm \S+ \d+ \d+' has taken over from '.*writes nothing more"):
            orphan.check()
    attempt(*former)  # its batch script tries again
    with pytest.raises(ValueError, match="started after this"):
        Claim(tmp_path / "lock")
    replacement.check()


@pytest.mark.parametrize(("first", "second"), [((None,), (3,)), ((7,), (None,)), ((7,), (30, 0, "elsewhere"))])
def test_of_attempts_that_are_not_one_after_the_other_the_living_one_stays(attempt, tmp_path, first, second):
    attempt(*first)
    with Claim(tmp_path / "lock") as living:
        attempt(*second)
        with pytest.raises(ValueError, match=r"another process is writing here: .(process|slurm here 7 0).*lock, and this .(process|slurm \w+ \d)"):
            Claim(tmp_path / "lock")
        living.check()
    with Claim(tmp_path / "lock") as next_one:
        next_one.check()


def test_order_is_known_within_a_cluster_alone():
    assert is_later("slurm a 10 0", "slurm a 9 5")
    assert is_later("slurm a 9 10", "slurm a 9 9")
    for one, other in (("slurm a 9 0", "slurm a 9 0"), ("slurm b 10 0", "slurm a 9 0"), ("process h 10 0", "process h 9 0"), ("", "slurm a 9 0")):
        assert not is_later(one, other)


def refuse():
    raise ValueError("taken over")


def test_the_check_comes_last_before_a_thing_appears(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(ValueError, match="taken over"), atomic_path(tmp_path / "file", refuse) as temp:
        temp.write_text("new")
    with pytest.raises(ValueError, match="taken over"), atomic_dir(tmp_path / "folder", refuse) as temp:
        (temp / "file").write_text("new")
    assert files(tmp_path) == {(tmp_path / "file").relative_to(tmp_path): b"old"}


# ---------------------------------------------------------------- shards


class Deaf:
    """A claim that is never looked at: the seeded fault."""

    def check(self):
        pass

    def close(self):
        pass


def race(attempt, folder, deaf=False):
    """An orphan and its replacement capture the same twelve rows; returns what stopped the orphan, and whether it wrote anything."""
    attempt(7)
    orphan = ShardWriter(folder, HEADER, shard_tokens=1)  # every sample is a shard
    if deaf:
        orphan._claim = Deaf()
    for number in range(4):
        orphan.add(make_sample(number))
    attempt(7, 1)
    replacement = ShardWriter(folder, HEADER, shard_tokens=1)
    assert replacement.stored == {make_sample(number).id for number in range(4)}
    for number in range(4, 12):
        replacement.add(make_sample(number))
    replacement.finish()
    before = files(folder)
    try:
        orphan.add(make_sample(5))
        orphan.finish()
    except ValueError as error:
        return str(error), files(folder) != before
    return None, files(folder) != before


def test_an_orphan_writes_no_shard_beside_its_replacement(attempt, tmp_path):
    stopped_by, wrote = race(attempt, tmp_path)
    assert "'slurm here 7 1' has taken over from 'slurm here 7 0'" in stopped_by
    assert not wrote
    merge(tmp_path)
    verify(tmp_path)
    assert sorted(ShardReader(tmp_path).ids) == sorted(make_sample(number).id for number in range(12))


def test_seeded_fault_without_the_check_rows_are_lost(attempt, tmp_path):
    assert race(attempt, tmp_path, deaf=True) == (None, True)
    assert len(merge(tmp_path).shards) < 12


class Meanwhile(torch.Tensor):
    """States whose writing takes so long that something happens in between."""

    def contiguous(self):
        self.happens()
        return self.as_subclass(torch.Tensor).contiguous()


def test_an_orphan_stopped_in_the_middle_of_a_shard_says_why(attempt, tmp_path):
    attempt(7)
    orphan = ShardWriter(tmp_path, HEADER, shard_tokens=1000)
    orphan.add(make_sample(0))
    orphan.add(make_sample(1))
    states = orphan._buffer[1].hidden_states.as_subclass(Meanwhile)
    states.happens = lambda: (attempt(8), ShardWriter(tmp_path, HEADER, shard_tokens=1000).finish())
    orphan._buffer[1].__dict__["hidden_states"] = states
    with pytest.raises(ValueError, match="has taken over"):
        orphan.flush()
    assert merge(tmp_path).shards == ()
    assert not list(tmp_path.glob("*shard*")) + list(tmp_path.glob(".*tmp"))


# ---------------------------------------------------------------- answers, checkpoints, figures


def test_an_orphan_adds_no_answer_beside_its_replacement(attempt, tmp_path):
    path = tmp_path / "rows.journal"
    attempt(7)
    orphan = Journal(path, "mark", Claim(tmp_path / "lock"))
    orphan.add("a", 0, [1, 2], "stop")
    attempt(7, 1)
    replacement = Journal(path, "mark", Claim(tmp_path / "lock"))
    assert set(replacement.answers) == {("a", 0)}
    with pytest.raises(ValueError, match="has taken over"):
        orphan.add("b", 0, [3], "stop")
    orphan.file.write("beyond the check\n")
    orphan.file.flush()
    replacement.add("b", 0, [3], "stop")
    assert set(Journal(path, "mark", replacement.claim).answers) == {("a", 0), ("b", 0)}


def test_an_orphaned_training_saves_nothing_beside_its_replacement(attempt, captured, tmp_path):
    shards, overrides = captured
    os.symlink(shards / "shards", tmp_path / "shards")
    config = compose(*overrides, f'run_dir="{tmp_path}"')
    attempt(7)
    orphan = set_up(config)
    log_of_orphan = Metrics(tmp_path, config.train, 0, {}, orphan.device)
    attempt(7, 1)
    replacement = set_up(config)
    log = Metrics(tmp_path, config.train, 0, {}, replacement.device)
    replacement.at.step = orphan.at.step = 5
    save(replacement, tmp_path, {"validation": None, "window": {}}, keep_last=2)
    before = files(tmp_path / "checkpoints")
    orphan.at.step = 6
    with pytest.raises(ValueError, match="has taken over"):
        save(orphan, tmp_path, {"validation": None, "window": {}}, keep_last=2)
    assert files(tmp_path / "checkpoints") == before
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step_00000005"]
    log_of_orphan._write({"step": 6})
    log._write({"step": 7})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 7}]
