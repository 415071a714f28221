"""Heads that lie in an engine's directory: read back with the same audit, whether mtp-export wrote them or somebody published them.

A published EAGLE-1, EAGLE-3 or speculators directory (config.json and safetensors or pytorch_model.bin) becomes a head of ours: its layer is built
from its own config.json, which may rotate or be sized otherwise than the target's layers. `open_head` takes either kind of directory.
"""

from __future__ import annotations

import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import AutoConfig

from mtp_train.checkpoint import HEAD, HeadInfo, LoadedHead, check_draft_vocab, load_exactly, load_head, read_safetensors, vocab_fingerprint
from mtp_train.engines.row import COPIED_EAGLE, INDIFFERENT, Config, EngineClass, Tensors
from mtp_train.heads.base import DraftHead
from mtp_train.heads.table import build_head, taps_of
from mtp_train.provenance import fingerprint, sha256
from mtp_train.serving import class_of
from mtp_train.target.ends import FrozenEnds, read_json, text_config
from mtp_train.target.identity import target_info

log = logging.getLogger(__name__)

BIN = "pytorch_model.bin"
ENDS = {"embed_tokens.weight": "embed_weight", "lm_head.weight": "head_weight"}
"""Copies of the target's own that a published directory may hold: engines take the target's where they are equal."""
COPY_ERROR = 1e-2  # relative; a copy may be rounded to another precision
UNROLL_STEPS = 3
"""Of a head that does not say how many tokens it drafts."""


def read_tensors(folder: Path) -> Tensors:
    """All of a directory, from safetensors or pytorch_model.bin. Raises FileNotFoundError."""
    if files := weight_files(folder):
        return {name: tensor for file in files for name, tensor in (read_safetensors(file) if file.suffix == ".safetensors" else _unpickle(file)).items()}
    raise FileNotFoundError(f"{folder} holds neither safetensors nor {BIN}")


def weight_files(folder: Path) -> list[Path]:
    """safetensors, else pytorch_model.bin."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob(BIN))


def _unpickle(path: Path) -> Tensors:
    try:
        tensors: Tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read: is it cut short, a Git LFS pointer, or does it hold more than tensors? ({why})") from error
    return tensors


def identity(folder: str | Path) -> str:
    """Changes with every file that makes the head in a directory what it is, of either kind; also where it cannot be opened."""
    folder = Path(folder)
    weights = [folder / HEAD] if (folder / HEAD).exists() else weight_files(folder)
    about = [folder / name for name in ("head.json", "target_config.json", "config.json") if (folder / name).exists()]
    return fingerprint({path.name: sha256(path) for path in (*weights, *about)})


def read_engine(folder: Path, info: HeadInfo, layer_config: Config, target_path: str | None = None) -> LoadedHead:
    """The head of an engine's directory, strictly: it carries tensors and engine config, `info` and `layer_config` say what they must be.

    Raises ValueError naming missing, unknown and misshapen tensors, and what config.json says otherwise.
    """
    config = read_json(folder / "config.json")
    kind, known = class_of(config), AutoConfig.for_model(**layer_config)
    head = build_head(info.config, known)
    if kind.layout is not None:
        there, layer = kind.published(config, layer_config)
        fields: dict[str, Any] = {"head": tuple((one.kind, one.num_layers, one.layout) for one in (build_head(there, known).config, head.config))}
        theirs, mine = AutoConfig.for_model(**layer).to_dict(), known.to_dict()
        fields |= {key: (theirs.get(key), mine.get(key)) for key in COPIED_EAGLE if key in layer_config and key not in INDIFFERENT}
        if wrong := [f"{key}: {one} there, {two} here" for key, (one, two) in fields.items() if one != two]:
            raise ValueError(f"{folder / 'config.json'} is of another head: {'; '.join(wrong)}")
    return _fill(folder, kind, head, info, layer_config, target_path, strict=True)


def read_published(folder: Path, target_path: str, strict: bool = True) -> LoadedHead:
    """A published head, for a target.

    Args:
        strict: refuse embeddings (and an EAGLE-1 lm_head) that are not the target's, as a head that drafts must; a warm start goes on with the target's.

    Raises:
        ValueError: naming what does not fit in config.json or among the tensors.
    """
    config = read_json(folder / "config.json")
    target, kind = target_info(target_path), class_of(config)
    head_config, layer = kind.published(config, text_config(target_path).to_dict())
    head = build_head(head_config, AutoConfig.for_model(**layer))
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    steps, length = methods[0].get("speculative_tokens", UNROLL_STEPS), layer.get("max_position_embeddings", 2048)
    info = HeadInfo(head.config, target, taps_of(head.config, target.num_layers), steps, length, 0)
    return _fill(folder, kind, head, info, layer, target_path, strict)


def open_head(folder: str | Path, target_path: str, strict: bool = True) -> LoadedHead:
    """A head of ours (a checkpoint, an export of format hf) or a published one. Raises FileNotFoundError and ValueError as `load_head` and `read_published`."""
    folder = Path(folder)
    published = not (folder / "head.json").exists() and (folder / "config.json").exists()
    return read_published(folder, target_path, strict) if published else load_head(folder)


def _fill(folder: Path, kind: EngineClass, head: DraftHead, info: HeadInfo, layer_config: Config, target_path: str | None, strict: bool) -> LoadedHead:
    """The directory's tensors, in the head."""
    shapes = {name: parameter.shape for name, parameter in head.named_parameters()}
    tensors = read_tensors(folder)
    copies = {name: tensors.pop(name) for name in ENDS if name in tensors and name not in shapes} if target_path else {}
    if copies:
        check_copies(copies, FrozenEnds.from_pretrained(str(target_path)), str(folder), strict)
    tensors = kind.from_engine(tensors, shapes, layer_config)
    draft_vocab = tensors.pop("draft_vocab", None)
    load_exactly(head, tensors, str(folder))
    if kind.keeps_draft_vocab:
        check_draft_vocab(draft_vocab, info, str(folder))
    info = HeadInfo(**{**vars(info), "draft_vocab": info.draft_vocab or vocab_fingerprint(draft_vocab)})
    return LoadedHead(head.eval().requires_grad_(False), info, draft_vocab, layer_config)


def check_copies(copies: Tensors, ends: Any, where: str, strict: bool) -> None:
    """Raise ValueError, or log, where a directory's copies of the target's embeddings and lm_head are not the target's."""
    for name, copy in copies.items():
        own = getattr(ends, ENDS[name]).float()
        error = float((copy.float() - own).norm() / own.norm()) if copy.shape == own.shape else float("inf")
        if error > COPY_ERROR:
            what = f"{where}: {name} {tuple(copy.shape)} is not the target's {tuple(own.shape)} (relative difference {error:.2g})"
            if strict:
                raise ValueError(f"{what}: it belongs to another target, or was trained; heads here draft with the target's own")
            log.warning("%s; the target's own is used", what)
