"""The commands of SLURM: sbatch, squeue, scancel."""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED")


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array, as squeue has it."""

    id: str  # of the whole array
    state: str
    reason: str
    elapsed: str
    nodes: str

    @property
    def active(self) -> bool:
        """Whether it waits, runs, or is about to end."""
        return self.state not in OVER


def command(arguments: Sequence[str], cwd: Path | None = None) -> str:
    """What a command of SLURM prints. Raises ValueError with what it complains of, FileNotFoundError where there is no SLURM."""
    # Submitted from inside a job, its variables would be taken for those of the new one.
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}
    try:
        done = subprocess.run(arguments, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        if cwd and not cwd.exists():
            raise
        raise FileNotFoundError(f"{arguments[0]} is not on the PATH: is this a machine that submits to SLURM?") from error
    if done.returncode:
        raise ValueError(f"{' '.join(arguments)}: exit code {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def squeue() -> list[Job]:
    """The user's jobs that SLURM still knows, ended ones included: no accounting is needed."""
    out = command(["squeue", "--noheader", "--array", "--states=all", f"--user={getpass.getuser()}", "--format=%F|%T|%r|%M|%N"])
    return [Job(*(line.split("|") + [""] * 5)[:5]) for line in out.splitlines() if line.strip()]


def ask(ids: Iterable[str]) -> tuple[list[Job], str]:
    """What SLURM knows of jobs, by squeue or else by scontrol; and why that is nothing."""
    try:
        wanted = set(ids)
        return [job for job in squeue() if job.id in wanted], ""
    except (ValueError, FileNotFoundError) as error:
        trouble = str(error)
    out = []
    for id in sorted(wanted):
        try:
            lines = command(["scontrol", "--oneliner", "show", "job", id]).splitlines()
        except (ValueError, FileNotFoundError):
            continue
        facts = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
        out += [Job(id, *(one.get(key, "") for key in ("JobState", "Reason", "RunTime", "NodeList"))) for one in facts]
    return out, "" if out else trouble


def sbatch_command(file: str, after: str | None, array: str | None) -> list[str]:
    """The command that submits `file`, to start when job `after` has succeeded."""
    return [
        "sbatch", "--parsable", "--kill-on-invalid-dep=yes", *([f"--dependency=afterok:{after}"] if after else []),
        *([f"--array={array}"] if array else []), file,
    ]  # fmt: skip


def sbatch(arguments: Sequence[str], cwd: Path) -> str:
    """Submit; returns the job's id."""
    return command(arguments, cwd).strip().split(";")[0].splitlines()[-1]


def scancel(jobs: Iterable[str]) -> None:
    """Cancel jobs."""
    command(["scancel", *jobs])


def ranges(numbers: Sequence[int]) -> str:
    """As sbatch --array has them: [0, 1, 2, 5] is 0-2,5."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
