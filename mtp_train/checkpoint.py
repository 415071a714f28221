"""Checkpoints of a head: safetensors and readable json, written whole or not at all.

    checkpoints/step_00000200/
        head.safetensors       the trained tensors (and draft_vocab, where there is one); nothing that is the target's
        head.json              head config, target identity, taps, convention: all that is needed to use the head
        target_config.json     what the block is built from: the target's own config.json, or that of the published head it came from
        optimizer.safetensors  moments, by parameter name; where weights are averaged, head.safetensors is the average, the weights are here
        state.json             step, position in the data, unfinished log line, figures of the last validation
        acceptance.json        measured by decoding (train.validate_with), added later

All ranks' shards are gathered first, so a checkpoint does not depend on how many there were.
A directory without state.json (written last, then renamed with the rest) is not a checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig

from mtp_train.config import HeadConfig
from mtp_train.heads.base import DraftHead
from mtp_train.heads.table import build_head
from mtp_train.interfaces import Tap, TargetInfo
from mtp_train.provenance import atomic_dir, fingerprint, unclaimed
from mtp_train.target.ends import read_json

ACCEPTANCE = "acceptance.json"
HEAD = "head.safetensors"
CONVENTION = "row t of step k embeds token t+k+1, reads the post-norm state h_t (step 0) or its own last feature, rope position t+k, predicts token t+k+2"
"""Where the head has taps it reads their states of row t in place of h_t; all else is the same."""


@dataclass(frozen=True)
class HeadInfo:
    """What a head is and which target it belongs to."""

    config: HeadConfig
    target: TargetInfo
    taps: tuple[Tap, ...]
    unroll_steps: int
    seq_len: int
    step: int
    draft_vocab: str | None = None
    """fingerprint of the draft vocabulary; None: the whole one, or a head older than this field"""
    training_flop: float | None = None
    """what its training took, by planner.training_flop; None: a head older than this field"""

    def to_json(self) -> dict[str, Any]:
        return {"format": 1, "convention": CONVENTION, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HeadInfo:
        """Raises ValueError when another convention made the head."""
        if (data.get("format"), data.get("convention")) != (1, CONVENTION):
            raise ValueError(f"the head follows another convention: {data.get('convention')!r} there, {CONVENTION!r} here")
        taps = tuple(Tap(**tap) for tap in data["taps"])
        rest = (data["unroll_steps"], data["seq_len"], data["step"], data.get("draft_vocab"), data.get("training_flop"))
        return cls(HeadConfig(**data["config"]), TargetInfo(**data["target"]), taps, *rest)


@dataclass(frozen=True)
class LoadedHead:
    """A head ready to draft."""

    head: DraftHead
    info: HeadInfo
    draft_vocab: Tensor | None  # (D,) sorted ids
    layer_config: dict[str, Any]  # what its block is built from: the target's config.json, or that of a published head


def head_tensors(head: nn.Module, draft_vocab: Tensor | None) -> dict[str, Tensor]:
    """What is saved of a head. Buffers that the config determines (rope frequencies) are not."""
    tensors = {name: value.detach().contiguous().cpu() for name, value in head.named_parameters()}
    return tensors if draft_vocab is None else {**tensors, "draft_vocab": draft_vocab.cpu()}


def write_head(folder: Path, tensors: dict[str, Tensor], info: HeadInfo, target_config: dict[str, Any]) -> None:
    """Write the three files that make a head usable."""
    save_file(tensors, folder / HEAD)
    (folder / "head.json").write_text(json.dumps(info.to_json(), indent=2) + "\n")
    (folder / "target_config.json").write_text(json.dumps(target_config, indent=2) + "\n")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file. Raises ValueError, naming it, where it is cut short or no safetensors."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: is it cut short, or a Git LFS pointer? ({error})") from error


def load_head(folder: str | Path, dtype: torch.dtype = torch.float32) -> LoadedHead:
    """Read a head back, strictly: a missing, unknown or misshapen tensor is refused by name."""
    folder = Path(folder)
    if not (folder / "head.json").exists():
        raise FileNotFoundError(
            f"{folder} holds no head.json: not a head of mtp-train (give a checkpoint or an export of format hf), and no config.json: not a published one"
        )
    info = HeadInfo.from_json(read_json(folder / "head.json"))
    config = read_json(folder / "target_config.json")
    head = build_head(info.config, AutoConfig.for_model(**config))
    tensors = read_safetensors(folder / HEAD)
    draft_vocab = tensors.pop("draft_vocab", None)
    check_draft_vocab(draft_vocab, info, str(folder))
    load_exactly(head, tensors, str(folder / HEAD))
    return LoadedHead(head.to(dtype).eval().requires_grad_(False), info, draft_vocab, config)


def vocab_fingerprint(draft_vocab: Tensor | None) -> str | None:
    """Changes with any of the ids (D,)."""
    return None if draft_vocab is None else fingerprint(draft_vocab.tolist())


def check_draft_vocab(draft_vocab: Tensor | None, info: HeadInfo, where: str) -> None:
    """Raise ValueError unless the ids are sorted, unique, inside the target's vocabulary, and those that the head was trained with."""
    vocab_size = info.target.vocab_size
    if draft_vocab is not None and not bool((draft_vocab.diff() > 0).all() and draft_vocab[0] >= 0 and draft_vocab[-1] < vocab_size):
        raise ValueError(f"draft_vocab must be sorted unique ids below {vocab_size}; it spans {int(draft_vocab.min())}..{int(draft_vocab.max())}")
    if info.draft_vocab is not None and vocab_fingerprint(draft_vocab) != info.draft_vocab:
        found = vocab_fingerprint(draft_vocab) or "none"
        raise ValueError(f"{where}: the draft vocabulary is not the one that the head was trained with ({info.draft_vocab[:12]} there, {found[:12]} here)")


