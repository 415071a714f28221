"""Held-out prompts: each conversation is answered from its last user (or tool) turn, rendered as in training."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_train.data.chat import prompt_ids
from mtp_train.data.corpus import BadRow, read_corpus
from mtp_train.interfaces import Reject

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt."""

    id: str
    domain: str
    text: str  # the last question, for the report
    token_ids: list[int]


def read_prompts(path: str, tokenizer: Any, num_prompts: int | None, template_kwargs: dict[str, Any]) -> list[Prompt]:
    """Prompts of a JSONL file, `num_prompts` of them at most, taken evenly from the domains.

    Raises:
        FileNotFoundError: no such file. ValueError: not one usable prompt.
    """
    by_domain: dict[str, list[Prompt]] = defaultdict(list)
    rejects: list[Reject] = []
    for row in read_corpus(path, need_answer=False):
        if isinstance(row, Reject):
            rejects.append(row)
            continue
        try:
            last = max((index for index, message in enumerate(row.messages) if message["role"] in ("user", "tool")), default=-1)
            if last < 0:
                raise BadRow("no question")
            messages = row.messages[: last + 1]
            by_domain[row.domain].append(Prompt(row.id, row.domain, messages[-1]["content"], prompt_ids(messages, tokenizer, template_kwargs)))
        except BadRow as bad:
            rejects.append(Reject(row.where, bad.reason, bad.detail))
    for one in rejects:
        log.warning("prompt rejected, %s: %s %s", one.where, one.reason, one.detail)
    if not by_domain:
        raise ValueError(
            f"{Path(path).name} has no usable prompt; {len(rejects)} rejected" + (f", first {rejects[0].where}: {rejects[0].reason}" if rejects else "")
        )
    share = None if num_prompts is None else max(1, num_prompts // len(by_domain))
    return [prompt for domain in sorted(by_domain) for prompt in by_domain[domain][:share]]
