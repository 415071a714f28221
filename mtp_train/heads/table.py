"""The heads there are: one row a head."""

from __future__ import annotations

from typing import Any

from mtp_train.config import HeadConfig
from mtp_train.heads.base import DraftHead, Start
from mtp_train.heads.eagle1 import Eagle1Head
from mtp_train.heads.eagle3 import Eagle3Head
from mtp_train.heads.mtp import MTPHead
from mtp_train.interfaces import Tap

HEADS: dict[str, type[Any]] = {"mtp": MTPHead, "eagle1": Eagle1Head, "eagle3": Eagle3Head}


def resolve(config: HeadConfig, num_layers: int) -> HeadConfig:
    """With what follows from the target's number of layers written out. Raises ValueError for an unknown kind and for impossible taps."""
    if config.kind not in HEADS:
        raise ValueError(f"head.kind={config.kind!r} is not one of {', '.join(HEADS)}")
    resolved: HeadConfig = HEADS[config.kind].resolve(config, num_layers)
    return resolved


def taps_of(config: HeadConfig, num_layers: int) -> tuple[Tap, ...]:
    """What a head reads of the target, as `fuse` takes it: the residuals of `layout.taps`, where there are some, and the teacher state."""
    layers = resolve(config, num_layers).layout.get("taps", ())
    return (*(Tap(layer, "pre") for layer in layers), Tap(num_layers, "post"))


def build_head(config: HeadConfig, target_config: Any, start: Start | None = None) -> DraftHead:
    """A head for a target's transformers config; without `start` it will be loaded. Raises ValueError as `resolve` and the head do."""
    config = resolve(config, target_config.num_hidden_layers)
    head: DraftHead = HEADS[config.kind](config, target_config, start)
    return head
