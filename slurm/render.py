"""Readable sbatch files from the templates beside this file: `<stage>.sbatch`, and the shell that all of them share (`job.sh`, `rendezvous.sh`)."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from mtp_train.config import Config
from slurm.chain import ARRAYS, WITH_TARGET, Stage, processes

TEMPLATES = Path(__file__).parent


def render(stage: Stage, config: Config, cwd: Path, hours: dict[str, float] | str) -> str:
    """The sbatch file of a stage.

    Args:
        cwd: where relative paths of the configuration begin.
        hours: what the planner expects of stages, or why that is not known.
    """
    cluster, name = config.cluster, stage.name
    python = " ".join(filter(None, [cluster.prefix, shlex.quote(cluster.python or sys.executable)]))
    values = {
        "header": "\n".join(header(stage, config, hours)),
        "fingerprint": stage.tasks[0].fingerprint,
        "points": " ".join(shlex.quote(task.label) for task in stage.tasks),
        "fingerprints": " ".join(task.fingerprint for task in stage.tasks),
        "env": "\n".join(f"export {key}={shlex.quote(value)}" for key, value in cluster.env.items()) or "# cluster.env is empty",
        "setup": "\n".join(cluster.setup) or "# cluster.setup is empty",
        "cwd": shlex.quote(str(cwd)),
        "python": python,
        "lead": str(cluster.signal_lead_s),
        "max_requeues": str(cluster.max_requeues),
        "retries": str(cluster.retries),
        "nodes": str(cluster.nodes),
        "processes": str(processes(config)),
        "corpus_steps": "demo,corpus" if "demo" in config.precompute.steps else "corpus",
    }
    shared = {part: fill((TEMPLATES / f"{part}.sh").read_text(), values).rstrip() for part in ("job", "rendezvous")}
    return fill((TEMPLATES / f"{name}.sbatch").read_text(), {**values, **shared})


def fill(text: str, values: dict[str, str]) -> str:
    """A template with its values for @{name}; the shell's own $ stays as it is. Raises KeyError for one that is missing."""
    return re.sub(r"@\{([a-z_]+)\}", lambda match: values[match[1]], text)


def header(stage: Stage, config: Config, hours: dict[str, float] | str) -> list[str]:
    """The #SBATCH lines; what the cluster's configuration leaves empty is left out."""
    cluster, name, is_array = config.cluster, stage.name, stage.name in ARRAYS
    trains, gpus = name in ("train", "sweep"), num_gpus(name, config)
    cpus = cluster.cpus_per_process * (processes(config) if trains else max(1, gpus))
    limit = cluster.max_parallel
    lines = {
        "job-name": f"mtp-{name}",
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "nodes": cluster.nodes if trains else 1,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "mem-per-cpu": cluster.mem_per_cpu,
        "gres": f"gpu:{cluster.gpu_type + ':' if cluster.gpu_type else ''}{gpus}" if gpus else None,
        "time": cluster.time[name],
        "array": f"0-{len(stage.tasks) - 1}" + (f"%{limit}" if limit else "") if is_array else None,
        "output": f"logs/{name}-%A_%a.log" if is_array else f"logs/{name}-%j.log",
        "open-mode": "append",
        "signal": f"B:USR1@{cluster.signal_lead_s}",
    }
    flags = [*(f"--{key}={value}" for key, value in lines.items() if value is not None), "--requeue", *cluster.flags, *cluster.stage_flags.get(name, [])]
    return [*(f"#SBATCH {flag}" for flag in flags), f"# Planner: {expected(name, config, hours)}"]


def num_gpus(stage: str, config: Config) -> int:
    """GPUs of a node that a job of a stage takes."""
    if stage in ("train", "sweep"):
        return config.cluster.gpus_per_node
    runs_target = stage in WITH_TARGET and (stage != "regenerate" or config.precompute.regenerate.enabled)
    return config.engine.tensor_parallel_size if config.cluster.gpus_per_node and runs_target else 0


def expected(stage: str, config: Config, hours: dict[str, float] | str) -> str:
    """What the planner says of a stage, in words."""
    if isinstance(hours, str):
        return f"nothing known ({hours})"
    plans = {"regenerate": ["regeneration"], "capture": ["capture"], "train": ["training"], "sweep": ["training"]}
    if stage not in plans:
        return "does not count this stage"
    total = sum(hours[name] for name in plans[stage])
    more = ", at each point" if stage == "sweep" else ", all tasks together" if stage in ARRAYS else ""
    return f"{total:.2g} h on {config.node.name}{more} (node.*; compute alone, see docs/planning.md)"
