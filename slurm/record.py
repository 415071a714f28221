"""What a run directory knows of its submissions: `<run_dir>/slurm/stages.json`, and a folder for each submission.

    slurm/stages.json              the job that last took on each stage, and for which fingerprints
    slurm/<submission>/            config.yaml, provenance.json, points.json and points/ of a sweep, <stage>.sbatch, logs/
    slurm/done/<stage>-<task>      left by a job that has finished: the fingerprint of what it did
    slurm/failed/<stage>-<task>    left by a job that has given up: why, and the path of its log

Marks hold fingerprints, so an old one means nothing to a new configuration.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_train import config as cfg
from mtp_train.provenance import atomic_write, config_yaml, write_provenance
from slurm.chain import Point, Stage


@dataclass(frozen=True)
class Entry:
    """Who took on a stage last."""

    job: str
    submission: str
    tasks: dict[str, str]  # fingerprints by label

    @classmethod
    def of(cls, job: str, submission: str, stage: Stage) -> Entry:
        return cls(job, submission, stage.fingerprints)

    def covers(self, stage: Stage) -> bool:
        """Whether it was submitted with these very settings."""
        return self.tasks == stage.fingerprints


@dataclass(frozen=True)
class Record:
    """The stages of a run directory."""

    cwd: str  # where relative paths of the configuration begin
    submission: str  # the newest
    stages: dict[str, Entry]


def read(run_dir: Path) -> Record | None:
    """The record of a run directory; None where nothing was submitted."""
    path = run_dir / "slurm" / "stages.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return Record(found["cwd"], found["submission"], {name: Entry(**entry) for name, entry in found["stages"].items()})


def read_submitted(run_dir: Path) -> Record:
    """As `read`. Raises FileNotFoundError where nothing was submitted."""
    known = read(run_dir)
    if known is None:
        raise FileNotFoundError(f"{run_dir} holds no slurm/stages.json: nothing was submitted from there")
    return known


def write(run_dir: Path, record: Record) -> None:
    """Replace the record."""
    atomic_write(run_dir / "slurm" / "stages.json", json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n")


def new_folder(run_dir: Path) -> Path:
    """A folder that no other submission has, named by the time."""
    now = time.strftime("%Y%m%d-%H%M%S")
    (run_dir / "slurm").mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        folder = run_dir / "slurm" / (now if number == 1 else f"{now}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise FileExistsError(f"{run_dir}/slurm/{now}-* are all taken")


def save(folder: Path, config: cfg.Config, points: list[Point], files: dict[str, str]) -> None:
    """Everything that the jobs of a submission read."""
    (folder / "logs").mkdir()
    write_provenance(folder, asdict(config))
    if points:
        (folder / "points").mkdir()
        atomic_write(folder / "points.json", json.dumps([{"name": one.name, "overrides": one.overrides} for one in points], indent=1, ensure_ascii=False))
    for point in points:
        atomic_write(folder / "points" / f"{point.name}.yaml", config_yaml(asdict(point.config)))
    for name, text in files.items():
        atomic_write(folder / name, text)


def load(folder: Path, overrides: list[str]) -> tuple[cfg.Config, list[Point]]:
    """The configuration of a submission, and its points."""
    config = cfg.read(folder / "config.yaml", overrides)
    listed: list[dict[str, Any]] = json.loads((folder / "points.json").read_text()) if (folder / "points.json").exists() else []
    return config, [Point(one["name"], one["overrides"], cfg.read(folder / "points" / f"{one['name']}.yaml")) for one in listed]
