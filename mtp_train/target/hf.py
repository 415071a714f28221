"""The embedded target: a batched runner over any transformers causal LM with full or sliding-window attention.

Capture (precompute) and validation (spec_decode) use this same code, so a state that trained a head is the state that serves it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mtp_train.interfaces import ALL_ROWS, LogitsFor, Rows, Tap, TargetStep
from mtp_train.target.ends import FrozenEnds, text_config
from mtp_train.target.kv import SlotCache

log = logging.getLogger(__name__)

ATTENTION_NAME = "mtp_slots"


def _grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface, without copying shared keys for every query head: in decoding that copy costs most.

    A mask of as many keys as queries is that of empty slots, so a causal one unless a window cuts it: causal kernels do half of the work.
    """
    causal = attention_mask.shape[-1] == attention_mask.shape[-2] > 1 and bool(attention_mask[0, 0, -1, 0])
    options: dict[str, Any] = {"is_causal": True} if causal else {"attn_mask": attention_mask}
    out = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=query.shape[1] != key.shape[1], **options)
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _grouped_attention)

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
UNSUPPORTED_ROPE = {"dynamic", "longrope"}  # their frequencies depend on the longest row of a batch, so rows would not be independent


def check_supported(config: Any) -> None:
    """Refuse what a slot cache cannot roll back. Raises ValueError with the reason."""
    kinds = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYERS
    if kinds or getattr(config, "is_encoder_decoder", False) or any(hasattr(config, name) for name in ("ssm_state_size", "mamba_d_state", "state_size")):
        what = ", ".join(sorted(kinds)) or "a recurrent or encoder-decoder state"
        raise ValueError(
            f"target {config.model_type!r} has layers of kind {what}: recurrent and hybrid targets are not supported, "
            "because rejected tokens cannot be rolled back by an index"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    nested = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    for parameters in nested:
        if parameters.get("rope_type") in UNSUPPORTED_ROPE:
            raise ValueError(f"rope_type {parameters['rope_type']!r} depends on the longest row of the batch and is not supported")


def default_taps(num_layers: int) -> list[Tap]:
    """What an MTP head needs: the teacher state alone."""
    return [Tap(num_layers, "post")]


class Target:
    """prefill, extend, commit over slots. `extend` writes each row at its own length and does not advance it; `commit` advances."""

    def __init__(self, model: Any, num_slots: int, max_length: int, taps: Sequence[Tap] | None = None):
        self.model, self.base = model.eval().requires_grad_(False), model.get_decoder()
        self.config = self.base.config  # of the text part, where the target has others
        check_supported(self.config)
        self.device = next(model.parameters()).device
        self.num_layers = len(self.base.layers)
        self.taps = list(taps or default_taps(self.num_layers))
        self.ends = FrozenEnds.from_model(model)
        self.cache = SlotCache(num_slots, max_length, self.device)
        self._taken: dict[Tap, Tensor] = {}
        self._hook_taps()

    @classmethod
    def load(
        cls, path: str | Path, dtype: str | torch.dtype, num_slots: int, max_length: int, taps: Sequence[Tap] | None = None, device: str = "cpu"
    ) -> Target:
        """A target from a directory or hub id. `dtype` is "auto" or a torch dtype (name)."""
        config = text_config(path)
        check_supported(config)
        # Soft-capped attention scores exist in the eager code only.
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
        dtype = dtype if dtype == "auto" or isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
        return cls(model.to(device), num_slots, max_length, taps)

    def _hook_taps(self) -> None:
        """Read every tap where it is computed, so that no convention of a model's output list matters."""
        last = Tap(self.num_layers, "post")
        if self.taps[-1] != last:
            raise ValueError(f"the last tap must be the teacher state {last}, got {self.taps[-1]}")
        for tap in self.taps:
            if not 0 <= tap.layer <= self.num_layers or (tap.norm == "post" and tap != last) or self.taps.count(tap) > 1:
                raise ValueError(f"tap {tap} is not one of the {self.num_layers}-layer target's, or is asked for twice")
            if tap.norm == "post":
                self.base.norm.register_forward_hook(lambda _m, _i, out, tap=tap: self._take(tap, out))
            elif tap.layer == 0:
                self.base.layers[0].register_forward_pre_hook(lambda _m, args, tap=tap: self._take(tap, args[0]))
            else:
                self.base.layers[tap.layer - 1].register_forward_hook(lambda _m, _i, out, tap=tap: self._take(tap, out))

    def _take(self, tap: Tap, value: Any) -> None:
        self._taken[tap] = value[0] if isinstance(value, tuple) else value

    def _mask(self) -> Any:
        """The pass's attention mask: one for targets of one kind of layer, a dictionary for those that mix full and sliding ones."""
        window = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
        masks = {kind: self._as_bias(self.cache.mask(window if kind == "sliding_attention" else None)) for kind in kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _as_bias(self, mask: Tensor) -> Tensor:
        if self.config._attn_implementation != "eager":
            return mask
        dtype = next(self.model.parameters()).dtype
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    @contextlib.contextmanager
    def _grouped(self) -> Iterator[None]:
        """Our attention for one pass; the model stays as it was for whoever else calls it."""
        usual = self.config._attn_implementation
        self.config._attn_implementation = usual if usual == "eager" else ATTENTION_NAME
        try:
            yield
        finally:
            self.config._attn_implementation = usual

    @property
    def lengths(self) -> Tensor:
        """(B,) committed tokens of each slot."""
        return self.cache.lengths

    def resize(self, num_slots: int, max_length: int) -> None:
        """Start over with empty slots of another number or size."""
        self.cache = SlotCache(num_slots, max_length, self.device)

    def reset(self, rows: Rows = ALL_ROWS) -> None:
        """Empty these slots."""
        self.cache.lengths[rows] = 0

    @torch.no_grad()
    def extend(self, token_ids: Tensor, logits: LogitsFor = "none", num: Tensor | None = None, rows: Rows = ALL_ROWS) -> TargetStep:
        """Run (b, n) tokens, each row at its own length, without advancing it.

        Args:
            token_ids: (b, n) int64; rows shorter than n are padded on the right with any token.
            logits: "none", "all" (b, n, V), or "last": (b, V) at each row's last valid token.
            num: (b,) valid tokens of each row (for "last"); None: all n.
            rows: the b slots this is about.

        Raises:
            ValueError: a row would outgrow its slot.
        """
        positions = self.cache.begin(token_ids.shape[1], rows)
        self._taken.clear()
        with self._grouped():
            self.base(input_ids=token_ids, attention_mask=self._mask(), position_ids=positions, past_key_values=self.cache, use_cache=True)
        if len(self.cache.buffers) != self.num_layers:
            raise ValueError(f"only {len(self.cache.buffers)} of {self.num_layers} layers keep keys and values: this target cannot be rolled back by an index")
        last = self._taken[self.taps[-1]]  # (b, n, H)
        out = None
        if logits == "all":
            out = self.ends.logits(last)
        elif logits == "last":
            index = torch.full_like(positions[:, 0], token_ids.shape[1] - 1) if num is None else (num - 1).clamp(min=0)
            out = self.ends.logits(last[torch.arange(len(last), device=last.device), index])
        states = last[:, :, None] if len(self.taps) == 1 else torch.stack([self._taken[tap] for tap in self.taps], dim=2)
        return TargetStep(logits=out, hidden_states=states)

    def commit(self, num: Tensor, rows: Rows = ALL_ROWS) -> None:
        """Advance rows by `num` (b,) tokens of the last extend; the rest of it is rolled back by never being looked at."""
        self.cache.commit(num, rows)

    def rollback(self, lengths: Tensor, rows: Rows = ALL_ROWS) -> None:
        """Set rows back to earlier lengths (b,)."""
        self.cache.rollback(lengths, rows)

    def prefill(self, token_ids: Tensor, num: Tensor, logits: LogitsFor = "last", rows: Rows = ALL_ROWS, chunk_size: int = 0) -> TargetStep:
        """Empty the slots, run (b, n) prompts of `num` (b,) tokens and commit them. A `chunk_size` > 0 bounds the tokens of one pass.

        Returns logits ("last" or "none") and the states of all n positions (those past `num` mean nothing).
        """
        assert logits != "all", "a prompt's logits are needed at its last token only"
        self.reset(rows)
        size = chunk_size or token_ids.shape[1]
        steps = []
        for start in range(0, token_ids.shape[1], size):
            tokens = token_ids[:, start : start + size]
            valid = (num - start).clamp(0, tokens.shape[1])
            steps.append(self.extend(tokens, "none", valid, rows))
            self.commit(valid, rows)
        states = torch.cat([step.hidden_states for step in steps], dim=1)  # (b, n, L, H)
        if logits == "none":
            return TargetStep(None, states)
        teacher = states[torch.arange(len(states), device=states.device), (num - 1).clamp(min=0), -1]
        return TargetStep(self.ends.logits(teacher), states)
