"""Everything that training needs before its first step: shards checked against the target, head, optimiser, and the place to go on from."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig

from mtp_train import config as cfg
from mtp_train import dist
from mtp_train.checkpoint import HEAD, HeadInfo, LoadedHead, checkpoints, head_tensors, load_exactly, read_safetensors, read_state, vocab_fingerprint
from mtp_train.data.dataset import PackedBatches
from mtp_train.data.shards import ShardReader
from mtp_train.heads.base import DraftHead, Start
from mtp_train.heads.table import build_head, resolve, taps_of
from mtp_train.interfaces import Tap, TargetInfo
from mtp_train.metrics import DECODED, METRICS
from mtp_train.optim import make_optimizer, take_up
from mtp_train.parallel import Objective, Replica, make_replica
from mtp_train.planner import Meter, Sizes, measure, peak_flops, training_flop
from mtp_train.provenance import Claim, write_provenance
from mtp_train.published import open_head
from mtp_train.serving import check_formats, choose_class
from mtp_train.target.ends import FrozenEnds, read_json, read_layer, text_config
from mtp_train.target.identity import target_info

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """Where a training stands. A step never crosses an epoch, so the same rows make it at any number of ranks and micro-batches."""

    step: int = 0  # optimiser steps done
    epoch: int = 0
    row: int = 0  # packed rows of this epoch already used, by all ranks together


@dataclass
class Setup:
    """All that the loop needs."""

    device: torch.device
    replica: Replica
    data: PackedBatches
    validation: PackedBatches | None
    draft_vocab: Tensor | None
    info: HeadInfo
    target_config: dict[str, Any]
    at: Progress
    window: dict[str, Any]  # the log line begun
    meter: Meter | None  # where the device's peak is known
    claim: Claim | None  # to the checkpoints: rank 0 writes them
    flop_of: Callable[[int], float]  # optimiser steps -> FLOP of all processes


def set_up(config: cfg.Config) -> Setup:
    """Open the shards, check them against the target, build the head, resume. Raises ValueError for what does not fit."""
    run_dir, options = Path(config.run_dir), config.train
    device = dist.start(config.distributed.mode, dist.pick_device(config.target.device))
    dtype = dist.pick_dtype(options.dtype, device.type)
    torch.manual_seed(options.seed)  # of the head's first weights, alike on every rank; nothing later is random
    info = target_info(config.target.path)
    config = replace(config, head=resolved(config.head, info))
    taps = taps_of(config.head, info.num_layers)
    reader = open_shards(Path(options.shards) / "train", info, taps)
    if int(reader.supervised.sum()) == 0:
        raise ValueError(f"{reader.dir}: 0 supervised tokens in {len(reader)} samples; nothing can be trained (see data.turns and the chat template)")
    ends = FrozenEnds.from_pretrained(config.target.path, dtype=dtype).to(device)
    source = warm_start(config, info) if options.init_from else None
    target_config = AutoConfig.for_model(**source.layer_config) if source else text_config(config.target.path)
    layer_config = target_config.to_dict()
    sizes = measure(config.head, target_config)  # before DeepSpeed is there: with ZeRO-3 transformers builds no model on the meta device
    own = source is not None and source.head.lm_head is not None
    vocab = source.draft_vocab if source and own else choose_draft_vocab(reader, config.head.draft_vocab_size, info.vocab_size)
    check_formats(config.export.formats, config.head, layer_config, vocab is not None)
    draft_vocab = None if vocab is None else vocab.to(device)
    lm_head = ends.head_weight if draft_vocab is None else ends.head_weight[draft_vocab]
    start = Start(ends.norm_weight.float(), lm_head, partial(read_layer, config.target.path))
    head = build_head(config.head, target_config, start).to(device)
    if source:
        load_exactly(head, head_tensors(source.head, None), str(options.init_from))
    place = (dist.rank(), dist.world_size())
    data = PackedBatches(reader, options.seq_len, options.rows_per_batch, options.seed, *place, options.window_shards)
    held_out, validation = Path(options.shards) / "validation", None
    if held_out.exists():
        validation = PackedBatches(open_shards(held_out, info, taps), options.seq_len, options.rows_per_batch, 0, *place)
    head_info = HeadInfo(config.head, info, taps, options.unroll_steps, options.seq_len, 0, vocab_fingerprint(vocab))
    claim = Claim(run_dir / "checkpoints" / ".lock") if dist.is_first() else None
    if claim and not options.resume:
        set_aside(run_dir)
    found = dist.from_first(checkpoints(run_dir / "checkpoints")[-1:])
    if found:
        load_weights(found[0], head, head_info, draft_vocab, layer_config)
    optimizer = make_optimizer(head, options.optim)
    replica = make_replica(config.distributed.mode, Objective(head, ends, options, draft_vocab, dtype), optimizer, options, device)
    at, window = resume(found[0], replica, data, options.optim) if found else (Progress(), {})
    peak = peak_flops(device)
    meter = Meter(config, sizes, peak * dist.world_size()) if peak else None
    flop_of = partial(_flop_of_all, config, sizes)
    setup = Setup(device, replica, data, validation, draft_vocab, head_info, layer_config, at, window, meter, claim, flop_of)
    if dist.is_first():
        write_provenance(run_dir / "checkpoints", asdict(config))
    describe(setup, head, reader, config, dtype)
    return setup


def resolved(head: cfg.HeadConfig, target: TargetInfo) -> cfg.HeadConfig:
    """What the head config means for this target: its default taps, and no draft vocabulary where that is the whole one."""
    size = None if head.draft_vocab_size == target.vocab_size else head.draft_vocab_size
    return replace(resolve(head, target.num_layers), draft_vocab_size=size)


def warm_start(config: cfg.Config, target: TargetInfo) -> LoadedHead:
    """The head of `train.init_from`. Raises ValueError unless it is the configured one, saying what to configure, and fits the target.

    A head that the target's lm_head reads may come from a target of another vocabulary, as before tokens were added.
    """
    source = open_head(str(config.train.init_from), config.target.path, strict=False)
    there, here = source.info.config, config.head
    names = ("kind", "layout", "num_layers", "dense_mlp") + (("draft_vocab_size",) if source.head.lm_head is not None else ())
    if different := [f"head.{name}: {getattr(there, name)} there, {getattr(here, name)} here" for name in names if getattr(there, name) != getattr(here, name)]:
        raise ValueError(f"train.init_from={config.train.init_from} holds another head than is configured ({'; '.join(different)})")
    own = source.head.lm_head is not None
    for name in ("hidden_size", *(["vocab_size"] if own else [])):
        if (found := source.layer_config[name]) != (size := getattr(target, name)):
            raise ValueError(f"train.init_from={config.train.init_from} is a head for {name}={found}, the target has {size}")
    return replace(source, layer_config=source.layer_config | {"vocab_size": target.vocab_size})


def _flop_of_all(config: cfg.Config, sizes: Sizes, num_steps: int) -> float:
    return dist.world_size() * training_flop(config, sizes, num_steps)


def open_shards(folder: Path, target: TargetInfo, taps: tuple[Tap, ...]) -> ShardReader:
    """Raises ValueError where another target made them, or a tap is not stored."""
    reader = ShardReader(folder, taps=taps)
    reader.manifest.target.check(target, str(folder))
    return reader


def describe(setup: Setup, head: DraftHead, reader: ShardReader, config: cfg.Config, dtype: torch.dtype) -> None:
    """Say what will be trained, and which engine class its layout is for: that cannot be changed afterwards."""
    log.info(
        "head %s: %.2fM trained parameters; %d samples, %d supervised tokens; autocast %s on %s; %d processes (%s)",
        config.head.kind,
        sum(tensor.numel() for tensor in head.parameters()) / 1e6,
        len(reader),
        int(reader.supervised.sum()),
        dist.dtype_name(dtype),
        setup.device.type,
        dist.world_size(),
        config.distributed.mode,
    )
    if dtype == torch.bfloat16 and not dist.has_fast_bfloat16(setup.device.type):
        log.warning("train.dtype=bfloat16, but this %s has no such products in hardware: float32, which is what fast means here, is quicker", setup.device.type)
    try:
        log.info("vLLM will serve this head as %s", choose_class(setup.info.config, setup.target_config, setup.draft_vocab is not None)[1])
    except ValueError as error:
        log.warning("%s; it can be measured with the embedded engine alone", error)


def choose_draft_vocab(reader: ShardReader, size: int | None, vocab_size: int) -> Tensor | None:
    """The `size` most frequent supervised tokens of the training rows, sorted; the rest is filled up with the lowest ids."""
    if size is None:
        return None
    if not 0 < size <= vocab_size:
        raise ValueError(f"head.draft_vocab_size={size} is not between 1 and the target's {vocab_size}")
    chosen, shares = dist.from_first(reader.frequent_tokens(size, vocab_size) if dist.is_first() else (torch.empty(0), {}))
    said = ", ".join(f"{100 * share:.2f} % ({domain})" for domain, share in sorted(shares.items()))
    log.info("draft vocabulary: %d of %d tokens cover of the supervised tokens of each domain: %s", size, vocab_size, said)
    return chosen


# ---------------------------------------------------------------- going on


UNCOMPUTED = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache")
"""Of a config.json, what no layer computes with."""


def set_aside(run_dir: Path) -> None:
    """Before a training that begins anew where another one was: what that left goes into a folder of its own, so that neither is taken for the other."""
    left = [path for path in (*(run_dir / "checkpoints").glob("step_*"), run_dir / METRICS, run_dir / DECODED) if path.exists()]
    if not left:
        return
    folder = next(path for number in count(1) if not (path := run_dir / f"before_{number}").exists())
    for path in left:
        place = folder / path.relative_to(run_dir)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    log.info("train.resume=false: the training that was in %s is now in %s", run_dir, folder)


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The single settings below a setting, by their dotted names."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, below in value.items():
        yield from leaves(f"{name}.{key}", below)


def check_finished(config: cfg.Config, path: Path) -> None:
    """Raise ValueError unless the last checkpoint of a finished training is of the head and the target configured; log what else is configured otherwise."""
    there, info = HeadInfo.from_json(read_json(path / "head.json")), target_info(config.target.path)
    there.target.check(info, str(path))
    check_same_head(there, resolved(config.head, info), config.train.unroll_steps, str(path))
    before = dict(leaves("train", yaml.safe_load((path.parent / "config.yaml").read_text(encoding="utf-8"))["train"]))
    now = leaves("train", asdict(config.train))
    if different := [f"{name}: {before[name]}, now {value}" for name, value in now if before.get(name, value) != value]:
        log.warning("%s stands as it is, though its training had other settings (%s): use a new run_dir for another", path, "; ".join(different))


def check_same_head(there: HeadInfo, head: cfg.HeadConfig, unroll_steps: int, where: str) -> None:
    """Raise ValueError, with both, unless a checkpoint's head is the one configured."""
    if (there.config, there.unroll_steps) != (head, unroll_steps):
        found = f"{there.config}, unrolled {there.unroll_steps} steps, there; {head}, {unroll_steps} steps, here"
        raise ValueError(f"{where} holds another head ({found}): use a new run_dir, or train.resume=false to begin anew in this one")


