"""One command from a configuration to a report: renders a readable sbatch file for every stage into the run directory, and submits them as a chain.

    mtp-submit experiment=llama-3.1-8b run_dir=runs/mine data.train=... eval.prompts=...     # submits, and returns at once
    mtp-submit ... submit.dry_run=true        # prints what would be submitted
    mtp-submit ... stages=train,eval          # these stages alone
    mtp-submit ... sweep='train.optim.lr=1e-3,2e-3 train.loss.kind=forward_kl,lk'    # every combination, on the same captured states
    mtp-submit status=runs/mine               # stages, jobs, progress
    mtp-submit resume=runs/mine               # submits what is missing, as it was submitted

A stage that is finished, with these very settings and inputs, is skipped; one that is queued or running is not submitted again.
docs/slurm.md says what to set for a cluster, and what each file is.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import hydra

from mtp_train import cli
from mtp_train import config as cfg
from mtp_train.config_cluster import SUBMIT_STAGES
from mtp_train.metrics import DECODED, METRICS
from mtp_train.planner import report, run_hours
from mtp_train.provenance import Claim
from slurm import queue, record, status
from slurm.chain import ARRAYS, Point, Stage, chain, finished, is_picked, processes
from slurm.render import render
from slurm.sweep import expand, link_shared

log = logging.getLogger(__name__)

STALE = {"capture": ("shards",), **dict.fromkeys(("train", "sweep"), ("checkpoints", METRICS, DECODED))}
"""What a stage would go on from although it was made otherwise: it is set aside, and never deleted."""

ORDER = (*SUBMIT_STAGES, "sweep", "compare")


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    config: cfg.Config
    points: list[Point]
    cwd: Path

    @property
    def run_dir(self) -> Path:
        return self.cwd / self.config.run_dir


@dataclass(frozen=True)
class Todo:
    """A stage to submit."""

    stage: Stage
    missing: list[int]  # numbers of its tasks
    after: str | None  # the job or, before it is submitted, the stage that it waits for
    text: str

    @property
    def array(self) -> str | None:
        """Of its tasks those that are missing; None: all of them, as the file says."""
        return queue.ranges(self.missing) if len(self.missing) < len(self.stage.tasks) else None

    def command(self, jobs: dict[str, str]) -> list[str]:
        return queue.sbatch_command(f"{self.stage.name}.sbatch", self.after and jobs.get(self.after, self.after), self.array)


# ---------------------------------------------------------------- the request


def prepared(config: cfg.Config) -> cfg.Config:
    """The configuration of the jobs: what follows from the cluster is set, and what cannot work is refused here rather than in the queue."""
    cluster, stages = config.cluster, config.submit.stages
    if not config.data.train and "corpus" in stages:
        raise ValueError("data.train is empty: give sources, e.g. 'data.train=[{path: my.jsonl, form: auto, domain: null, split: train, limit: null}]'")
    if config.eval.prompts is None and {"eval", "report"} & set(stages):
        raise ValueError("eval.prompts is not set: give a JSONL file of held-out conversations, or stages= without eval and report")
    if cluster.gpus_per_node and config.engine.tensor_parallel_size > cluster.gpus_per_node:
        raise ValueError(f"engine.tensor_parallel_size={config.engine.tensor_parallel_size} does not fit cluster.gpus_per_node={cluster.gpus_per_node}")
    if config.distributed.mode == "single" and cluster.nodes * processes(config) > 1:
        log.info("distributed.mode=ddp, because %d x %d processes train", cluster.nodes, processes(config))
        config = replace(config, distributed=cfg.DistributedConfig(mode="ddp"))
    if config.train.wandb.mode == "online":
        log.info("train.wandb.mode=offline: compute nodes have no network")
        config = replace(config, train=replace(config.train, wandb=replace(config.train.wandb, mode="offline")))
    return config


def compose(overrides: list[str]) -> Request:
    """From overrides, as every command takes them."""
    try:
        config = prepared(cfg.compose(*overrides))
        points = expand(config.submit.sweep, config, lambda *more: prepared(cfg.compose(*overrides, *more))) if config.submit.sweep else []
    except hydra.errors.HydraException as error:
        raise ValueError(str(error).strip().splitlines()[0]) from error
    return Request(config, points, Path.cwd())


def saved(run_dir: Path, overrides: list[str]) -> Request:
    """As it was submitted last. Raises FileNotFoundError where nothing was."""
    known = record.read_submitted(run_dir)
    config, points = record.load(run_dir / "slurm" / known.submission, overrides)
    return Request(config, points, Path(known.cwd))


# ---------------------------------------------------------------- what there is to do


def plan(request: Request, known: dict[str, record.Entry], jobs: list[queue.Job]) -> list[Todo]:
    """The stages to submit: of those that are picked, what is missing. They wait for jobs at earlier stages as well, picked or not.

    Raises ValueError where a job of another configuration is still at a stage, up to the last one picked.
    """
    hours, out, before = expected_hours(request.config), list[Todo](), None
    stages = chain(request.config, request.points)
    picked = [is_picked(stage, request.config.submit.stages) for stage in stages]
    for at, stage in enumerate(stages):
        if not any(picked[at:]):
            break
        done = finished(stage, request.run_dir)
        entry = known.get(stage.name)
        if entry and is_active(entry, jobs):
            if not entry.covers(stage):
                raise ValueError(f"{stage.name} is queued or running as job {entry.job}, with other settings: wait for it, or scancel {entry.job}")
            log.info("%-10s  is queued or running as job %s", stage.name, entry.job)
            before = entry.job
        elif not picked[at]:
            continue
        elif all(done):
            log.info("%-10s  is finished", stage.name)
        else:
            missing = [number for number, one in enumerate(done) if not one]
            out.append(Todo(stage, missing, before, render(stage, request.config, request.cwd, hours)))
            before = stage.name
    return out


def expected_hours(config: cfg.Config) -> dict[str, float] | str:
    """Of the planner; in words why not, where the target's sizes cannot be read here."""
    try:
        return run_hours(config)
    except (OSError, ValueError) as error:
        return f"target.arch is empty, and {str(error).splitlines()[0]}"


