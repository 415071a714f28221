"""Lossless verification of a drafted chain (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318).

Pure: no model, no state, no randomness of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_train.interfaces import Proposal, Verdict
from mtp_train.spec_decode.sampling import sample


def verify(proposal: Proposal, target_probs: Tensor, uniforms: Tensor) -> Verdict:
    """Accept drafts so that the committed tokens have exactly the target's distribution.

    Draft i is accepted when u_i q(d_i) < p(d_i), strictly: a token the target gives no mass is never accepted. The first rejection
    draws from the residual max(p - q, 0), normalised; after K acceptances the next token is drawn from the target itself (bonus).

    Args:
        proposal: K tokens (B, K) and the distributions q (B, K, V) they were drawn from.
        target_probs: p (B, K + 1, V); one-hot rows make this greedy verification.
        uniforms: (B, K + 1) in [0, 1): K for accepting, the last for the next token.

    Returns:
        The verdict; example with K = 3: matches 1, 0, 1 accept one token, and what follows the mismatch counts for nothing.

    Raises:
        ValueError: shapes that do not fit one another.
    """
    drafted = proposal.token_ids
    batch, num_draft = drafted.shape
    shapes = {
        "target_probs": (target_probs, (batch, num_draft + 1, target_probs.shape[-1])),
        "proposal.probs": (proposal.probs, (batch, num_draft, target_probs.shape[-1])),
        "uniforms": (uniforms, (batch, num_draft + 1)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape:
            raise ValueError(f"{num_draft} drafts of {batch} rows need {name} of shape {shape}, got {tuple(tensor.shape)}")
    p = target_probs[:, :num_draft].gather(-1, drafted[..., None])[..., 0]  # (B, K)
    q = proposal.probs.gather(-1, drafted[..., None])[..., 0]
    accepted = uniforms[:, :num_draft] * q < p
    num_accepted = accepted.long().cumprod(1).sum(1)  # (B,)
    is_bonus = num_accepted == num_draft
    rows = torch.arange(batch, device=drafted.device)
    final = target_probs[rows, num_accepted]  # (B, V)
    if num_draft:
        rejected = proposal.probs[rows, num_accepted.clamp(max=num_draft - 1)]
        residual = (final - rejected).clamp(min=0)
        # p = q up to rounding leaves no residual; the rejection was then a rounding event, and p itself is the right draw.
        usable = ~is_bonus & (residual.sum(-1) > 0)
        final = torch.where(usable[:, None], residual, final)
    return Verdict(num_accepted, sample(final, uniforms[:, num_draft]), is_bonus)
