"""torchrun inside a step of srun, one launcher a node: `srun --ntasks-per-node=1 python -m slurm.launch --processes 8 --logs DIR -- --config FILE`.

Beside torchrun's own work, three things that a SLURM job needs:
- the place of this node comes from the step's environment, so that nothing is expanded on another node;
- USR1 goes to the ranks: they begin with it blocked, so one that comes while they start waits until training can save (`dist.StopSignals`);
- exit code 75 (stopped, saved) goes through, where torchrun makes 1 of it.

With cluster.scratch the shards are copied to the node's own disk first. Checkpoints stay where they are.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from mtp_train import cli
from mtp_train import config as cfg

log = logging.getLogger(__name__)


def topology(env: Mapping[str, str]) -> list[str]:
    """torchrun's arguments for this node of the step. Raises ValueError outside of a step, and in one that is not a launcher on every node of the job.

    Only the variables of the step (SLURM_STEP_*) tell a step from the batch script: SLURM_NODEID and SLURM_PROCID are 0 in the latter.
    """
    if "SLURM_STEP_NUM_NODES" not in env:
        raise ValueError("slurm.launch must be started by srun, inside a job: SLURM_STEP_NUM_NODES is not set")
    nodes, tasks, of_job = (int(env[f"SLURM_{name}"]) for name in ("STEP_NUM_NODES", "STEP_NUM_TASKS", "JOB_NUM_NODES"))
    if (nodes, tasks) != (of_job, of_job):
        raise ValueError(f"the step has {tasks} tasks on {nodes} nodes, the job has {of_job} nodes: srun --ntasks-per-node=1 on all of them")
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]:
        raise ValueError(f"{' and '.join(missing)} not set: the batch script takes them from scontrol show hostnames and the job's id")
    place = {"nnodes": nodes, "node-rank": env["SLURM_NODEID"], "master-addr": env["MASTER_ADDR"], "master-port": env["MASTER_PORT"]}
    return [f"--{name}={value}" for name, value in place.items()]


def scratch_folder(scratch: str, job: str) -> Path:
    """The job's own folder on the node's disk. Raises ValueError where a variable of cluster.scratch is not set here, or the path is relative."""
    folder = os.path.expandvars(scratch)
    if "$" in folder or not os.path.isabs(folder):
        raise ValueError(f"cluster.scratch={scratch} is {folder!r} on {socket.gethostname()}: it must be an absolute path, of variables that are set there")
    return Path(folder) / f"mtp-{job}"


def stage_in(source: Path, scratch: Path) -> Path:
    """Copy a folder of shards; what is there in its full size is left alone. Raises ValueError where the disk is too small."""
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    missing = [path for path in files if not _same_size(path, scratch / path.relative_to(source))]
    scratch.mkdir(parents=True, exist_ok=True)
    needed, free = sum(path.stat().st_size for path in missing), shutil.disk_usage(scratch).free
    if needed > free:
        raise ValueError(f"cluster.scratch: {source} needs {needed / 1e9:.1f} GB, {scratch} has {free / 1e9:.1f} GB free")
    for path in missing:
        copy = scratch / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy.with_name(f".{copy.name}.tmp"))
        copy.with_name(f".{copy.name}.tmp").replace(copy)
        if not _same_size(path, copy):
            raise ValueError(f"{copy} has {copy.stat().st_size} bytes, {path} has {path.stat().st_size}")
    log.info("%d files, %.1f GB copied to %s", len(missing), needed / 1e9, scratch)
    return scratch


def _same_size(a: Path, b: Path) -> bool:
    return b.exists() and a.stat().st_size == b.stat().st_size


def children() -> list[int]:
    """Ids of this process's children."""
    return [int(pid) for thread in Path("/proc/self/task").iterdir() for pid in (thread / "children").read_text().split()]


def hand_on_usr1(scratch: Path | None) -> None:
    """From now on USR1 goes to the children alone; while there are none, it ends this process with 75: nothing was begun."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # inherited by threads and children

    def wait() -> None:
        while True:
            signal.sigwait({signal.SIGUSR1})
            ranks = children()
            if not ranks:
                if scratch:
                    shutil.rmtree(scratch, ignore_errors=True)
                os._exit(os.EX_TEMPFAIL)
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)

    threading.Thread(target=wait, daemon=True).start()


def launch(processes: int, logs: Path, arguments: Sequence[str]) -> int:
    """Run the ranks of this node to their end; returns an exit code."""
    place = topology(os.environ)
    logs = logs / f"start{int(os.environ.get('SLURM_RESTART_COUNT', 0)) + 1}" / f"node{os.environ['SLURM_NODEID']}"
    logs.mkdir(parents=True, exist_ok=True)
    console = [f"--nproc-per-node={processes}", f"--log-dir={logs}", "--redirects=3", "--tee=0:3"]
    try:
        run(parse_args([*place, *console, "-m", "mtp_train.train", *arguments]))
    except ChildFailedError as error:
        if os.EX_TEMPFAIL in [failure.exitcode for failure in error.failures.values()]:  # the others end because of it; every rank had agreed to stop
            return os.EX_TEMPFAIL
        log.error("%s\nlogs of every rank: %s", error, logs)
        return 1
    return 0


def main() -> None:
    """The launcher of one node."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, required=True, help="ranks of this node")
    parser.add_argument("--logs", type=Path, required=True, help="folder of the ranks' logs")
    parser.add_argument("--config", type=Path, required=True, help="config.yaml of the training")
    own = [one for one in sys.argv[1:] if one != "--"]
    options, overrides = parser.parse_known_args(own)
    cli.set_up_logging()
    code = 1
    with cli.one_line_errors():
        config = cfg.read(options.config, overrides)
        scratch = scratch_folder(config.cluster.scratch, os.environ.get("SLURM_JOB_ID", "")) if config.cluster.scratch else None
        hand_on_usr1(scratch)
        try:
            if scratch:
                copies = stage_in(Path(config.train.shards), scratch)
                overrides.append(f"train.shards={json.dumps(str(copies), ensure_ascii=False)}")
            code = launch(options.processes, options.logs, ["--config", str(options.config), *overrides])
        finally:
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
