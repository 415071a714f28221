"""Whole or not at all; and where it came from."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from mtp_train.provenance import atomic_dir, atomic_path, atomic_write, fingerprint, provenance, sha256, temp_path, write_provenance


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_atomic_write(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    atomic_write(path, "é\n")
    assert path.read_bytes() == b"\xc3\xa9\n"
    atomic_write(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert names(path.parent) == {"file"}
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask  # others of the team can read it
    assert sha256(path) == hashlib.sha256(b"\x00\xff").hexdigest()


def test_an_error_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, "old")
    with pytest.raises(RuntimeError), atomic_path(path) as temp:  # noqa: PT012 (fails half-way)
        temp.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert names(tmp_path) == {"file"}


@pytest.mark.parametrize("name", ["plain", "with [odd] * name?"])
def test_atomic_dir(tmp_path: Path, name: str) -> None:
    path = tmp_path / "deep" / name
    for content in ("old", "new"):
        with atomic_dir(path) as temp:
            (temp / "sub").mkdir()
            (temp / "sub" / content).write_text(content)
            assert not path.exists() or names(path / "sub") == {"old"}
        assert names(path / "sub") == {content}
        assert names(path.parent) == {name}
    with pytest.raises(RuntimeError), atomic_dir(path) as temp:  # noqa: PT012 (fails half-way)
        (temp / "half").write_text("half")
        raise RuntimeError
    assert names(path / "sub") == {"new"}
    assert names(path.parent) == {name}


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_dead_processes_left_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    host = socket.gethostname()
    dead, alive = tmp_path / f".x.{host}.{dead_pid()}.abc.tmp", tmp_path / f".x.{host}.{os.getppid()}.abc.tmp"
    elsewhere, old = tmp_path / ".x.other.host.1.abc.tmp", tmp_path / ".x.other.host.2.abc.tmp"
    neighbour = tmp_path / f".y.{host}.{dead_pid()}.abc.tmp"
    for path in (dead, alive, elsewhere, old, neighbour):
        path.mkdir()
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    with atomic_dir(tmp_path / "x"):
        pass
    assert names(tmp_path) == {"x", alive.name, elsewhere.name, neighbour.name}
    assert temp_path(tmp_path / "x") != temp_path(tmp_path / "x")
    assert temp_path(tmp_path / "x").parent == tmp_path


def test_a_kill_while_filling_a_directory(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal\nfrom mtp_train.provenance import atomic_dir\n"
        f"with atomic_dir(pathlib.Path({str(tmp_path / 'x')!r})) as temp:\n    (temp / 'half').write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "x").exists()
    assert len(names(tmp_path)) == 1
    with atomic_dir(tmp_path / "x") as temp:
        (temp / "whole").write_text("whole")
    assert names(tmp_path) == {"x"}
    assert names(tmp_path / "x") == {"whole"}


def test_fingerprint() -> None:
    assert fingerprint({"b": [1, "é"], "a": None}) == fingerprint({"a": None, "b": [1, "é"]})
    different = [{"a": 1}, {"a": "1"}, {"a": 1.5}, {"a": [1]}, {"a": None}, {"b": 1}, [["a", 1]]]
    assert len({fingerprint(value) for value in different}) == len(different)
    with pytest.raises(TypeError):
        fingerprint({"a": {1, 2}})


def test_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mtp-train", "run_dir=a b", "x='中文,#'"])
    config = {"b": 1, "a": {"path": "a \udc80 中文 #=,", "none": None, "list": [1.5, "yes"]}}
    write_provenance(tmp_path, config)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == config
    assert list(yaml.safe_load((tmp_path / "config.yaml").read_text())) == ["b", "a"]
    stored = json.loads((tmp_path / "provenance.json").read_text())
    assert stored["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert stored["num_threads"] == torch.get_num_threads()
    assert stored["command"].startswith("mtp-train 'run_dir=a b'")
    assert stored["cpu"]
    assert stored["host"] == socket.gethostname()
    assert names(tmp_path) == {"config.yaml", "provenance.json"}


def test_provenance_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance()["git_sha"] is None
    assert provenance()["git_dirty"] is None
