"""The chain of jobs on a real SLURM cluster of two nodes: to its report, and through signals, kills, lost nodes and orphans."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from mtp_train.checkpoint import checkpoints, read_state
from mtp_train.config import compose
from mtp_train.data.manifest import load_parts
from mtp_train.data.shards import ShardReader, merge, stored_ids, verify
from mtp_train.metrics import read_metrics
from precompute.run import stage as precompute
from tests.conftest import source, write_conversations
from tests.ranks import ROOT
from tests.test_distributed import read, same

pytestmark = pytest.mark.slurm

STAGES = ["corpus", "regenerate", "capture", "merge", "train", "export", "eval", "report"]
TRAINING = [
    "train.num_steps=200", "train.log_every=1", "train.validate_every=0", "train.save_every=80", "train.rows_per_batch=1", "cluster.nodes=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def settings(target_dir):
    """Overrides of every run here."""
    return ["experiment=tiny", f'target.path="{target_dir}"', "cluster.retries=0", "cluster.mem_per_cpu=1000"]


class Run:
    """A run directory, and what is submitted from it."""

    def __init__(self, cluster, folder, *overrides):
        self.cluster, self.folder, self.overrides = cluster, folder, [*overrides, f'run_dir="{folder}"']

    def submit(self, *more):
        return self.cluster.submit(*self.overrides, *more)[1]

    def log(self, job):
        return Path(self.cluster.facts(job)["StdOut"]).read_text()

    def succeed(self, jobs, seconds=600):
        states = self.cluster.wait(jobs.values(), seconds)
        assert set(states.values()) == {"COMPLETED"}, self.cluster.explain(jobs.values())


# ---------------------------------------------------------------- the whole chain


@pytest.fixture(scope="module")
def chain(cluster, settings, corpus, tmp_path_factory):
    """A chain that has come to its end, from a directory whose name is hard on launchers."""
    sources = [f"data.{name}=[{source(corpus / f'{name}.jsonl')}]" for name in ("train", "validation")]
    heads = [f"{{num_draft_tokens: {steps}, temperature: 0.0, draft_sampling: greedy, draft_vocab_size: null}}" for steps in (1, 2)]
    prompts = [f'eval.prompts="{corpus / "heldout.jsonl"}"', f"eval.runs=[{', '.join(heads)}]"]
    run = Run(cluster, tmp_path_factory.mktemp("chain") / "my run, no=1 #2", *settings, *sources, *prompts, *TRAINING, "precompute.num_parts=2")
    run.announced, _ = cluster.submit(*run.overrides, "submit.dry_run=true")
    assert not run.folder.exists()
    run.jobs = run.submit()
    run.waits_for = {stage: cluster.facts(job)["Dependency"] for stage, job in run.jobs.items()}
    run.succeed(run.jobs, 1200)
    return run


def test_a_chain_ends_in_a_report(chain):
    assert list(chain.jobs) == STAGES
    report = json.loads((chain.folder / "eval" / "report.json").read_text())
    assert [run["overall"]["num_prompts"] for run in report["runs"]] == [8, 8]
    assert report["lossless"]["num_equal"] == report["lossless"]["num_prompts"]
    assert (chain.folder / "eval" / "report.html").exists()
    assert not list((chain.folder / "slurm" / "failed").iterdir())
    assert read_state(checkpoints(chain.folder / "checkpoints")[-1])["step"] == 200


def test_what_a_dry_run_prints_is_what_slurm_was_given(chain):
    scripts = re.split(r"^### (sbatch .*)\n\n", chain.announced, flags=re.M)[1:]
    announced = dict(zip(scripts[::2], scripts[1::2], strict=True))
    assert [command.split()[-1] for command in announced] == [f"{stage}.sbatch" for stage in STAGES]
    for stage, before, (command, text) in zip(STAGES, [None, *STAGES], announced.items()):
        given = chain.cluster("scontrol", "write", "batch_script", chain.jobs[stage], "-")
        assert given.strip() == text.strip(), stage
        assert (f"--dependency=afterok:{before} " in command) == (before is not None), command
        assert chain.waits_for[stage].startswith(f"afterok:{chain.jobs[before]}" if before else "(null)"), stage


def test_tasks_of_an_array_overlap_nowhere(chain):
    for which, num in (("train", 24), ("validation", 6)):
        parts = [stored_ids(chain.folder / "shards" / which, part) for part in (0, 1)]
        assert all(parts)
        assert not parts[0] & parts[1]
        assert len(parts[0] | parts[1]) == num


def test_a_finished_chain_is_not_submitted_again_and_its_status_says_so(chain):
    assert chain.submit() == {}
    table, _ = chain.cluster.submit(f"status={chain.folder}")
    assert [line.split()[0:3:2] for line in table.splitlines()[1:9]] == [[stage, "done"] for stage in STAGES]
    assert "step 200 of 200" in table


# ---------------------------------------------------------------- signals, kills, failures


def share_shards(run, chain):
    run.folder.mkdir()
    os.symlink(chain.folder / "shards", run.folder / "shards")


def steps(run):
    return max((line["step"] for line in read_metrics(run.folder / "metrics.jsonl")), default=0)


def ranks(cluster, job):
    return [pid for pid, command in cluster.processes(job).items() if "mtp_train.train" in command and "slurm.launch" not in command and "srun" not in command]


def test_training_told_to_stop_and_then_killed_gives_the_same_weights(cluster, chain, settings, tmp_path):
    """USR1 as before a limit: saved, queued again, resumed at that step. Then SIGKILL to one rank: the job tries again by itself."""
    run = Run(cluster, tmp_path / "run", *settings, *TRAINING, "cluster.retries=1")
    share_shards(run, chain)
    job = run.submit("stages=train")["train"]
    cluster.until(lambda: steps(run) > 20, [job])
    cluster("scancel", "--signal=USR1", "--batch", job)
    cluster.until(lambda: cluster.facts(job)["Restarts"] == "1" and cluster.states(job)[job] == "RUNNING", [job])
    (saved,) = checkpoints(run.folder / "checkpoints")
    stopped_at = read_state(saved)["step"]
    assert 20 < stopped_at < 200
    cluster.until(lambda: steps(run) > stopped_at + 20, [job])
    os.kill(ranks(cluster, job)[0], signal.SIGKILL)
    run.succeed({"train": job})
    assert f"resuming at step {stopped_at} " in run.log(job)
    assert same(read(run.folder), read(chain.folder))


@pytest.mark.slow
def test_a_limit_shorter_than_the_work(cluster, chain, settings, tmp_path):
    """SLURM's own signal before the limit (it counts in whole minutes): saved, queued again, resumed."""
    run = Run(cluster, tmp_path / "run", *settings, "train.num_steps=1000000", "train.save_every=1000000", "train.validate_every=0")
    share_shards(run, chain)
    job = run.submit("stages=train", 'cluster.time.train="00:03:00"', "cluster.signal_lead_s=60")["train"]
    cluster.until(lambda: "resuming at step" in run.log(job), [job], 600)
    cluster("scancel", job)
    (saved,) = checkpoints(run.folder / "checkpoints")
    assert f"resuming at step {read_state(saved)['step']} " in run.log(job)
    assert "stopped by the time limit: queued again" in run.log(job)
    assert cluster.facts(job)["Restarts"] == "1"


