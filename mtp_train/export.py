"""Export a trained head: one directory an engine format.

    hf            <run_dir>/export/hf            head.json, target_config.json, head.safetensors: read back by mtp_train.checkpoint.load_head
    vllm          <run_dir>/export/vllm          for vLLM, as the stock class where one fits, else for our plugin (serving.py has the table)
    vllm_plugin   <run_dir>/export/vllm_plugin   for our plugin always: it keeps an MTP head's reduced draft vocabulary (other kinds are left out)
    speculators   <run_dir>/export/speculators   EAGLE-3 in the format of the speculators library, which vLLM reads too
    sglang        <run_dir>/export/sglang        for SGLang, which does not run on CPU: written and checked by names and shapes, never loaded here

Every key is audited before writing, and the file is read back and compared with the head: a loader that skips a tensor would silently
serve a broken draft. `mtp-eval engine=vllm` goes on from there: it proves in the loaded engine that every tensor is used.

`export.checkpoint` may be a published EAGLE-1, EAGLE-3 or speculators directory (published.py): it is then written in other formats.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from mtp_train import cli
from mtp_train import config as cfg
from mtp_train.checkpoint import HeadInfo, LoadedHead, choose, head_tensors, load_head, write_head
from mtp_train.engines.row import EngineClass
from mtp_train.provenance import atomic_dir, fingerprint, write_provenance
from mtp_train.published import identity, open_head, read_engine
from mtp_train.serving import choose_class, needed
from mtp_train.target.identity import target_info

log = logging.getLogger(__name__)

SOURCE = "source.sha256"
"""In every export: of what it was made."""


def write_engine(folder: Path, loaded: LoadedHead, engine_format: str = "vllm") -> None:
    """Weights and config.json of the class that the table gives, and a card with the command that serves them."""
    kind, why = choose_class(loaded.info.config, loaded.layer_config, loaded.draft_vocab is not None, engine_format)
    log.info("%s: %s", engine_format, why)
    size = None if loaded.draft_vocab is None else len(loaded.draft_vocab)
    save_file(kind.to_engine(head_tensors(loaded.head, loaded.draft_vocab), loaded.layer_config), folder / "model.safetensors", metadata={"format": "pt"})
    config = kind.config(loaded.info, loaded.layer_config, size) | {"architectures": [kind.architecture], "torch_dtype": loaded.info.target.dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "README.md").write_text(model_card(loaded.info, kind, why))


CARD = """# {kind} draft head for {target}

Trained by mtp-train, step {step}, unrolled over {steps} drafted tokens. It drafts for exactly this target (weights {hash}...).
Engine class: {why}.

    {command}

Output stays the target's own: every draft is verified.
"""
TITLES = {"mtp": "MTP", "eagle1": "EAGLE-1", "eagle3": "EAGLE-3"}


def model_card(info: HeadInfo, kind: EngineClass, why: str) -> str:
    """How an engine serves the directory, and what it is. `mtp-eval` adds what it measured."""
    command = kind.command.format(target=info.target.name, steps=info.unroll_steps, drafted=info.unroll_steps + 1, method=kind.method)
    fields = {"kind": TITLES[info.config.kind], "target": info.target.name, "step": info.step, "steps": info.unroll_steps}
    return CARD.format(**fields, hash=info.target.weights_hash[:12], why=why, command=command)


def check_written(folder: Path, name: str, loaded: LoadedHead) -> None:
    """Read the directory back and compare every tensor."""
    again = load_head(folder) if name == "hf" else read_engine(folder, loaded.info, loaded.layer_config)
    written = head_tensors(again.head, None)
    for key, tensor in head_tensors(loaded.head, None).items():
        assert torch.equal(written[key], tensor), f"{folder}: {key} was not written as it is"


def export(config: cfg.Config) -> None:
    """Write the configured formats from a checkpoint; a format that is there already, made from the same head, is left alone."""
    run_dir = Path(config.run_dir)
    source = choose(run_dir / "checkpoints", config.export.checkpoint)
    loaded = open_head(source, config.target.path)
    mark = fingerprint([identity(source), target_info(config.target.path).weights_hash])
    for name in needed(config.export.formats, loaded.info.config):
        folder = run_dir / "export" / name
        stamp = folder / "provenance.json"
        if stamp.exists() and (folder / SOURCE).read_text() == mark:
            log.info("export %s is complete: %s", name, folder)
            continue
        if folder.exists():
            shutil.rmtree(folder)
        with atomic_dir(folder) as temporary:
            if name == "hf":
                write_head(temporary, head_tensors(loaded.head, loaded.draft_vocab), loaded.info, loaded.layer_config)
            else:
                write_engine(temporary, loaded, name)
            check_written(temporary, name, loaded)
            write_provenance(temporary, asdict(config))
            (temporary / SOURCE).write_text(mark)
        log.info("exported step %d as %s: %s", loaded.info.step, name, folder)


def main() -> None:
    """Console script mtp-export."""
    cli.main(__doc__, export)


if __name__ == "__main__":
    main()
