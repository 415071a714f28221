"""Train a draft head on captured states: shards in, checkpoints out.

The whole of training is `train` below, in one sitting; what it stands on is made in `setup.py`, and how several processes share the work is
`parallel.py`. Reads `train.shards` (train/ and validation/ in it), writes `<run_dir>/checkpoints` and `<run_dir>/metrics.jsonl`. The target's
weights are never loaded, only its embeddings, final norm and lm_head.

On several devices: torchrun --nproc_per_node=8 -m mtp_train.train distributed=ddp ... (or zero1, zero2, zero3).
SIGTERM or SIGUSR1, to any of the processes: the step is finished, a checkpoint written, and every process exits with 75 (EX_TEMPFAIL).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_train import cli, dist
from mtp_train import config as cfg
from mtp_train.checkpoint import checkpoints, choose, prune, read_state, save_checkpoint
from mtp_train.interfaces import Batch
from mtp_train.loss import LossSums, divisor
from mtp_train.measure import Measurer, unmeasured
from mtp_train.metrics import Metrics
from mtp_train.optim import averaged, lr_at, update_average
from mtp_train.planner import report
from mtp_train.setup import Setup, check_finished, set_up
from mtp_train.spec_decode.predict import prediction, walk
from mtp_train.spec_decode.stats import AcceptanceStats

log = logging.getLogger(__name__)


def train(config: cfg.Config) -> Path:
    """Run the training that `config` describes; returns the last checkpoint. Exits with code 75 where a signal ended it."""
    run_dir, options = Path(config.run_dir), config.train
    setup = set_up(config)
    at, replica = setup.at, setup.replica
    metrics = Metrics(run_dir, options, at.step, setup.window, setup.device, setup.meter)
    measurer = Measurer(config)
    feed = steps(setup, options.accumulation)
    last, stopped = choose(run_dir / "checkpoints", "last") if at.step else run_dir / "checkpoints", False
    with dist.StopSignals() as signals, setup.claim or nullcontext():
        while at.step < options.num_steps and not stopped:
            started = time.perf_counter()
            lr = lr_at(at.step, options.num_steps, options.optim)
            for group in replica.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]

            # Forward and backward: every micro-batch is divided by the supervised tokens (or documents) of the whole step, of all ranks.
            parts = next(feed)
            waited = time.perf_counter() - started
            num_unrolled = 1 if at.step < options.unroll_from * options.num_steps else options.unroll_steps
            divided_by, num_tokens, num_stopped = count(parts, options.loss.normalise, signals.received)
            total: LossSums | None = None
            for part in parts:
                with replica.micro_batch(last=part is parts[-1]):
                    sums, _ = replica(part, num_unrolled)
                    replica.backward(sums.loss / divided_by)
                total = sums.detached() if total is None else total + sums.detached()
            assert total is not None

            # Clip and step.
            norm = replica.step()
            if not torch.isfinite(norm):
                raise ValueError(f"step {at.step}: the gradient norm is {float(norm)}; lower train.optim.lr or check the states")
            at.step += 1
            update_average(replica.optimizer, options.optim.ema_decay, at.step)

            # Log, validate, save.
            metrics.step(at.step, over_ranks(total), lr, float(norm), int(num_tokens), time.perf_counter() - started, waited)
            stopped, final = bool(num_stopped), at.step == options.num_steps
            validation = None
            if setup.validation and (final or (options.validate_every and at.step % options.validate_every == 0)):
                with averaged(replica.optimizer):
                    validation = validate(setup, options.unroll_steps)
                metrics.validation(at.step, validation)
            if final or stopped or at.step % options.save_every == 0:
                with averaged(replica.optimizer):
                    last = save(setup, run_dir, {"validation": validation, "window": metrics.state()}, options.keep_last)
                measurer.saved()
            measurer.report(metrics)
        stopped = measurer.finish(metrics, signals) if at.step == options.num_steps else stopped
    metrics.close()
    dist.finish()
    if stopped:
        log.info("stopped by a signal after step %d of %d, with a checkpoint: run the same command again to go on", at.step, options.num_steps)
        sys.exit(os.EX_TEMPFAIL)
    return last


def steps(setup: Setup, accumulation: int) -> Iterator[list[Batch]]:
    """This rank's micro-batches of every optimiser step, without end, from where the set-up stands; keeps its place."""
    data, at = setup.data, setup.at
    while True:
        batches = data.numbered(at.epoch, at.row, ahead=accumulation + 1)  # the whole next step is read during this one
        while parts := list(islice(batches, accumulation)):
            at.row += sum(num_rows for _, num_rows in parts)
            yield [part.to(setup.device) for part, _ in parts]
        at.epoch, at.row = at.epoch + 1, 0


def count(parts: list[Batch], normalise: str, stop: bool) -> Tensor:
    """What the loss is divided by (at least 1), tokens, and ranks that were asked to stop: (3,) over all ranks, so all agree where to stop."""
    tokens = sum(int((part.document_ids >= 0).sum()) for part in parts)
    divided_by = sum(divisor(part, normalise) for part in parts)
    (counted,) = dist.total([torch.tensor([divided_by, tokens, int(stop)], device=parts[0].input_ids.device)])
    return torch.cat([counted[:1].clamp(min=1), counted[1:]])


def over_ranks(sums: LossSums) -> LossSums:
    """The sums of all ranks."""
    return LossSums(*dist.total(list(vars(sums).values())))


@torch.no_grad()
def validate(setup: Setup, num_steps: int) -> dict[str, Any]:
    """Loss parts, a teacher-forced proxy of acceptance by position, and the acceptance length predicted by walking the rows; of all ranks."""
    assert setup.validation is not None
    setup.replica.module.eval()
    total: LossSums | None = None
    walked = AcceptanceStats()
    for batch in setup.validation.batches(0):
        batch = batch.to(setup.device)
        sums, drafted = setup.replica(batch, num_steps)
        total = sums if total is None else total + sums
        walked = sum(walk(drafted, batch), walked)
    setup.replica.module.train()
    assert total is not None
    return {**over_ranks(total).averages(), **prediction(sum(dist.from_all(walked), AcceptanceStats()))}


def save(setup: Setup, run_dir: Path, state: dict[str, Any], keep_last: int) -> Path:
    """A checkpoint of where the set-up stands, written by rank 0; the others wait for it."""
    weights, moments = setup.replica.gather()
    path, root, at = None, run_dir / "checkpoints", setup.at
    if setup.claim is not None:
        if setup.draft_vocab is not None:
            weights["draft_vocab"] = setup.draft_vocab.cpu()
        place = {"epoch": at.epoch, "row": at.row, "plan": setup.data.plan}
        info = replace(setup.info, step=at.step, training_flop=setup.flop_of(at.step))
        path = save_checkpoint(root, weights, info, setup.target_config, moments, {**place, **state}, setup.claim.check)
        prune(root, keep_last)
    path = dist.from_first(path)
    assert path is not None
    return path


def stage(config: cfg.Config) -> None:
    """The command mtp-train."""
    if config.plan:
        sys.stdout.write(report(config))
        return
    done = checkpoints(Path(config.run_dir) / "checkpoints")
    if done and config.train.resume and read_state(done[-1])["step"] >= config.train.num_steps:
        check_finished(config, done[-1])
        if not (config.train.validate_with and unmeasured(Path(config.run_dir))):
            log.info("training is complete: %s", done[-1])
            return
    train(config)


def main() -> None:
    """Console script mtp-train."""
    cli.main(__doc__, stage)


if __name__ == "__main__":
    main()
