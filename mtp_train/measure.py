"""Acceptance during training: a second process decodes with each saved checkpoint, and training does not stop for it.

The process is `python -m eval.checkpoints` (the command mtp-validate, which may also run as a job of its own). It leaves
`acceptance.json` in the checkpoint, by which `best` is then chosen, and a line in `<run_dir>/acceptance.jsonl`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mtp_train import dist
from mtp_train.checkpoint import ACCEPTANCE, checkpoints
from mtp_train.config import Config
from mtp_train.metrics import DECODED, METRICS, Metrics, read_metrics

log = logging.getLogger(__name__)
POLL_SECONDS = 0.2


def prompts_path(run_dir: Path) -> Path:
    """The validation conversations: held out from training, and other prompts than those of the report, because they choose the checkpoint."""
    return run_dir / "data" / "validation.conversations.jsonl"


def unmeasured(run_dir: Path) -> list[Path]:
    """The checkpoints without a measurement, oldest first."""
    return [path for path in checkpoints(run_dir / "checkpoints") if not (path / ACCEPTANCE).exists()]


def parsed(line: str) -> dict[str, Any] | None:
    """A line of JSON; None where it is half-written, or grown together with one that is."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


class Measurer:
    """Starts the process after a save, one at a time, and hands its results to the training's metrics."""

    def __init__(self, config: Config):
        """Raises FileNotFoundError without validation conversations."""
        self.run_dir, self.engine = Path(config.run_dir), config.train.validate_with if dist.is_first() else None  # rank 0's business
        self.process: subprocess.Popen[bytes] | None = None
        lines = read_metrics(self.run_dir / METRICS) if self.engine else []
        self.reported = {line["step"] for line in lines if "decoded_acceptance_length" in line}
        if self.engine and not prompts_path(self.run_dir).exists():
            raise FileNotFoundError(f"train.validate_with={self.engine} needs {prompts_path(self.run_dir)}: set data.validation and run mtp-precompute")

    def saved(self) -> None:
        """A checkpoint is there: measure it, unless the process is still busy (it will see this one when it is done)."""
        if not self.engine or (self.process and self.process.poll() is None):
            return
        with (self.run_dir / "validate.log").open("ab") as output:
            command = [sys.executable, "-m", "eval.checkpoints", str(self.run_dir), "--engine", self.engine]
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=dist.unlaunched())

    def results(self) -> list[dict[str, Any]]:
        """Measurements that the metrics do not have yet, by step."""
        path = self.run_dir / DECODED
        if not self.engine or not path.exists():
            return []
        new = {row["step"]: row for row in map(parsed, path.read_text().splitlines()) if row and row["step"] not in self.reported}
        self.reported |= new.keys()
        return [new[step] for step in sorted(new)]

    def report(self, metrics: Metrics) -> None:
        """Hand new measurements on."""
        for row in self.results():
            metrics.decoded(row)

    def finish(self, metrics: Metrics, signals: dist.StopSignals) -> bool:
        """Wait until every checkpoint that is kept has been measured; a process that failed is a warning, the training stands.

        Returns whether a signal ended the waiting: the same command goes on with it.
        """
        if self._pending():
            log.info("waiting for %s to measure the last checkpoints (%s)", self.engine, self.run_dir / "validate.log")
        while self._pending() and not signals.received:
            self.saved()
            assert self.process is not None
            while self.process.poll() is None and not signals.received:
                time.sleep(POLL_SECONDS)
            if self.process.returncode and not signals.received:
                log.warning("measuring checkpoints failed with exit code %d: see %s", self.process.returncode, self.run_dir / "validate.log")
                break
        self.report(metrics)
        if not (signals.received and self._pending()):
            return False
        if self.process:
            self.process.terminate()
            self.process.wait()
        return True

    def _pending(self) -> bool:
        return bool(self.engine and unmeasured(self.run_dir))
