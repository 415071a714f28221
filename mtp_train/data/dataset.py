"""From shards to packed batches. The order is a pure function of (seed, epoch): resuming at any batch needs nothing but its number."""

from __future__ import annotations

import logging
import queue
import random
import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from mtp_train.data.manifest import STATE_DTYPES
from mtp_train.data.shards import ShardReader
from mtp_train.interfaces import Batch, Sample

log = logging.getLogger(__name__)

T = TypeVar("T")


def pack(lengths: Sequence[int], seq_len: int, rng: random.Random) -> list[list[int]]:
    """Best-fit packing of samples, longest first, into rows of `seq_len` tokens; the rows, and equally long samples, in shuffled order.

    Every sample stands in exactly one row; one longer than a row has a row of its own (it is cut when read). Example: lengths 5, 3, 2 in
    rows of 5 give [[0], [1, 2]] in some order.
    """
    order = list(range(len(lengths)))
    rng.shuffle(order)
    order.sort(key=lengths.__getitem__, reverse=True)
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens left -> rows
    rooms: list[int] = []  # its keys, sorted: at most seq_len of them, however many rows there are
    for sample in order:
        need = min(lengths[sample], seq_len)
        at = bisect_left(rooms, need)
        if at == len(rooms):
            left, row = seq_len, len(rows)
            rows.append([])
        else:
            left = rooms[at]
            row = with_room[left].pop()
            if not with_room[left]:
                del with_room[left], rooms[at]
        rows[row].append(sample)
        left -= need
        if left and left not in with_room:
            insort(rooms, left)
        if left:
            with_room.setdefault(left, []).append(row)
    rng.shuffle(rows)
    return rows


def collate(rows: Sequence[Sequence[Sample]], seq_len: int, like: Tensor | None = None) -> Batch:
    """Lay samples side by side: positions restart and document ids change at each; padding has document -1 and no loss.

    A sample longer than `seq_len` is cut, ids, mask and states together. `like` (…, L, H) gives shape and type of the states where all rows
    are empty. Where there is a GPU the batch lies in page-locked memory, so that it is copied there while the GPU computes.
    Raises ValueError for a row that does not fit otherwise.
    """
    like = next((sample.hidden_states for row in rows for sample in row), like)
    assert like is not None, "rows without samples need `like`"
    shape, pin = (len(rows), seq_len), torch.cuda.is_available()
    input_ids, position_ids = (torch.zeros(shape, dtype=torch.long, pin_memory=pin) for _ in range(2))
    document_ids, loss_mask = torch.full(shape, -1, pin_memory=pin), torch.zeros(shape, dtype=torch.bool, pin_memory=pin)
    hidden_states = torch.empty(*shape, *like.shape[-2:], dtype=like.dtype, pin_memory=pin)
    for index, row in enumerate(rows):
        start = 0
        for document, sample in enumerate(row):
            size = min(len(sample.input_ids), seq_len)
            if start + size > seq_len:
                raise ValueError(f"row {index}: sample {sample.id!r} of {size} tokens does not fit, {start} of seq_len={seq_len} are taken")
            part = slice(start, start + size)
            input_ids[index, part], loss_mask[index, part] = sample.input_ids[:size], sample.loss_mask[:size]
            hidden_states[index, part] = sample.hidden_states[:size]
            position_ids[index, part] = torch.arange(size)
            document_ids[index, part] = document
            start += size
        hidden_states[index, start:] = 0
    return Batch(input_ids, position_ids, document_ids, loss_mask, hidden_states)


