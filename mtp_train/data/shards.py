"""Captured states on disk: what they are (Manifest), how they are written (ShardWriter, merge) and read (ShardReader, verify).

    part-00000-of-00004-shard-00000.safetensors   few big tensors; appears whole, by a rename
    part-00000-of-00004.json                      index of one part (what one worker writes), replaced after each of its shards
    manifest.json                                 written last, by `merge`: a directory without it is not a data set

Many workers share a directory. A kill loses at most each one's unfinished shard. Read `dataset.py` next.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from mtp_train.data.manifest import MANIFEST, STATE_DTYPES, Header, Manifest, ShardInfo, damage, load_parts, part_name, refuse_damage
from mtp_train.interfaces import Sample, Tap
from mtp_train.provenance import Claim, atomic_write, save_safetensors, unclaimed

log = logging.getLogger(__name__)


def write_shard(path: Path, samples: Sequence[Sample], header: Header, check: Callable[[], None] = unclaimed) -> ShardInfo:
    """Write samples as one safetensors file, whole or not at all, streamed so that nothing is held twice. No samples give an empty shard.

    Tensors: offsets (S+1,), supervised (S,), input_ids (N,), hidden_states (N, L, H), loss_mask (N,), and names (uint8): ids and domains
    as JSON, because a header that grows with the samples becomes unreadable.
    """
    names = torch.frombuffer(bytearray(json.dumps([[s.id for s in samples], [s.domain for s in samples]]).encode()), dtype=torch.uint8)
    offsets = torch.tensor([0] + [len(s.input_ids) for s in samples]).cumsum(0)
    supervised = torch.tensor([int(s.loss_mask.sum()) for s in samples], dtype=torch.int64)
    num_tokens, state_shape = int(offsets[-1]), (int(offsets[-1]), len(header.taps), header.target.hidden_size)
    columns: list[tuple[str, torch.dtype, tuple[int, ...], list[Tensor]]] = [  # wide types first, so that each tensor is aligned
        ("offsets", torch.int64, (len(offsets),), [offsets]),
        ("supervised", torch.int64, (len(samples),), [supervised]),
        ("input_ids", torch.int64, (num_tokens,), [s.input_ids for s in samples]),
        ("hidden_states", STATE_DTYPES[header.state_dtype], state_shape, [s.hidden_states for s in samples]),
        ("loss_mask", torch.bool, (num_tokens,), [s.loss_mask for s in samples]),
        ("names", torch.uint8, (len(names),), [names]),
    ]
    return ShardInfo(path.name, len(samples), num_tokens, int(supervised.sum()), *save_safetensors(path, columns, check))


def read_names(path: Path) -> list[list[str]]:
    """[ids, domains] of a shard's samples."""
    with safe_open(path, "pt") as file:
        names: list[list[str]] = json.loads(file.get_tensor("names").numpy().tobytes())
        return names


def stored_ids(directory: Path, part: int) -> set[str]:
    """Ids of the samples that a part holds already, in shards that are whole."""
    shards = [shard for index in load_parts(directory) if index.part == part for shard in index.shards]
    return {id for shard in shards if not damage(directory, shard) for id in read_names(directory / shard.file)[0]}