def stale(request: Request, todo: list[Todo], known: dict[str, record.Entry], jobs: list[queue.Job]) -> list[Path]:
    """What earlier submissions left with other settings, and would be gone on from. Raises ValueError where a job of a later stage may be reading it."""
    out = []
    for one in todo:
        entry, found = known.get(one.stage.name), list[Path]()
        for task in one.stage.tasks if entry else ():
            if entry and entry.tasks.get(task.label, task.fingerprint) != task.fingerprint:
                paths = (request.cwd / task.run_dir / name for name in STALE.get(one.stage.name, ()))
                found += [path for path in paths if path.exists() and path not in found]
        later = ORDER[ORDER.index(one.stage.name) + 1 :]
        busy = [f"{name} (job {known[name].job})" for name in later if name in known and is_active(known[name], jobs)]
        if found and busy:
            raise ValueError(f"{found[0]} is of other settings and would be set aside, but {', '.join(busy)} may be reading it: wait, or scancel")
        out += found
    return out


def is_active(entry: record.Entry, jobs: list[queue.Job]) -> bool:
    """Whether a job of a stage waits or runs."""
    return any(job.active for job in jobs if job.id == entry.job)


# ---------------------------------------------------------------- submission


def submit(request: Request) -> None:
    """Submit what is missing of a chain, or print it."""
    if request.config.plan:
        sys.stdout.write(report(request.config))
        return
    run_dir, dry = request.run_dir, request.config.submit.dry_run
    if dry:
        known = record.read(run_dir)
        stages, jobs = (known.stages, queue.squeue()) if known else ({}, [])
        todo = plan(request, stages, jobs)
        sys.stdout.write("".join(f"### {shlex.join(one.command({}))}\n\n{one.text}\n" for one in todo))
        for path in stale(request, todo, stages, jobs):
            log.info("would be set aside, made with other settings: %s", path)
        return
    (run_dir / "slurm").mkdir(parents=True, exist_ok=True)
    with Claim(run_dir / "slurm" / ".lock"):
        known = record.read(run_dir)
        stages, jobs = known.stages if known else {}, queue.squeue()
        todo = plan(request, stages, jobs)
        if not todo:
            log.info("nothing to submit")
            return
        aside = stale(request, todo, stages, jobs)
        folder = record.new_folder(run_dir)
        record.save(folder, request.config, request.points, {f"{one.stage.name}.sbatch": one.text for one in todo})
        for point in request.points:
            link_shared(run_dir, request.cwd / point.config.run_dir)
        for path in aside:
            path.rename(path.with_name(f"{path.name}.before-{folder.name}"))
            log.info("made with other settings, set aside: %s.before-%s", path, folder.name)
        sent = send(request, todo, folder, stages)
    for one in todo:
        log.info("%-10s  job %s%s", one.stage.name, sent[one.stage.name], f", {len(one.missing)} tasks" if one.stage.name in ARRAYS else "")
    log.info("submitted from %s\nmtp-submit status=%s", folder, shlex.quote(str(run_dir)))
    if request.config.train.wandb.mode == "offline":
        log.info("wandb, when training has ended: wandb sync --append %s/wandb/offline-run-*", shlex.quote(str(run_dir)))