def test_a_failure_stops_the_chain_and_says_where_to_look(cluster, settings, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"messages": [\n')
    run = Run(cluster, tmp_path / "run", *settings, f"data.train=[{source(tmp_path / 'broken.jsonl')}]")
    jobs = run.submit("stages=corpus,regenerate,capture,merge,train")
    states = cluster.wait(jobs.values())
    assert states.pop(jobs["corpus"]) == "FAILED"
    assert set(states.values()) == {"CANCELLED"}
    (mark,) = (run.folder / "slurm" / "failed").iterdir()
    log = Path(mark.read_text().splitlines()[-1].removeprefix("log "))
    assert "broken JSON line" in log.read_text()
    table, _ = cluster.submit(f"status={run.folder}")
    assert "FAILED" in table
    assert str(log) in table


# ---------------------------------------------------------------- capture that is cancelled, loses its node, is orphaned


@pytest.fixture(scope="module")
def rows(settings, tmp_path_factory):
    """Token rows of a corpus whose capture takes a while: every row is a shard."""
    folder = tmp_path_factory.mktemp("rows")
    data = f"data.train=[{source(write_conversations(folder / 'train.jsonl', 500))}]"
    small = ["precompute.regenerate.enabled=false", "precompute.shard_tokens=1", "data.validation=[]", "precompute.num_parts=1"]
    overrides = [*settings, data, *small]
    precompute(compose(*overrides, f'run_dir="{folder / "run"}"', "precompute.steps=[corpus,rows]"))
    return folder / "run" / "data", overrides


@pytest.fixture
def capture(cluster, rows, tmp_path):
    """A capture that has been submitted, and has written some shards."""
    errors = tmp_path / "errors.sh"  # where a process can write them although its slurmstepd is gone
    errors.write_text(f'#!/bin/sh\nexec "$@" 2>>"{tmp_path}/run/stderr.${{SLURM_RESTART_COUNT:-0}}"\n')
    errors.chmod(0o755)
    run = Run(cluster, tmp_path / "run", *rows[1], f'cluster.prefix="{errors}"')
    run.folder.mkdir()
    os.symlink(rows[0], run.folder / "data")
    run.jobs = run.submit("stages=capture")
    cluster.until(lambda: samples(run) > 20, run.jobs.values())
    yield run
    cluster("scancel", *run.jobs.values())
    cluster.up()  # nodes that were lost


def samples(run):
    return sum(shard.samples for index in load_parts(run.folder / "shards" / "train") for shard in index.shards)


def task(run):
    """Of its array, and the raw id that its processes carry."""
    name = f"{run.jobs['capture']}_0"
    return name, run.cluster.facts(name)["JobId"]


def assert_whole(run):
    """Every row is there once, as written."""
    merge(run.folder / "shards" / "train")
    verify(run.folder / "shards" / "train")
    found = ShardReader(run.folder / "shards" / "train").ids
    assert len(found) == len(set(found)) == 500


def test_cancelled_and_resumed_and_its_node_lost(cluster, capture):
    name, id = task(capture)
    cluster("scancel", name)
    assert set(cluster.wait(capture.jobs.values()).values()) == {"CANCELLED"}
    assert not cluster.processes(id)
    kept = samples(capture)
    assert 20 < kept < 500
    _, again = cluster.submit(f"resume={capture.folder}")
    assert list(again) == ["capture"]
    capture.jobs = again
    cluster.until(lambda: samples(capture) > kept + 20, again.values())
    name, id = task(capture)
    node = cluster.facts(name)["NodeList"]
    cluster.lose(node, id, signal.SIGKILL)
    cluster.until(lambda: cluster.facts(name)["Restarts"] == "1" and samples(capture) > kept + 60, again.values())
    cluster("scancel", f"{id}.0")  # as srun does when it learns, on a node that was cut off, that it has been lost: the new step has the same number
    capture.succeed(again)
    assert "attempt 2 of 2" in capture.log(name)
    assert cluster.facts(name)["Restarts"] == "1"
    assert cluster.facts(name)["NodeList"] != node
    assert_whole(capture)


def test_an_orphan_stops_when_its_replacement_has_begun(cluster, capture):
    """A node is cut off, and comes back when the job has been started elsewhere: its process writes nothing more, its batch script marks nothing."""
    name, id = task(capture)
    lost = cluster.lose(cluster.facts(name)["NodeList"], id, signal.SIGSTOP)
    (orphan,) = [pid for pid, command in lost.items() if "precompute.run" in command and "srun" not in command]
    first, second = (capture.folder / f"stderr.{attempt}" for attempt in ("0", "1"))
    cluster.until(lambda: second.exists() and f"taken over from 'slurm mtp-test {id} 0', which still runs" in second.read_text(), [name])
    os.kill(orphan, signal.SIGCONT)
    cluster.until(lambda: f"'slurm mtp-test {id} 1' has taken over from 'slurm mtp-test {id} 0'" in first.read_text(), [name])
    for pid in lost:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    cluster.until(lambda: not lost.keys() & cluster.processes(id).keys(), [name])
    assert "== replaced (now JobState=" in capture.log(name)
    assert not list((capture.folder / "slurm" / "failed").iterdir()), cluster.explain(capture.jobs.values())
    capture.succeed(capture.jobs)
    assert_whole(capture)


# ---------------------------------------------------------------- files for another cluster


@pytest.mark.parametrize("recipe", ["llama-3.2-1b", "llama-3.1-8b", "llama-3.3-70b", "deepseek-v2-lite"])
def test_golden_files_fit_nodes_of_eight_h100(cluster, recipe):
    files = sorted((ROOT / "tests" / "golden" / "slurm" / recipe).glob("*.sbatch"))
    assert sorted(path.stem for path in files) == sorted(STAGES)
    for path in files:
        cluster("sbatch", "--test-only", "--partition=h100", str(path))


@pytest.mark.parametrize("wish", ["--gres=gpu:h100:9", "--cpus-per-task=129", "--mem=3000G", "--nodes=5", "--gres=gpu:a100:1"])
def test_what_does_not_fit_is_refused(cluster, wish):
    with pytest.raises(AssertionError, match=r"not available|More processors|Node count"):
        cluster("sbatch", "--test-only", "--partition=h100", wish, "--wrap=true")
