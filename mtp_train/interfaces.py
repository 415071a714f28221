"""The nouns of mtp-train. Read this first, then `heads/mtp.py` and `train.py`.

Shape letters, used everywhere:
    B rows (slots of a batch)   T tokens of a row    L tapped layers   H hidden size
    V vocabulary                K drafted tokens     A accepted tokens of a draft (0..K)

One flow, never backwards:

    Conversation -> TokenRow -> Sample (in shards) -> Batch -> draft head, unrolled -> loss -> checkpoint -> export
                                                        engine: prefill, propose, extend, verify, commit -> AcceptanceStats

The packages `data`, `target` and `heads` do not import one another: they meet here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Rows = slice | Tensor
"""Which slots of a batch a call is about: a slice (a view of the caches) or a LongTensor (a copy)."""

ALL_ROWS: Rows = slice(None)


# ---------------------------------------------------------------- conversations and token rows


@dataclass(frozen=True)
class Conversation:
    """One row of a corpus, before the chat template.

    `messages` are the template's own dictionaries ({"role", "content", and whatever else the template reads}); plain text has no
    messages and `text` set: it is trained on whole. `where` is "file:line", for error messages.
    """

    id: str
    domain: str
    messages: tuple[dict[str, Any], ...]
    where: str
    text: str | None = None


@dataclass(frozen=True)
class Reject:
    """A row that was not used, and why. Rows in = rows out + rejects."""

    where: str
    reason: str  # a short fixed phrase, so that rejects can be counted by it
    detail: str = ""


@dataclass(frozen=True)
class TokenRow:
    """One training row as token ids. `loss_mask[t]`: token t is a training target (an answer token or its end-of-turn)."""

    id: str
    domain: str
    input_ids: list[int]
    loss_mask: list[bool]

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.loss_mask):
            raise ValueError(f"row {self.id}: {len(self.input_ids)} ids but {len(self.loss_mask)} loss_mask entries")


# ---------------------------------------------------------------- captured states


@dataclass(frozen=True)
class Tap:
    """Where in the target a state is read.

    Tap id k is the residual after k decoder layers (0 = embeddings; vLLM's numbering), before any final norm. The teacher state is
    taken after the last layer AND the final norm; it is always the last tap of L.
    """

    layer: int
    norm: Literal["pre", "post"]


@dataclass(frozen=True)
class TargetInfo:
    """What identifies a target, written into every manifest, checkpoint and report.

    States of one target must never train a head for another: `check` compares every field that changes them.
    """

    name: str
    revision: str
    weights_hash: str
    model_type: str
    dtype: str
    quantisation: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tokenizer_hash: str
    chat_template_hash: str

    def check(self, other: TargetInfo, what: str) -> None:
        """Raise ValueError naming every differing field with both values (the name and revision say only where it lies)."""
        mine, theirs = asdict(self), asdict(other)
        different = [f"{key}: {mine[key]!r} there, {theirs[key]!r} here" for key in mine if key not in ("name", "revision") and mine[key] != theirs[key]]
        if different:
            raise ValueError(f"{what} was made for another target ({self.name}); " + "; ".join(different))


@dataclass(frozen=True)
class Sample:
    """One captured row. Nothing is shifted on disk."""

    id: str
    domain: str
    input_ids: Tensor  # (T,) int64
    loss_mask: Tensor  # (T,) bool
    hidden_states: Tensor  # (T, L, H); index L-1 is the teacher state (last layer, post norm)


@dataclass(frozen=True)
class Batch:
    """Packed rows of documents. Attention never crosses a document; padding has document id -1 and no loss."""

    input_ids: Tensor  # (B, T) int64
    position_ids: Tensor  # (B, T) int64, restarts at 0 in every document
    document_ids: Tensor  # (B, T) int64, -1 for padding; unique within a row
    loss_mask: Tensor  # (B, T) bool
    hidden_states: Tensor  # (B, T, L, H)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        return Batch(**{name: getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__})


# ---------------------------------------------------------------- the target's frozen ends


class Ends(Protocol):
    """The two ends of a target that a head shares with it, frozen: equal to the target's own, family multipliers included."""

    hidden_size: int
    vocab_size: int

    @property
    def dtype(self) -> torch.dtype:
        """Of embeddings and lm_head, and so of what a head computes in."""

    @property
    def bytes_per_logit(self) -> int:
        """Bytes alive at once for each logit in `logits` and its backward pass, the logits and their gradient included."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """(…) int64 -> (…, H), as the target's first decoder layer receives them."""

    def logits(self, hidden_states: Tensor, vocab: Tensor | None = None, own: Tensor | None = None) -> Tensor:
        """(…, H) post-norm states -> (…, V) logits; only entries `vocab` (D,) int64: (…, D). With `own` (D, H), a head's lm_head, read by that alone."""

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        """The target's final norm, (…, H) -> (…, H)."""


# ---------------------------------------------------------------- decoding


LogitsFor = Literal["none", "last", "all"]


@dataclass(frozen=True)
class TargetStep:
    """What one target pass returns."""

    logits: Tensor | None  # (B, V) for "last", (B, n, V) for "all", None for "none"
    hidden_states: Tensor  # (B, n, L, H)


@dataclass(frozen=True)
class Proposal:
    """K drafted tokens a row, and the distribution each was drawn from (one-hot where drafting is greedy)."""

    token_ids: Tensor  # (B, K) int64
    probs: Tensor  # (B, K, V)


@dataclass(frozen=True)
class Verdict:
    """What verification decided. Committed tokens = the accepted ones and `next_token`: A + 1."""

    num_accepted: Tensor  # (B,) int64, 0..K
    next_token: Tensor  # (B,) int64
    is_bonus: Tensor  # (B,) bool: next_token follows K accepted (bonus), else it was recovered from the residual


class Drafter(Protocol):
    """Proposes tokens. Its cache holds only what the target has confirmed, except while a proposal is being made."""

    num_draft_tokens: int

    def reset(self, rows: Rows) -> None:
        """Forget these slots: their requests are finished. An idle slot is still carried along, so it must not stay long."""

    def begin(self, first_token_ids: Tensor, rows: Rows) -> None:
        """Forget these slots and begin prompts whose first tokens are (b,): the one token that follows no state."""

    def commit(self, token_ids: Tensor, hidden_states: Tensor, num: Tensor, rows: Rows = ALL_ROWS) -> None:
        """Take in confirmed tokens: prefill (a prompt) and commit (a verified draft) are the same call.

        Args:
            token_ids: (b, n) the token that FOLLOWS each state: x_{t+1} beside h_t. The last valid one is the newest token.
            hidden_states: (b, n, L, H) target states h_t of the positions since the last commit.
            num: (b,) how many of the n are valid; 0 leaves the row as it is.
        """

    def propose(self, temperature: Tensor, uniforms: Tensor) -> Proposal:
        """Draft K tokens for every slot: a chain. temperature (B,), 0 = greedy; uniforms (B, K) in [0, 1)."""
