"""A key/value cache of slots in which every row has its own length and roll-back is only an index.

A pass writes the keys of row b at positions `lengths[b] .. lengths[b] + n - 1` and does not advance the row; `commit` advances it. What
lies past a row's length is never attended to and is overwritten by the next pass: rejected drafts need no clean-up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mtp_train.interfaces import ALL_ROWS, Rows


class SlotCache(Cache):
    """Holds keys and values of all layers for `num_slots` rows of up to `max_length` tokens.

    Works inside any transformers decoder that calls `past_key_values.update(keys, values, layer_idx)`. The mask of a pass must be made by
    `mask`, since rows differ in length.
    """

    def __init__(self, num_slots: int, max_length: int, device: torch.device | str = "cpu"):
        super().__init__(layers=[])
        self.num_slots, self.max_length = num_slots, max_length
        self.lengths = torch.zeros(num_slots, dtype=torch.long, device=device)
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys and values, (num_slots, max_length, heads, head size)

    def begin(self, num_new: int, rows: Rows = ALL_ROWS) -> Tensor:
        """Open a pass of `num_new` tokens a row; returns their positions (b, n). Raises ValueError past `max_length`."""
        positions = self.lengths[rows, None] + torch.arange(num_new, device=self.lengths.device)  # (b, n)
        self.end = int(positions.max()) + 1
        if self.end > self.max_length:
            raise ValueError(f"a row would reach {self.end} tokens, but its slot holds {self.max_length}: raise max_length")
        self.rows, self.positions = rows, positions
        self.row_ids = torch.arange(self.num_slots, device=positions.device)[rows, None]  # (b, 1)
        return positions

    def mask(self, window: int | None = None) -> Tensor:
        """Who may look at whom in the open pass: (b, 1, n, end) bool, causal and, with `window`, sliding."""
        distance = self.positions[:, :, None] - torch.arange(self.end, device=self.positions.device)  # (b, n, end)
        allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return allowed[:, None]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (b, heads, n, size) keys and values of the open pass and return all that its rows hold, (b, heads, end, size)."""
        if layer_idx not in self.buffers:
            self.buffers[layer_idx] = tuple(  # type: ignore[assignment]
                new.new_zeros(self.num_slots, self.max_length, new.shape[1], new.shape[3]) for new in (key_states, value_states)
            )
        out = []
        for buffer, new in zip(self.buffers[layer_idx], (key_states, value_states), strict=True):
            buffer[self.row_ids, self.positions] = new.transpose(1, 2).to(buffer.dtype)
            out.append(buffer[self.rows, : self.end].transpose(1, 2))
        return out[0], out[1]

    def commit(self, num: Tensor, rows: Rows = ALL_ROWS) -> None:
        """Advance rows by `num` (b,) tokens of the last pass."""
        self.lengths[rows] += num

    def rollback(self, lengths: Tensor, rows: Rows = ALL_ROWS) -> None:
        """Set rows back to earlier lengths (b,)."""
        assert bool((lengths <= self.lengths[rows]).all()), "roll-back goes backwards only"
        self.lengths[rows] = lengths

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest committed row: only read by code that made no mask of its own."""
        return int(self.lengths.max())
