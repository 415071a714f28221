"""On-policy data: replace the assistant turns of a corpus by the target's own answers, with the configured engine.

Answers are kept as the very ids the target produced, never re-tokenised. They go to a journal, one line an answer, so that a killed run
goes on at the answer where it was.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from mtp_train.config import RegenerateConfig
from mtp_train.data.chat import Tally, prompt_ids
from mtp_train.data.corpus import BadRow
from mtp_train.interfaces import Conversation, Reject, TokenRow
from mtp_train.provenance import Claim, atomic_write
from mtp_train.spec_decode.engine import Completion, Request

log = logging.getLogger(__name__)

MIN_ANSWER = 8  # tokens; a turn with less room is not asked for
BLOCK = 4096  # conversations held in memory


@dataclass
class _Dialog:
    """A conversation while its answers are made."""

    source: Conversation
    history: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    cursor: int = 0  # messages of the source already used
    end: Reject | None = None  # why it stops before the end of the source

    @property
    def more(self) -> bool:
        """Whether the source goes on with anything but an answer."""
        return any(message["role"] != "assistant" for message in self.source.messages[self.cursor :])

    def ask(self) -> bool:
        """Move on to the next question; False at the end. Assistant turns of the source are skipped: the target answers itself."""
        messages = self.source.messages
        while self.cursor < len(messages) and messages[self.cursor]["role"] in ("assistant", "system", "user"):
            message = messages[self.cursor]
            if message.get("tool_calls"):
                break
            self.cursor += 1
            if message["role"] != "assistant":
                self.history.append(message)
            if message["role"] == "user":
                return True
        return False


class Generator(Protocol):
    """What answers: the embedded engine or vLLM."""

    def generate(self, requests: Sequence[Request], batch_size: int) -> Iterator[Completion]:
        """Answer requests, in the order in which they finish."""


class Journal:
    """Answers already made, by conversation and turn; its first line says for which inputs they were made. Written under a claim."""

    def __init__(self, path: Path, fingerprint: str, claim: Claim):
        self.path, self.claim, self.answers = path, claim, {}
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if whole and json.loads(whole[0]).get("fingerprint") == fingerprint:
            for line in whole[1:]:
                entry = json.loads(line)
                self.answers[entry["id"], entry["turn"]] = entry
        else:
            whole = [json.dumps({"fingerprint": fingerprint}).encode() + b"\n"]
        atomic_write(path, b"".join(whole), claim.check)  # a new file: who had the old one open writes into nothing
        self.file = path.open("a")

    def add(self, id: str, turn: int, ids: list[int], finish: str) -> None:
        """Keep an answer."""
        self.claim.check()
        entry = {"id": id, "turn": turn, "ids": ids, "finish": finish}
        self.answers[id, turn] = entry
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()


def seed_of(seed: int, id: str, turn: int) -> int:
    """A request's own seed: it depends on the row, not on its neighbours in the batch."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{id}:{turn}".encode()).digest()[:7], "big")


class Regenerator:
    """Turns conversations into token rows whose answers are the target's own."""

    def __init__(self, engine: Generator, tokenizer: Any, stops: frozenset[int], options: RegenerateConfig, max_length: int, template_kwargs: dict[str, Any]):
        self.engine, self.tokenizer, self.stops, self.options = engine, tokenizer, stops, options
        self.max_length, self.template_kwargs = max_length, template_kwargs

    def rows(self, conversations: Sequence[Conversation], journal: Journal, tally: Tally) -> Iterator[TokenRow | Reject]:
        """Answer every conversation; rows come in their order. `tally` counts those that stop before the end of their conversation."""
        for start in range(0, len(conversations), BLOCK):
            yield from self._block([_Dialog(one) for one in conversations[start : start + BLOCK]], journal, tally)

    def _block(self, dialogs: list[_Dialog], journal: Journal, tally: Tally) -> Iterator[TokenRow | Reject]:
        going, turn = dialogs, 0
        while going:
            prompts = {dialog.source.id: prompt for dialog in going if (prompt := self._prompt(dialog)) is not None}
            self._answer(prompts, turn, journal)
            going = [
                dialog
                for dialog in going
                if dialog.source.id in prompts and self._take(dialog, prompts[dialog.source.id], journal.answers[dialog.source.id, turn])
            ]
            turn += 1
        for dialog in dialogs:
            if dialog.end and not dialog.ids:
                yield dialog.end
                continue
            if dialog.end:
                tally.shorten(dialog.end)
            yield TokenRow(dialog.source.id, dialog.source.domain, dialog.ids, dialog.mask)

    def _prompt(self, dialog: _Dialog) -> list[int] | None:
        """The ids of the next question, or None when the dialog ends here (`dialog.end` says why where it should go on)."""
        try:
            if dialog.source.text is not None:
                raise BadRow("plain text cannot be regenerated")
            if not dialog.ask():
                if dialog.ids and not dialog.more:
                    return None
                raise BadRow("no question that can be regenerated")
            prompt = prompt_ids(dialog.history, self.tokenizer, self.template_kwargs)
            if len(prompt) + MIN_ANSWER > self.max_length:
                raise BadRow("the prompt leaves no room within max_length", f"{len(prompt)} tokens, max_length {self.max_length}")
            if prompt[: len(dialog.ids)] != dialog.ids:
                raise BadRow("the template rewrites earlier turns")
            return prompt
        except BadRow as bad:
            dialog.end = Reject(dialog.source.where, bad.reason, bad.detail)
            return None

    def _answer(self, prompts: dict[str, list[int]], turn: int, journal: Journal) -> None:
        """Make the answers that the journal does not have."""
        options = self.options
        requests = [
            Request(id, prompt, min(options.max_new_tokens, self.max_length - len(prompt)), self.stops, options.temperature, seed_of(options.seed, id, turn))
            for id, prompt in prompts.items()
            if (id, turn) not in journal.answers
        ]
        if not requests:
            return
        tokens, begun = 0, time.perf_counter()
        with tqdm(total=len(requests), unit="answer", desc=f"regenerate, turn {turn + 1}", mininterval=5, dynamic_ncols=True) as bar:
            for completion in self.engine.generate(requests, options.batch_size):
                journal.add(completion.id, turn, completion.token_ids, completion.finish)
                tokens += len(completion.token_ids)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - begun):.0f} tok/s", refresh=False)
                bar.update()

    def _take(self, dialog: _Dialog, prompt: list[int], answer: dict[str, Any]) -> bool:
        """Append an answer; True when the dialog may go on (an answer cut by the budget ends it)."""
        ids = answer["ids"]
        dialog.mask += [False] * (len(prompt) - len(dialog.ids)) + [True] * len(ids)
        dialog.ids = prompt + ids
        kept = ids[:-1] if answer["finish"] == "stop" else ids
        dialog.history.append({"role": "assistant", "content": self.tokenizer.decode(kept, skip_special_tokens=True)})
        whole = answer["finish"] == "stop"
        if not whole and dialog.more:
            dialog.end = Reject(dialog.source.where, "an answer was cut, questions follow it", f"after {len(ids)} tokens")
        return whole
