"""What `eval.run` needs of an inference engine."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from eval.prompts import Prompt
from mtp_train.checkpoint import LoadedHead
from mtp_train.config import Config, EvalRunConfig
from mtp_train.data.shards import ShardReader
from mtp_train.spec_decode.engine import Completion, Costs
from mtp_train.spec_decode.stats import AcceptanceStats

log = logging.getLogger(__name__)


@dataclass
class Decoded:
    """What one pass over the prompts gave."""

    completions: dict[str, Completion]
    costs: Costs | None  # None: the engine does not say where its time goes
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """After each answer's first token (which belongs to its prefill) where the engine times its parts; else of the whole, prefill included.

        None where no answer has more than that first token.
        """
        num_tokens = sum(len(one.token_ids) for one in self.completions.values())
        if self.costs is None:
            return num_tokens / self.seconds
        num_after = num_tokens - len(self.completions)
        return num_after / (self.seconds - self.costs.prefill) if num_after else None


def check_counters(completions: Iterable[Completion], counted: list[int]) -> None:
    """Raise ValueError unless an engine's own counters (drafts, draft tokens, accepted, accepted at each position) are the sums over our requests."""
    total = sum((one.stats for one in completions), AcceptanceStats())
    mine = [total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens, *total.num_accepted_tokens_per_pos]
    if total.num_drafts and counted != mine:
        raise ValueError(f"vLLM counted {counted}, its requests sum to {mine}: another client is using this engine; measure while it is idle")


class DraftVocab:
    """A run's draft vocabulary: the head's own, or the most frequent answer tokens of the training shards."""

    def __init__(self, config: Config, loaded: LoadedHead):
        self.shards, self.loaded = Path(config.run_dir) / "shards" / "train", loaded
        self.vocab_size = loaded.info.target.vocab_size
        self.known: dict[int, Tensor] = {}
        own = loaded.head.lm_head_weight
        for size in (run.draft_vocab_size for run in config.eval.runs):
            if own is None or size in (None, len(own)):
                continue
            if size < len(own):
                raise ValueError(f"eval.runs: draft_vocab_size={size}, but the head has an lm_head of its own, of {len(own)} tokens: give null")
            log.warning("eval.runs: draft_vocab_size=%d, but the head's own lm_head has %d tokens: it drafts from those", size, len(own))

    def __call__(self, size: int | None) -> Tensor | None:
        """Sorted ids (D,); None: the whole vocabulary. `size` None: the head's own."""
        if size is None or self.loaded.head.lm_head is not None:
            return self.loaded.draft_vocab
        if size >= self.vocab_size:
            return None
        if size not in self.known:
            self.known[size] = ShardReader(self.shards).frequent_tokens(size, self.vocab_size)[0]
        return self.known[size]


class EvalEngine(Protocol):
    """An engine with a target and a head."""

    name: str
    title: str  # for the report
    decodes_plainly: bool
    dtype: str

    def load(self, dtype: str) -> None:
        """(Re)load in a precision."""

    def draft_vocab(self, run: EvalRunConfig) -> Tensor | None:
        """The ids (D,) that a run drafts from; None: all."""

    def self_checks(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """What must hold before a figure is believed: rows {name, passed, found}."""

    def decode(self, run: EvalRunConfig | None, prompts: Sequence[Prompt], batch_size: int, max_new_tokens: int, what: str) -> Decoded:
        """Answer prompts with a run's drafting, or plainly; `what` labels the progress bar."""

    def top2_gap(self, token_ids: list[int]) -> float:
        """The target's logit gap between its two best next tokens."""

    def live_validation(self, prompts: Sequence[Prompt], plain: Decoded) -> dict[str, Any] | None:
        """Loss parts of the live head against the live target; None where the engine does not show states."""

    def close(self) -> None:
        """Free what it holds."""
