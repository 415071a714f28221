"""The launcher of one node: its place from a step's environment, USR1 and exit code 75 through torchrun, shards on the node's own disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from mtp_train.checkpoint import checkpoints, read_state
from mtp_train.config import compose
from mtp_train.metrics import read_metrics
from mtp_train.provenance import write_provenance
from slurm.launch import scratch_folder, stage_in, topology
from tests.ranks import QUIET, ROOT, free_port

# As SLURM 22.05 sets them, on the second of two nodes.
BATCH = {"SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
         "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_HOST": "login", "MASTER_ADDR": "n1", "MASTER_PORT": "20042"}  # fmt: skip
STEP = {**BATCH, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEPID": "0", "SLURM_NODEID": "1",
        "SLURM_PROCID": "1"}  # fmt: skip


def test_the_place_of_a_node_is_its_steps():
    assert topology(STEP) == ["--nnodes=2", "--node-rank=1", "--master-addr=n1", "--master-port=20042"]
    assert topology({**STEP, "SLURM_NODEID": "0", "SLURM_PROCID": "0"})[1] == "--node-rank=0"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "must be started by srun"),
        (BATCH, "must be started by srun"),  # where both nodes would be rank 0
        ({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, "1 tasks on 1 nodes, the job has 2 nodes"),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "4"}, "4 tasks on 2 nodes"),
        ({key: value for key, value in STEP.items() if key != "MASTER_PORT"}, "MASTER_PORT not set"),
    ],
)
def test_another_place_is_refused(env, message):
    with pytest.raises(ValueError, match=message):
        topology(env)


def test_scratch_is_an_absolute_folder_of_the_job(monkeypatch):
    monkeypatch.setenv("PLACE", "/local disk")
    monkeypatch.delenv("UNSET", raising=False)
    assert scratch_folder("$PLACE/x", "42") == Path("/local disk/x/mtp-42")
    for wrong in ("$UNSET", "${UNSET}/x", "/local/$UNSET", "tmp"):
        with pytest.raises(ValueError, match=re.escape(f"cluster.scratch={wrong} is '{wrong}' on ")):
            scratch_folder(wrong, "42")


def test_shards_are_copied_once_and_checked_by_size(tmp_path):
    source, copy = tmp_path / "shards", tmp_path / "scratch"
    (source / "train").mkdir(parents=True)
    for name in ("train/a.safetensors", "train/manifest.json", "train/.a.lock"):
        (source / name).write_text(name)
    stage_in(source, copy)
    assert sorted(path.name for path in (copy / "train").iterdir()) == ["a.safetensors", "manifest.json"]
    stamp = (copy / "train" / "manifest.json").stat().st_mtime_ns
    (copy / "train" / "a.safetensors").write_text("cut")
    stage_in(source, copy)
    assert (copy / "train" / "a.safetensors").read_text() == "train/a.safetensors"
    assert (copy / "train" / "manifest.json").stat().st_mtime_ns == stamp


class Launcher:
    """slurm.launch of a job of one node, with two ranks."""

    def __init__(self, captured, tmp_path, *extra):
        run, overrides = captured
        self.run_dir = tmp_path / "run, no=1 #2"
        config = compose(*overrides, f'run_dir="{self.run_dir}"', f'train.shards="{run}/shards"', "distributed=ddp", "train.log_every=1", *extra)
        write_provenance(tmp_path / "saved", asdict(config))
        one = {"SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
        env = {**os.environ, **QUIET, **STEP, **one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PLACE": str(tmp_path / "sc ratch")}
        command = ["--processes", "2", "--logs", str(tmp_path / "logs"), "--", "--config", str(tmp_path / "saved" / "config.yaml")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slurm.launch", *command], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def end(self):
        output = self.process.communicate(timeout=300)[0]
        return self.process.returncode, output


@pytest.mark.distributed
@pytest.mark.parametrize("moment", ["in training", "while the ranks start"])
def test_usr1_reaches_ranks_that_save_and_end_with_75_and_the_run_goes_on(captured, tmp_path, moment):
    steps = ("train.num_steps=3000", "train.save_every=3000", "train.validate_every=0")
    job = Launcher(captured, tmp_path, *steps)
    begun = (lambda: read_metrics(job.run_dir / "metrics.jsonl")) if moment == "in training" else (lambda: list((tmp_path / "logs").rglob("stderr.log")))
    deadline = time.monotonic() + 120
    while not begun():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.process.send_signal(signal.SIGUSR1)
    code, output = job.end()
    assert code == 75, output
    (saved,) = checkpoints(job.run_dir / "checkpoints")
    assert 0 < read_state(saved)["step"] < 3000
    assert len(list((tmp_path / "logs").rglob("stderr.log"))) == 2, "a log for every rank"


@pytest.mark.distributed
def test_training_from_scratch_leaves_nothing_there(captured, tmp_path):
    job = Launcher(captured, tmp_path, "train.num_steps=4", "cluster.scratch=$PLACE")
    code, output = job.end()
    assert code == 0, output
    assert "copied to" in output
    assert list((tmp_path / "sc ratch").iterdir()) == []


@pytest.mark.distributed
def test_a_failure_is_not_taken_for_a_stop(captured, tmp_path):
    code, output = Launcher(captured, tmp_path, "target.path=nowhere").end()
    assert code == 1
    assert "logs of every rank" in output
