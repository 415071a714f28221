"""mtp-submit against small programs in the place of SLURM's: what is submitted, what is skipped, and what the job scripts do when bash runs them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mtp_train import config as cfg
from mtp_train.config_cluster import SUBMIT_STAGES
from slurm import record, status, submit
from slurm.chain import chain, fingerprints
from slurm.compare import compare
from slurm.render import render
from slurm.sweep import combinations, expand, name_of
from tests.conftest import source

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden" / "slurm"
ODD = "my runs, no=1 #2 试 it's"
SHARED = ("corpus", "regenerate", "capture", "merge")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A machine that submits: the fakes are on the PATH, and the working directory has a name that shells stumble over."""
    fakes, work = tmp_path / "fakes", tmp_path / ODD
    fakes.mkdir()
    work.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol", "srun"):
        (fakes / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{ROOT}/tests/fake_slurm.py" {name} "$@"\n')
        (fakes / name).chmod(0o755)
    monkeypatch.setenv("FAKE_SLURM", str(fakes))
    monkeypatch.setenv("PATH", f"{fakes}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(work)
    for name in ("train", "validation", "heldout"):
        (work / f"{name}.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": name}]}) + "\n")
    return fakes


def arguments(*extra):
    """A command line; two ranges and two ways of drafting."""
    runs = ", ".join(f"{{num_draft_tokens: {k}, temperature: 0.0, draft_sampling: greedy, draft_vocab_size: null}}" for k in (1, 3))
    return [
        "experiment=tiny", "target=llama-3.2-1b", f'run_dir="runs/{ODD}"', f"data.train=[{source('train.jsonl')}]",
        f"data.validation=[{source('validation.jsonl')}]", "eval.prompts=heldout.jsonl", "precompute.num_parts=2", f"eval.runs=[{runs}]", *extra,
    ]  # fmt: skip


def run(*extra):
    """As `main` does, with overrides."""
    own, overrides = submit.arguments(arguments(*extra))
    assert not own
    submit.submit(submit.compose(overrides))


def run_dir():
    return Path.cwd() / "runs" / ODD


def calls(fakes, name):
    path = fakes / "calls.jsonl"
    return [call for call in map(json.loads, path.read_text().splitlines()) if call["name"] == name] if path.exists() else []


def submitted(fakes):
    """Stages, in the order of their submission."""
    return [Path(call["args"][-1]).stem for call in calls(fakes, "sbatch")]


def settle(fakes, *stages, output=True):
    """As if the jobs had finished: their marks are there, and something of what they write."""
    found = record.read(run_dir())
    outputs = ("data/train.corpus.json", "shards/train/manifest.json", "checkpoints/x", "export/x")
    for path in (run_dir() / name for name in (outputs if output else ())):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (run_dir() / "slurm" / "done").mkdir(exist_ok=True)
    for name, entry in found.stages.items():
        for label, mark in entry.tasks.items() if not stages or name in stages else ():
            (run_dir() / "slurm" / "done" / f"{name}-{label}").write_text(mark + "\n")
    (fakes / "queue").unlink()
    (fakes / "calls.jsonl").unlink()


# ---------------------------------------------------------------- what is submitted


def test_the_chain_waits_stage_for_stage_and_all_its_files_are_in_one_folder(slurm):
    run()
    sent = calls(slurm, "sbatch")
    assert submitted(slurm) == ["corpus", "regenerate", "capture", "merge", "train", "export", "eval", "report"]
    for number, call in enumerate(sent):
        assert call["args"][:2] == ["--parsable", "--kill-on-invalid-dep=yes"]
        assert call["args"][2:-1] == ([f"--dependency=afterok:{99 + number}"] if number else [])
        assert Path(call["cwd"]).parent == run_dir() / "slurm"
    assert [line for call in sent for line in call["text"].splitlines() if "--array" in line] == ["#SBATCH --array=0-1"] * 3
    assert len({call["cwd"] for call in sent}) == 1
    folder = Path(sent[0]["cwd"])
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "provenance.json", "logs", "train.sbatch"}
    assert cfg.read(folder / "config.yaml").run_dir == f"runs/{ODD}"


