"""The heads there are: one row a head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mtp_train.config import HeadConfig
from mtp_train.heads.base import DraftHead
from mtp_train.heads.mtp import MTPHead, ReadLayer

HEADS: dict[str, type[MTPHead]] = {"mtp": MTPHead}


def build_head(config: HeadConfig, target_config: Any, final_norm: Tensor | None = None, read_layer: ReadLayer | None = None) -> DraftHead:
    """A head for a target; see the head for the arguments. Raises ValueError for an unknown kind."""
    if config.kind not in HEADS:
        raise ValueError(f"head.kind={config.kind!r} is not one of {', '.join(HEADS)}")
    return HEADS[config.kind](config, target_config, final_norm, read_layer)
