"""From shards to packed batches. The order is a pure function of (seed, epoch): resuming at any batch needs nothing but its number."""

from __future__ import annotations

import logging
import queue
import random
import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mtp_train.data.manifest import STATE_DTYPES
from mtp_train.data.shards import ShardReader
from mtp_train.interfaces import Batch, Sample

log = logging.getLogger(__name__)


def pack(lengths: Sequence[int], seq_len: int, seed: int, epoch: int) -> list[list[int]]:
    """Best-fit packing of shuffled samples into rows of `seq_len` tokens, in shuffled order.

    Every sample stands in exactly one row; one longer than a row has a row of its own (it is cut when read). Example: lengths 5, 3, 2 in
    rows of 5 give [[0], [1, 2]] in some order.
    """
    order = list(range(len(lengths)))
    shuffle = random.Random(f"{seed}:{epoch}")
    shuffle.shuffle(order)
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
    shuffle.shuffle(rows)
    return rows


def collate(rows: Sequence[Sequence[Sample]], seq_len: int, like: Tensor | None = None) -> Batch:
    """Lay samples side by side: positions restart and document ids change at each; padding has document -1 and no loss.

    A sample longer than `seq_len` is cut, ids, mask and states together. `like` (…, L, H) gives shape and type of the states where all rows
    are empty. Raises ValueError for a row that does not fit otherwise.
    """
    like = next((sample.hidden_states for row in rows for sample in row), like)
    assert like is not None, "rows without samples need `like`"
    shape = (len(rows), seq_len)
    input_ids, position_ids = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    document_ids, loss_mask = torch.full(shape, -1, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    hidden_states = torch.zeros(*shape, *like.shape[-2:], dtype=like.dtype)
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
    return Batch(input_ids, position_ids, document_ids, loss_mask, hidden_states)


class PackedBatches:
    """Batches of up to `rows_per_batch` packed rows of `seq_len` tokens, read ahead by one thread.

    Samples without a supervised token in their first `seq_len` are left out (`num_dropped`); longer ones are cut (`num_cut`). The ranks
    share every epoch's rows and get the same number of batches; a rank left over in the last one gets an empty row.

    Raises ValueError where nothing supervised remains.
    """

    def __init__(self, reader: ShardReader, seq_len: int, rows_per_batch: int, seed: int, rank: int = 0, world_size: int = 1):
        if not 0 <= rank < world_size or seq_len < 1 or rows_per_batch < 1:
            raise ValueError(f"rank={rank} of world_size={world_size}, seq_len={seq_len}, rows_per_batch={rows_per_batch} are not possible")
        self.reader, self.seq_len, self.rows_per_batch, self.seed, self.rank, self.world_size = reader, seq_len, rows_per_batch, seed, rank, world_size
        long, useful = reader.lengths > seq_len, reader.supervised > 0
        for index in (long & useful).nonzero().flatten().tolist():
            useful[index] = reader.loss_mask(index)[:seq_len].any()
        self.num_cut, self.num_dropped = int((long & useful).sum()), int((~useful).sum())
        self._samples: list[int] = useful.nonzero().flatten().tolist()
        if not self._samples:
            raise ValueError(f"{reader.dir}: 0 supervised tokens within seq_len={seq_len} in {len(reader)} samples")
        if self.num_cut or self.num_dropped:
            log.info("%s: seq_len=%d cuts %d samples; %d have no supervised token within it", reader.dir, seq_len, self.num_cut, self.num_dropped)
        self._planned: tuple[int, list[list[list[int]]]] = (-1, [])

    def _plan(self, epoch: int) -> list[list[list[int]]]:
        """Sample numbers by batch and row, of all ranks together."""
        if self._planned[0] != epoch:
            rows = pack(self.reader.lengths[self._samples].tolist(), self.seq_len, self.seed, epoch)
            size = self.rows_per_batch * self.world_size
            numbered = [[self._samples[index] for index in row] for row in rows]
            self._planned = epoch, [numbered[start : start + size] for start in range(0, len(numbered), size)]
        return self._planned[1]

    def num_batches(self, epoch: int) -> int:
        """Batches of this epoch, for every rank alike; the last one may have fewer rows."""
        return len(self._plan(epoch))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch from number `start` on; over all ranks every sample exactly once an epoch."""
        plan = self._plan(epoch)
        if not 0 <= start <= len(plan):
            raise ValueError(f"batch {start} of epoch {epoch}, which has {len(plan)}: these are other shards or settings than before")
        header = self.reader.manifest
        like = torch.zeros(len(header.taps), header.target.hidden_size, dtype=STATE_DTYPES[header.state_dtype])
        mine = (rows[self.rank :: self.world_size] or [[]] for rows in plan[start:])
        return prefetch(collate([[self.reader[index] for index in row] for row in rows], self.seq_len, like) for rows in mine)


def prefetch(batches: Iterator[Batch], size: int = 2) -> Iterator[Batch]:
    """The same batches, made ahead by a thread that keeps at most `size` ready. Its errors are raised here; closing ends it."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=size)
    stop = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def read() -> None:
        try:
            for batch in batches:
                put(batch)
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
