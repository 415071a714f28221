"""Inside vLLM's worker: proof that every tensor of a head is loaded and used. Given to vLLM as `worker_extension_cls`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


class HeadAudit:
    """Methods that `collective_rpc` calls on a worker."""

    model_runner: Any

    def mtp_watch(self) -> None:
        """From now on, keep the draft's logits."""
        model = self.model_runner.drafter.model
        inner = model.compute_logits

        def watched(hidden_states: torch.Tensor, *more: Any) -> torch.Tensor | None:
            self.mtp_seen = inner(hidden_states, *more)
            return self.mtp_seen

        model.compute_logits = watched

    def mtp_logits(self) -> list[float]:
        """Of the last draft: enough of them to see any change."""
        seen = self.mtp_seen.float()
        return torch.cat([seen[-1, :32], seen[-1].nan_to_num(neginf=0.0).square().sum()[None]]).tolist()

    @torch.no_grad()
    def mtp_load(self, folder: str, name: str, amount: float) -> None:
        """Load one tensor of the directory again, `amount` added, by the model's own loader."""
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            tensor = file.get_tensor(name)
        self.model_runner.drafter.model.load_weights(iter([(name, tensor + amount)]))
