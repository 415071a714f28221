"""Acceptance during training: a second process decodes with each saved checkpoint, and training does not stop for it.

The process is `python -m eval.checkpoints` (the command mtp-validate, which may also run as a job of its own). It leaves
`acceptance.json` in the checkpoint, by which `best` is then chosen, and a line in `<run_dir>/acceptance.jsonl`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from mtp_train import dist
from mtp_train.checkpoint import ACCEPTANCE, checkpoints
from mtp_train.config import Config
from mtp_train.metrics import Metrics

log = logging.getLogger(__name__)


def prompts_path(run_dir: Path) -> Path:
    """The validation conversations: held out from training, and other prompts than those of the report, because they choose the checkpoint."""
    return run_dir / "data" / "validation.conversations.jsonl"


class Measurer:
    """Starts the process after a save, one at a time, and hands its results to the training's metrics."""

    def __init__(self, config: Config, step: int):
        """`step`: where training begins; earlier results are known already. Raises FileNotFoundError without validation conversations."""
        self.run_dir, self.engine = Path(config.run_dir), config.train.validate_with if dist.is_first() else None  # rank 0's business
        self.process: subprocess.Popen[bytes] | None = None
        self.reported = step
        if self.engine and not prompts_path(self.run_dir).exists():
            raise FileNotFoundError(f"train.validate_with={self.engine} needs {prompts_path(self.run_dir)}: set data.validation and run mtp-precompute")

    def saved(self) -> None:
        """A checkpoint is there: measure it, unless the process is still busy (it will see this one when it is done)."""
        if not self.engine or (self.process and self.process.poll() is None):
            return
        with (self.run_dir / "validate.log").open("ab") as output:
            command = [sys.executable, "-m", "eval.checkpoints", str(self.run_dir), "--engine", self.engine]
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def results(self) -> list[dict[str, Any]]:
        """Measurements since the last call, by step."""
        path = self.run_dir / "acceptance.jsonl"
        if not self.engine or not path.exists():
            return []
        new = [row for row in map(json.loads, path.read_text().splitlines()) if row["step"] > self.reported]
        self.reported = max((row["step"] for row in new), default=self.reported)
        return sorted(new, key=lambda row: row["step"])

    def report(self, metrics: Metrics) -> None:
        """Hand new measurements on."""
        for row in self.results():
            metrics.decoded(row)

    def finish(self, metrics: Metrics) -> None:
        """Wait until every checkpoint that is kept has been measured; a process that failed is a warning, the training stands."""
        self._wait()
        self.report(metrics)

    def _wait(self) -> None:
        while self.engine and self.process:
            log.info("waiting for %s to measure the last checkpoints (%s)", self.engine, self.run_dir / "validate.log")
            code = self.process.wait()
            if code:
                log.warning("measuring checkpoints failed with exit code %d: see %s", code, self.run_dir / "validate.log")
                return
            if all((path / ACCEPTANCE).exists() for path in checkpoints(self.run_dir / "checkpoints")):
                return
            self.saved()
