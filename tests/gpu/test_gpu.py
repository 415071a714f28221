"""On one GPU, in a few minutes: bfloat16, NCCL, ZeRO-2 with one process, and memory and MFU at the shapes of Llama-3.1-8B.

pytest -m gpu -s tests/gpu tests/test_unroll.py
"""

from __future__ import annotations

import os
import time

import pytest
import torch

from benchmarks.loss_memory import MIB, chunked_step, counted_peak, make_ends, make_rows
from mtp_train.config import LossConfig, compose
from mtp_train.heads.base import supervised, unroll
from mtp_train.heads.table import build_head
from mtp_train.interfaces import Batch
from mtp_train.loss import draft_loss
from mtp_train.metrics import read_metrics
from mtp_train.optim import make_optimizer
from mtp_train.planner import measure, read_target, train_flop
from tests.ranks import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize(("chunk_mib", "workspace"), [(60, 64), (120, 128)])
def test_the_loss_fits_its_budget_at_8b_shapes(chunk_mib, workspace):
    ends = make_ends(128256, 4096, torch.bfloat16, "cuda")
    rows = make_rows(1, 8192, 4096, 128256, torch.bfloat16, "cuda")
    config = LossConfig("forward_kl", 3.0, "tokens", 0.1, 0.8, chunk_mib)
    chunked_step(ends, rows, config)  # libraries take their workspace once
    peak = counted_peak(lambda: chunked_step(ends, rows, config), "cuda")
    gradient = rows.students.numel() * 2
    print(f"\nloss at T=8192, V=128256, H=4096, chunk_mib={chunk_mib}: peak {peak / MIB:.0f} MiB, beyond the gradient {(peak - gradient) / MIB:.0f}")
    assert peak < 192 * MIB
    assert peak - gradient < workspace * MIB


def test_ddp_and_zero2_over_nccl_give_the_losses_of_one_process(captured, tmp_path):
    shards, overrides = captured
    found = {}
    for mode in ("single", "ddp", "zero2"):
        folder = tmp_path / mode
        folder.mkdir()
        os.symlink(shards / "shards", folder / "shards")
        extra = ("target.device=cuda", "train.dtype=bfloat16", f"distributed={mode}", "train.log_every=1", "train.num_steps=6")
        run(folder, [*overrides, f'run_dir="{folder}"', *extra], size=1)
        found[mode] = [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    assert len(found["single"]) == 6
    assert found["ddp"] == pytest.approx(found["single"], rel=5e-3)
    assert found["zero2"] == pytest.approx(found["single"], rel=5e-3)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_step_at_8b_shapes(num_steps):
    """Prints tokens per second and MFU; asserts only that it trains."""
    config = compose("experiment=llama-3.1-8b", "head.draft_vocab_size=null", "train.loss.chunk_mib=1024")
    target = read_target(config.target)
    ends = make_ends(128256, 4096, torch.bfloat16, "cuda")
    head = build_head(config.head, target).cuda()
    optimizer = make_optimizer(head, config.train.optim)
    shape = (4, 2048)
    positions = torch.arange(shape[1], device="cuda").expand(shape)
    batch = Batch(
        torch.randint(0, 128256, shape, device="cuda"), positions, torch.zeros_like(positions), positions >= shape[1] // 2,
        torch.randn(*shape, 1, 4096, device="cuda", dtype=torch.bfloat16),
    )  # fmt: skip

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            sums, _ = draft_loss(ends, supervised(unroll(head, ends, batch, num_steps), batch), config.train.loss)
        (sums.loss / sums.divisor).backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(sums.loss / sums.divisor)

    losses = [step() for _ in range(2)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    losses += [step() for _ in range(5)]
    torch.cuda.synchronize()
    rate = 5 * positions.numel() / (time.perf_counter() - start)
    flop = sum(train_flop(measure(config.head, target), shape[1], num_steps, 0.5, 128256).values())
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"\n8B shapes, K={num_steps}, half supervised: {rate:,.0f} tok/s, {rate * flop / 989e12:.1%} of 989 TFLOP/s, peak {peak:.1f} GiB")
    assert losses[-1] < losses[0]