class ShardWriter:
    """Writes one part, a shard whenever `shard_tokens` are reached, and goes on where an earlier writer of the part was stopped.

        writer = ShardWriter(out_dir, header, shard_tokens=262_144, part=0, num_parts=4)
        for row in remaining(rows, writer.stored):  # ids that need no capture
            writer.add(capture(row))
        writer.finish()

    Changing a merged data set withdraws its manifest until the next merge.

    Raises:
        ValueError: the directory holds states of another target, taps, corpus, dtype, engine or number of parts (both values), or
            another process is writing this part (see `Claim`); from `add`, `flush` and `finish`: a later attempt has taken it over.
    """

    def __init__(self, out_dir: str | Path, header: Header, shard_tokens: int, part: int = 0, num_parts: int = 1):
        if not 0 <= part < num_parts or shard_tokens < 1:
            raise ValueError(f"part={part} must be in 0..num_parts-1 (num_parts={num_parts}), and shard_tokens={shard_tokens} above 0")
        self.dir, self.header, self.shard_tokens, self.name = Path(out_dir), header, shard_tokens, part_name(part, num_parts)
        self.dir.mkdir(parents=True, exist_ok=True)
        for other in load_parts(self.dir):
            if other.num_parts != num_parts:
                raise ValueError(f"{self.dir} was begun with {other.num_parts} parts, now {num_parts}: keep that number or use another directory")
            other.check(header, f"{self.dir} (part {other.part})")
        self._claim = Claim(self.dir / f".{self.name}.lock")
        self._index_path = self.dir / f"{self.name}.json"
        self._index = Manifest.read(self._index_path) if self._index_path.exists() else Manifest(**vars(header), part=part, num_parts=num_parts)
        self._recover()
        self.stored = frozenset(stored_ids(self.dir, part))
        self._ids, self._buffer, self._buffered_tokens = set(self.stored), list[Sample](), 0

    def add(self, sample: Sample) -> None:
        """Take in one sample; its states are converted to the data set's dtype and copied.

        Raises ValueError naming the sample: wrong shapes, an id stored before, inf or NaN states.
        """
        self._check(sample)
        states = sample.hidden_states.detach().to("cpu", STATE_DTYPES[self.header.state_dtype], copy=True)
        if not states.isfinite().all():
            token, tap, _ = (int(i) for i in (~states.isfinite()).nonzero()[0])
            largest = float(sample.hidden_states.float().abs().max())
            why = f"overflow {self.header.state_dtype} (largest {largest:.3g})" if largest < float("inf") else "are inf or NaN in the target itself"
            where = f"token {token}, {self.header.taps[tap]}"
            raise ValueError(f"sample {sample.id!r}: hidden_states {why}, first at {where}; use bfloat16 (precompute.state_dtype, target.dtype)")
        ids, mask = sample.input_ids.to("cpu", torch.int64, copy=True), sample.loss_mask.to("cpu", copy=True)
        self._buffer.append(replace(sample, input_ids=ids, loss_mask=mask, hidden_states=states))
        self._ids.add(sample.id)
        self._buffered_tokens += len(ids)
        if self._buffered_tokens >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as a shard. Raises OSError where the disk is full: nothing half-written remains."""
        if not self._buffer:
            return
        shards = {shard.file: shard for shard in self._index.shards}
        free_names = {f"{self.name}-shard-{number:05d}.safetensors" for number in range(len(shards) + 1)} - set(shards)
        path = self.dir / min(free_names)
        try:
            shards[path.name] = write_shard(path, self._buffer, self.header, self._claim.check)
            self._save(tuple(shards[name] for name in sorted(shards)), complete=False)
        except OSError as error:
            self._claim.check()  # whoever took over has removed the unfinished file
            free = f"{shutil.disk_usage(self.dir).free / 2**30:.2f} GiB free"
            message = f"{error.strerror} while writing {self._buffered_tokens} tokens ({free}); finished shards are kept: make room and run again"
            raise OSError(error.errno, message, str(path)) from error
        self._buffer, self._buffered_tokens = [], 0

    def finish(self) -> None:
        """Write the last shard and mark the part complete."""
        self.flush()
        self._save(self._index.shards, complete=True)
        self._claim.close()

    def _check(self, sample: Sample) -> None:
        ids, mask, states, where = sample.input_ids, sample.loss_mask, sample.hidden_states, f"sample {sample.id!r}"
        if ids.dim() != 1 or mask.shape != ids.shape or mask.dtype != torch.bool or not len(ids):
            raise ValueError(f"{where}: input_ids {tuple(ids.shape)}, loss_mask {tuple(mask.shape)} {mask.dtype}; expected (T,), (T,) torch.bool, T > 0")
        expected = (len(ids), len(self.header.taps), self.header.target.hidden_size)
        if tuple(states.shape) != expected or not states.is_floating_point():
            raise ValueError(f"{where}: hidden_states {tuple(states.shape)} {states.dtype}, expected {expected} (tokens, taps, hidden) of a float type")
        if sample.id in self._ids:
            raise ValueError(f"{where} is already stored in {self.name}: ids must be unique")

    def _recover(self) -> None:
        """Forget shards whose file is lost and remove what a kill left (of this part alone)."""
        kept = tuple(shard for shard in self._index.shards if not damage(self.dir, shard))
        for lost in set(self._index.shards) - set(kept):
            log.warning("%d samples are captured again: %s", lost.samples, damage(self.dir, lost))
        for left in (*self.dir.glob(f"{self.name}-shard-*.safetensors"), *self.dir.glob(f".{self.name}*.tmp")):
            if left.name not in {shard.file for shard in kept}:
                left.unlink()
        self._save(kept, complete=self._index.complete and kept == self._index.shards)

    def _save(self, shards: tuple[ShardInfo, ...], complete: bool) -> None:
        index = replace(self._index, shards=shards, complete=complete)
        if index != self._index or not self._index_path.exists():
            self._claim.check()
            (self.dir / MANIFEST).unlink(missing_ok=True)
            atomic_write(self._index_path, index.to_json(), self._claim.check)
        self._index = index


def merge(data_dir: str | Path) -> Manifest:
    """Make complete parts a data set, by writing its manifest. Doing it again is harmless.

    Raises ValueError naming parts that are missing, incomplete or made otherwise, lost shards, and sample ids stored twice.
    """
    directory = Path(data_dir)
    parts = load_parts(directory)
    if not parts:
        raise ValueError(f"{directory} holds no parts: nothing was captured there")
    first, complete = parts[0], {index.part for index in parts if index.complete}
    for other in parts:
        if other.num_parts != first.num_parts:
            raise ValueError(f"{directory} holds parts of two splits, of {first.num_parts} and of {other.num_parts} parts")
        first.check(other, f"{directory} (part {first.part}, against part {other.part})")
    unfinished = [part_name(part, first.num_parts) for part in range(first.num_parts) if part not in complete]
    if unfinished:
        raise ValueError(f"{directory}: missing or incomplete: {', '.join(unfinished)}; run the capture of these parts (it resumes), then merge")
    manifest = replace(first, shards=tuple(shard for index in parts for shard in index.shards), part=None)
    refuse_damage(directory, manifest)
    if twice := stored_twice(directory, manifest):
        raise ValueError(f"{directory}: {len(twice)} sample ids are stored twice, such as {', '.join(map(repr, twice[:3]))}")
    atomic_write(directory / MANIFEST, manifest.to_json())
    return manifest


def stored_twice(directory: Path, manifest: Manifest) -> list[str]:
    """Sample ids that occur more than once. Only hashes are held of all of them (8 bytes a sample); equal hashes are looked at again."""

    def all_ids() -> Iterator[list[str]]:
        return (read_names(directory / shard.file)[0] for shard in manifest.shards)

    hashes, counts = torch.cat([torch.tensor([hash(id) for id in ids], dtype=torch.int64) for ids in all_ids()] or [torch.zeros(0)]).unique(return_counts=True)
    doubtful = set(hashes[counts > 1].tolist())
    suspects = Counter(id for ids in all_ids() for id in ids if hash(id) in doubtful) if doubtful else {}
    return [id for id, count in suspects.items() if count > 1]


def read_manifest(data_dir: str | Path) -> Manifest:
    """The manifest of a data set. Raises FileNotFoundError without the directory, ValueError where it is not (yet) a data set."""
    directory = Path(data_dir)
    if not directory.is_dir():
        raise FileNotFoundError(f"no such data set directory: {directory}")
    if not (directory / MANIFEST).exists():
        parts = ", ".join(f"part {index.part} {'complete' if index.complete else 'incomplete'}" for index in load_parts(directory)) or "no parts"
        raise ValueError(f"{directory} is not a data set, it has no {MANIFEST} ({parts}): run the capture (it resumes), then the merge step")
    return Manifest.read(directory / MANIFEST)


def verify(data_dir: str | Path) -> Manifest:
    """Read every byte of a data set again. Raises ValueError naming each shard that is missing, truncated or changed."""
    manifest = read_manifest(data_dir)
    refuse_damage(Path(data_dir), manifest, rehash=True)
    return manifest


class _Shard:
    """An open shard; what is small of it is read when first asked for."""

    def __init__(self, path: Path):
        self.path, self.file = path, safe_open(path, "pt")

    @cached_property
    def offsets(self) -> list[int]:
        offsets: list[int] = self.file.get_tensor("offsets").tolist()
        return offsets

    @cached_property
    def names(self) -> list[list[str]]:
        return read_names(self.path)


class ShardReader:
    """Random access to the samples of a data set through memory maps. Threads may share it.

    `manifest`, `lengths` (S,) tokens and `supervised` (S,) supervised tokens, both int32, describe the S samples; those of shard n are
    `first[n]` to `first[n + 1]` - 1. Opening reads these and no states: 8 bytes a sample stay in memory. Samples have the states at `taps`
    in this order; None: all.

    Raises:
        FileNotFoundError, ValueError: as `read_manifest`; a tap is not stored; or a shard is missing, truncated or shaped otherwise than the manifest says.
    """

    def __init__(self, data_dir: str | Path, max_open: int = 64, taps: Sequence[Tap] | None = None):
        self.dir, self.manifest, self._max_open = Path(data_dir), read_manifest(data_dir), max_open
        self.taps = self.manifest.taps if taps is None else tuple(taps)
        self._places = self.manifest.places(self.taps, str(self.dir))
        self._open: dict[int, _Shard] = {}  # the last used shards: thousands would use up the file descriptors
        self._lock = threading.Lock()
        self.first = [0, *accumulate(shard.samples for shard in self.manifest.shards)]
        self.lengths, self.supervised = torch.zeros(2, self.first[-1], dtype=torch.int32)
        for number, (start, stop) in enumerate(pairwise(self.first)):
            file = self._shard(number).file
            self.lengths[start:stop] = file.get_tensor("offsets").diff()
            self.supervised[start:stop] = file.get_tensor("supervised")

    def __len__(self) -> int:
        return self.first[-1]

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        shard, at = self._find(i)
        ids, domains = shard.names
        return Sample(ids[at], domains[at], self._read(i, "input_ids").clone(), self.loss_mask(i), self._read(i, "hidden_states")[:, self._places])

    @property
    def ids(self) -> list[str]:
        """Of every sample, read now: a hundred bytes each."""
        return [id for shard in self.manifest.shards for id in read_names(self.dir / shard.file)[0]]

    @property
    def domains(self) -> list[str]:
        """As `ids`."""
        return [domain for shard in self.manifest.shards for domain in read_names(self.dir / shard.file)[1]]

    def loss_mask(self, i: int) -> Tensor:
        """(T,) bool of one sample, without reading its states."""
        return self._read(i, "loss_mask").clone()

    def token_counts(self, vocab_size: int) -> dict[str, Tensor]:
        """How often each token (V,) is a training target, by domain."""
        counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros(vocab_size, dtype=torch.int64))
        for shard in map(self._shard, range(len(self.manifest.shards))):
            ids, mask = shard.file.get_tensor("input_ids"), shard.file.get_tensor("loss_mask")
            for domain, (start, stop) in zip(shard.names[1], pairwise(shard.offsets), strict=True):
                found = ids[start:stop][mask[start:stop]]
                counts[domain].index_add_(0, found, torch.ones_like(found))
        return counts

    def frequent_tokens(self, size: int, vocab_size: int) -> tuple[Tensor, dict[str, float]]:
        """The `size` most frequent training targets (size,), sorted ids, filled up with the lowest; and the share of each domain's targets that they cover."""
        counts = self.token_counts(vocab_size)
        chosen = sum(counts.values(), torch.zeros(vocab_size, dtype=torch.int64)).argsort(descending=True, stable=True)[:size].sort().values
        return chosen, {domain: float(each[chosen].sum() / each.sum()) for domain, each in counts.items() if each.any()}

    def _find(self, i: int) -> tuple[_Shard, int]:
        """The shard of a sample, and its number in there."""
        number = bisect_right(self.first, i) - 1
        return self._shard(number), i - self.first[number]

    def _read(self, i: int, name: str) -> Tensor:
        """A view of the map, to be copied: a write into it would show in later reads."""
        shard, at = self._find(i)
        rows: Tensor = shard.file.get_slice(name)[shard.offsets[at] : shard.offsets[at + 1]]
        return rows

    def _shard(self, number: int) -> _Shard:
        """The open shard. Its size is checked first, because reading past the end of a map kills the process."""
        with self._lock:
            shard = self._open.pop(number, None)
            if shard is None:
                info = self.manifest.shards[number]
                refuse_damage(self.dir, replace(self.manifest, shards=(info,)))
                shard = _Shard(self.dir / info.file)
                wanted = {"offsets": (info.samples + 1,), "hidden_states": (info.tokens, len(self.manifest.taps), self.manifest.target.hidden_size)}
                for name, expected in wanted.items():
                    found = tuple(shard.file.get_slice(name).get_shape())
                    if found != expected:
                        raise ValueError(f"{shard.path}: {name} {found}, but the manifest says {expected}")
            self._open[number] = shard
            if len(self._open) > self._max_open:
                del self._open[next(iter(self._open))]
            return shard
