"""Figures of a training run: metrics.jsonl always, a progress bar, and wandb where asked for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mtp_train.config import TrainConfig
from mtp_train.loss import LossSums


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
    """Sums steps up to a log line; opened at `step`, it drops lines that a killed run wrote beyond its checkpoint."""

    def __init__(self, run_dir: Path, options: TrainConfig, step: int):
        self.path, self.options = run_dir / "metrics.jsonl", options
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self.file = self.path.open("a", buffering=1)
        self.bar = tqdm(total=options.num_steps, initial=step, unit="step", desc="train", mininterval=5, dynamic_ncols=True)
        self.total: LossSums | None = None
        self.tokens, self.seconds = 0, 0.0
        self.wandb = self._open_wandb()

    def _open_wandb(self) -> Any:
        if self.options.wandb.mode == "disabled":
            return None
        import wandb

        mode: Any = self.options.wandb.mode
        return wandb.init(project=self.options.wandb.project, mode=mode, dir=str(self.path.parent), id=self.path.parent.name, resume="allow")

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        if self.wandb:
            self.wandb.log({key: value for key, value in line.items() if not isinstance(value, list)}, step=line["step"])

    def step(self, step: int, sums: LossSums, lr: float, grad_norm: float, tokens: int, seconds: float) -> None:
        """Take in one optimiser step."""
        self.total = sums if self.total is None else self.total + sums
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.bar.update()
        if step % self.options.log_every and step != self.options.num_steps:
            return
        line = {
            "step": step,
            **self.total.averages(),
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "time": time.time(),
        }
        self.bar.set_postfix_str(f"loss {line['loss']:.3f}, {line['tokens_per_second']:.0f} tok/s", refresh=False)
        self._write(line)
        self.total, self.tokens, self.seconds = None, 0, 0.0

    def validation(self, step: int, figures: dict[str, Any]) -> None:
        """Take in a validation."""
        self._write({"step": step, **{f"val_{key}": value for key, value in figures.items()}})
        self.bar.write(f"step {step}: validation loss {figures['loss']:.3f}, predicted acceptance length {figures['predicted_acceptance_length']:.3f}")

    def decoded(self, row: dict[str, Any]) -> None:
        """Take in what a checkpoint was measured to accept, some steps after it was saved."""
        length, step = row["acceptance_length"]["value"] or 1.0, row["step"]  # null: no draft was made
        rates = [rate["value"] for rate in row["acceptance_rate_at"]]
        self.file.write(json.dumps({"step": step, "decoded_acceptance_length": length, "decoded_acceptance_rate_at": rates}) + "\n")
        if self.wandb:
            self.wandb.log({"decoded_acceptance_length": length, "decoded_step": step})  # wandb's own step cannot go back
        self.bar.write(f"step {step}: acceptance length {length:.3f} in decoding ({row['engine']}, {row['num_prompts']} prompts)")

    def close(self) -> None:
        """Close the sinks."""
        self.file.close()
        self.bar.close()
        if self.wandb:
            self.wandb.finish()
