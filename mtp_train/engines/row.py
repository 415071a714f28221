"""What a row of the table in `serving.py` is: an engine's class, how a head becomes its tensors, and how it comes back from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtp_train.checkpoint import HeadInfo
from mtp_train.config import HeadConfig

Config = dict[str, Any]
Tensors = dict[str, Tensor]
LAYER = "block.layers.0."
DENSE = ("llama", "mistral")
COPIED = (  # fields of the target's config that a class reads
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "vocab_size", "bos_token_id", "eos_token_id", "rope_parameters", "rope_theta", "rope_scaling", "initializer_range", "attention_bias", "mlp_bias",
)  # fmt: skip
COPIED_EAGLE = (*COPIED, "head_dim")
INDIFFERENT = ("bos_token_id", "eos_token_id", "initializer_range", "max_position_embeddings")
"""Of those, what changes nothing that a layer computes."""


def reasons_of(*found: tuple[bool, str]) -> list[str]:
    """The reasons that hold."""
    return [reason for failed, reason in found if failed]


def _no_zeros(tensors: Tensors, target: Config) -> Tensors:
    return {}


@dataclass(frozen=True)
class EngineClass:
    """One row of the table."""

    name: str
    head: str  # the kind it serves
    architecture: str  # in its config.json
    needs: str  # what has to be installed where it serves
    command: str  # that serves it
    method: str  # as the engine calls this way of drafting
    refuses: Callable[[HeadConfig, Config], list[str]]  # (head, the target's config) -> reasons
    config: Callable[[HeadInfo, Config, int | None], Config]  # its config.json, with a draft vocabulary's size
    table: Callable[[list[str], Config], dict[str, list[str]]]  # engine tensor -> head tensors, joined by rows
    layer: str = ""  # the engine's name for the decoder layer, where it may have experts
    zeros: Callable[[Tensors, Config], Tensors] = _no_zeros  # what the engine wants beside, as zeros
    vocab: str = ""  # the tensor that keeps a draft vocabulary: draft_vocab (ids) or d2t (id - index, with t2d); none: it drafts from the whole one
    also: tuple[str, ...] = ()  # architectures of published heads that it reads as well
    layout: Callable[[Config], dict[str, Any]] | None = None  # a published config.json -> the head's layout; None: only our own exports are read
    block: str = ""  # the family of its layer; as its config.json says where there is a choice

    @property
    def keeps_draft_vocab(self) -> bool:
        """Whether a reduced draft vocabulary survives; else the head drafts from the whole one."""
        return bool(self.vocab)

    def to_engine(self, tensors: Tensors, target: Config) -> Tensors:
        """Rename and join by the table. Raises ValueError when a tensor of the head has no place, or the table names one it lacks."""
        draft_vocab = tensors.get("draft_vocab")
        tensors = {name: tensor for name, tensor in tensors.items() if name != "draft_vocab"}
        table = self.table(list(tensors), target)
        used = [name for names in table.values() for name in names]
        missing, left = sorted(set(used) - tensors.keys()), sorted(tensors.keys() - set(used))
        if missing or left:
            raise ValueError(f"{self.name}: the head lacks {missing} and has no place for {left}")
        out = split_experts({key: torch.cat([tensors[name] for name in names]).contiguous() for key, names in table.items()}, self.layer)
        return out | self.zeros(out, target) | self._write_vocab(draft_vocab, target["vocab_size"])

    def from_engine(self, tensors: Tensors, shapes: dict[str, torch.Size], target: Config) -> Tensors:
        """The inverse of `to_engine`, given the shapes of the head's tensors.

        Raises ValueError naming missing, unknown and misshapen tensors, zeros that are none, and a draft vocabulary that is not consistent.
        """
        tensors, draft_vocab = self._read_vocab(tensors, target["vocab_size"])
        table, zeros = self.table(list(shapes), target), self.zeros(tensors, target)
        found = join_experts({name: tensor for name, tensor in tensors.items() if name not in zeros}, self.layer)
        missing, unknown = sorted(table.keys() - found.keys() | zeros.keys() - tensors.keys()), sorted(found.keys() - table.keys())
        if missing or unknown:
            raise ValueError(f"{self.name}: missing {missing}, unknown {unknown}")
        if filled := [name for name in zeros if tensors[name].any()]:
            raise ValueError(f"{self.name}: the head has no {filled}, which must be zero")
        out: Tensors = {}
        for key, names in table.items():
            wanted = (sum(shapes[name][0] for name in names), *shapes[names[0]][1:])
            if found[key].shape != wanted:
                raise ValueError(f"{self.name}: {key} has shape {tuple(found[key].shape)}, the head needs {wanted}")
            out |= dict(zip(names, found[key].split([shapes[name][0] for name in names]), strict=True))
        rows, ids = len(out.get("lm_head.weight", ())), target["vocab_size"] if draft_vocab is None else len(draft_vocab)
        if rows and rows != ids:
            raise ValueError(f"{self.name}: lm_head has {rows} rows, {self.vocab} gives {ids} tokens")
        return out if draft_vocab is None else {**out, "draft_vocab": draft_vocab}

    def _write_vocab(self, draft_vocab: Tensor | None, vocab_size: int) -> Tensors:
        if draft_vocab is None or not self.vocab:
            return {}
        if self.vocab != "d2t":
            return {self.vocab: draft_vocab}
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[draft_vocab] = True
        return {"d2t": draft_vocab - torch.arange(len(draft_vocab)), "t2d": t2d}

    def _read_vocab(self, tensors: Tensors, vocab_size: int) -> tuple[Tensors, Tensor | None]:
        """The other tensors, and the ids (D,)."""
        if not self.vocab:
            return tensors, None
        rest, stored = {name: tensor for name, tensor in tensors.items() if name not in (self.vocab, "t2d")}, tensors.get(self.vocab)
        if stored is None or self.vocab != "d2t":
            return rest, stored
        ids, t2d = stored.long() + torch.arange(len(stored)), tensors.get("t2d")
        if not bool((ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < vocab_size) or (t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids)):
            marked = "" if t2d is None else f", t2d marks {int(t2d.sum())} tokens"
            what = "does it hold absolute ids, where offsets from the index belong?"
            raise ValueError(f"{self.name}: d2t gives {len(ids)} ids from {int(ids.min())} to {int(ids.max())} of {vocab_size}{marked}: {what}")
        return rest, ids if len(ids) < vocab_size else None

    def published(self, config: Config, target: Config) -> tuple[HeadConfig, Config]:
        """What a directory of this class holds by its config.json: the head, and the config of which its layer is built, at the target's depth.

        Raises ValueError where it is for another target, or cannot be told.
        """
        if self.layout is None:
            raise ValueError(f"{self.name}: a head of this class is read from a checkpoint or an export of format hf (head.json) alone")
        inner = config.get("transformer_layer_config") or config
        if not self.block and not inner.get("model_type"):
            raise ValueError(f"{self.name}: the head's config.json has no model_type, which says of which family its layer is")
        read = config.get("target_hidden_size") or inner.get("hidden_size")
        for name, there in (("hidden_size", inner.get("hidden_size")), ("vocab_size", inner.get("vocab_size")), ("target_hidden_size", read)):
            if there != (here := target[name.removeprefix("target_")]):
                raise ValueError(f"the head's config.json has {name}={there}, the target {here}")
        size = config.get("draft_vocab_size")
        size = None if size == target["vocab_size"] else size
        head = HeadConfig(self.head, self.layout(config), inner.get("num_hidden_layers", 1), True, "identity", size if self.vocab else None)
        layer = {key: inner[key] for key in COPIED_EAGLE if inner.get(key) is not None}
        return head, layer | {"model_type": self.block or inner["model_type"], "num_hidden_layers": target["num_hidden_layers"]}


def split_experts(tensors: Tensors, layer: str) -> Tensors:
    """(experts, 2 x intermediate, hidden) and (experts, hidden, intermediate) -> one gate, up and down of each expert, as the engines read them."""
    out = dict(tensors)
    gate_up, down = (out.pop(f"{layer}mlp.experts.{name}", None) for name in ("gate_up_proj", "down_proj"))
    if gate_up is None or down is None:
        return out
    for index in range(len(gate_up)):
        gate, up = gate_up[index].chunk(2)
        for name, part in (("gate", gate), ("up", up), ("down", down[index])):
            out[f"{layer}mlp.experts.{index}.{name}_proj.weight"] = part.contiguous()
    return out


def join_experts(tensors: Tensors, layer: str) -> Tensors:
    """The inverse of `split_experts`."""
    out = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    num = len(tensors.keys() - out.keys()) // 3
    if num:
        experts = [[tensors[f"{layer}mlp.experts.{index}.{name}_proj.weight"] for name in ("gate", "up", "down")] for index in range(num)]
        out[f"{layer}mlp.experts.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        out[f"{layer}mlp.experts.down_proj"] = torch.stack([down for _, _, down in experts])
    return out
