"""Capture with the embedded target: the code that serves is the code that is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import transformers
from tqdm import tqdm

from mtp_train.interfaces import Sample, TokenRow
from mtp_train.target.hf import Target

WINDOW = 512  # rows sorted by length together, so that a pass pads little


def engine_info(target: Target) -> dict[str, str]:
    """What a manifest says of this engine: states depend on the precision it computed in."""
    return {
        "name": "embedded",
        "version": f"transformers {transformers.__version__}",
        "dtype": str(next(target.model.parameters()).dtype).removeprefix("torch."),
    }


def passes(rows: Sequence[TokenRow], batch_tokens: int) -> Iterator[list[TokenRow]]:
    """Group rows of like length into passes of at most `batch_tokens` tokens, padding included (a longer row has a pass of its own)."""
    for start in range(0, len(rows), WINDOW):
        group: list[TokenRow] = []
        for row in sorted(rows[start : start + WINDOW], key=lambda row: (len(row.input_ids), row.id)):
            if group and (len(group) + 1) * len(row.input_ids) > batch_tokens:
                yield group
                group = []
            group.append(row)
        if group:
            yield group


def capture(target: Target, rows: Sequence[TokenRow], batch_tokens: int) -> Iterator[Sample]:
    """The target's states of every row, with progress."""
    with tqdm(total=sum(len(row.input_ids) for row in rows), unit="tok", unit_scale=True, desc="capture", mininterval=5, dynamic_ncols=True) as bar:
        for group in passes(rows, batch_tokens):
            num = torch.tensor([len(row.input_ids) for row in group], device=target.device)
            tokens = torch.zeros(len(group), int(num.max()), dtype=torch.long, device=target.device)
            for index, row in enumerate(group):
                tokens[index, : num[index]] = torch.tensor(row.input_ids)
            target.resize(*tokens.shape)
            states = target.prefill(tokens, num, "none").hidden_states.cpu()  # (b, n, L, H)
            for index, row in enumerate(group):
                yield Sample(row.id, row.domain, torch.tensor(row.input_ids), torch.tensor(row.loss_mask), states[index, : num[index]])
            bar.update(int(num.sum()))
