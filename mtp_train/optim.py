"""AdamW, or Muon for matrices; the running average of the weights; and a learning rate that is a pure function of the step (no scheduler state).

Everything that a resume needs stands in `optimizer.state`, so it is saved and loaded by parameter name like any moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from mtp_train.config import OptimConfig

AVERAGE = "ema"  # entry of a parameter's state


class MuonAdamW(Optimizer):
    """Muon and AdamW behind one `state` and one list of groups: whoever wraps, saves or loads an optimiser sees a single one."""

    def __init__(self, muon: Muon, adamw: AdamW):
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.parts: tuple[tuple[Optimizer, str], ...] = ((muon, "momentum"), (adamw, "betas"))  # a setting that only its own groups have

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part, own in self.parts:  # handed over each time: loading a state replaces both
            part.state, part.param_groups = self.state, [group for group in self.param_groups if own in group]
            part.step()


def make_optimizer(head: nn.Module, config: OptimConfig) -> Optimizer:
    """Groups of parameters by what they are: `norms` (with biases; no weight decay), matrices of the `block`, and of the `projection` into it.

    Muon takes matrices, scaled to the size of AdamW's updates (arXiv 2502.16982, eq. 4) so that one learning rate serves both; all else,
    batched experts and a head's own lm_head included, is AdamW's.
    """
    groups: dict[tuple[str, bool], list[Tensor]] = {}
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            part = "norms" if parameter.dim() < 2 else "block" if name.startswith("block.") else "projection"
            by_muon = config.name == "muon" and parameter.dim() == 2 and not name.startswith("lm_head.")
            groups.setdefault((part, by_muon), []).append(parameter)
    settings: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for (part, by_muon), parameters in groups.items():
        decay = 0.0 if part == "norms" else config.weight_decay
        settings[by_muon].append({"params": parameters, "weight_decay": decay, "lr_scale": getattr(config.lr_scale, part)})
    adamw = AdamW(settings[False], lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=1e-8, fused=True)
    return MuonAdamW(Muon(settings[True], lr=config.lr, adjust_lr_fn="match_rms_adamw"), adamw) if settings[True] else adamw


def lr_at(step: int, num_steps: int, config: OptimConfig) -> float:
    """Linear warm-up to `lr`, then by `schedule` down to `min_lr_ratio` of it. `step` counts from 0.

    cosine and linear fall all the way; wsd (warm-up, stable, decay: arXiv 2404.06395) stays up and falls linearly over the last `decay_ratio` of
    all steps; constant stays.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    begin = {"wsd": num_steps - round(config.decay_ratio * num_steps), "constant": num_steps}.get(config.schedule, config.warmup_steps)
    progress = min(1.0, max(0.0, (step - begin) / max(1, num_steps - begin)))
    height = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)


# ---------------------------------------------------------------- the average of the weights


@torch.no_grad()
def update_average(optimizer: Optimizer, decay: float, step: int) -> None:
    """After optimiser step number `step` (from 1): average the weights so far, step s weighing decay ** (step - s), normalised. Decay 0: no average."""
    if not decay:
        return
    share = (1 - decay) / (1 - decay**step)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        state = optimizer.state.get(parameter)
        if state:  # a parameter that never had a gradient has none
            if AVERAGE not in state:
                state[AVERAGE] = parameter.detach().clone()
            state[AVERAGE].lerp_(parameter, share)


@torch.no_grad()
def swap_average(optimizer: Optimizer) -> None:
    """Exchange the weights and their average, where there is one."""
    for parameter, state in optimizer.state.items():
        if AVERAGE in state:
            current = parameter.clone()
            parameter.copy_(state[AVERAGE])
            state[AVERAGE].copy_(current)


@contextmanager
def averaged(optimizer: Optimizer) -> Iterator[None]:
    """Within, the head is its average: what is validated, saved and so exported. A checkpoint keeps the weights themselves as the `ema` entry."""
    swap_average(optimizer)
    try:
        yield
    finally:
        swap_average(optimizer)


def take_up(optimizer: Optimizer, config: OptimConfig, where: str) -> None:
    """Go on from loaded tensors: the weights back in place of their average. Raises ValueError where another optimiser wrote the checkpoint."""
    for group in optimizer.param_groups:
        wanted = "momentum_buffer" if "momentum" in group else "exp_avg"
        for state in (optimizer.state[parameter] for parameter in group["params"] if parameter in optimizer.state):
            if wanted not in state:
                raise ValueError(f"{where} holds the optimiser state {sorted(state)}, train.optim.name={config.name} needs {wanted}; use a new run_dir")
    swap_average(optimizer)
    if not config.ema_decay:
        for state in optimizer.state.values():
            state.pop(AVERAGE, None)
