"""The chain of jobs: which stages there are, their tasks, and the fingerprint by which a finished one is known again.

    corpus -> regenerate (array) -> capture (array) -> merge -> train -> export -> eval (array) -> report
                                                             -> sweep (array: train, export, eval of a point) -> compare

A fingerprint is made of the settings that change a stage's output, of the files that it reads from outside the run directory, and of the fingerprint
of the stage before. So a changed setting does again what depends on it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mtp_train.config import Config
from mtp_train.config_cluster import SUBMIT_STAGES
from mtp_train.provenance import fingerprint, sha256

SMALL = 2**20
"""Files up to this many bytes are known by content, larger ones by size and time of change."""

SHARED = SUBMIT_STAGES[:4]
"""Stages that all points of a sweep have in common."""
ARRAYS = ("regenerate", "capture", "eval", "sweep")
WITH_TARGET = ("regenerate", "capture", "eval")
"""Stages that run the target itself."""

OUTPUT = {
    "corpus": "data/train.corpus.json",
    "regenerate": "data",
    "capture": "shards",
    "merge": "shards/train/manifest.json",
    "train": "checkpoints",
    "export": "export",
    "eval": "",
    "report": "",
}
"""What must be there of a stage that is called finished, below its run directory."""

WITHOUT_EFFECT = {
    "regenerate": ("batch_size",),
    "train": ("shards", "rows_per_batch", "accumulation", "log_every", "validate_every", "save_every", "validate_with", "keep_last", "resume", "wandb"),
    "eval": ("steps", "part"),
}
"""Settings that change no output, or are counted otherwise (rows of a step, content of shards): alone they do no stage again."""


@dataclass(frozen=True)
class Task:
    """One task of an array, or the whole of a stage that is none."""

    label: str  # its marks are <stage>-<label>
    fingerprint: str
    run_dir: Path


@dataclass(frozen=True)
class Stage:
    """One job of the chain."""

    name: str
    tasks: tuple[Task, ...]

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of its tasks, by label."""
        return {task.label: task.fingerprint for task in self.tasks}


@dataclass(frozen=True)
class Point:
    """One combination of a sweep."""

    name: str
    overrides: list[str]
    config: Config


def processes(config: Config) -> int:
    """Training processes of one node."""
    return config.cluster.processes_per_node or config.cluster.gpus_per_node or 1


def chain(config: Config, points: list[Point]) -> list[Stage]:
    """All stages of a configuration, in order; each depends on the one before. With points, a sweep and its comparison come after merge."""
    run_dir = Path(config.run_dir)
    prints = fingerprints(config, run_dir)
    sizes = {"regenerate": config.precompute.num_parts, "capture": config.precompute.num_parts, "eval": len(config.eval.runs)}
    stages = [Stage(name, tuple(Task(str(i), prints[name], run_dir) for i in range(sizes.get(name, 1)))) for name in SUBMIT_STAGES]
    if not points:
        return stages
    tasks = []
    for point in points:
        mine = fingerprints(point.config, run_dir)
        if mine["merge"] != prints["merge"]:
            raise ValueError(f"the sweep's point {point.name} changes what is captured, which all points share: submit it as a run of its own")
        tasks.append(Task(point.name, mine["report"], Path(point.config.run_dir)))
    compare = Task("0", fingerprint([task.fingerprint for task in tasks]), run_dir)
    return [*stages[: len(SHARED)], Stage("sweep", tuple(tasks)), Stage("compare", (compare,))]


def is_picked(stage: Stage, names: Collection[str]) -> bool:
    """Whether a stage is among the `names` of submit.stages; a sweep and its comparison are picked by the sweep itself."""
    return stage.name in names or stage.name not in SUBMIT_STAGES


def fingerprints(config: Config, own: Path) -> dict[str, str]:
    """By stage. `own` is the run directory (for a point of a sweep, that of the whole sweep): what lies there is known by the stages that made it."""
    out, before = {}, ""
    for name in SUBMIT_STAGES:
        before = out[name] = fingerprint([name, before, settings(config, name, own)])
    return out


def settings(config: Config, stage: str, own: Path) -> Any:
    """What changes a stage's output, beside what the stages before it left in the run directory `own`."""
    data, precompute, head = asdict(config.data), asdict(config.precompute), asdict(config.head)
    regenerate = precompute["regenerate"]
    demo = asdict(config.demo) if "demo" in config.precompute.steps else None  # its step makes its own files
    if stage == "corpus":
        paths = [] if demo else [source.path for source in config.data.train + config.data.validation]
        return [data["train"], data["validation"], regenerate["enabled"], demo, content(paths, own)]
    if stage == "regenerate":
        answers = [config.engine.name, config.target.dtype, _only(regenerate, stage)] if regenerate["enabled"] else None
        target = content([] if demo else [config.target.path], own)
        return [config.target.path, target, data["max_length"], data["turns"], data["template_kwargs"], precompute["num_parts"], answers]
    if stage == "capture":
        taps = head["layout"].get("taps", []) if precompute["tap_layers"] is None else precompute["tap_layers"]
        return [config.engine.name, config.target.dtype, taps, precompute["shard_tokens"], precompute["state_dtype"]]
    if stage == "train":
        rows = config.train.rows_per_batch * config.train.accumulation * config.cluster.nodes * processes(config)
        return [head, _only(asdict(config.train), stage), rows, content([config.train.init_from, config.train.shards], own)]
    if stage == "export":
        return [asdict(config.export), content([] if config.export.checkpoint in ("best", "last") else [config.export.checkpoint], own)]
    if stage == "eval":
        files = [config.eval.prompts, config.eval.head, *config.eval.heads, config.eval.vllm_head]
        return [_only(asdict(config.eval), stage), config.engine.name, content(files, own)]
    return None


def _only(section: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in WITHOUT_EFFECT[name]}


def content(paths: Iterable[str | None], own: Path) -> list[Any]:
    """What files (and the files of folders) hold, cheaply. A path that is not here (a hub's id) is its name; one inside of the run directory is left out."""
    out: list[Any] = []
    for path in map(Path, filter(None, paths)):
        if own.absolute() in path.absolute().parents:
            continue
        if not path.exists():
            out.append(str(path))
            continue
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        for file in files:
            facts = file.stat()
            out.append([file.name, facts.st_size, sha256(file) if facts.st_size <= SMALL else facts.st_mtime_ns])
    return out


def finished(stage: Stage, run_dir: Path) -> list[bool]:
    """Which tasks have left the mark of this very fingerprint, and their output."""
    return [_mark(run_dir, stage.name, task.label) == task.fingerprint and (task.run_dir / OUTPUT.get(stage.name, "")).exists() for task in stage.tasks]


def _mark(run_dir: Path, stage: str, label: str) -> str:
    path = run_dir / "slurm" / "done" / f"{stage}-{label}"
    return path.read_text().strip() if path.exists() else ""


def with_run_dir(config: Config, run_dir: Path) -> Config:
    """The same configuration for a point of a sweep: what lies in the run directory and belongs to the point moves with it; the captured states stay."""
    old = Path(config.run_dir)

    def moved(path: str) -> str:
        return str(run_dir / Path(path).relative_to(old)) if old in Path(path).parents else path

    return replace(config, run_dir=str(run_dir), eval=replace(config.eval, head=moved(config.eval.head), vllm_head=moved(config.eval.vllm_head)))