def test_dry_run_prints_exactly_what_is_then_submitted_and_leaves_nothing(slurm, capsys):
    run("submit.dry_run=true")
    printed = capsys.readouterr().out
    assert not calls(slurm, "sbatch")
    assert not run_dir().exists()
    run()
    names = {str(100 + number): call["args"][-1].removesuffix(".sbatch") for number, call in enumerate(calls(slurm, "sbatch"))}
    expected = ""
    for call in calls(slurm, "sbatch"):
        command = " ".join(["sbatch", *call["args"]])
        for job, name in names.items():
            command = command.replace(f"afterok:{job}", f"afterok:{name}")
        expected += f"### {command}\n\n{call['text']}\n"
    assert printed == expected


def test_a_refused_submission_is_taken_back_and_said(slurm):
    (slurm / "fail_at").write_text("4")
    with pytest.raises(
        ValueError, match=r"invalid partition.*cancelled again: corpus \(job 100\), regenerate \(job 101\), capture \(job 102\), merge \(job 103\)"
    ):
        run()
    assert calls(slurm, "scancel")[0]["args"] == ["100", "101", "102", "103"]
    assert record.read(run_dir()) is None


def test_stages_are_picked_and_wait_for_the_nearest_one_before(slurm):
    run("stages=train,eval")
    assert [call["args"][2:] for call in calls(slurm, "sbatch")] == [["train.sbatch"], ["--dependency=afterok:100", "eval.sbatch"]]


def test_picked_stages_wait_for_jobs_of_earlier_ones_that_are_not_picked(slurm):
    run(f"stages={','.join(SHARED)}")
    with pytest.raises(ValueError, match=r"capture is queued or running as job 102, with other settings"):
        run("stages=train,export", "precompute.state_dtype=bfloat16")
    run("stages=train,export")
    assert submitted(slurm) == [*SHARED, "train", "export"]
    assert [call["args"][2] for call in calls(slurm, "sbatch")[4:]] == ["--dependency=afterok:103", "--dependency=afterok:104"]
    run("stages=eval", "sweep=train.optim.lr=1e-3,2e-3")
    assert submitted(slurm)[6:] == ["sweep", "compare"]
    assert calls(slurm, "sbatch")[6]["args"][2] == "--dependency=afterok:103"


def test_what_is_queued_is_not_submitted_again_and_other_settings_are_refused_meanwhile(slurm):
    run("stages=corpus,regenerate")
    run()
    assert submitted(slurm) == ["corpus", "regenerate", "capture", "merge", "train", "export", "eval", "report"]
    assert calls(slurm, "sbatch")[2]["args"][2] == "--dependency=afterok:101"
    with pytest.raises(ValueError, match=r"corpus is queued or running as job 100, with other settings: .* scancel 100"):
        run("precompute.regenerate.enabled=false")


def test_submissions_at_once_have_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(record.new_folder, [tmp_path] * 40))) == 40


# ---------------------------------------------------------------- fingerprints


def test_a_finished_chain_is_left_alone_and_a_lost_output_is_made_again(slurm):
    run()
    settle(slurm)
    run()
    assert not calls(slurm, "sbatch")
    shutil.rmtree(run_dir() / "export")
    run()
    assert submitted(slurm) == ["export"]


def test_only_the_missing_tasks_of_an_array_are_submitted(slurm):
    run("precompute.num_parts=6")
    settle(slurm)
    for task in (1, 2, 5):
        (run_dir() / "slurm" / "done" / f"capture-{task}").unlink()
    run("precompute.num_parts=6")
    assert [call["args"][2:] for call in calls(slurm, "sbatch")] == [["--array=1-2,5", "capture.sbatch"]]


def marks(*extra):
    """Fingerprints by stage."""
    config = submit.compose(arguments(*extra)).config
    return fingerprints(config, Path(config.run_dir))


