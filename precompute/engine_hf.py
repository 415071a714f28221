"""Regeneration and capture by the embedded target: the code that serves is the code that is recorded."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
import transformers
from tqdm import tqdm

from mtp_train.dist import pick_device
from mtp_train.interfaces import Sample, Tap, TokenRow
from mtp_train.spec_decode.drafters import NoDrafter
from mtp_train.spec_decode.engine import Completion, Engine, Request
from mtp_train.target.ends import local_dir
from mtp_train.target.hf import Target

log = logging.getLogger(__name__)

WINDOW = 512  # rows sorted by length together, so that a pass pads little


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


class EmbeddedEngine:
    """What `precompute.run` needs of an engine, by the slot-cache target. Weights are loaded when first needed."""

    def __init__(self, path: str, taps: tuple[Tap, ...], dtype: str, device: str, max_length: int):
        self.path, self.taps, self.dtype, self.device, self.max_length = path, taps, dtype, pick_device(device), max_length

    @cached_property
    def target(self) -> Target:
        """The loaded target."""
        target = Target.load(local_dir(self.path), getattr(torch, self.dtype), 1, 1, self.taps, self.device)
        log.info("target %s: %s on %s", self.path, self.dtype, self.device)
        return target

    @property
    def info(self) -> dict[str, str]:
        """For the manifest: states depend on the engine and its precision."""
        return {"name": "embedded", "version": f"transformers {transformers.__version__}", "dtype": self.dtype}

    def generate(self, requests: Sequence[Request], batch_size: int) -> Iterator[Completion]:
        """Answer requests by plain decoding, in the order in which they finish."""
        self.target.resize(min(batch_size, max(1, len(requests))), self.max_length + 1)
        yield from Engine(self.target, NoDrafter(self.target.ends.vocab_size)).generate(requests)

    def capture(self, rows: Sequence[TokenRow], batch_tokens: int) -> Iterator[Sample]:
        """The target's states of every row, with progress."""
        target = self.target
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

    def close(self) -> None:
        """Nothing runs beside this process."""
