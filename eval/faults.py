"""Known faults of wiring, one list for each head: `parity.py` simulates them, and names the one that reproduces what another engine accepted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from mtp_train.heads.base import DraftHead

Fault = Callable[[Any, Tensor], None]
"""Spoils a copy of the head in place; takes the target's final gain (H,)."""
LAYER = "block.layers.0"


def _swap(path: str, order: tuple[int, ...], head: Any, gain: Tensor) -> None:
    """The inputs of a matrix, cut in as many equal parts as `order` has, in that order."""
    weight = head.get_submodule(path).weight
    parts = weight.data.chunk(len(order), dim=1)
    weight.data = torch.cat([parts[place] for place in order], dim=1)


def _transpose(path: str, head: Any, gain: Tensor) -> None:
    weight = head.get_submodule(path).weight
    weight.data = torch.cat([half.T for half in weight.data.chunk(2, dim=1)], dim=1)


def _wrap(change: Callable[..., tuple[Tensor, Tensor, Tensor]], head: Any, gain: Tensor) -> None:
    inner = head.forward
    head.forward = lambda embeds, features, positions, attention: inner(*change(embeds, features, positions), attention)


def _identity_gain(*paths: str) -> Fault:
    def fault(head: Any, gain: Tensor) -> None:
        for path in paths:
            weight = head.get_submodule(path).get_parameter("weight")
            weight.data = head.block.make_norm(len(weight)).get_parameter("weight").data.to(weight)  # of the family: w or 1 + w

    return fault


def _without(path: str, head: Any, gain: Tensor) -> None:
    head.set_submodule(path, torch.nn.Identity())


def _added_norm(path: str, head: Any, gain: Tensor) -> None:
    head.set_submodule(path, head.block.make_norm(len(gain)).to(gain))


def _pre_norm_state(head: Any, gain: Tensor) -> None:
    head.fuse = lambda hidden_states: hidden_states[:, :, -1] / gain.to(hidden_states.dtype)  # hnorm is blind to scale


def _other_recycled(head: Any, gain: Tensor) -> None:
    there = "pre" if head.layout.recycled == "post" else "post"
    head.layout = type(head.layout)(**{**vars(head.layout), "recycled": there})


def _other_residual(head: Any, gain: Tensor) -> None:
    layer = head.block.layers[0]
    layer.norm_before_residual = not layer.norm_before_residual


CHAIN: dict[str, Fault] = {
    # A shift of every position is nothing to rotary embeddings; one between the chain (single rows) and its cache is.
    "positions of the chain are off by one": partial(_wrap, lambda e, h, p: (e, h, p - 1 if p.shape[1] == 1 else p)),
    "the embedding is not the target's": partial(_wrap, lambda e, h, p: (torch.zeros_like(e), h, p)),
    "the embedding at position 0 is zeroed": partial(_wrap, lambda e, h, p: (e * (p != 0)[..., None].to(e.dtype), h, p)),
}
MTP: dict[str, Fault] = {
    "the final norm of the head is missing": partial(_without, "norm"),
    "the feature is taken before the target's final norm": _pre_norm_state,
    "the halves of eh_proj are swapped ([h; e] for [e; h])": partial(_swap, "eh_proj", (1, 0)),
    "eh_proj is transposed": partial(_transpose, "eh_proj"),
    **CHAIN,
    "the gains of enorm and hnorm are not loaded": _identity_gain("enorm", "hnorm"),
    "the gain of the head's final norm is not loaded": _identity_gain("norm"),
    "the gains of the layer's norms are not loaded": _identity_gain(f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"),
}
EAGLE1: dict[str, Fault] = {
    "the halves of fc are swapped ([h; e] for [e; h])": partial(_swap, "fc", (1, 0)),
    "fc is transposed": partial(_transpose, "fc"),
    "the layer has an input norm": partial(_added_norm, f"{LAYER}.input_layernorm"),
    **CHAIN,
    "the gain of the layer's norm is not loaded": _identity_gain(f"{LAYER}.post_attention_layernorm"),
}
EAGLE3: dict[str, Fault] = {
    "the final norm of the head is missing": partial(_without, "norm"),
    "hidden_norm is missing": partial(_without, f"{LAYER}.hidden_norm"),
    "the gain of hidden_norm is not loaded": _identity_gain(f"{LAYER}.hidden_norm"),
    "the gain of the head's final norm is not loaded": _identity_gain("norm"),
    "the gains of the layer's norms are not loaded": _identity_gain(f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"),
    "the other residual is used (head.layout.norm_before_residual)": _other_residual,
    "the state of the other side of the final norm is recycled (head.layout.recycled)": _other_recycled,
    **CHAIN,
}


def faults_of(head: DraftHead) -> dict[str, Fault]:
    """The known faults of a head."""
    if head.config.kind != "eagle3":
        return {"mtp": MTP, "eagle1": EAGLE1}[head.config.kind]
    taps = head.config.layout["taps"]
    orders = [order for order in permutations(range(len(taps))) if list(order) != sorted(order)] if len(taps) <= 3 else []
    return EAGLE3 | {
        f"the tapped layers {taps} are read as {[taps[order.index(place)] for place in range(len(taps))]}": partial(_swap, "fc", order) for order in orders
    }


def spoiled(head: DraftHead, fault: Fault, gain: Tensor) -> DraftHead:
    """A copy of the head with a fault of wiring."""
    out = copy.deepcopy(head)
    fault(out, gain)
    return out
