"""Predict acceptance from recorded rows, by walking them as decoding would.

Averaging teacher-forced accuracy over all positions flatters a head: decoding skips what was accepted, so it meets the hard positions more
often. The walk jumps A + 1 tokens a round, as the engine does. It is exact for rows that the target itself produced greedily; for rows it
sampled, a greedy draft matches the recorded token just as often as verification would accept it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtp_train.interfaces import Batch
from mtp_train.spec_decode.stats import AcceptanceStats


def matches(drafted: Tensor, batch: Batch) -> Tensor:
    """Which rows' drafts are the recorded tokens.

    Args:
        drafted: (K, N) greedily drafted ids for the N supervised tokens, in the order of `heads.base.supervised`.
        batch: the same batch.

    Returns:
        (K, B, T) bool: [k, :, t] is about the draft of token t + k + 2.
    """
    row, token = torch.nonzero(batch.loss_mask & (batch.position_ids >= 2), as_tuple=True)
    out = torch.zeros(len(drafted), *batch.input_ids.shape, dtype=torch.bool, device=drafted.device)
    for k in range(len(drafted)):
        reach = batch.position_ids[row, token] >= k + 2
        out[k, row[reach], token[reach] - k - 2] = drafted[k, reach] == batch.input_ids[row[reach], token[reach]]
    return out


def spans(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every run of supervised tokens within one document."""
    out = []
    for row, (mask, documents) in enumerate(zip(batch.loss_mask.tolist(), batch.document_ids.tolist(), strict=True)):
        start = None
        for token in range(len(mask) + 1):
            inside = token < len(mask) and mask[token]
            if start is not None and (not inside or documents[token] != documents[start]):
                out.append((row, start, token))
                start = None
            if inside and start is None:
                start = token
    return out


def walk(drafted: Tensor, batch: Batch) -> list[AcceptanceStats]:
    """Counters of every answer of the batch. A draft past the answer's end counts as rejected: what it would have met is not recorded."""
    match = matches(drafted, batch)
    run = match.long().cumprod(0).sum(0).tolist()  # (B, T) how many drafts in a row are right
    num_draft = len(drafted)
    out = []
    for row, start, stop in spans(batch):
        stats, newest = AcceptanceStats(), max(start, 1)  # token `newest` is known; the state before it drafts what follows
        while newest + 1 < stop:
            accepted = min(run[row][newest - 1], stop - 1 - newest)
            stats += AcceptanceStats.of(accepted, num_draft)
            newest += accepted + 1
        out.append(stats)
    return out


def prediction(stats: AcceptanceStats) -> dict[str, Any]:
    """What a walk predicts for decoding."""
    return {
        "predicted_acceptance_length": stats.acceptance_length,
        "predicted_acceptance_rate_at": list(stats.acceptance_rate_at),
        "num_walked_drafts": stats.num_drafts,
    }
