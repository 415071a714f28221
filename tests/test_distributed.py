"""Several processes: the same losses in every mode, exact resume after kills, signals, and no silent fall-back."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from mtp_train.checkpoint import checkpoints
from mtp_train.config import compose
from mtp_train.data.dataset import PackedBatches
from mtp_train.data.shards import ShardReader
from mtp_train.metrics import read_metrics
from mtp_train.train import train
from precompute.run import stage as precompute
from tests.conftest import source
from tests.ranks import QUIET, ROOT, Ranks, run
from tests.tiny import save_tiny, tiny_target

pytestmark = pytest.mark.distributed

MODES = ("ddp", "zero1", "zero2", "zero3")
VOLATILE = ("time", "tokens_per_second", "stall_share")


def line_up(captured, folder, *extra):
    """A run directory with the shared shards, and the command line that trains in it."""
    shards, overrides = captured
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "shards").exists():
        os.symlink(shards / "shards", folder / "shards")
    return [*overrides, f'run_dir="{folder}"', "train.log_every=1", *extra]


def read(folder):
    """The last weights, and the log without what differs between any two runs."""
    lines = [{key: value for key, value in line.items() if key not in VOLATILE} for line in read_metrics(folder / "metrics.jsonl")]
    return load_file(checkpoints(folder / "checkpoints")[-1] / "head.safetensors"), lines


def same(a, b):
    return all(torch.equal(a[0][name], b[0][name]) for name in a[0]) and a[1] == b[1]


def assert_close(found, expected, rel, atol=None):
    assert [line.keys() for line in found[1]] == [line.keys() for line in expected[1]]
    for mine, theirs in zip(found[1], expected[1], strict=True):
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=rel, abs=1e-7), (key, theirs["step"])
    for name, weight in expected[0].items():
        torch.testing.assert_close(found[0][name], weight, rtol=100 * rel, atol=atol or 10 * rel)


@pytest.fixture(scope="module")
def alone(captured, tmp_path_factory):
    """One process, eight steps of four rows at once: what every mode must equal."""
    folder = tmp_path_factory.mktemp("alone")
    train(compose(*line_up(captured, folder, "train.num_steps=8", "train.rows_per_batch=4")))
    return read(folder)


# ---------------------------------------------------------------- the same losses


@pytest.mark.parametrize(
    ("mode", "size", "rows", "accumulation"),
    [("ddp", 2, 2, 1), ("ddp", 2, 1, 2), ("ddp", 1, 2, 2), ("zero1", 2, 1, 2), ("zero2", 2, 2, 1), ("zero2", 2, 1, 2), ("zero3", 2, 1, 2)],
)
def test_every_mode_gives_the_losses_of_one_process_and_resumes_bit_equal(captured, alone, tmp_path, mode, size, rows, accumulation):
    folder = tmp_path / "run"
    overrides = line_up(captured, folder, f"distributed={mode}", "train.num_steps=8", f"train.rows_per_batch={rows}", f"train.accumulation={accumulation}")
    run(tmp_path / "logs", overrides, size)
    whole = read(folder)
    assert_close(whole, alone, 1e-5)
    shutil.rmtree(checkpoints(folder / "checkpoints")[-1])  # as if killed between steps 6 and 8
    run(tmp_path / "logs", overrides, size)
    assert same(read(folder), whole)


@pytest.mark.parametrize("mode", ["ddp", "zero2", "zero3"])
def test_a_heads_own_lm_head_trains_in_every_mode(captured, tmp_path, mode):
    """The loss reads it outside of the module that holds it."""
    extra = ["head=eagle3", "head.layout.taps=[1,2,3]", "head.draft_vocab_size=64", "train.num_steps=6"]
    train(compose(*line_up(captured, tmp_path / "alone", *extra, "train.rows_per_batch=2")))
    run(tmp_path / "logs", line_up(captured, tmp_path / "run", *extra, f"distributed={mode}", "train.rows_per_batch=1"))
    assert_close(read(tmp_path / "run"), read(tmp_path / "alone"), 1e-5)


def test_the_last_step_of_an_epoch_leaves_a_rank_without_rows(captured):
    """What makes the comparison above one about ranks and micro-batches that have nothing supervised."""
    data = [PackedBatches(ShardReader(captured[0] / "shards" / "train"), 128, 1, 0, rank, 2) for rank in range(2)]
    supervised = [[int(batch.loss_mask.sum()) for batch in part.batches(0)] for part in data]
    assert 0 in supervised[1], supervised


@pytest.mark.parametrize("mode", ["ddp", "zero3"])
def test_three_ranks_resume_bit_equal(captured, tmp_path, mode):
    """With three, the order in which gradients are added matters (with two it cannot), and matrices do not divide by the number of ranks."""
    folder = tmp_path / "run"
    overrides = line_up(captured, folder, f"distributed={mode}", "train.rows_per_batch=1", "train.num_steps=6", "train.save_every=3")
    run(tmp_path / "logs", overrides, 3)
    whole = read(folder)
    shutil.rmtree(checkpoints(folder / "checkpoints")[-1])
    run(tmp_path / "logs", overrides, 3)
    assert same(read(folder), whole)


def test_a_checkpoint_of_any_mode_goes_on_in_any_other_at_any_size(captured, alone, tmp_path):
    folder = tmp_path / "run"
    for step, (mode, size) in enumerate([("zero3", 2), ("single", 1), ("zero1", 2), ("ddp", 1), ("zero3", 1)]):
        for path in checkpoints(folder / "checkpoints")[step:]:
            shutil.rmtree(path)
        extra = [f"distributed={mode}", "train.num_steps=8", f"train.rows_per_batch={4 // size}", "train.save_every=1", "train.keep_last=9"]
        run(tmp_path / f"logs{step}", line_up(captured, folder, *extra), size)
        assert_close(read(folder), alone, 1e-4)


@pytest.mark.parametrize(("family", "modes"), [("deepseek_v2", ("ddp", "zero2")), ("deepseek_v3", ("zero1", "zero2", "zero3"))])
def test_experts_without_a_token_hang_nobody(corpus, tmp_path, family, modes):
    """DeepSeek-V3's also have a frozen parameter, which DeepSpeed's optimiser does not know."""
    target = save_tiny(tiny_target(family, n_routed_experts=16, num_experts_per_tok=1), tmp_path / "target")
    overrides = ["experiment=tiny", f'target.path="{target}"', f"data.train=[{source(corpus / 'train.jsonl')}]", "data.validation=[]"]
    precompute(compose(*overrides, f'run_dir="{tmp_path}"'))
    extra = ["head.dense_mlp=false", "train.num_steps=3", "train.optim.warmup_steps=1"]
    train(compose(*line_up((tmp_path, overrides), tmp_path / "alone", *extra, "train.rows_per_batch=2")))
    for mode in modes:
        run(tmp_path / "logs", line_up((tmp_path, overrides), tmp_path / mode, *extra, f"distributed={mode}", "train.rows_per_batch=1"))
        assert_close(read(tmp_path / mode), read(tmp_path / "alone"), 1e-5, atol=5e-4)  # Adam makes a step of any rounding where a gradient is all but 0


# ---------------------------------------------------------------- the mode asked for is the mode running


def test_a_silent_fall_back_of_accelerate_is_refused(captured, tmp_path):
    ranks = Ranks(tmp_path / "logs", line_up(captured, tmp_path / "run", "distributed=zero1"), 1, {"ACCELERATE_USE_CPU": "true"})
    assert ranks.wait() == [1]
    assert "asked for (engine, ZeRO stage, processes, device) ('DeepSpeedEngine', 1, 1, 'cpu'), but ('DistributedDataParallel'" in ranks.text()


def test_the_environments_mixed_precision_changes_nothing(captured, alone, tmp_path):
    overrides = line_up(captured, tmp_path / "run", "distributed=zero2", "train.num_steps=8", "train.rows_per_batch=4", "train.optim.max_grad_norm=0")
    assert Ranks(tmp_path / "logs", overrides, 1, {"ACCELERATE_MIXED_PRECISION": "bf16"}).wait() == [0]
    train(compose(*line_up(captured, tmp_path / "alone", "train.num_steps=8", "train.rows_per_batch=4", "train.optim.max_grad_norm=0")))
    unclipped = read(tmp_path / "alone")
    assert_close(read(tmp_path / "run"), unclipped, 1e-5)
    assert not torch.equal(unclipped[0]["eh_proj.weight"], alone[0]["eh_proj.weight"]), "0 clips nothing"


# ---------------------------------------------------------------- kills, signals, restarts


KILLS = int(os.environ.get("MTP_KILLS", "5"))


@pytest.fixture(scope="module")
def long(captured, tmp_path_factory):
    """An uninterrupted run of two ranks: its settings, and what it gives."""
    folder = tmp_path_factory.mktemp("long")
    extra = ["distributed=ddp", f"train.num_steps={12 * (KILLS + 1)}", "train.rows_per_batch=2", "train.save_every=4", "train.validate_every=20"]
    run(folder / "logs", line_up(captured, folder, *extra))
    return extra, read(folder)


def wait_for_steps(folder, processes, num_steps):
    """Until the log has grown by this many lines."""
    end, first = time.monotonic() + 60, len(read_metrics(folder / "metrics.jsonl"))
    while len(read_metrics(folder / "metrics.jsonl")) < first + num_steps:
        assert time.monotonic() < end and all(process.is_alive() for process in processes)
        time.sleep(0.005)


def test_random_kills_change_nothing(captured, long, tmp_path):
    """SIGKILL to one rank or to all, at random moments; a rank whose peer is gone must end by itself."""
    rng, folder = random.Random(KILLS), tmp_path / "run"
    overrides = line_up(captured, folder, *long[0])
    for kill in range(KILLS):
        ranks = Ranks(tmp_path / f"logs{kill}", overrides, 2)
        wait_for_steps(folder, ranks.processes, rng.randint(1, 10))
        time.sleep(rng.uniform(0, 0.05))
        victims = rng.choice([[0], [1], [0, 1]])
        for victim in victims:
            ranks.processes[victim].kill()
        codes = ranks.wait(60)
        assert all(codes) and -signal.SIGKILL in codes, codes
    run(tmp_path / "logs", overrides)
    assert same(read(folder), long[1])


def test_a_signal_to_one_rank_stops_all_at_one_step_and_one_process_goes_on(captured, long, tmp_path):
    folder = tmp_path / "run"
    ranks = Ranks(tmp_path / "logs", line_up(captured, folder, *long[0]), 2)
    wait_for_steps(folder, ranks.processes, 3)
    os.kill(ranks.processes[1].pid, signal.SIGUSR1)
    assert ranks.wait(60) == [75, 75], ranks.text()
    last = checkpoints(folder / "checkpoints")[-1]
    assert json.loads((last / "state.json").read_text())["step"] == read_metrics(folder / "metrics.jsonl")[-1]["step"]
    train(compose(*line_up(captured, folder, *long[0], "distributed=single", "train.rows_per_batch=4")))
    assert_close(read(folder), long[1], 1e-4)


def test_torchrun_restarts_after_a_kill(captured, long, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1", "-m", "mtp_train.train"]
    process = subprocess.Popen([*command, *line_up(captured, folder, *long[0])], cwd=ROOT, env={**os.environ, **QUIET}, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 90
        while len(read_metrics(folder / "metrics.jsonl")) < 6 and time.monotonic() < end:
            time.sleep(0.05)
        (children,) = [path.read_text().split() for path in (ROOT / f"/proc/{process.pid}/task/{process.pid}").glob("children")]
        os.kill(int(children[0]), signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    assert "resuming at step" in errors
    assert same(read(folder), long[1])
