"""The draft head and the ONE place of the index convention.

x_t are tokens; h_t is the target's state after reading x_t, AFTER the final norm; lm_head(h_t) predicts x_{t+1}.

    step 0, row t:  embeds x_{t+1},   feature h_t,    rope position t    ->  g^1_t,  predicts x_{t+2},    teacher lm_head(h_{t+1})
    step k, row t:  embeds x_{t+k+1}, feature g^k_t,  rope position t+k  ->  g^k+1_t, predicts x_{t+k+2}, teacher lm_head(h_{t+k+1})

With the six tokens  a b c d e f  (loss_mask on d e f) and two steps:

    row t             0       1       2       3       4
    step 0 reads      b,h_a   c,h_b   d,h_c   e,h_d   f,h_e
    step 0 predicts   c       d*      e*      f*      -          (* supervised: its predicted token has loss_mask)
    step 1 reads      c,g_0   d,g_1   e,g_2   f,g_3   -
    step 1 predicts   d*      e*      f*      -       -

In step k, row t attends to the step-0 keys of rows <= t and to its own keys of steps 1..k: what the engine's chain of drafts sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from mtp_train.config import HeadConfig
from mtp_train.interfaces import Batch, Ends


class Attention(Protocol):
    """How a block's queries meet keys: training unrolls, drafting keeps a cache. The block does not know which."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """(B, heads, T, D), (B, kv heads, T, D), (B, kv heads, T, Dv) -> (B, T, heads, Dv)."""


class DraftHead(nn.Module):
    """What every head is: `fuse` once, then `forward` once per drafted token; `readout` is what lm_head reads.

    `forward` gives the feature that the next step takes; `readout` of it goes into the target's frozen lm_head.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Target states (B, T, L, H) -> the feature of step 0 (B, T, H)."""
        raise NotImplementedError

    def forward(self, token_embeds: Tensor, features: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        """(B, T, H), (B, T, H), (B, T) -> the feature of the next step (B, T, H)."""
        raise NotImplementedError

    def readout(self, features: Tensor) -> Tensor:
        """Feature (…, H) -> what lm_head reads (…, H)."""
        raise NotImplementedError


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, own: list[tuple[Tensor, Tensor]], scaling: float, softcap: float | None) -> Tensor:
    """Attention over shared keys (masked) and, beside them, one own key a row for each earlier step of the unroll.

    Args:
        query: (B, heads, T, D); keys, values: (B, kv heads, S, D or Dv); mask: (B, 1, T, S) bool.
        own: keys and values (B, kv heads, T, D or Dv): row t sees only its own entry t of each.

    Returns:
        (B, T, heads, Dv).
    """
    if not own and softcap is None:
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != keys.shape[1])
        return out.transpose(1, 2)
    batch, heads, rows, _ = query.shape
    grouped = query.unflatten(1, (keys.shape[1], heads // keys.shape[1])) * scaling  # (B, kv, group, T, D)
    scores = [grouped @ keys[:, :, None].transpose(-1, -2)]  # (B, kv, group, T, S)
    scores += [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key, _ in own]  # (B, kv, group, T, 1)
    if softcap is not None:
        scores = [torch.tanh(score / softcap) * softcap for score in scores]
    scores[0] = scores[0].masked_fill(~mask[:, :, None], -math.inf)
    weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
    out = weights[..., : keys.shape[2]] @ values[:, :, None]
    for step, (_, value) in enumerate(own):
        out = out + weights[..., keys.shape[2] + step, None] * value[:, :, None]
    return out.reshape(batch, heads, rows, -1).transpose(1, 2)


class UnrollAttention:
    """Training: remembers each layer's keys of every step; see the module's docstring for who sees what."""

    def __init__(self, document_ids: Tensor):
        size = document_ids.shape[1]
        same = document_ids[:, :, None] == document_ids[:, None, :]  # (B, T, T)
        self.mask = (same & torch.ones(size, size, dtype=torch.bool, device=same.device).tril())[:, None]
        self.steps: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None) -> Tensor:
        steps = self.steps.setdefault(layer, [])
        steps.append((key, value))
        return attend(query, *steps[0], self.mask, steps[1:], scaling, softcap)


def shift_left(tensor: Tensor, by: int) -> Tensor:
    """Row t of the result is row t + `by` of `tensor` (B, T, …); zeros come in from the right."""
    return F.pad(tensor[:, by:], (0, 0) * (tensor.dim() - 2) + (0, min(by, tensor.shape[1])))


def unroll(head: DraftHead, ends: Ends, batch: Batch, num_steps: int) -> Tensor:
    """The drafted chain of every row at once: what lm_head reads at each step.

    Args:
        batch: packed rows; the token fed at step k is always the data's, never the head's own guess.
        num_steps: K.

    Returns:
        (K, B, T, H): entry [k, :, t] predicts token t + k + 2. Rows whose predicted token lies outside their document mean nothing.
    """
    attention = UnrollAttention(batch.document_ids)
    features = head.fuse(batch.hidden_states)
    readouts = []
    for step in range(num_steps):
        embeds = ends.embed(shift_left(batch.input_ids, step + 1))
        features = head(embeds, features, batch.position_ids + step, attention)
        readouts.append(head.readout(features))
    return torch.stack(readouts)


@dataclass(frozen=True)
class Supervised:
    """The N tokens a batch trains on, as predicted tokens: one teacher state serves all K steps."""

    students: Tensor  # (K, N, H) readout of step k that predicts the token
    teacher: Tensor  # (N, H) the target's state that predicts it
    valid: Tensor  # (K, N) bool: step k has a row in the same document
    token_ids: Tensor  # (N,) the token itself


def supervised(readouts: Tensor, batch: Batch) -> Supervised:
    """Gather what the loss sees. Token q is predicted by row q - k - 2 of step k, and by the target's state q - 1."""
    position = batch.position_ids
    row, token = torch.nonzero(batch.loss_mask & (position >= 2), as_tuple=True)  # (N,), (N,)
    students = torch.stack([readouts[k, row, (token - k - 2).clamp(min=0)] for k in range(len(readouts))])
    valid = torch.stack([position[row, token] >= k + 2 for k in range(len(readouts))])
    return Supervised(students, batch.hidden_states[row, token - 1, -1], valid, batch.input_ids[row, token])
