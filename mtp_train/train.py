"""Train a draft head on captured states: shards in, checkpoints out.

The whole of training is `train` below, in one sitting. Reads `<run_dir>/shards/train` (and `/validation`), writes
`<run_dir>/checkpoints` and `<run_dir>/metrics.jsonl`. The target's weights are never loaded, only its embeddings, final norm and lm_head.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from mtp_train import cli
from mtp_train import config as cfg
from mtp_train.checkpoint import HeadInfo, checkpoints, load_exactly, load_optimizer, prune, read_state, save_checkpoint
from mtp_train.data.dataset import PackedBatches
from mtp_train.data.shards import ShardReader
from mtp_train.dist import make_accelerator, pick_device, pick_dtype
from mtp_train.heads.base import DraftHead, supervised, unroll
from mtp_train.heads.table import build_head
from mtp_train.interfaces import Batch, Ends
from mtp_train.loss import LossSums, draft_loss
from mtp_train.measure import Measurer
from mtp_train.metrics import Metrics
from mtp_train.optim import lr_at, make_optimizer
from mtp_train.provenance import write_provenance
from mtp_train.serving import choose_class
from mtp_train.spec_decode.predict import prediction, walk
from mtp_train.spec_decode.stats import AcceptanceStats
from mtp_train.target.ends import FrozenEnds
from mtp_train.target.identity import target_info

log = logging.getLogger(__name__)


@dataclass
class Setup:
    """All that the loop needs."""

    accelerator: Accelerator
    head: DraftHead
    ends: FrozenEnds
    optimizer: torch.optim.AdamW
    data: PackedBatches
    validation: PackedBatches | None
    draft_vocab: Tensor | None
    info: HeadInfo
    target_config: dict[str, Any]
    step: int = 0  # optimiser steps done
    epoch: int = 0
    index: int = 0  # batches of this epoch already used


def train(config: cfg.Config) -> Path:
    """Run the training that `config` describes; returns the last checkpoint."""
    run_dir, options = Path(config.run_dir), config.train
    setup = set_up(config)
    head, optimizer, accelerator = setup.head, setup.optimizer, setup.accelerator
    metrics = Metrics(run_dir, options, setup.step)
    measurer = Measurer(config, setup.step)
    batches = stream(setup)
    last = run_dir / "checkpoints"
    while setup.step < options.num_steps:
        started = time.perf_counter()
        lr = lr_at(setup.step, options.num_steps, options.optim)
        for group in optimizer.param_groups:
            group["lr"] = lr

        # Forward and backward: every micro-batch is divided by the supervised tokens of the whole step.
        parts = [next(batches) for _ in range(options.accumulation)]
        num_unrolled = 1 if setup.step < options.unroll_from_step else options.unroll_steps
        num_supervised = sum(int((part.loss_mask & (part.position_ids >= 2)).sum()) for part in parts)
        total: LossSums | None = None
        for part in parts:
            with accelerator.autocast():
                readouts = unroll(head, setup.ends, part, num_unrolled)
                sums, _ = draft_loss(setup.ends, supervised(readouts, part), options.loss, setup.draft_vocab)
            accelerator.backward(sums.loss / max(1, num_supervised))
            total = sums.detached() if total is None else total + sums.detached()
        assert total is not None

        # Clip and step.
        norm = torch.nn.utils.clip_grad_norm_(head.parameters(), options.optim.max_grad_norm)
        if not torch.isfinite(norm):
            raise ValueError(f"step {setup.step}: the gradient norm is {float(norm)}; lower train.optim.lr or check the states")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        setup.step += 1

        # Log, validate, save.
        metrics.step(setup.step, total, lr, float(norm), sum(int((part.document_ids >= 0).sum()) for part in parts), time.perf_counter() - started)
        final = setup.step == options.num_steps
        validation = None
        if setup.validation and (final or (options.validate_every and setup.step % options.validate_every == 0)):
            validation = validate(head, setup.ends, setup.validation, options, setup.draft_vocab, accelerator)
            metrics.validation(setup.step, validation)
        if final or setup.step % options.save_every == 0:
            last = save(setup, run_dir, validation)
            prune(run_dir / "checkpoints", options.keep_last)
            measurer.saved()
        for row in measurer.results():
            metrics.decoded(row)
    measurer.finish()
    for row in measurer.results():
        metrics.decoded(row)
    metrics.close()
    return last


def set_up(config: cfg.Config) -> Setup:
    """Open the shards, check them against the target, build the head, resume. Raises ValueError for what does not fit."""
    run_dir, options = Path(config.run_dir), config.train
    device = pick_device(config.target.device)
    accelerator = make_accelerator(pick_dtype(options.dtype, device), device)
    torch.manual_seed(options.seed)
    reader = ShardReader(run_dir / "shards" / "train")
    info = target_info(config.target.path)
    reader.manifest.target.check(info, str(reader.dir))
    if int(reader.supervised.sum()) == 0:
        raise ValueError(f"{reader.dir}: 0 supervised tokens in {len(reader)} samples; nothing can be trained (see data.turns and the chat template)")
    ends = FrozenEnds.from_pretrained(config.target.path, dtype=pick_dtype(options.dtype, device)).to(device)
    target_config = AutoConfig.from_pretrained(config.target.path)
    head = build_head(config.head, target_config, ends.norm_weight.float()).to(device)
    optimizer = make_optimizer(head, options.optim)
    draft_vocab = choose_draft_vocab(reader, config.head.draft_vocab_size, info.vocab_size)
    data = PackedBatches(reader, options.seq_len, options.rows_per_batch, options.seed)
    validation = None
    if (run_dir / "shards" / "validation").exists():
        held_out = ShardReader(run_dir / "shards" / "validation")
        held_out.manifest.target.check(info, str(held_out.dir))
        validation = PackedBatches(held_out, options.seq_len, options.rows_per_batch, seed=0)
    setup = Setup(
        accelerator, head, ends, optimizer, data, validation, draft_vocab,
        HeadInfo(config.head, info, reader.manifest.taps, options.unroll_steps, options.seq_len, 0), target_config.to_dict(),
    )  # fmt: skip
    resume(setup, config)
    explain_serving(setup)
    write_provenance(run_dir / "checkpoints", asdict(config))
    size = sum(parameter.numel() for parameter in head.parameters())
    log.info(
        "head %s: %.2fM trained parameters; %d samples, %d supervised tokens; autocast %s on %s",
        config.head.kind,
        size / 1e6,
        len(reader),
        int(reader.supervised.sum()),
        options.dtype,
        device,
    )
    return setup


def explain_serving(setup: Setup) -> None:
    """Say before training which engine class the layout is for: it cannot be changed afterwards."""
    try:
        log.info("vLLM will serve this head as %s", choose_class(setup.info.config, setup.target_config, setup.draft_vocab is not None)[1])
    except ValueError as error:
        log.warning("%s; it can be measured with the embedded engine alone", error)


def resume(setup: Setup, config: cfg.Config) -> None:
    """Go on from the newest complete checkpoint, if there is one and it is of this very head."""
    found = checkpoints(Path(config.run_dir) / "checkpoints")
    if not found or not config.train.resume:
        return
    there = HeadInfo.from_json(json.loads((found[-1] / "head.json").read_text()))
    there.target.check(setup.info.target, str(found[-1]))
    if (there.config, there.taps, there.unroll_steps) != (setup.info.config, setup.info.taps, setup.info.unroll_steps):
        raise ValueError(f"{found[-1]} holds another head: {there.config} there, {setup.info.config} here; use a new run_dir or train.resume=false")
    tensors = load_file(found[-1] / "head.safetensors")
    vocab = tensors.pop("draft_vocab", None)
    if (vocab is None) != (setup.draft_vocab is None) or (vocab is not None and setup.draft_vocab is not None and not torch.equal(vocab, setup.draft_vocab)):
        raise ValueError(f"{found[-1]} was trained with another draft vocabulary than these shards give; use a new run_dir")
    load_exactly(setup.head, tensors, str(found[-1]))
    load_optimizer(setup.head, setup.optimizer, load_file(found[-1] / "optimizer.safetensors"))
    state = read_state(found[-1])
    setup.step, setup.epoch, setup.index = state["step"], state["epoch"], state["index"]
    log.info("resuming at step %d from %s", setup.step, found[-1])


def choose_draft_vocab(reader: ShardReader, size: int | None, vocab_size: int) -> Tensor | None:
    """The `size` most frequent supervised tokens of the training rows, sorted; the rest is filled up with the lowest ids."""
    if size is None:
        return None
    if not 0 < size <= vocab_size:
        raise ValueError(f"head.draft_vocab_size={size} is not between 1 and the target's {vocab_size}")
    chosen, share = reader.frequent_tokens(size, vocab_size)
    log.info("draft vocabulary: %d of %d tokens cover %.2f %% of the supervised tokens", size, vocab_size, 100 * share)
    return chosen


def stream(setup: Setup) -> Iterator[Batch]:
    """Batches without end, from where the set-up stands; keeps its place in it."""
    while True:
        for batch in setup.data.batches(setup.epoch, setup.index):
            setup.index += 1
            yield batch.to(setup.accelerator.device)
        setup.epoch, setup.index = setup.epoch + 1, 0


@torch.no_grad()
def validate(
    head: DraftHead, ends: Ends, data: PackedBatches, options: cfg.TrainConfig, draft_vocab: Tensor | None, accelerator: Accelerator
) -> dict[str, Any]:
    """Loss parts, a teacher-forced proxy of acceptance by position, and the acceptance length predicted by walking the rows."""
    head.eval()
    total: LossSums | None = None
    walked = AcceptanceStats()
    for batch in data.batches(0):
        batch = batch.to(accelerator.device)
        with accelerator.autocast():
            rows = supervised(unroll(head, ends, batch, options.unroll_steps), batch)
            sums, drafted = draft_loss(ends, rows, options.loss, draft_vocab)
        total = sums if total is None else total + sums
        walked = sum(walk(drafted, batch), walked)
    head.train()
    assert total is not None
    return {**total.averages(), **prediction(walked)}


def save(setup: Setup, run_dir: Path, validation: dict[str, Any] | None) -> Path:
    """A checkpoint of where the set-up stands."""
    info = HeadInfo(**{**setup.info.__dict__, "step": setup.step})
    state = {"epoch": setup.epoch, "index": setup.index, "validation": validation}
    return save_checkpoint(run_dir / "checkpoints", setup.head, info, setup.draft_vocab, setup.target_config, setup.optimizer, state)


def stage(config: cfg.Config) -> None:
    """The command mtp-train."""
    done = checkpoints(Path(config.run_dir) / "checkpoints")
    if done and config.train.resume and read_state(done[-1])["step"] >= config.train.num_steps:
        log.info("training is complete: %s", done[-1])
        return
    train(config)


def main() -> None:
    """Console script mtp-train."""
    cli.main(__doc__, stage)


if __name__ == "__main__":
    main()
