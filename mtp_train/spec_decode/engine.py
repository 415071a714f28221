"""The embedded draft/target engine. One step is four verbs: propose, extend, verify, commit.

Requests wait in a queue and take a slot as soon as one is free. Plain decoding is the same step with `NoDrafter` (K = 0), so speeds and
outputs are compared on one runner. A request's random numbers depend on its seed alone, never on its neighbours in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mtp_train.interfaces import Drafter
from mtp_train.spec_decode.sampling import sample, target_probs
from mtp_train.spec_decode.stats import AcceptanceStats
from mtp_train.spec_decode.verify import verify
from mtp_train.target.hf import Target

PREFILL_TOKENS = 2048  # of one prefill pass over several prompts, padding included
Kind = Literal["first", "accepted", "recovered", "bonus"]


@dataclass(frozen=True)
class Request:
    """A prompt to answer. `max_new_tokens` counts the stop token; temperature 0 is greedy."""

    id: str
    prompt_ids: list[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """An answer. `kinds[i]` says where token i came from; `stats` count what verify accepted, before any cut."""

    id: str
    token_ids: list[int]
    kinds: list[Kind]
    stats: AcceptanceStats
    finish: Literal["stop", "length"]


@dataclass
class Costs:
    """Seconds spent in each part of the steps, and what they made."""

    propose: float = 0.0
    extend: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    prefill: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0


@dataclass
class _Running:
    """A request in its slot."""

    request: Request
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    finish: Literal["stop", "length"] | None = None

    def emit(self, tokens: list[int], kinds: list[Kind]) -> int:
        """Append committed tokens up to a stop token or the budget; returns how many were kept."""
        for kept, (token, kind) in enumerate(zip(tokens, kinds, strict=True), start=1):
            self.tokens.append(token)
            self.kinds.append(kind)
            if token in self.request.stop_token_ids:
                self.finish = "stop"
            elif len(self.tokens) == self.request.max_new_tokens:
                self.finish = "length"
            if self.finish:
                return kept
        return len(tokens)


class Engine:
    """Batched speculative decoding of a queue of requests on a target's slots."""

    def __init__(self, target: Target, drafter: Drafter, prefill_chunk: int = 0):
        self.target, self.drafter, self.prefill_chunk = target, drafter, prefill_chunk
        self.num_slots = target.cache.num_slots
        self.slots: list[_Running | None] = [None] * self.num_slots
        self.newest = torch.zeros(self.num_slots, dtype=torch.long, device=target.device)  # committed, not yet read by the target
        self.costs = Costs()

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Answer requests, in the order in which they finish. Raises ValueError for one that does not fit a slot."""
        waiting = iter(requests)
        self.slots = [None] * self.num_slots  # whatever an aborted run left behind is forgotten
        while True:
            while self._admit(waiting):  # a request may be finished by its very first token
                yield from self._finished()
            if not any(self.slots):
                return
            self.step()
            yield from self._finished()

    def _admit(self, waiting: Iterator[Request]) -> bool:
        """Fill free slots from the queue; False when there is nothing to fill or nobody waits."""
        taken = list(zip([index for index, slot in enumerate(self.slots) if slot is None], waiting, strict=False))
        group: list[tuple[int, Request]] = []
        for index, request in sorted(taken, key=lambda pair: len(pair[1].prompt_ids)):
            if group and (len(group) + 1) * len(request.prompt_ids) > PREFILL_TOKENS:
                self._prefill(group)
                group = []
            group.append((index, request))
        if group:
            self._prefill(group)
        return bool(taken)

    def _prefill(self, group: list[tuple[int, Request]]) -> None:
        """Read prompts into free slots and emit each one's first token."""
        slots, requests = [slot for slot, _ in group], [request for _, request in group]
        room = self.target.cache.max_length - self.drafter.num_draft_tokens - 1
        for request in requests:
            if not request.prompt_ids or len(request.prompt_ids) + request.max_new_tokens > room:
                raise ValueError(
                    f"request {request.id}: a prompt of {len(request.prompt_ids)} tokens and {request.max_new_tokens} new ones "
                    f"do not fit the {room} tokens of a slot"
                )
        start = time.perf_counter()
        device = self.target.device
        num = torch.tensor([len(request.prompt_ids) for request in requests], device=device)
        prompt = torch.zeros(len(requests), int(num.max()), dtype=torch.long, device=device)
        for row, request in enumerate(requests):
            prompt[row, : num[row]] = torch.tensor(request.prompt_ids, device=device)
        rows = torch.tensor(slots, device=device)
        out = self.target.prefill(prompt, num, "last", rows, self.prefill_chunk)
        assert out.logits is not None
        running = [_Running(request, torch.Generator().manual_seed(request.seed)) for request in requests]
        heat = torch.tensor([request.temperature for request in requests], device=device)
        uniforms = torch.stack([torch.rand(1, generator=one.generator, dtype=torch.float64) for one in running]).to(device)[:, 0]
        first = sample(target_probs(out.logits.float(), heat), uniforms)
        self.newest[rows] = first
        following = torch.cat([prompt[:, 1:], prompt[:, :1]], dim=1)  # x_{t+1} beside h_t; the last one is the first answer token
        following[torch.arange(len(requests), device=device), num - 1] = first
        self.drafter.begin(prompt[:, 0], rows)
        self.drafter.commit(following, out.hidden_states, num, rows)
        for slot, one, token in zip(slots, running, first.tolist(), strict=True):
            self.slots[slot] = one
            one.emit([token], ["first"])
        self.costs.prefill += time.perf_counter() - start

    def _finished(self) -> Iterator[Completion]:
        for index, one in enumerate(self.slots):
            if one is not None and one.finish:
                self.slots[index] = None
                row = torch.tensor([index], device=self.target.device)
                self.target.reset(row)
                self.drafter.reset(row)
                self.costs.num_tokens += len(one.tokens)
                yield Completion(one.request.id, one.tokens, one.kinds, one.stats, one.finish)

    def _randoms(self, count: int) -> Tensor:
        """(B, count) uniforms, each row from its own request."""
        rows = [
            torch.rand(count, generator=one.generator, dtype=torch.float64)
            if one and one.request.temperature > 0
            else torch.full((count,), 0.5, dtype=torch.float64)
            for one in self.slots
        ]
        return torch.stack(rows).to(self.target.device)

    def step(self) -> None:
        """One round for every slot. Empty slots are carried along and commit nothing."""
        num_draft = self.drafter.num_draft_tokens
        heat = torch.tensor([one.request.temperature if one else 0.0 for one in self.slots], device=self.target.device)
        active = torch.tensor([one is not None for one in self.slots], device=self.target.device)
        uniforms = self._randoms(2 * num_draft + 1)
        marks = [time.perf_counter()]
        proposal = self.drafter.propose(heat, uniforms[:, :num_draft])
        marks.append(time.perf_counter())
        tokens = torch.cat([self.newest[:, None], proposal.token_ids], dim=1)  # (B, K + 1)
        out = self.target.extend(tokens, "all")
        assert out.logits is not None
        marks.append(time.perf_counter())
        verdict = verify(proposal, target_probs(out.logits.float(), heat), uniforms[:, num_draft:])
        marks.append(time.perf_counter())
        num = (verdict.num_accepted + 1) * active
        self.target.commit(num)
        following = torch.cat([proposal.token_ids, verdict.next_token[:, None]], dim=1)
        following[torch.arange(self.num_slots, device=num.device), verdict.num_accepted] = verdict.next_token
        self.drafter.commit(following, out.hidden_states, num)
        self.newest = torch.where(active, verdict.next_token, self.newest)
        marks.append(time.perf_counter())
        self._record(following.tolist(), verdict.num_accepted.tolist(), verdict.is_bonus.tolist())
        self.costs.num_steps += 1
        for name, begin, end in zip(("propose", "extend", "verify", "commit"), marks, marks[1:], strict=False):
            setattr(self.costs, name, getattr(self.costs, name) + end - begin)

    def _record(self, following: list[list[int]], accepted: list[int], bonus: list[bool]) -> None:
        """Count and emit what each request got."""
        num_draft = self.drafter.num_draft_tokens
        for one, row, num, is_bonus in zip(self.slots, following, accepted, bonus, strict=True):
            if one is None:
                continue
            kinds: list[Kind] = ["accepted"] * num + ["bonus" if is_bonus else "recovered"]  # type: ignore[assignment]
            kept = one.emit(row[: num + 1], kinds)
            one.stats += AcceptanceStats.of(num, num_draft, num_cut=num + 1 - kept)
