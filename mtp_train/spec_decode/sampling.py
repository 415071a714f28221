"""Distributions and draws. Temperature 0 is a one-hot distribution, so greedy decoding is a case of sampling, not a branch."""

from __future__ import annotations

import torch
from torch import Tensor


def target_probs(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits (B, …, V) at temperature (B,) -> probabilities of the same shape, in float32 (float64 stays).

    Temperature 0 puts all mass on the first largest logit. Rows may differ in temperature.

    Raises:
        ValueError: a row of logits holds NaN or inf, or nothing but -inf: no token can be drawn from it.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    peak = logits.amax(-1, keepdim=True)
    if not bool(peak.isfinite().all()):
        rows = (~peak.isfinite()).reshape(len(logits), -1).any(-1).nonzero().flatten().tolist()
        raise ValueError(f"the largest logit is not finite in rows {rows} of {len(logits)}")
    heat = temperature.to(logits.dtype)
    cold = heat <= 0  # (B,)
    if bool(cold.all()):
        return _first_largest(logits)
    # Relative to the largest: a tiny temperature would otherwise give inf - inf.
    probs = (logits - peak).div_(torch.where(cold, 1.0, heat).view(-1, *[1] * (logits.dim() - 1))).softmax(-1)
    if bool(cold.any()):
        probs[cold] = _first_largest(logits[cold])
    return probs


def _first_largest(logits: Tensor) -> Tensor:
    """One-hot at the largest logit; of equal ones at the lowest id."""
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw: probs (…, V), not necessarily summing to 1, and uniforms (…) in [0, 1) -> ids (…).

    Takes the first id whose cumulative mass exceeds u times the total, so an id of probability 0 is never drawn, at u = 0 neither.

    Raises:
        ValueError: a row has no mass, or holds NaN or inf.
    """
    mass = probs.double().cumsum(-1)
    total = mass[..., -1:].contiguous()
    if not bool((total.isfinite() & (total > 0)).all()):
        raise ValueError(f"probabilities must have a finite positive sum, got sums from {total.min().item()} to {total.max().item()}")
    index = torch.searchsorted(mass, uniforms.double()[..., None] * total, right=True)
    # Rounding may let u * total reach the total: the last id with mass is then meant.
    last = torch.searchsorted(mass, total, right=False)
    return torch.minimum(index, last)[..., 0]
