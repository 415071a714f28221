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

A head with taps (EAGLE-3) reads their states of row t in place of h_t, pre-norm; all else is the same, as vLLM feeds every draft head.
In step k, row t attends to the step-0 keys of rows <= t and to its own keys of steps 1..k: what the engine's chain of drafts sees (`attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from mtp_train.checks import one_of
from mtp_train.config import HeadConfig
from mtp_train.heads.attention import Attention, UnrollAttention
from mtp_train.interfaces import Batch, Ends

ReadLayer = Callable[[int], dict[str, Tensor]]
"""The tensors that the target's checkpoint holds of layer N, by their names within the layer; none where it has no such layer."""


@dataclass(frozen=True)
class Start:
    """What of the target a head may start from."""

    final_norm: Tensor  # (H,) the final norm's gain
    lm_head: Tensor  # (D, H) its rows of the draft vocabulary
    read_layer: ReadLayer


class DraftHead(nn.Module):
    """What every head is: `fuse` once, then `forward` once per drafted token; `readout` is what lm_head reads.

    `forward` gives the feature that the next step takes; `readout` of it goes into lm_head: the target's frozen one, or the head's own.
    """

    Layout: ClassVar[type]
    """A dataclass of the fields of `config.layout`; it refuses values that mean nothing."""
    inits: ClassVar[tuple[str, ...]] = ("identity", "last_layer")
    """What `config.init` may be."""

    def __init__(self, config: HeadConfig):
        """Raises ValueError for a layout or an init that the head does not have."""
        super().__init__()
        one_of("head.init", config.init, self.inits)
        self.config, self.layout = config, read_layout(self.Layout, config)
        self.lm_head: nn.Linear | None = None

    @classmethod
    def resolve(cls, config: HeadConfig, num_layers: int) -> HeadConfig:
        """The same, with what follows from the target's number of layers written out."""
        return config

    @property
    def lm_head_weight(self) -> Tensor | None:
        """(D, H) the head's own lm_head, of the draft vocabulary; None: it is read by the target's."""
        return None if self.lm_head is None else self.lm_head.weight

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Target states (B, T, L, H) at the head's taps, the teacher state last -> the feature of step 0 (B, T, H)."""
        raise NotImplementedError

    def forward(self, token_embeds: Tensor, features: Tensor, position_ids: Tensor, attention: Attention) -> Tensor:
        """(B, T, H), (B, T, H), (B, T) -> the feature of the next step (B, T, H)."""
        raise NotImplementedError

    def readout(self, features: Tensor) -> Tensor:
        """Feature (…, H) -> what lm_head reads (…, H)."""
        raise NotImplementedError


def read_layout(kind: type, config: HeadConfig) -> Any:
    """`config.layout` as the head's own dataclass. Raises ValueError naming missing and unknown fields."""
    known = {field.name: field.type for field in fields(kind)}
    missing, unknown = sorted(known.keys() - config.layout.keys()), sorted(config.layout.keys() - known.keys())
    if missing or unknown:
        raise ValueError(f"head.layout of a head of kind {config.kind} lacks {missing} and has unknown {unknown}")
    for name, value in config.layout.items():
        if known[name] == "bool" and not isinstance(value, bool):
            raise ValueError(f"head.layout.{name}={value!r} is neither true nor false")
    return kind(**config.layout)


def shift_left(tensor: Tensor, by: int) -> Tensor:
    """Row t of the result is row t + `by` of `tensor` (B, T, …); zeros come in from the right."""
    return F.pad(tensor[:, by:], (0, 0) * (tensor.dim() - 2) + (0, min(by, tensor.shape[1])))


def chained(batch: Batch, num_steps: int) -> Tensor:
    """(B, T) bool: rows that a supervised token of a step k >= 1 hangs on. The others serve step 0 and as its keys."""
    out = torch.zeros_like(batch.loss_mask)
    for step in range(1, num_steps):
        out |= shift_left(batch.loss_mask & (batch.position_ids >= step + 2), step + 2)
    return out


