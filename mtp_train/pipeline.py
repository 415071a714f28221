"""All stages in a row: precompute, train, export, eval. Each is a process of its own, as under SLURM, so memory is freed in between.

Every stage leaves what is complete alone and goes on where it was killed: run the same command again after any interruption.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

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
    for stage in config.stages:
        log.info("== %s", stage)
        start = time.monotonic()
        code = subprocess.run([sys.executable, "-m", MODULES[stage], *overrides], env=os.environ, check=False).returncode
        if code == os.EX_TEMPFAIL:  # stopped by a signal, with a checkpoint
            sys.exit(code)
        if code:
            sys.exit(
                f"error: stage {stage} failed with exit code {code}; run the same command again to go on from there"
                if code > 0
                else f"error: stage {stage} was killed by signal {-code}; run the same command again to go on"
            )
        log.info("== %s: done in %.0f s", stage, time.monotonic() - start)


def main() -> None:
    """Console script mtp-pipeline."""
    cli.main(__doc__, lambda config: run(config, sys.argv[1:]))


if __name__ == "__main__":
    main()
