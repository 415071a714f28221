"""The points of a sweep: every combination of the values that overrides are given."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from mtp_train.config import Config
from slurm.chain import Point, with_run_dir

MAX_NAME = 100


def combinations(sweep: str) -> list[list[str]]:
    """ "a=1,2 b=x" is [[a=1, b=x], [a=2, b=x]]; values are written as hydra has them. Raises ValueError for what it cannot read."""
    choices = []
    for override in OverridesParser.create().parse_overrides(shlex.split(sweep)):
        values = list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.get_value_element_as_str()]
        choices.append([f"{override.get_key_element()}={value}" for value in values])
    found = [list(point) for point in product(*choices)]
    if len(found) < 2:
        raise ValueError(f"sweep={sweep!r} has one point only: give a setting several values, as in sweep='train.optim.lr=1e-3,2e-3'")
    return found


def name_of(overrides: Sequence[str]) -> str:
    """A folder's name for a point: its overrides where they make one, else as much of them as does, and a hash."""
    text = ",".join(overrides)
    name = re.sub(r"[^A-Za-z0-9._=+,-]+", "_", text).lstrip(".-")
    return name if name == text and len(name) <= MAX_NAME else f"{name[:MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def expand(sweep: str, base: Config, compose: Callable[..., Config]) -> list[Point]:
    """The points of a sweep. `compose` gives the configuration of the base with more overrides."""
    points: list[Point] = []
    for overrides in combinations(sweep):
        name = name_of(overrides)
        if name in [point.name for point in points]:
            raise ValueError(f"sweep={sweep!r} gives the point {name} twice")
        points.append(Point(name, overrides, with_run_dir(compose(*overrides), Path(base.run_dir) / "sweep" / name)))
    return points


def link_shared(run_dir: Path, point_dir: Path) -> None:
    """A point reads the captured states and rows of the run."""
    point_dir.mkdir(parents=True, exist_ok=True)
    for name in ("data", "shards"):
        if not (point_dir / name).is_symlink():
            (point_dir / name).symlink_to(Path("..") / ".." / name)