def _places(chosen: Tensor) -> Tensor:
    """Where `chosen` (N,) bool is true; one place at least, because transformers' layers do not take an empty row."""
    found = chosen.nonzero().flatten()
    return found if len(found) else found.new_zeros(1)


def unroll(head: DraftHead, ends: Ends, batch: Batch, num_steps: int, noise: Tensor | None = None) -> Tensor:
    """The drafted chain of every row at once: what lm_head reads at each step.

    Rows are laid flat, without padding: (1, N, …). Steps k >= 1 compute the `chained` rows alone, about the supervised share.

    Args:
        batch: packed rows; the token fed at step k is always the data's, never the head's own guess.
        num_steps: K.
        noise: (B, T, H) added to the features of step 0.

    Returns:
        (K, B, T, H): entry [k, :, t] predicts token t + k + 2; zero where it was not computed. Rows whose predicted token lies outside
        their document mean nothing.
    """
    documents = batch.document_ids + (batch.document_ids.max() + 1) * torch.arange(len(batch.document_ids), device=batch.document_ids.device)[:, None]
    rows = _places(batch.document_ids.flatten() >= 0)  # (N,)
    going_on = _places(chained(batch, num_steps).flatten()[rows])  # (M,) of the N
    attention = UnrollAttention(documents.flatten()[rows], going_on)
    features = head.fuse(batch.hidden_states.flatten(0, 1)[None, rows].to(ends.dtype))
    if noise is not None:
        features = features + noise.flatten(0, 1)[None, rows].to(features.dtype)
    readouts, places = [], []
    for step in range(num_steps):
        if step == 1:
            rows, features = rows[going_on], features[:, going_on]
        embeds = ends.embed(shift_left(batch.input_ids, step + 1).flatten()[None, rows])
        features = head(embeds, features, batch.position_ids.flatten()[None, rows] + step, attention)
        readouts.append(head.readout(features)[0])
        places.append(rows + step * batch.input_ids.numel())
    done = torch.cat(readouts)
    out = done.new_zeros(num_steps * batch.input_ids.numel(), done.shape[1]).index_copy_(0, torch.cat(places), done)
    return out.unflatten(0, (num_steps, *batch.input_ids.shape))


@dataclass(frozen=True)
class Supervised:
    """The N tokens a batch trains on, as predicted tokens: one teacher state serves all K steps."""

    students: Tensor  # (K, N, H) readout of step k that predicts the token
    teacher: Tensor  # (N, H) the target's state that predicts it
    valid: Tensor  # (K, N) bool: step k has a row in the same document
    token_ids: Tensor  # (N,) the token itself
    documents: Tensor  # (N,) a number that tokens of one document share


def supervised(readouts: Tensor, batch: Batch) -> Supervised:
    """Gather what the loss sees. Token q is predicted by row q - k - 2 of step k, and by the target's state q - 1."""
    position = batch.position_ids
    row, token = supervised_at(batch)
    students = torch.stack([readouts[k, row, (token - k - 2).clamp(min=0)] for k in range(len(readouts))])
    valid = torch.stack([position[row, token] >= k + 2 for k in range(len(readouts))])
    return Supervised(students, batch.hidden_states[row, token - 1, -1], valid, batch.input_ids[row, token], supervised_documents(batch))


def supervised_at(batch: Batch) -> tuple[Tensor, Tensor]:
    """Row and place (N,), (N,) of the supervised tokens: those of loss_mask that step 0 can predict."""
    row, token = torch.nonzero(batch.loss_mask & (batch.position_ids >= 2), as_tuple=True)
    return row, token


def supervised_documents(batch: Batch) -> Tensor:
    """A number (N,) for each supervised token that it shares with those of its document, in this batch."""
    row, token = supervised_at(batch)
    return row * batch.input_ids.shape[1] + batch.document_ids[row, token]