def load_weights(path: Path, head: DraftHead, info: HeadInfo, draft_vocab: Tensor | None, layer_config: dict[str, Any]) -> None:
    """A checkpoint's weights, before the head is wrapped. Raises ValueError unless it is of this very head."""
    there = HeadInfo.from_json(read_json(path / "head.json"))
    there.target.check(info.target, str(path))
    check_same_head(there, info.config, info.unroll_steps, str(path))
    there_config, here_config = read_json(path / "target_config.json"), json.loads(json.dumps(layer_config))
    shared = [key for key in there_config if key in here_config and key not in UNCOMPUTED]
    if different := [f"{key}: {there_config[key]} there, {here_config[key]} here" for key in shared if there_config[key] != here_config[key]]:
        raise ValueError(f"{path} has a layer of another config.json ({'; '.join(different)}); give the train.init_from it began with, or use a new run_dir")
    tensors = read_safetensors(path / HEAD)
    if vocab_fingerprint(tensors.pop("draft_vocab", None)) != vocab_fingerprint(draft_vocab):
        raise ValueError(f"{path} was trained with another draft vocabulary than these shards give; use a new run_dir")
    load_exactly(head, tensors, str(path))


def resume(path: Path, replica: Replica, data: PackedBatches, optim: cfg.OptimConfig) -> tuple[Progress, dict[str, Any]]:
    """Moments, place in the data and the log line begun, of a checkpoint. Raises ValueError where the place means nothing here."""
    replica.load_moments(read_safetensors(path / "optimizer.safetensors"))
    take_up(replica.optimizer, optim, str(path))
    state = read_state(path)
    at = Progress(state["step"], state["epoch"], state["row"])
    if different := [f"{key}: {state['plan'].get(key)} there, {value} here" for key, value in data.plan.items() if state["plan"].get(key) != value]:
        raise ValueError(f"{path} stands at row {at.row} of epoch {at.epoch} of other data ({'; '.join(different)}); use a new run_dir")
    log.info("resuming at step %d from %s", at.step, path)
    return at, state["window"]
