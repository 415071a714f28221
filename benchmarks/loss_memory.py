"""Memory and work of the chunked loss at the shape of Llama-3.1-8B (V 128256, H 4096), counted, beside plain autograd.

    PYTHONPATH=. python benchmarks/loss_memory.py --rows 128             # a table; rows may be few, the counts are exact
    PYTHONPATH=. python benchmarks/loss_memory.py --rows 8192 --device cuda

Memory is what torch's allocator hands out beyond inputs and weights, temporaries inside operators included: on CPU the profiler's events
added up, on a GPU the allocator's own peak. FLOP are counted by torch.utils.flop_counter. A CPU without bfloat16 takes seconds a
row at H 4096: `--hidden 128 --rows 104 208` has the same vocabulary-wide tensors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from mtp_train.config import LossConfig
from mtp_train.heads.base import Supervised
from mtp_train.loss import KINDS, draft_loss
from mtp_train.target.ends import FrozenEnds

MIB = 2**20


def counted_peak(work: Callable[[], Any], device: str = "cpu") -> int:
    """The most bytes alive at once while `work` runs, beyond what was alive before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def make_rows(num_steps: int, num_rows: int, hidden: int, vocab_size: int, dtype: torch.dtype, device: str = "cpu") -> Supervised:
    """Random students and teachers; every row supervised."""
    generator = torch.Generator(device).manual_seed(0)
    students = torch.randn(num_steps, num_rows, hidden, generator=generator, device=device, dtype=dtype).requires_grad_()
    teacher = torch.randn(num_rows, hidden, generator=generator, device=device, dtype=dtype)
    valid = torch.ones(num_steps, num_rows, dtype=torch.bool, device=device)
    token_ids = torch.randint(0, vocab_size, (num_rows,), generator=generator, device=device)
    return Supervised(students, teacher, valid, token_ids, torch.zeros(num_rows, dtype=torch.long, device=device))


def make_ends(vocab_size: int, hidden: int, dtype: torch.dtype, device: str = "cpu") -> FrozenEnds:
    """Random tied ends of a Llama."""
    weight = torch.empty(vocab_size, hidden, dtype=dtype, device=device).normal_(std=hidden**-0.5)
    return FrozenEnds(LlamaConfig(vocab_size=vocab_size, hidden_size=hidden), weight, torch.ones(hidden, dtype=dtype, device=device), weight)


def chunked_step(ends: FrozenEnds, rows: Supervised, config: LossConfig) -> None:
    """Loss and gradient as trained."""
    sums, _ = draft_loss(ends, rows, config)
    (sums.loss / sums.divisor).backward()
    rows.students.grad = None


def dense_step(ends: FrozenEnds, rows: Supervised, _: LossConfig) -> None:
    """The same by plain autograd: forward KL with all logits at once."""
    target = ends.logits(rows.teacher).float().log_softmax(-1)
    loss = F.kl_div(ends.logits(rows.students).float().log_softmax(-1), target.expand(len(rows.students), -1, -1), log_target=True, reduction="sum")
    (loss / len(rows.token_ids)).backward()
    rows.students.grad = None


def measure(step: Callable[..., None], ends: FrozenEnds, rows: Supervised, config: LossConfig, device: str) -> tuple[int, float, float]:
    """Peak bytes, GFLOP and seconds of one step."""
    started = time.perf_counter()
    peak = counted_peak(lambda: step(ends, rows, config), device)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    few = Supervised(rows.students[:, :8].detach().requires_grad_(), rows.teacher[:8], rows.valid[:, :8], rows.token_ids[:8], rows.documents[:8])
    with FlopCounterMode(display=False) as counter:
        step(ends, few, config)
    return peak, counter.get_total_flops() / 8 / 1e9, seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1024], help="supervised tokens")
    parser.add_argument("--steps", type=int, nargs="+", default=[1], help="unrolled steps K")
    parser.add_argument("--kinds", nargs="+", default=["forward_kl"], choices=list(KINDS))
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[60, 120])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dense-rows", type=int, default=32, help="plain autograd, for its bytes a row; 0: without")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of states and weights; bfloat16 is slow on a CPU without it")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    ends = make_ends(args.vocab, args.hidden, dtype, args.device)
    unit = 2 * args.vocab * args.hidden / 1e9  # GFLOP of one pass of a row through lm_head
    print(f"V {args.vocab}, H {args.hidden}, {args.dtype}, {args.device}; MiB beyond inputs and weights; FLOP in passes of one row through lm_head")
    print("| loss | K | rows | chunk_mib | peak MiB | gradient | the rest | at 8192 rows | passes/row | rows/s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    cases = [("dense", 1, args.dense_rows, 0)] if args.dense_rows else []
    cases += [(kind, k, rows, mib) for kind in args.kinds for k in args.steps for rows in args.rows for mib in args.chunk_mib]
    for kind, num_steps, num_rows, mib in cases:
        rows = make_rows(num_steps, num_rows, args.hidden, args.vocab, dtype, args.device)
        config = LossConfig("forward_kl" if kind == "dense" else kind, 3.0, "tokens", 0.1, 0.8, mib)
        peak, gflop, seconds = measure(dense_step if kind == "dense" else chunked_step, ends, rows, config, args.device)
        gradient = rows.students.numel() * dtype.itemsize
        grows = peak if kind == "dense" else gradient  # with the rows; the chunk's workspace does not
        print(
            f"| {kind} | {num_steps} | {num_rows} | {mib or '-'} | {peak / MIB:.1f} | {gradient / MIB:.1f} | {(peak - gradient) / MIB:.1f} "
            f"| {(peak - grows + grows * 8192 / num_rows) / MIB:.1f} | {gflop / unit:.3f} | {num_rows / seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
