"""What there is to do: ranges of a corpus that workers can take, the bytes they will write, and whether the disk holds them."""

from __future__ import annotations

import shutil
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from mtp_train.interfaces import TokenRow


@dataclass(frozen=True)
class Range:
    """Rows start..stop-1 of a corpus, the share of part `part` of `num_parts`."""

    part: int
    num_parts: int
    start: int
    stop: int


def split(tokens: int | Sequence[int], num_parts: int) -> list[Range]:
    """Contiguous ranges of rows, every row in exactly one, balanced by tokens (a number of rows: by rows). A range may be empty.

    Example: 11 rows in 2 parts are rows 0..5 and 6..10.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts} must be above 0")
    sums = [0, *accumulate([1] * tokens if isinstance(tokens, int) else tokens)]
    cuts = [0]
    for part in range(1, num_parts):
        bound = sums[-1] * part / num_parts
        at = bisect_left(sums, bound)  # the first cut at or past the bound; the one before may be nearer
        nearest = at if at == 0 or sums[at] - bound <= bound - sums[at - 1] else at - 1
        cuts.append(max(cuts[-1], nearest))
    cuts.append(len(sums) - 1)
    return [Range(part, num_parts, cuts[part], cuts[part + 1]) for part in range(num_parts)]


def remaining(rows: Sequence[TokenRow], stored_ids: Collection[str]) -> list[TokenRow]:
    """The rows still to be captured, in order. Raises ValueError for stored ids that are not among the rows: they are of another range."""
    strange = set(stored_ids) - {row.id for row in rows}
    if strange:
        raise ValueError(f"{len(strange)} stored samples, such as {min(strange)!r}, are not among the {len(rows)} rows of this part")
    return [row for row in rows if row.id not in stored_ids]


def check_disk(folder: Path, needed: int) -> None:
    """Raise ValueError when the disk of `folder` cannot hold `needed` more bytes."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(f"the states need {needed / 2**30:.2f} GiB, the disk of {folder} has {free / 2**30:.2f} GiB free; use fewer rows or another run_dir")
