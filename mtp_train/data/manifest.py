"""What a data set of captured states is: the header its parts share, and the manifest that lists its shards. `shards.py` writes and reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from mtp_train.interfaces import Tap, TargetInfo
from mtp_train.provenance import sha256

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONVENTION = (
    "Nothing is shifted: hidden_states[t] is the state after reading input_ids[t]; loss_mask[t]: input_ids[t] is a training target. Axes: tokens, taps, "
    "hidden. Tap k is the residual after k decoder layers (0 = embeddings), pre or post final norm; the last one is the teacher state (last layer, post)."
)


@dataclass(frozen=True)
class ShardInfo:
    """One shard file, as its index records it."""

    file: str
    samples: int
    tokens: int
    supervised_tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Header:
    """What all parts of a data set share. Raises ValueError for taps outside of the target, given twice, or without the teacher state at the end."""

    target: TargetInfo
    taps: tuple[Tap, ...]
    engine: dict[str, str]  # name, version and whatever else changes the states
    corpus_fingerprint: str
    state_dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))
        depth = self.target.num_layers
        known = {Tap(layer, norm) for layer in range(depth + 1) for norm in ("pre", "post")}
        if not set(self.taps) <= known or len(set(self.taps)) < len(self.taps) or self.taps[-1:] != (Tap(depth, "post"),):
            raise ValueError(f"taps {self.taps} must be distinct, of layers 0..{depth}, and end in the teacher state {Tap(depth, 'post')}")
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype={self.state_dtype!r} is not one of {', '.join(STATE_DTYPES)}")

    def places(self, taps: Sequence[Tap], what: str) -> list[int]:
        """Where each of `taps` lies on the axis of taps. Raises ValueError, naming both, where one is not stored in `what`."""
        if missing := [tap for tap in taps if tap not in self.taps]:
            stored, asked = (", ".join(f"{tap.layer} ({tap.norm})" for tap in some) for some in (self.taps, missing))
            raise ValueError(f"{what} holds the states after layers {stored}; the head also reads {asked}: capture them (precompute.tap_layers)")
        return [self.taps.index(tap) for tap in taps]

    def check(self, other: Header, what: str) -> None:
        """Raise ValueError, with both values, unless `other` belongs to the same data set as this header, which is `what`'s."""
        self.target.check(other.target, what)
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(Header) if field.name != "target"}
        different = [f"{name}: {mine} there, {theirs} here" for name, (mine, theirs) in pairs.items() if mine != theirs]
        if different:
            raise ValueError(f"{what} was made otherwise (remove it, or use another directory); " + "; ".join(different))


@dataclass(frozen=True)
class Manifest(Header):
    """What a data set holds; with `part` set, what one part of it holds so far, complete once its writer has finished."""

    shards: tuple[ShardInfo, ...] = ()
    complete: bool = False
    part: int | None = None
    num_parts: int = 1

    @property
    def header(self) -> Header:
        """What all parts share."""
        return Header(**{field.name: getattr(self, field.name) for field in fields(Header)})

    def to_json(self) -> str:
        """As text, the same for equal manifests."""
        about = {"format_version": FORMAT_VERSION, "convention": CONVENTION, "hidden_size": self.target.hidden_size}
        return json.dumps({**about, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = MANIFEST) -> Manifest:
        """Read `to_json` back. Raises ValueError for another format version and for missing or unknown fields."""
        try:
            data = json.loads(text)
            version, _, _ = (data.pop(name) for name in ("format_version", "convention", "hidden_size"))
            if version != FORMAT_VERSION:
                raise ValueError(f"{where} has format_version {version!r}; this version of mtp-train reads {FORMAT_VERSION}")
            taps, shards = (Tap(**tap) for tap in data["taps"]), tuple(ShardInfo(**shard) for shard in data["shards"])
            return cls(**{**data, "target": TargetInfo(**data["target"]), "taps": taps, "shards": shards})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{where} is damaged: {type(error).__name__}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """As `from_json`, of a file."""
        return cls.from_json(path.read_text(), str(path))


def part_name(part: int, num_parts: int) -> str:
    """Start of the names of a part's files."""
    return f"part-{part:05d}-of-{num_parts:05d}"


def load_parts(directory: Path) -> list[Manifest]:
    """Every part index of a directory, by part. Raises ValueError naming a damaged one."""
    return [Manifest.read(path) for path in sorted(directory.glob("part-*-of-*[0-9].json"))]


def damage(directory: Path, shard: ShardInfo, rehash: bool = False) -> str:
    """What is wrong with a shard file, or "": missing, of another size or (with `rehash`, reading all of it) content than was written."""
    path = directory / shard.file
    found, wanted = f"has {path.stat().st_size} bytes" if path.exists() else "is missing", f"has {shard.bytes} bytes"
    if rehash and found == wanted:
        found, wanted = f"has sha256 {sha256(path)}", f"has sha256 {shard.sha256}"
    return "" if found == wanted else f"{path} {found}, but as written it {wanted}: delete it and run the capture again (only its rows are captured)"


def refuse_damage(directory: Path, manifest: Manifest, rehash: bool = False) -> None:
    """Raise ValueError naming every shard that is damaged."""
    bad = [problem for shard in manifest.shards if (problem := damage(directory, shard, rehash))]
    if bad:
        raise ValueError(f"{len(bad)} of {len(manifest.shards)} shards are damaged: " + "; ".join(bad))