class PackedBatches:
    """Batches of up to `rows_per_batch` packed rows of `seq_len` tokens, read ahead by one thread.

    Shards are taken in shuffled order, `window_shards` at a time: the samples of such a window are shuffled and packed together. So each file is
    read within one stretch of the epoch, within a batch from front to back, and what stands together is new in every epoch.
    Samples without a supervised token in their first `seq_len` are left out (`num_dropped`); longer ones are cut (`num_cut`). The ranks
    share every epoch's rows and get the same number of batches; a rank left over in the last one gets an empty row. A place in an epoch
    is a number of rows, of all ranks together, so it means the same at any number of ranks.

    Raises ValueError where nothing supervised remains.
    """

    def __init__(self, reader: ShardReader, seq_len: int, rows_per_batch: int, seed: int, rank: int = 0, world_size: int = 1, window_shards: int = 16):
        if not 0 <= rank < world_size or min(seq_len, rows_per_batch, window_shards) < 1:
            sizes = f"seq_len={seq_len}, rows_per_batch={rows_per_batch}, window_shards={window_shards}"
            raise ValueError(f"rank={rank} of world_size={world_size}, {sizes} are not possible")
        self.reader, self.seq_len, self.rows_per_batch, self.seed, self.rank, self.world_size = reader, seq_len, rows_per_batch, seed, rank, world_size
        self.window_shards = window_shards
        long, useful = reader.lengths > seq_len, reader.supervised > 0  # a byte a sample
        for index in (long & useful).nonzero().flatten().tolist():
            useful[index] = reader.loss_mask(index)[:seq_len].any()
        self.num_cut, self.num_dropped, self._useful = int((long & useful).sum()), int((~useful).sum()), useful
        if not useful.any():
            raise ValueError(f"{reader.dir}: 0 supervised tokens within seq_len={seq_len} in {len(reader)} samples")
        if self.num_cut or self.num_dropped:
            log.info("%s: seq_len=%d cuts %d samples; %d have no supervised token within it", reader.dir, seq_len, self.num_cut, self.num_dropped)

    def rows(self, epoch: int) -> Iterator[list[int]]:
        """Sample numbers of each row of an epoch, planned window by window; they do not depend on ranks."""
        rng = random.Random(f"{self.seed}:{epoch}")
        shards = list(pairwise(self.reader.first))
        rng.shuffle(shards)
        for begin in range(0, len(shards), self.window_shards):
            window = shards[begin : begin + self.window_shards]
            samples = torch.cat([self._useful[start:stop].nonzero().flatten() + start for start, stop in window])
            numbers = samples.tolist()
            for row in pack(self.reader.lengths[samples].tolist(), self.seq_len, rng):
                yield [numbers[i] for i in row]

    @property
    def plan(self) -> dict[str, Any]:
        """What the rows of every epoch follow from: a place in an epoch means the same only where all of it is the same."""
        return {
            "corpus": self.reader.manifest.corpus_fingerprint, "num_samples": int(self._useful.sum()), "num_shards": len(self.reader.first) - 1,
            "seq_len": self.seq_len, "window_shards": self.window_shards, "seed": self.seed,
        }  # fmt: skip

    def numbered(self, epoch: int, start: int = 0, ahead: int = 2) -> Iterator[tuple[Batch, int]]:
        """This rank's batches of an epoch from row `start` on, each with its number of rows over all ranks; every sample exactly once an epoch.

        Up to `ahead` of them are ready before they are asked for.
        """
        rows, size = islice(self.rows(epoch), start, None), self.rows_per_batch * self.world_size
        batches = iter(lambda: list(islice(rows, size)), [])
        return prefetch(((self._read(batch[self.rank :: self.world_size] or [[]]), len(batch)) for batch in batches), ahead)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """As `numbered`, the batches alone."""
        return (batch for batch, _ in self.numbered(epoch, start))

    def _read(self, rows: list[list[int]]) -> Batch:
        header = self.reader.manifest
        like = torch.zeros(len(self.reader.taps), header.target.hidden_size, dtype=STATE_DTYPES[header.state_dtype])
        samples = {i: self.reader[i] for i in sorted(chain.from_iterable(rows))}  # in the order of the disk
        return collate([[samples[i] for i in row] for row in rows], self.seq_len, like)


def prefetch(items: Iterator[T], size: int) -> Iterator[T]:
    """The same items, made ahead by a thread that keeps at most `size` ready. Its errors are raised here; closing ends it."""
    ready: queue.Queue[T | BaseException | None] = queue.Queue(maxsize=size)
    stop = threading.Event()

    def put(item: T | BaseException | None) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def read() -> None:
        try:
            for item in items:
                put(item)
                if stop.is_set():
                    return
            put(None)
        except BaseException as error:  # handed to the consumer, who raises it
            put(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
