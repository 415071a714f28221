"""Figures of a training run: metrics.jsonl always, a progress bar, and wandb where asked for."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mtp_train import dist
from mtp_train.config import TrainConfig
from mtp_train.loss import LossSums
from mtp_train.planner import Meter
from mtp_train.provenance import atomic_write, fingerprint

log = logging.getLogger(__name__)
METRICS, DECODED = "metrics.jsonl", "acceptance.jsonl"
"""Files of a run directory: the figures of training, and those that decoding with its checkpoints gave."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a half-written last line (a killed run) is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    out = []
    for number, line in enumerate(lines):
        try:
            out.append(json.loads(line))
        except json.JSONDecodeError:
            if number + 1 < len(lines):
                raise ValueError(f"{path}:{number + 1} is not JSON") from None
    return out


class Metrics:
    """Sums steps up to a log line; opened at `step`, it drops lines that a killed run wrote beyond its checkpoint (in a new file: were it alive, it would
    write into the old one).

    Every rank takes in the same sums, those of all ranks; rank 0 writes. `window` is what `state` gave at that step: the line begun there.
    With `meter` the log has the MFU.
    """

    def __init__(self, run_dir: Path, options: TrainConfig, step: int, window: dict[str, Any], device: torch.device, meter: Meter | None = None):
        self.path, self.options, self.meter = run_dir / METRICS, options, meter
        if dist.is_first():
            kept = [line for line in read_metrics(self.path) if line["step"] <= step]
            atomic_write(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = self.path.open("a", buffering=1) if dist.is_first() else None
        self.bar = tqdm(total=options.num_steps, initial=step, unit="step", desc="train", mininterval=5, dynamic_ncols=True, disable=not dist.is_first())
        sums = window.get("sums")
        self.total = None if sums is None else LossSums(**{name: torch.tensor(value, device=device) for name, value in sums.items()})
        self.tokens, self.seconds, self.waited = (window.get(name, 0.0) for name in ("tokens", "seconds", "waited"))
        self.wandb: Any = self._open_wandb()

    def state(self) -> dict[str, Any]:
        """The line begun since the last one written, for a checkpoint; float32 survives JSON exactly."""
        sums = None if self.total is None else {name: value.tolist() for name, value in vars(self.total).items()}
        return {"sums": sums, "tokens": self.tokens, "seconds": self.seconds, "waited": self.waited}

    def _open_wandb(self) -> Any:
        if self.options.wandb.mode == "disabled" or not dist.is_first():
            return None
        import wandb

        mode: Any = self.options.wandb.mode
        run_dir = self.path.parent.resolve()
        id = fingerprint(str(run_dir))[:16]  # one run through all restarts; a folder's name may have characters that an id must not
        with self._second_sink():
            return wandb.init(project=self.options.wandb.project, mode=mode, dir=str(run_dir), id=id, name=run_dir.name, resume="allow")
        return None

    @contextmanager
    def _second_sink(self) -> Iterator[None]:
        """Whatever wandb does within (no key, no network, a full disk), training goes on without it."""
        try:
            yield
        except Exception as error:
            log.warning("wandb has failed, metrics.jsonl has everything (%s: %s)", type(error).__name__, error)
            self.wandb = None

    def _send(self, figures: dict[str, Any], step: int | None = None) -> None:
        with self._second_sink():
            if self.wandb:
                self.wandb.log(figures, step=step)

    def _write(self, line: dict[str, Any]) -> None:
        if self.file:
            self.file.write(json.dumps(line) + "\n")
        self._send({key: value for key, value in line.items() if not isinstance(value, list)}, step=line["step"])

    def step(self, step: int, sums: LossSums, lr: float, grad_norm: float, tokens: int, seconds: float, waited: float) -> None:
        """Take in one optimiser step; `waited` of its seconds passed until its data were there."""
        self.total = sums if self.total is None else self.total + sums
        self.tokens, self.seconds, self.waited = self.tokens + tokens, self.seconds + seconds, self.waited + waited
        self.bar.update()
        if step % self.options.log_every and step != self.options.num_steps:
            return
        line = {
            "step": step,
            **self.total.averages(),
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "stall_share": self.waited / max(self.seconds, 1e-9),
            "time": time.time(),
        }
        said = f"loss {line['loss']:.3f}, {line['tokens_per_second']:.0f} tok/s"
        if self.meter:
            line["mfu"] = self.meter.mfu(len(self.total.count), float(self.total.count[0]) / max(1, self.tokens), line["tokens_per_second"])
            said += f", MFU {line['mfu']:.0%}"
        self.bar.set_postfix_str(said, refresh=False)
        self._write(line)
        self.total, self.tokens, self.seconds, self.waited = None, 0, 0.0, 0.0

    def validation(self, step: int, figures: dict[str, Any]) -> None:
        """Take in a validation."""
        self._write({"step": step, **{f"val_{key}": value for key, value in figures.items()}})
        if self.file:
            self.bar.write(f"step {step}: validation loss {figures['loss']:.3f}, predicted acceptance length {figures['predicted_acceptance_length']:.3f}")

    def decoded(self, row: dict[str, Any]) -> None:
        """Take in what a checkpoint was measured to accept, some steps after it was saved."""
        assert self.file is not None, "rank 0 measures"
        length, step = row["acceptance_length"]["value"] or 1.0, row["step"]  # null: no draft was made
        rates = [rate["value"] for rate in row["acceptance_rate_at"]]
        self.file.write(json.dumps({"step": step, "decoded_acceptance_length": length, "decoded_acceptance_rate_at": rates}) + "\n")
        self._send({"decoded_acceptance_length": length, "decoded_step": step})  # wandb's own step cannot go back
        self.bar.write(f"step {step}: acceptance length {length:.3f} in decoding ({row['engine']}, {row['num_prompts']} prompts)")

    def close(self) -> None:
        """Close the sinks."""
        if self.file:
            self.file.close()
        self.bar.close()
        with self._second_sink():
            if self.wandb:
                self.wandb.finish()