def send(request: Request, todo: list[Todo], folder: Path, stages: dict[str, record.Entry]) -> dict[str, str]:
    """Submit in order; returns job ids by stage. Where one is refused, those before it are cancelled: raises ValueError that says so."""
    jobs: dict[str, str] = {}
    before, now = record.read(request.run_dir), dict(stages)
    try:
        for one in todo:
            jobs[one.stage.name] = queue.sbatch(one.command(jobs), folder)
            now[one.stage.name] = record.Entry.of(jobs[one.stage.name], folder.name, one.stage)
            record.write(request.run_dir, record.Record(str(request.cwd), folder.name, now))
    except (ValueError, OSError) as error:
        if jobs:
            queue.scancel(jobs.values())
        if before:
            record.write(request.run_dir, before)
        else:
            (request.run_dir / "slurm" / "stages.json").unlink(missing_ok=True)
        cancelled = f"; cancelled again: {', '.join(f'{name} (job {job})' for name, job in jobs.items())}" if jobs else ""
        raise ValueError(f"{error}{cancelled}. Nothing is queued") from error
    return jobs


def arguments(given: list[str]) -> tuple[dict[str, str], list[str]]:
    """mtp-submit's own words (status, resume), and the overrides. stages=a,b and sweep=... become overrides. Raises ValueError for flags of hydra's."""
    own, overrides = {}, []
    for one in given:
        key, _, value = one.partition("=")
        if one in ("-m", "--multirun"):
            raise ValueError(f"{one} is hydra's launcher, which would start a job for each point and capture everything again: use sweep='key=a,b'")
        if one.startswith("-"):
            raise ValueError(f"{one}: mtp-submit takes overrides alone; mtp-train {one} takes hydra's flags, on the same configuration")
        if key in ("status", "resume"):
            own[key] = value
        elif key == "stages":
            overrides.append(f"submit.stages=[{value.strip('[]')}]")
        elif key == "sweep":
            quoted = value.replace("\\", "\\\\").replace('"', '\\"')
            overrides.append(f'submit.sweep="{quoted}"')
        else:
            overrides.append(one)
    if len(own) > 1:
        raise ValueError("give status= or resume=, not both")
    return own, overrides


def main() -> None:
    """Console script mtp-submit."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        sys.stdout.write(cli.help_text(Path(sys.argv[0]).name, __doc__ or ""))
        return
    cli.set_up_logging()
    with cli.one_line_errors():
        own, overrides = arguments(sys.argv[1:])
        if "status" in own:
            sys.stdout.write(status.table(Path(own["status"]), time.time()))
        elif "resume" in own:
            request = saved(Path(own["resume"]).absolute(), overrides)
            os.chdir(request.cwd)
            submit(request)
        else:
            submit(compose(overrides))


if __name__ == "__main__":
    main()
