"""Held-out prompts: each conversation is answered from its last user (or tool) turn, rendered as in training."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
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


def evenly(prompts: Sequence[Prompt], num: int | None) -> list[Prompt]:
    """`num` prompts (None: all), one of each domain in turn while it has more."""
    by_domain: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_domain[prompt.domain].append(prompt)
    return [prompt for group in zip_longest(*by_domain.values()) for prompt in group if prompt is not None][:num]


def read_prompts(path: str, tokenizer: Any, num_prompts: int | None, template_kwargs: dict[str, Any]) -> list[Prompt]:
    """Prompts of a JSONL file by domain, `num_prompts` of them at most, taken evenly from the domains.

    Raises:
        FileNotFoundError: no such file. ValueError: not one usable prompt.
    """
    prompts: list[Prompt] = []
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
            prompts.append(Prompt(row.id, row.domain, messages[-1]["content"], prompt_ids(messages, tokenizer, template_kwargs)))
        except BadRow as bad:
            rejects.append(Reject(row.where, bad.reason, bad.detail))
    for one in rejects:
        log.warning("prompt rejected, %s: %s %s", one.where, one.reason, one.detail)
    if not prompts:
        raise ValueError(
            f"{Path(path).name} has no usable prompt; {len(rejects)} rejected" + (f", first {rejects[0].where}: {rejects[0].reason}" if rejects else "")
        )
    prompts.sort(key=lambda prompt: prompt.domain)
    return sorted(evenly(prompts, num_prompts), key=lambda prompt: prompt.domain)
