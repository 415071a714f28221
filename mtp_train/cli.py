"""The command line of every stage: hydra composes, `config.load` checks, and what a user did wrong becomes one clear line."""

from __future__ import annotations

import ast
import inspect
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path

import hydra
from omegaconf import DictConfig

from mtp_train.config import CONF_DIR, Config, load, read


def field_help(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    out = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            out[ast.unparse(field.target)] = str(text.value.value)
    return out


def describe(kind: type, prefix: str = "") -> list[str]:
    """Lines "key  meaning" of every field, nested ones with dots."""
    lines, hints = [], inspect.get_annotations(kind, eval_str=True)
    texts = field_help(kind)
    for field in fields(kind):
        hint = hints[field.name]
        item = getattr(hint, "__args__", (None,))[0] if getattr(hint, "__origin__", None) is list else None
        if is_dataclass(hint):
            lines += ["", *describe(hint, f"{prefix}{field.name}.")]  # type: ignore[arg-type]
        else:
            lines.append(f"  {prefix}{field.name:<{max(1, 38 - len(prefix))}} {texts.get(field.name, '')}")
            lines += describe(item, f"{prefix}{field.name}[].") if is_dataclass(item) else []  # type: ignore[arg-type]
    return lines


HELP = """{doc}

Usage: {name} [experiment=NAME] [key=value ...]
       {name} --config FILE [key=value ...]    the config.yaml that a run left, instead of composing one
  Lists are given as 'key=[a,b]'; quote the whole argument for the shell. Values with commas, spaces, = or # need inner quotes:
  'eval.prompts="my, file.jsonl"'. Print the composed configuration with --cfg job; more of hydra with --hydra-help.

Config groups (conf/):
{groups}

Fields:
{fields}
"""


def help_text(name: str, doc: str) -> str:
    """What `--help` prints."""
    groups = [
        f"  {folder.name:<12} {', '.join(sorted(file.stem for file in folder.glob('*.yaml')))}" for folder in sorted(CONF_DIR.iterdir()) if folder.is_dir()
    ]
    return HELP.format(name=name, doc=doc.strip(), groups="\n".join(groups), fields="\n".join(describe(Config)))


def set_up_logging() -> None:
    """Our own messages to stderr; what libraries say at this level is not for our users."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for package in ("mtp_train", "precompute", "eval", "slurm", "__main__"):
        logging.getLogger(package).setLevel(logging.INFO)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What a user did wrong (a ValueError, a missing file) becomes one clear line and exit code 1. MTP_TRACEBACK=1 shows where it was raised."""
    try:
        yield
    except (ValueError, OSError) as error:
        if "MTP_TRACEBACK" in os.environ:
            raise
        sys.exit(f"error: {error}")


def main(doc: str, stage: Callable[[Config], None]) -> None:
    """The command line of a stage: compose (or read), check, run. A ValueError or missing file becomes one clear line and exit code 1."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        sys.stdout.write(help_text(Path(sys.argv[0]).name, doc))
        return

    set_up_logging()
    if sys.argv[1:2] == ["--config"] and len(sys.argv) > 2:
        with one_line_errors():
            stage(read(Path(sys.argv[2]), sys.argv[3:]))
        return

    def run(composed: DictConfig) -> None:
        with one_line_errors():
            stage(load(composed))

    hydra.main(version_base=None, config_path=str(CONF_DIR), config_name="pipeline")(run)()