def load_exactly(head: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Copy tensors into the head's parameters; names and shapes must be exactly its own."""
    parameters = dict(head.named_parameters())
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    if missing or unknown:
        raise ValueError(f"{where}: missing tensors {missing}, unknown tensors {unknown}")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise ValueError(f"{where}: {name} has shape {tuple(tensors[name].shape)}, the head needs {tuple(parameter.shape)}")
        with torch.no_grad():
            parameter.copy_(tensors[name])


def load_optimizer(head: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore an optimiser's state from "parameter/entry" tensors."""
    parameters = dict(head.named_parameters())
    for key, value in tensors.items():
        name, entry = key.rsplit("/", 1)
        like = parameters[name]
        optimizer.state[like][entry] = value.to(like.device)  # a fused AdamW has its step count there too


def save_checkpoint(
    root: Path,
    weights: dict[str, Tensor],
    info: HeadInfo,
    target_config: dict[str, Any],
    moments: dict[str, Tensor],
    state: dict[str, Any],
    check: Callable[[], None] = unclaimed,
) -> Path:
    """Write a checkpoint of `info.step`; it appears under its name only when it is whole (and `check`, see `Claim`, lets it)."""
    path = root / f"step_{info.step:08d}"
    with atomic_dir(path, check) as folder:
        write_head(folder, weights, info, target_config)
        save_file(moments, folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps({"step": info.step, **state}, indent=2) + "\n")
    return path


def checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in root.glob("step_*") if (path / "state.json").exists())


def read_state(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint."""
    return json.loads((path / "state.json").read_text())


def choose(root: Path, which: str) -> Path:
    """ "last", "best" (by `score`; the later one of equals) or a directory. Raises FileNotFoundError."""
    if which not in ("best", "last"):
        return Path(which)
    found = checkpoints(root)
    if not found:
        raise FileNotFoundError(f"{root} holds no complete checkpoint: run mtp-train first")
    return found[-1] if which == "last" else max(found, key=lambda path: (score(path), path))


def score(path: Path) -> tuple[bool, float]:
    """Acceptance length at this checkpoint: measured in decoding, which comes before any that is only predicted; 0 where there is none."""
    if (path / ACCEPTANCE).exists():
        return True, json.loads((path / ACCEPTANCE).read_text())["acceptance_length"]["value"] or 0.0  # null: no draft was made
    return False, (read_state(path).get("validation") or {}).get("predicted_acceptance_length") or 0.0


def prune(root: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` and the best; also what a kill left half deleted."""
    found = checkpoints(root)
    keep = {*found[-keep_last:], choose(root, "best")} if found else set()
    for path in set(root.glob("step_*")) - keep:
        (path / "state.json").unlink(missing_ok=True)  # first: from here on it is no checkpoint
        shutil.rmtree(path, ignore_errors=True)  # a measurement may be written there just now: the next call deletes the rest