def changed(before, after):
    """The stages, in order, whose fingerprints differ."""
    return [name for name in SUBMIT_STAGES if before[name] != after[name]]


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ("precompute.regenerate.max_new_tokens=9", "regenerate"),
        ("precompute.regenerate.batch_size=3", None),
        ("precompute.state_dtype=bfloat16", "capture"),
        ("precompute.batch_tokens=99", None),
        ("head=eagle1", "train"),
        ("head=eagle3", "capture"),
        ("train.optim.lr=3e-3", "train"),
        ("train.save_every=2", None),
        ("train.accumulation=2", "train"),
        ("train.shards=elsewhere", "train"),
        ("cluster.nodes=2", "train"),
        ("cluster.account=x", None),
        ("export.formats=[hf]", "export"),
        ("eval.max_new_tokens=7", "eval"),
        ("train.log_every=1", None),
    ],
)
def test_a_changed_setting_does_again_what_depends_on_it(slurm, change, first):
    assert changed(marks(), marks(change)) == ([] if first is None else list(SUBMIT_STAGES[SUBMIT_STAGES.index(first) :]))


def test_changed_input_files_are_seen_by_content(slurm):
    before = marks()
    os.utime("train.jsonl", (1, 1))
    assert not changed(before, marks())
    Path("heldout.jsonl").write_text("{}\n")
    assert changed(before, marks())[0] == "eval"
    Path("train.jsonl").write_text("{}\n")
    assert changed(before, marks())[0] == "corpus"


@pytest.mark.parametrize(
    ("setting", "stage"),
    [
        ("train.init_from={}", "train"),
        ("train.shards={}", "train"),
        ("export.checkpoint={}", "export"),
        ("eval.head={}", "eval"),
        ("eval.heads=[{}]", "eval"),
        ("eval.vllm_head={}", "eval"),
    ],
)
def test_files_of_others_are_seen_by_content_and_those_of_the_run_follow_the_stages_that_made_them(slurm, setting, stage):
    for folder, first in ((Path("other"), [stage]), (run_dir() / "own", [])):
        folder.mkdir(parents=True)
        (folder / "head.safetensors").write_text("before")
        override = setting.format(f'"{folder}"')
        before = marks(override)
        (folder / "head.safetensors").write_text("after")
        assert changed(before, marks(override))[:1] == first


def test_what_was_made_otherwise_is_set_aside_and_never_gone_on_from(slurm):
    run()
    settle(slurm)
    (run_dir() / "metrics.jsonl").write_text("old")
    run("train.optim.lr=3e-3")
    assert submitted(slurm) == ["train", "export", "eval", "report"]
    assert not (run_dir() / "checkpoints").exists()
    (aside,) = run_dir().glob("metrics.jsonl.before-*")
    assert aside.read_text() == "old"
    assert (run_dir() / "shards" / "train" / "manifest.json").exists()
    settle(slurm)
    run("train.optim.lr=3e-3", "precompute.state_dtype=bfloat16")
    assert len(list(run_dir().glob("shards.before-*"))) == 1


def test_nothing_is_set_aside_that_a_later_job_may_be_reading(slurm):
    run()
    settle(slurm)
    (slurm / "queue").write_text("104|RUNNING|None|1:00|n1\n")
    with pytest.raises(ValueError, match=r"shards is of other settings .* but train \(job 104\) may be reading it"):
        run("precompute.state_dtype=bfloat16", "stages=capture")
    assert (run_dir() / "shards").exists()
    assert not calls(slurm, "sbatch")


# ---------------------------------------------------------------- the job scripts, run by bash


