"""AdamW on the head's trained parameters, and a learning rate that is a pure function of the step (so resuming needs no scheduler state)."""

from __future__ import annotations

import math

import torch
from torch import nn

from mtp_train.config import OptimConfig


def make_optimizer(head: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Weight decay on matrices, none on norms and biases."""
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=1e-8)


def lr_at(step: int, num_steps: int, config: OptimConfig) -> float:
    """Linear warm-up, then a cosine down to `min_lr_ratio`. `step` counts from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
