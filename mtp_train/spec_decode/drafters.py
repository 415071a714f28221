"""What proposes tokens: a draft head on the target's states, a small LM, or nothing (plain decoding).

All keep one rule: after `commit` a slot's cache holds the target's confirmed past and nothing else. Guesses made by `propose` lie beyond
the slot's length, where the next commit overwrites them with rows made from TARGET states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_train.heads.attention import attend
from mtp_train.heads.base import DraftHead
from mtp_train.interfaces import ALL_ROWS, Ends, Proposal, Rows
from mtp_train.spec_decode.sampling import sample, target_probs
from mtp_train.target.hf import Target
from mtp_train.target.kv import SlotCache


class SlotAttention:
    """Drafting: queries meet what their slot's cache holds."""

    def __init__(self, cache: SlotCache):
        self.cache = cache

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None) -> Tensor:
        keys, values = self.cache.update(key, value, layer)
        return attend(query, keys, values, self.cache.mask(), [], scaling, softcap)


class ChainDrafter:
    """Drafts K tokens one after another. A subclass says how one more token is read and which logits follow."""

    def __init__(self, num_draft_tokens: int, probabilistic: bool, vocab: Tensor | None, vocab_size: int):
        """`probabilistic`: sample drafts at the request's temperature; else draft greedily. `vocab` (D,): draft among these ids only."""
        self.num_draft_tokens, self.probabilistic = num_draft_tokens, probabilistic
        self.vocab, self.vocab_size = vocab, vocab_size

    def first_logits(self) -> Tensor:
        """Logits (B, D) of the first draft, as the last commit left them."""
        raise NotImplementedError

    def next_logits(self, token_ids: Tensor) -> Tensor:
        """Read one guessed token (B,) and return the logits (B, D) of the next draft."""
        raise NotImplementedError

    def start_chain(self) -> None:
        """A proposal begins."""
        raise NotImplementedError

    def end_chain(self) -> None:
        """Forget the guesses."""
        raise NotImplementedError

    def propose(self, temperature: Tensor, uniforms: Tensor) -> Proposal:
        """Draft K tokens for every slot. temperature (B,); uniforms (B, K)."""
        heat = temperature if self.probabilistic else torch.zeros_like(temperature)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        self.start_chain()
        for step in range(self.num_draft_tokens):
            logits = self.first_logits() if step == 0 else self.next_logits(tokens[-1])
            draft_probs = target_probs(logits.float(), heat)  # (B, D)
            index = sample(draft_probs, uniforms[:, step])
            tokens.append(index if self.vocab is None else self.vocab[index])
            probs.append(self._widen(draft_probs))
        self.end_chain()
        return Proposal(torch.stack(tokens, dim=1), torch.stack(probs, dim=1))

    def _widen(self, draft_probs: Tensor) -> Tensor:
        """(B, D) over the draft vocabulary -> (B, V); what lies outside has probability 0."""
        if self.vocab is None:
            return draft_probs
        return draft_probs.new_zeros(len(draft_probs), self.vocab_size).index_copy_(1, self.vocab, draft_probs)


