"""README's commands exist and run, on a tiny target in the place of the reader's."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from mtp_train.config import compose
from precompute.run import stage as precompute

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def commands():
    """The indented command lines, continued ones joined."""
    text = README.replace("\\\n", " ")
    return [line.strip().split("  #")[0] for line in text.splitlines() if re.match(r"    (make|mtp-)", line)]


def test_commands_named_are_the_ones_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(re.findall(r"`(mtp-[a-z]+)`", README)) == set(scripts)
    for target in re.findall(r"make ([a-z-]+)", "\n".join(commands())):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_the_command_for_ones_own_target_works(target_dir, corpus, tmp_path):
    (line,) = [line for line in commands() if line.startswith("mtp-pipeline")]
    files = {
        "runs/mine": f'"{tmp_path}"',
        "/models/my-llama": f'"{target_dir}"',
        "chats-val.jsonl": f'"{corpus / "validation.jsonl"}"',
        "chats.jsonl": f'"{corpus / "train.jsonl"}"',
    }
    arguments = shlex.split(line)[1:]
    for theirs, ours in files.items():
        arguments = [argument.replace(theirs, ours) for argument in arguments]
    precompute(compose("experiment=tiny", *arguments))
    assert (tmp_path / "shards" / "train" / "manifest.json").exists()
