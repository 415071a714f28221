"""How full packed rows are, and how long packing takes: `python benchmarks/packing.py` (CPU, about a minute).

For each distribution of sample lengths: fill of the rows of a window (about a million tokens), of all samples packed at once, of a loader that takes
samples as they come, and the most that any packer could reach (total / seq_len rows, or one row for each sample above half a row).
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

from mtp_train.data.dataset import pack

KINDS: dict[str, Callable[[random.Random], float]] = {
    "chat: lognormal, median 400": lambda rng: rng.lognormvariate(6.0, 0.8),
    "long answers: lognormal, median 1100": lambda rng: rng.lognormvariate(7.0, 0.6),
    "long tail: Pareto 1.1 from 60": lambda rng: 60 * rng.paretovariate(1.1),
    "two kinds: 80 % 40-300, 20 % 1100-2000": lambda rng: rng.uniform(40, 300) if rng.random() < 0.8 else rng.uniform(1100, 2000),
    "even: 10-3000": lambda rng: rng.uniform(10, 3000),
    "adverse: 1100-1500": lambda rng: rng.uniform(1100, 1500),
}


def fill(num_rows: int, lengths: list[int], seq_len: int) -> float:
    """Share of tokens that are not padding, in percent."""
    return 100 * sum(min(length, seq_len) for length in lengths) / (num_rows * seq_len)


def as_they_come(lengths: list[int], seq_len: int) -> int:
    """Rows of a loader that closes a row where the next sample does not fit."""
    rows, used = 0, seq_len
    for length in (min(length, seq_len) for length in lengths):
        rows, used = (rows + 1, length) if used + length > seq_len else (rows, used + length)
    return rows


def at_least(lengths: list[int], seq_len: int) -> int:
    """No packer needs fewer rows."""
    total = sum(min(length, seq_len) for length in lengths)
    return max(-(-total // seq_len), sum(length > seq_len / 2 for length in lengths))


def main(num_samples: int = 1_000_000) -> None:
    """Print the table."""
    write = sys.stdout.write
    write(f"{'lengths':40} {'seq_len':>7} {'as come':>8} {'window':>8} {'all':>8} {'bound':>8}   seconds for {num_samples:,}\n")
    for name, draw in KINDS.items():
        rng = random.Random(name)
        lengths = [max(1, int(draw(rng))) for _ in range(num_samples)]
        for seq_len in (2048, 4096):
            window: list[int] = []
            while sum(window) < 2**20:
                window.append(lengths[len(window)])
            started = time.process_time()
            rows = len(pack(lengths, seq_len, random.Random(0)))
            seconds = time.process_time() - started
            counts = (as_they_come(lengths, seq_len), len(pack(window, seq_len, random.Random(0))), rows, at_least(lengths, seq_len))
            shares = [fill(count, window if place == 1 else lengths, seq_len) for place, count in enumerate(counts)]
            write(f"{name:40} {seq_len:7} " + " ".join(f"{share:7.1f}%" for share in shares) + f"   {seconds:.1f}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
