"""All stages in a row: precompute, train, export, eval. Each is a process of its own, as under SLURM, so memory is freed in between.

Every stage leaves what is complete alone and goes on where it was killed: run the same command again after any interruption.
SIGTERM and SIGUSR1 are passed on to the stage that runs; where training saved and stopped, the exit code is its 75 (EX_TEMPFAIL).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from typing import Any

from mtp_train import cli
from mtp_train import config as cfg
from mtp_train.planner import report

log = logging.getLogger(__name__)

MODULES = {"precompute": "precompute.run", "train": "mtp_train.train", "export": "mtp_train.export", "eval": "eval.run"}


def run(config: cfg.Config, overrides: list[str]) -> None:
    """Run the configured stages; the first that fails ends the run with its exit code."""
    if config.plan:
        sys.stdout.write(report(config))
        return
    if "train" in config.stages and config.distributed.mode != "single":
        mode = config.distributed.mode
        raise ValueError(
            f"distributed.mode={mode}, but mtp-pipeline trains in one process: leave train out of stages={config.stages} and start it with "
            f"torchrun --nproc_per_node=N -m mtp_train.train distributed={mode} ... in its turn, or the whole chain under SLURM with mtp-submit"
        )
    for stage in config.stages:
        log.info("== %s", stage)
        start = time.monotonic()
        code = run_stage([sys.executable, "-m", MODULES[stage], *overrides])
        if code == os.EX_TEMPFAIL:  # stopped by a signal, with a checkpoint
            sys.exit(code)
        if code:
            sys.exit(
                f"error: stage {stage} failed with exit code {code}; run the same command again to go on from there"
                if code > 0
                else f"error: stage {stage} was killed by signal {-code}; run the same command again to go on"
            )
        log.info("== %s: done in %.0f s", stage, time.monotonic() - start)


def run_stage(command: list[str]) -> int:
    """Run a stage to its end; returns its exit code, or minus the signal that ended it or reached this process while it ran."""
    received: list[int] = []
    with subprocess.Popen(command) as child:

        def pass_on(number: int, _: Any) -> None:
            received.append(number)
            child.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            code = child.wait()
        finally:
            child.kill()  # where this process is interrupted; a child that has ended is left alone
    for number, handler in before.items():
        signal.signal(number, handler)
    return code or (-received[0] if received else 0)


def main() -> None:
    """Console script mtp-pipeline."""
    cli.main(__doc__, lambda config: run(config, sys.argv[1:]))


if __name__ == "__main__":
    main()