class Job:
    """A job script, run as slurmd would; `folder` is its submission's."""

    def __init__(self, fakes, stage, **env):
        self.fakes, self.stage = fakes, stage
        self.folder = Path(calls(fakes, "sbatch")[0]["cwd"])
        slurm = {"SLURM_SUBMIT_DIR": str(self.folder), "SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "4", **env}
        self.process = subprocess.Popen(
            ["bash", self.folder / f"{stage}.sbatch"], cwd=self.folder, env={**os.environ, **slurm}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def end(self):
        """Exit code and output."""
        output = self.process.communicate(timeout=60)[0]
        return self.process.returncode, output

    def after_start(self, number):
        """Send a signal to the batch script once its step runs."""
        deadline = time.monotonic() + 30
        while not (self.fakes / "waiting").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.process.send_signal(number)
        return self.end()

    def requeued(self):
        return [call["args"][1] for call in calls(self.fakes, "scontrol") if call["args"][0] == "requeue"]


def test_a_job_reaches_its_stage_with_paths_that_shells_stumble_over(slurm):
    run()
    code, output = Job(slurm, "regenerate", SLURM_ARRAY_JOB_ID="4000", SLURM_ARRAY_TASK_ID="1").end()
    assert code == 0, output
    args = calls(slurm, "srun")[0]["args"]
    assert calls(slurm, "srun")[0]["cwd"] == str(Path.cwd())
    at = args.index("--config")
    config = cfg.read(Path(args[at + 1]), args[at + 2 :])
    assert (config.run_dir, config.precompute.part, config.precompute.steps) == (f"runs/{ODD}", 1, ["rows"])
    marks = {path.name for path in (run_dir() / "slurm" / "done").iterdir()}
    assert marks == {"regenerate-1"}


@pytest.mark.slow
def test_a_stage_reads_the_saved_configuration_for_real(slurm, target_dir, corpus):
    shutil.copytree(target_dir, ODD)
    shutil.copy(corpus / "train.jsonl", "train.jsonl")
    run(f'target.path="{ODD}"', "stages=corpus", "data.validation=[]", f'+cluster.env.PYTHONPATH="{ROOT}"')
    (slurm / "run").touch()
    code, output = Job(slurm, "corpus").end()
    assert code == 0, output
    assert json.loads((run_dir() / "data" / "train.corpus.json").read_text())["rows_out"] == 24


@pytest.mark.parametrize(("env", "id"), [({}, "4242"), ({"SLURM_ARRAY_JOB_ID": "4000", "SLURM_ARRAY_TASK_ID": "1"}, "4000_1")])
def test_exit_code_75_queues_the_job_again_under_its_own_id(slurm, env, id):
    run()
    (slurm / "codes").write_text("75")
    job = Job(slurm, "eval" if env else "train", **env)
    code, output = job.end()
    assert (code, job.requeued()) == (75, [id]), output
    assert not list((run_dir() / "slurm" / "done").iterdir())


def test_usr1_goes_to_the_step_and_then_the_job_is_queued_again(slurm):
    run()
    (slurm / "codes").write_text("wait")
    job = Job(slurm, "train", SLURM_RESTART_COUNT="19")
    code, output = job.after_start(signal.SIGUSR1)
    assert (code, job.requeued()) == (75, ["4242"]), output


def test_term_ends_the_job_without_queueing_it_again(slurm):
    run()
    (slurm / "codes").write_text("wait")
    job = Job(slurm, "train")
    code, output = job.after_start(signal.SIGTERM)
    assert (code, job.requeued()) == (75, []), output
    assert not list((run_dir() / "slurm" / "failed").iterdir())


@pytest.mark.parametrize("now", ["RUNNING Restarts=1", "PENDING Restarts=1", "NODE_FAIL Restarts=0", "RUNNING Restarts=0"])
@pytest.mark.parametrize("step", ["0", "3", "75"])
def test_a_job_that_was_replaced_marks_nothing_and_queues_nothing(slurm, step, now):
    """Its node was lost, and is alive: srun ends with anything, 0 included."""
    run("cluster.retries=0")
    (slurm / "codes").write_text(step)
    (slurm / "job").write_text(f"JobId=4242 JobName=mtp JobState={now.replace(' ', ' Reason=None Requeue=1 ')} BatchFlag=1\n")
    job = Job(slurm, "train")
    code, output = job.end()
    marks = [path for kind in ("done", "failed") for path in (run_dir() / "slurm" / kind).iterdir()]
    if now == "RUNNING Restarts=0":
        assert (code, len(marks), len(job.requeued())) == {"0": (0, 1, 0), "3": (1, 1, 0), "75": (75, 0, 1)}[step], output
    else:
        assert (code, marks, job.requeued()) == (1, [], []), output


def test_the_cap_of_restarts_ends_the_chain_and_says_what_to_change(slurm):
    run()
    (slurm / "codes").write_text("75")
    job = Job(slurm, "train", SLURM_RESTART_COUNT="20")
    code, output = job.end()
    assert (code, job.requeued()) == (1, []), output
    assert "cluster.time.train" in (run_dir() / "slurm" / "failed" / "train-0").read_text()


@pytest.mark.parametrize(("codes", "good"), [("3", True), ("3 4", False)])
def test_a_failure_is_retried_and_then_said_with_where_to_look(slurm, codes, good):
    run("cluster.retries=1")
    (slurm / "codes").write_text(codes)
    code, output = Job(slurm, "capture", SLURM_ARRAY_JOB_ID="4000", SLURM_ARRAY_TASK_ID="1").end()
    failed = run_dir() / "slurm" / "failed" / "capture-1"
    assert (code == 0, failed.exists(), len(calls(slurm, "srun"))) == (good, not good, 2), output
    if not good:
        assert "exit code 4, after 2 attempts" in failed.read_text()
        assert f"{calls(slurm, 'sbatch')[0]['cwd']}/logs/capture-4000_1.log" in failed.read_text()


def test_an_environment_is_kept_without_secrets(slurm, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    monkeypatch.setenv("SSH_PRIVATE_KEY", "-----BEGIN\nhidden\nhidden=1\n-----END")
    monkeypatch.setenv("http_proxy", "http://user:hidden@proxy:3128/")
    monkeypatch.setenv("MIRROR", "http://mirror:3128/")
    monkeypatch.setenv("TWO_LINES", "one\ntwo")
    run()
    Job(slurm, "train").end()
    (kept,) = Path(calls(slurm, "sbatch")[0]["cwd"]).glob("logs/train-4242.env")
    lines = kept.read_text().splitlines()
    assert {"SLURM_JOB_NODELIST=n[1-2]", "MIRROR=http://mirror:3128/", "TWO_LINES=one", "two"} <= set(lines)
    assert not [line for line in lines if "hidden" in line or "WANDB_API_KEY" in line]


def test_the_clusters_setup_may_use_what_is_not_set(slurm):
    run('cluster.setup=["[ -z $CONDA_SHLVL_OF_NOBODY ] && export FROM_SETUP=1"]', "stages=export")
    code, output = Job(slurm, "export").end()
    assert code == 0, output
    (kept,) = Path(calls(slurm, "sbatch")[0]["cwd"]).glob("logs/export-4242.env")
    assert "FROM_SETUP=1" in kept.read_text().splitlines()


# ---------------------------------------------------------------- sweeps


def test_a_sweep_is_the_product_of_its_values():
    assert combinations("a=1,2 'b=[x,y],z' c=k") == [[f"a={a}", f"b={b}", "c=k"] for a in (1, 2) for b in ("[x,y]", "z")]
    assert name_of(["train.optim.lr=0.001", "head.kind=mtp"]) == "train.optim.lr=0.001,head.kind=mtp"
    assert name_of(["a='b c'"]) != name_of(["a='b/c'"])
    with pytest.raises(ValueError, match="one point only"):
        combinations("a=1")


def test_a_sweep_captures_once_and_its_points_share_the_shards(slurm):
    run("sweep=train.optim.lr=1e-3,2e-3 train.loss.kind=forward_kl,lk")
    assert submitted(slurm) == [*SHARED, "sweep", "compare"]
    assert "#SBATCH --array=0-3" in calls(slurm, "sbatch")[4]["text"]
    points = sorted(path.name for path in (run_dir() / "sweep").iterdir())
    assert len(points) == 4
    (run_dir() / "shards").mkdir()
    assert (run_dir() / "sweep" / points[0] / "shards").resolve() == run_dir() / "shards"
    job = Job(slurm, "sweep", SLURM_ARRAY_JOB_ID="4000", SLURM_ARRAY_TASK_ID="3")
    code, output = job.end()
    assert code == 0, output
    ran = [call["args"] for call in calls(slurm, "srun")]
    assert [args[args.index("-m") + 1] for args in ran] == ["slurm.launch", "mtp_train.export", "eval.run"]
    config = cfg.read(Path(ran[2][ran[2].index("--config") + 1]))
    assert (config.train.optim.lr, config.train.loss.kind) == (2e-3, "lk")
    assert config.eval.head == f"{config.run_dir}/export/hf"
    assert Path(config.run_dir).parent == Path("runs") / ODD / "sweep"
    assert (run_dir() / "slurm" / "done" / f"sweep-{Path(config.run_dir).name}").exists()


def test_a_sweep_over_what_is_captured_is_refused(slurm):
    with pytest.raises(ValueError, match="changes what is captured"):
        run("sweep=data.max_length=50,60")


@pytest.mark.parametrize(("engine", "folder"), [("embedded", "eval"), ("vllm", "eval-vllm")])
def test_a_comparison_takes_the_reports_of_the_configured_engine(tmp_path, engine, folder):
    points = [{"name": "lr=1", "overrides": ["lr=1"]}, {"name": "lr=2", "overrides": ["lr=2"]}]
    report = json.loads((GOLDEN.parent / "report.json").read_text())
    for point in points:
        for name in ("eval", "eval-vllm"):
            report["runs"][0]["name"] = f"{point['name']} in {name}"
            (tmp_path / point["name"] / name).mkdir(parents=True)
            (tmp_path / point["name"] / name / "report.json").write_text(json.dumps(report))
    assert [row["run"] for row in compare(points, tmp_path, engine)] == [f"lr=1 in {folder}", f"lr=2 in {folder}"]
    (tmp_path / "lr=2" / folder / "report.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"point lr=2 was not measured with engine={engine}"):
        compare(points, tmp_path, engine)


@pytest.mark.slow
def test_a_wider_sweep_runs_its_new_points_alone(slurm):
    run("sweep=train.optim.lr=1e-3,2e-3")
    settle(slurm)
    run("sweep=train.optim.lr=4e-3,2e-3,1e-3")
    assert [call["args"][2:] for call in calls(slurm, "sbatch")] == [["--array=0", "sweep.sbatch"], ["--dependency=afterok:100", "compare.sbatch"]]


# ---------------------------------------------------------------- status and resume


def test_status_tells_stages_jobs_states_and_progress(slurm):
    run()
    data, shards, now = run_dir() / "data", run_dir() / "shards" / "train", 1_000_000.0
    settle(slurm, "corpus", "regenerate")
    (data / "train.corpus.json").write_text(json.dumps({"rows_in": 30, "rows_out": 24}))
    for part in range(2):
        (data / f"train.rows-0000{part}-of-00002.jsonl").write_text(json.dumps({"rows_out": 12}) + "\n")
    (shards / "part-00000-of-00002.json").write_text(json.dumps({"shards": [{"samples": 9, "tokens": 200}]}))
    lines = [{"step": step, "loss": 2.0, "tokens_per_second": 1500.0, "time": now - 100 + step} for step in (10, 20)]
    (run_dir() / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (slurm / "queue").write_text("102|COMPLETED|None|5:00|n1\n102|RUNNING|None|12:34|n2\n103|PENDING|Dependency|0:00|\n106|CANCELLED|None|0:00|\n")
    (run_dir() / "slurm" / "failed").mkdir()
    (run_dir() / "slurm" / "failed" / "export-0").write_text("exit code 1, after 2 attempts\nlog /x\n")
    rows = {line.split()[0]: " ".join(line.split()) for line in status.table(run_dir(), now).splitlines()[:9] if line}
    assert rows["corpus"] == "corpus 100 done 1/1 24 of 30 conversations usable"
    assert rows["regenerate"] == "regenerate 101 done 2/2 24 rows"
    assert rows["capture"] == "capture 102 RUNNING 1 0/2 12:34 9 of 24 samples, 200 tokens"
    assert rows["merge"] == "merge 103 PENDING (Dependency) 0/1 0:00"
    assert rows["train"].startswith("train 104 ended without finishing 0/1 step 20 of 12, loss 2.000, 1500 tok/s")
    assert rows["export"] == "export 105 FAILED 0/1"
    assert rows["eval"] == "eval 106 CANCELLED 0/2"
    assert "exit code 1, after 2 attempts" in status.table(run_dir(), now)


def test_status_shows_every_stage_and_which_are_of_other_settings(slurm):
    run()
    settle(slurm)
    run("train.optim.lr=3e-3", "stages=train")
    states = {line.split()[0]: line for line in status.table(run_dir(), 0.0).splitlines()[1:9]}
    assert "done" in states["merge"]
    assert "PENDING" in states["train"]
    assert "of other settings" in states["report"]


def test_the_time_left_follows_the_last_lines(tmp_path):
    lines = [{"step": step, "loss": 1.0, "tokens_per_second": 10.0, "time": 2.0 * step} for step in range(10, 60, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert status.training(tmp_path, 1850, 130.0) == "step 50 of 1850, loss 1.000, 10 tok/s, 1 h 00 min left, last heard of 30 s ago"


def test_status_works_where_there_is_no_queue(slurm, monkeypatch, tmp_path):
    run()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "could not be asked" in status.table(run_dir(), 0.0)


def test_resume_submits_what_is_missing_as_it_was_submitted(slurm, tmp_path, monkeypatch):
    run("train.optim.lr=3e-3")
    settle(slurm, *SHARED)
    folder = run_dir()
    monkeypatch.chdir(tmp_path)
    request = submit.saved(folder, [])
    monkeypatch.chdir(request.cwd)
    submit.submit(request)
    assert submitted(slurm) == ["train", "export", "eval", "report"]
    assert submit.saved(folder, []).config.train.optim.lr == 3e-3


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["-m", "a=1,2"], r"use sweep='key=a,b'"),
        (["--multirun"], "sweep="),
        (["--cfg", "job"], "mtp-train --cfg"),
        (["status=a", "resume=b"], "not both"),
    ],
)
def test_hydras_own_launcher_is_refused_with_a_hint(given, message):
    with pytest.raises(ValueError, match=message):
        submit.arguments(given)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=[]", "data.train is empty"),
        ("eval.prompts=null", "eval.prompts is not set"),
        ("submit.stages=[train,fly]", "fly"),
        ("cluster.flags=[exclude]", "exclude"),
        ("~cluster.time.eval", "no limit for eval"),
        ("cluster.time.train=86400", r"cluster\.time\.train=86400 is none of HH:MM:SS.*quotes"),
        ("cluster.gpus_per_node=4 engine.tensor_parallel_size=8", "8 does not fit cluster.gpus_per_node=4"),
        ("cluster.nodes=two", "cluster.nodes"),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_queued(slurm, override, message):
    with pytest.raises(ValueError, match=message):
        run(*override.split())
    assert not calls(slurm, "sbatch")


# ---------------------------------------------------------------- golden files

RECIPES = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.3-70b", "deepseek-v2-lite")


@pytest.mark.parametrize("recipe", RECIPES)
def test_golden_sbatch_files_of_the_recipes(recipe, monkeypatch, tmp_path):
    """`make golden` writes them anew; `sbatch --test-only` of a real SLURM is asked in tests/test_slurm.py."""
    files = {name: f"{name}.jsonl" for name in ("train", "validation")}
    monkeypatch.chdir(tmp_path)
    config = submit.compose([
        f"experiment={recipe}", "run_dir=runs/mine", *(f"data.{name}=[{source(path)}]" for name, path in files.items()),
        "eval.prompts=heldout.jsonl", "cluster.python=python3",
    ]).config  # fmt: skip
    hours = submit.expected_hours(config)
    found = {stage.name: render(stage, config, Path("/projects/mtp"), hours) for stage in chain(config, [])}
    folder = GOLDEN / recipe
    if os.environ.get("MTP_GOLDEN") == "write":
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in found.items():
            (folder / f"{name}.sbatch").write_text(text)
    assert found == {path.stem: path.read_text() for path in folder.glob("*.sbatch")}


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_rendered_scripts_are_clean_to_shellcheck(slurm):
    run("cluster.scratch=$TMPDIR", "+cluster.env.NCCL_DEBUG=WARN", "cluster.setup=[module load cuda]")
    settle(slurm)
    run("sweep=train.optim.lr=1e-3,2e-3", "cluster.scratch=$TMPDIR")
    files = sorted((run_dir() / "slurm").glob("*/*.sbatch"))
    assert {path.stem for path in files} >= {"corpus", "train", "sweep", "compare"}
    done = subprocess.run(["shellcheck", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_points_expand_with_everything_of_the_base(slurm):
    base = submit.compose(arguments()).config
    points = expand("train.optim.lr=1e-3,2e-3", base, lambda *more: submit.compose(arguments(*more)).config)
    assert [point.config.train.optim.lr for point in points] == [1e-3, 2e-3]
    assert {point.config.train.shards for point in points} == {base.train.shards}
    before = chain(base, points)
    (run_dir() / "shards").mkdir(parents=True)
    (run_dir() / "shards" / "x").write_text("captured, which is known by its own fingerprint")
    assert chain(base, points) == before
