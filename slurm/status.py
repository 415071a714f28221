"""`mtp-submit status=RUN_DIR`: stages, jobs, states and progress, from the queue and the files of the run. Works without accounting, and without a queue."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from mtp_train.config import Config
from mtp_train.config_cluster import SUBMIT_STAGES
from mtp_train.metrics import METRICS, read_metrics
from slurm import queue, record
from slurm.chain import Stage, chain, finished, is_picked

HEAD = ("stage", "job", "state", "tasks", "time", "progress")


def table(run_dir: Path, now: float) -> str:
    """The table, and below it what failed. Raises FileNotFoundError where nothing was submitted."""
    run_dir = run_dir.absolute()
    known = record.read_submitted(run_dir)
    os.chdir(known.cwd)
    config, points = record.load(run_dir / "slurm" / known.submission, [])
    every = [name for name in SUBMIT_STAGES if name in known.stages or name in config.submit.stages]
    jobs, trouble = queue.ask(entry.job for entry in known.stages.values())
    rows = [HEAD]
    for stage in (stage for stage in chain(config, points) if is_picked(stage, every)):
        entry = known.stages.get(stage.name)
        mine = [job for job in jobs if entry and job.id == entry.job]
        done = finished(stage, run_dir)
        longest = max((job.elapsed for job in mine if job.active), key=len, default="")
        rows.append((
            stage.name, entry.job if entry else "", state(run_dir, stage, mine, done, entry), f"{sum(done)}/{len(done)}", longest,
            progress(run_dir, stage.name, config, now, [task.run_dir for task in stage.tasks]),
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if trouble:
        lines += ["", f"the queue could not be asked, so states are those of the files: {trouble}"]
    for path in sorted((run_dir / "slurm" / "failed").glob("*")):
        lines += ["", f"failed: {path.name}", *(f"  {line}" for line in path.read_text().splitlines())]
    if (run_dir / "wandb").exists():
        lines += ["", f"wandb, when training has ended: wandb sync --append {shlex.quote(str(run_dir / 'wandb'))}/offline-run-*"]
    return "\n".join([*lines, "", f"submission {run_dir / 'slurm' / known.submission}", ""])


def state(run_dir: Path, stage: Stage, jobs: list[queue.Job], done: list[bool], entry: record.Entry | None) -> str:
    """In a few words."""
    active = Counter(job.state for job in jobs if job.active)
    if active:
        reasons = {job.reason for job in jobs if job.state == "PENDING"} - {"None", ""}
        words = ", ".join(name if len(jobs) == 1 else f"{name} {count}" for name, count in sorted(active.items()))
        return words + (f" ({', '.join(sorted(reasons))})" if reasons else "")
    if all(done):
        return "done"
    if entry and not entry.covers(stage):
        return "of other settings"
    if any((run_dir / "slurm" / "failed" / f"{stage.name}-{task.label}").exists() for task in stage.tasks):
        return "FAILED"
    ended = Counter(job.state for job in jobs if job.state != "COMPLETED")
    if ended:
        return ", ".join(sorted(ended))
    return "ended without finishing" if entry else "not submitted"


def progress(run_dir: Path, stage: str, config: Config, now: float, folders: list[Path]) -> str:
    """How far a stage is, from the files that it writes."""
    parts = f"of-{config.precompute.num_parts:05d}"
    if stage == "corpus":
        counts = _json(run_dir / "data" / "train.corpus.json")
        return f"{counts['rows_out']} of {counts['rows_in']} conversations usable" if counts else ""
    if stage == "regenerate":
        whole = sorted((run_dir / "data").glob(f"train.rows-*-{parts}.jsonl"))
        begun = [path for path in sorted((run_dir / "data").glob(f"train.rows-*-{parts}.journal")) if path.with_suffix(".jsonl") not in whole]
        answers = sum(max(0, path.read_bytes().count(b"\n") - 1) for path in begun)
        return f"{_rows(whole)} rows" + (f", {answers} answers of unfinished ranges" if begun else "") if whole or begun else ""
    if stage == "capture":
        indexes = [found for path in sorted((run_dir / "shards" / "train").glob(f"part-*-{parts}.json")) if (found := _json(path))]
        samples, tokens = (sum(shard[key] for index in indexes for shard in index["shards"]) for key in ("samples", "tokens"))
        total = _rows(sorted((run_dir / "data").glob(f"train.rows-*-{parts}.jsonl")))
        return f"{samples} of {total} samples, {tokens} tokens" if indexes else ""
    if stage == "train":
        return training(run_dir, config.train.num_steps, now)
    if stage == "sweep":
        return "; ".join(f"{folder.name}: {said}" for folder in folders if (said := training(folder, config.train.num_steps, now)))
    return ""


def training(run_dir: Path, num_steps: int, now: float) -> str:
    """Step, speed, and the time that is left at the rate of the last lines of the log."""
    lines = [line for line in read_metrics(run_dir / METRICS) if "tokens_per_second" in line]
    if not lines:
        return ""
    last = lines[-1]
    said = f"step {last['step']} of {num_steps}, loss {last['loss']:.3f}, {last['tokens_per_second']:.0f} tok/s"
    recent = lines[-10:]
    if last["step"] < num_steps and len(recent) > 1:
        per_step = (last["time"] - recent[0]["time"]) / (last["step"] - recent[0]["step"])
        said += f", {duration((num_steps - last['step']) * per_step)} left, last heard of {duration(now - last['time'])} ago"
    return said


def duration(seconds: float) -> str:
    """1 h 05 min, 12 min or 40 s."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _rows(paths: list[Path]) -> int:
    total = 0
    for path in paths:
        with path.open() as file:
            total += json.loads(file.readline())["rows_out"]
    return total
