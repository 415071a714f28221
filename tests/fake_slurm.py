"""Stands for sbatch, squeue, scancel, scontrol and srun: `python fake_slurm.py NAME ARGUMENT...` records what it got and answers simply.

The folder FAKE_SLURM holds calls.jsonl ({name, args, cwd, text of the sbatch file}), queue (squeue's lines) and, where a test puts them there:
fail_at (the number of the sbatch call that is refused), codes (exit codes of the coming srun calls; "wait" waits for USR1, then exits with 75), job
(the answer of scontrol show job).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ.get("FAKE_SLURM", "."))


def calls(name=None):
    """What was called so far."""
    path = FOLDER / "calls.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [call for call in found if name in (None, call["name"])]


def sbatch(args):
    number = len(calls("sbatch")) - 1  # this one is recorded already
    fail_at = FOLDER / "fail_at"
    if fail_at.exists() and int(fail_at.read_text()) == number:
        sys.exit("sbatch: error: invalid partition specified: nowhere")
    with (FOLDER / "queue").open("a") as queue:
        queue.write(f"{100 + number}|PENDING|Dependency|0:00|\n")
    print(f"{100 + number};cluster")


def srun(args):
    codes = FOLDER / "codes"
    waiting = codes.read_text().split() if codes.exists() else []
    if waiting:
        codes.write_text(" ".join(waiting[1:]))
        if waiting[0] != "wait":
            sys.exit(int(waiting[0]))
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
        (FOLDER / "waiting").touch()
        time.sleep(60)
    command = args[next(index for index, one in enumerate(args) if not one.startswith("--")) :]
    if (FOLDER / "run").exists():
        sys.exit(subprocess.run(command, check=False).returncode)


def main():
    name, *args = sys.argv[1:]
    text = Path(args[-1]).read_text() if name == "sbatch" else ""
    with (FOLDER / "calls.jsonl").open("a") as file:
        file.write(json.dumps({"name": name, "args": args, "cwd": os.getcwd(), "text": text}) + "\n")
    if name == "squeue" and (FOLDER / "queue").exists():
        sys.stdout.write((FOLDER / "queue").read_text())
    if name == "scontrol" and args[:2] == ["show", "hostnames"]:
        print("n1\nn2")
    if name == "scontrol" and "job" in args and (FOLDER / "job").exists():
        sys.stdout.write((FOLDER / "job").read_text())
    if name in ("sbatch", "srun"):
        {"sbatch": sbatch, "srun": srun}[name](args)


if __name__ == "__main__":
    main()