class HeadDrafter(ChainDrafter):
    """The trained head. Slot position and rope position are one: row t of step 0 stands at t, its own step k at t + k."""

    def __init__(
        self, head: DraftHead, ends: Ends, num_draft_tokens: int, num_slots: int, max_length: int, *, probabilistic: bool = False, vocab: Tensor | None = None
    ):
        super().__init__(num_draft_tokens, probabilistic, vocab, ends.vocab_size)
        self.head, self.ends = head.eval(), ends
        parameter = next(head.parameters())
        self.cache = SlotCache(num_slots, max_length, parameter.device)
        self.attention = SlotAttention(self.cache)
        self.dtype = parameter.dtype
        self.confirmed = torch.zeros(num_slots, ends.hidden_size, dtype=self.dtype, device=parameter.device)  # g^1 of each slot's last row
        self.features = self.confirmed

    def reset(self, rows: Rows) -> None:
        """Forget these slots."""
        self.cache.lengths[rows] = 0

    def begin(self, first_token_ids: Tensor, rows: Rows) -> None:
        """Forget these slots; a head never embeds a prompt's first token."""
        self.reset(rows)

    @torch.no_grad()
    def commit(self, token_ids: Tensor, hidden_states: Tensor, num: Tensor, rows: Rows = ALL_ROWS) -> None:
        """Write step-0 rows from target states; the last one's feature starts the next chain. See `interfaces.Drafter`."""
        positions = self.cache.begin(token_ids.shape[1], rows)
        features = self.head.fuse(hidden_states.to(self.dtype))
        out = self.head(self.ends.embed(token_ids).to(self.dtype), features, positions, self.attention)  # (b, n, H)
        last = out[torch.arange(len(out), device=out.device), (num - 1).clamp(min=0)]
        self.confirmed[rows] = torch.where((num > 0)[:, None], last, self.confirmed[rows])
        self.cache.commit(num, rows)

    def start_chain(self) -> None:
        self.features, self.saved = self.confirmed, self.cache.lengths.clone()

    def end_chain(self) -> None:
        self.cache.rollback(self.saved)

    @torch.no_grad()
    def first_logits(self) -> Tensor:
        return self.ends.logits(self.head.readout(self.features), self.vocab, self.head.lm_head_weight)

    @torch.no_grad()
    def next_logits(self, token_ids: Tensor) -> Tensor:
        positions = self.cache.begin(1)
        embeds = self.ends.embed(token_ids[:, None]).to(self.dtype)
        self.features = self.head(embeds, self.features[:, None], positions, self.attention)[:, 0]
        self.cache.commit(torch.ones_like(self.cache.lengths))
        return self.first_logits()


class LMDrafter(ChainDrafter):
    """A separate LM with the target's vocabulary. With the target itself every draft must be accepted: a self-check of an engine."""

    def __init__(self, lm: Target, num_draft_tokens: int, *, probabilistic: bool = False):
        super().__init__(num_draft_tokens, probabilistic, None, lm.ends.vocab_size)
        self.lm = lm
        self.confirmed = torch.zeros(lm.cache.num_slots, lm.ends.vocab_size, device=lm.device)

    def reset(self, rows: Rows) -> None:
        """Forget these slots."""
        self.lm.reset(rows)

    def begin(self, first_token_ids: Tensor, rows: Rows) -> None:
        """Forget these slots and read the first token of each prompt (b,)."""
        self.reset(rows)
        self.lm.extend(first_token_ids[:, None], "none", rows=rows)
        self.lm.commit(torch.ones_like(first_token_ids), rows)

    def commit(self, token_ids: Tensor, hidden_states: Tensor, num: Tensor, rows: Rows = ALL_ROWS) -> None:
        """Read confirmed tokens; the target's states are of no use to a separate LM."""
        step = self.lm.extend(token_ids, "last", num, rows)
        assert step.logits is not None
        self.lm.commit(num, rows)
        self.confirmed[rows] = torch.where((num > 0)[:, None], step.logits.float(), self.confirmed[rows])

    def start_chain(self) -> None:
        self.saved = self.lm.lengths.clone()

    def end_chain(self) -> None:
        self.lm.rollback(self.saved)

    def first_logits(self) -> Tensor:
        return self.confirmed

    def next_logits(self, token_ids: Tensor) -> Tensor:
        step = self.lm.extend(token_ids[:, None], "last")
        assert step.logits is not None
        self.lm.commit(torch.ones_like(self.lm.lengths))
        return step.logits


class NoDrafter:
    """Plain decoding: no proposal, so every step commits the target's own next token."""

    num_draft_tokens = 0

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def reset(self, rows: Rows) -> None:
        """Nothing is kept."""

    def begin(self, first_token_ids: Tensor, rows: Rows) -> None:
        """Nothing is kept."""

    def commit(self, token_ids: Tensor, hidden_states: Tensor, num: Tensor, rows: Rows = ALL_ROWS) -> None:
        """Nothing is kept."""

    def propose(self, temperature: Tensor, uniforms: Tensor) -> Proposal:
        """No tokens, (B, 0)."""
        empty = torch.zeros(len(temperature), 0, dtype=torch.long, device=temperature.device)
        return Proposal(empty, torch.zeros(*empty.shape, self.vocab_size, device=empty.device))
