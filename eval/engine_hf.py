"""The embedded engine under evaluation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eval.engine import Decoded, DraftVocab
from eval.prompts import Prompt
from mtp_train import config as cfg
from mtp_train.checkpoint import LoadedHead
from mtp_train.data.dataset import collate
from mtp_train.dist import pick_device
from mtp_train.heads.base import DraftHead, supervised, unroll
from mtp_train.interfaces import Drafter, Sample
from mtp_train.loss import LossSums, draft_loss
from mtp_train.spec_decode.drafters import HeadDrafter, NoDrafter
from mtp_train.spec_decode.engine import Engine, Request
from mtp_train.spec_decode.predict import prediction, walk
from mtp_train.spec_decode.stats import AcceptanceStats
from mtp_train.target.ends import local_dir
from mtp_train.target.hf import Target


class EmbeddedEngine:
    """Slot-cache target and head in this process."""

    name = title = "embedded"
    decodes_plainly = True

    def __init__(self, config: cfg.Config, loaded: LoadedHead, stops: frozenset[int], longest: int):
        self.config, self.loaded, self.stops, self.longest = config, loaded, stops, longest
        self.device = pick_device(config.target.device)
        self.vocab = DraftVocab(config, loaded)
        self.dtype = ""

    def load(self, dtype: str) -> None:
        """(Re)load target and head in a precision."""
        if dtype == self.dtype:
            return
        self.dtype = dtype
        self.target = Target.load(local_dir(self.config.target.path), dtype, 1, 1, self.loaded.info.taps, self.device)
        self.loaded = replace(self.loaded, head=self.loaded.head.to(self.device, getattr(torch, dtype)))

    def draft_vocab(self, run: cfg.EvalRunConfig) -> Tensor | None:
        """The ids (D,) that a run drafts from; None: all."""
        vocab = self.vocab(run.draft_vocab_size)
        return None if vocab is None else vocab.to(self.device)

    def decode(
        self, run: cfg.EvalRunConfig | None, prompts: Sequence[Prompt], batch_size: int, max_new_tokens: int, what: str, head: DraftHead | None = None
    ) -> Decoded:
        """Answer prompts with a run's drafting (by `head`, where another is given), or plainly."""
        num_draft = run.num_draft_tokens if run else 0
        slots, size = min(batch_size, len(prompts)), self.longest + max_new_tokens + num_draft + 2
        self.target.resize(slots, size)
        drafter: Drafter = NoDrafter(self.loaded.info.target.vocab_size)
        if run:
            probabilistic, vocab = run.draft_sampling == "probabilistic", self.draft_vocab(run)
            drafter = HeadDrafter(head or self.loaded.head, self.target.ends, num_draft, slots, size, probabilistic=probabilistic, vocab=vocab)
        heat, seed = (run.temperature if run else 0.0), self.config.eval.seed
        requests = [Request(one.id, one.token_ids, max_new_tokens, self.stops, heat, seed + index) for index, one in enumerate(prompts)]
        engine, start = Engine(self.target, drafter), time.perf_counter()
        done = {one.id: one for one in tqdm(engine.generate(requests), total=len(requests), desc=what, unit="prompt", mininterval=5, dynamic_ncols=True)}
        return Decoded(done, engine.costs, time.perf_counter() - start)

    def top2_gap(self, token_ids: list[int]) -> float:
        """The target's gap between its two best next tokens."""
        self.target.resize(1, len(token_ids))
        logits = self.target.prefill(torch.tensor([token_ids], device=self.device), torch.tensor([len(token_ids)], device=self.device)).logits
        assert logits is not None
        best = logits[0].float().topk(2).values
        return float(best[0] - best[1])

    def draft_gap(self, token_ids: list[int], run: cfg.EvalRunConfig, position: int) -> float:
        """The head's gap between its two best tokens for draft `position` (from 0), after the committed `token_ids`."""
        self.target.resize(1, len(token_ids) + run.num_draft_tokens + 2)
        ids = torch.tensor([token_ids], device=self.device)
        num = torch.tensor([len(token_ids) - 1], device=self.device)  # the newest token is committed, and not yet read by the target
        states = self.target.prefill(ids[:, :-1], num, "none").hidden_states
        drafter = HeadDrafter(self.loaded.head, self.target.ends, run.num_draft_tokens, 1, ids.shape[1] + run.num_draft_tokens + 2, vocab=self.draft_vocab(run))
        every = torch.zeros(1, dtype=torch.long, device=self.device)
        drafter.begin(ids[:, 0], every)
        drafter.commit(ids[:, 1:], states, num, every)
        drafter.start_chain()
        logits = drafter.first_logits()
        for _ in range(position):
            best = logits.argmax(-1)
            logits = drafter.next_logits(best if drafter.vocab is None else drafter.vocab[best])
        two = logits[0].float().topk(2).values
        return float(two[0] - two[1])

    def self_checks(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """None at run time: the tests of this package hold this engine against enumeration and against a draft equal to the target."""
        return []

    @torch.no_grad()
    def live_validation(self, prompts: Sequence[Prompt], plain: Decoded) -> dict[str, Any] | None:
        """Loss parts of the live head against the live target, on the answers that plain decoding just gave."""
        steps, total, walked = self.loaded.info.unroll_steps, None, AcceptanceStats()
        for prompt in prompts:
            answer = plain.completions[prompt.id].token_ids
            ids = torch.tensor(prompt.token_ids + answer)
            mask = torch.arange(len(ids)) >= len(prompt.token_ids)
            self.target.resize(1, len(ids))
            states = self.target.prefill(ids[None].to(self.device), torch.tensor([len(ids)], device=self.device), "none").hidden_states[0]
            batch = collate([[Sample(prompt.id, prompt.domain, ids, mask, states.cpu())]], len(ids)).to(self.device)
            rows = supervised(unroll(self.loaded.head, self.target.ends, batch, steps), batch)
            sums, drafted = draft_loss(self.target.ends, rows, self.config.train.loss, self.loaded.draft_vocab, self.loaded.head.lm_head_weight)
            total = sums if total is None else total + sums
            walked = sum(walk(drafted, batch), walked)
        assert isinstance(total, LossSums)
        return {**total.averages(), **prediction(walked)}

    def close(self) -> None:
        """Everything is this process's own."""
