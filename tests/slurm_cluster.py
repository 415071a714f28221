"""A SLURM cluster of two nodes on this machine (tests/cluster/up.sh), what its jobs are doing, and how its nodes are lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.ranks import QUIET, ROOT

OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE"}
SCRIPTS = ROOT / "tests" / "cluster"


class Cluster:
    """Brought up when made; `down` stops everything of it."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {**os.environ, **QUIET, "SLURM_CONF": str(folder / "slurm.conf")}
        self.up()

    def up(self):
        """Also starts again what was killed."""
        done = subprocess.run([SCRIPTS / "up.sh", self.folder], capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"the test cluster does not come up: {done.stderr}")

    def down(self):
        subprocess.run([SCRIPTS / "down.sh", self.folder], check=True, timeout=120)

    def __call__(self, *command):
        """What a command prints. SLURM's own may be busy for a while: no node answers when one has just been killed."""
        done = subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def submit(self, *arguments):
        """mtp-submit, as a user runs it; returns what it printed, and the job ids by stage that it told."""
        done = subprocess.run([sys.executable, "-m", "slurm.submit", *arguments], env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        told = [line.split() for line in done.stderr.splitlines()]
        return done.stdout, {words[0]: words[2].rstrip(",") for words in told if words[1:2] == ["job"]}

    def states(self, *jobs):
        """State of every task of these jobs, ended ones too: {"7": "COMPLETED", "8_0": "RUNNING", "8_1": ...}."""
        lines = self("squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(jobs)}", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def facts(self, job):
        """What scontrol knows of a job (of an array's task as 8_0)."""
        return dict(word.split("=", 1) for word in self("scontrol", "--oneliner", "show", "job", job).split() if "=" in word)

    def wait(self, jobs, seconds=600):
        """Until all these jobs are over; returns their states."""
        self.until(lambda: set(self.states(*jobs).values()) <= OVER, jobs, seconds)
        return self.states(*jobs)

    def until(self, condition, jobs, seconds=300):
        """Until something holds; else what the jobs' logs say last."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s\n{self.explain(jobs)}"
            time.sleep(0.1)

    def explain(self, jobs):
        """States, and the ends of the logs."""
        logs = {Path(self.facts(job)["StdOut"]) for job in self.states(*jobs)}
        return "\n".join([self("squeue", "--array", "--states=all"), *(f"--- {log}\n{log.read_text()[-4000:]}" for log in sorted(logs) if log.exists())])

    # ------------------------------------------------------------ losing nodes

    def processes(self, job):
        """{pid: command line} of a job on this machine: of its batch scripts, steps and their children."""
        return {pid: command for pid, command, environment in self._all() if f"SLURM_JOB_ID={job}" in environment}

    def lose(self, node, job, number):
        """slurmd is killed, and a signal sent to everything of the job there: SIGKILL as when the power fails, SIGSTOP as when the node is cut off."""
        os.kill(int((self.folder / "run" / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
        stepds = [pid for pid, command, _ in self._all() if command.startswith(f"slurmstepd: [{job}.")]
        lost = {**dict.fromkeys(stepds, "slurmstepd"), **self.processes(job)}
        for pid in lost:
            with suppress(ProcessLookupError):  # srun ends when its slurmstepd does
                os.kill(pid, number)
        return lost

    def _all(self):
        """(pid, command line, environment) of every process of this cluster, daemons included."""
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # gone by now
                command, environment = ((path / name).read_bytes().decode(errors="replace").split("\0") for name in ("cmdline", "environ"))
                if f"SLURM_CONF={self.env['SLURM_CONF']}" in environment:
                    yield int(path.name), " ".join(command), environment
