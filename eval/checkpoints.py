"""Measure checkpoints by decoding the validation prompts with a real engine, while training goes on or afterwards.

    mtp-validate runs/mine                      # every checkpoint that has no acceptance.json yet, newest first
    mtp-validate runs/mine --engine vllm --watch    # as a job of its own: goes on until training has ended

The first of eval.runs says how it drafts. Its result chooses the best checkpoint (export.checkpoint=best). Training starts this command itself where
train.validate_with is set.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.prompts import Prompt, read_prompts
from eval.report import finite
from eval.run import ENGINES
from mtp_train import cli
from mtp_train import config as cfg
from mtp_train.checkpoint import ACCEPTANCE, checkpoints, load_head, read_state
from mtp_train.data.chat import open_tokenizer
from mtp_train.dist import dtype_name, pick_device, pick_dtype
from mtp_train.export import write_engine
from mtp_train.measure import prompts_path, unmeasured
from mtp_train.metrics import DECODED
from mtp_train.provenance import atomic_write
from mtp_train.serving import format_that_keeps
from mtp_train.spec_decode.stats import summarise
from mtp_train.target.ends import local_dir

log = logging.getLogger(__name__)
POLL_SECONDS = 10
NUM_PROMPTS = 64
"""At most, where eval.num_prompts does not say."""


def measure(config: cfg.Config, checkpoint: Path, prompts: list[Prompt], stops: frozenset[int]) -> dict[str, Any]:
    """Decode the prompts with a checkpoint, as the first of eval.runs says; the engine is config.engine's."""
    run, options = config.eval.runs[0], config.eval
    with tempfile.TemporaryDirectory(prefix="mtp-head-") as folder:
        loaded = load_head(checkpoint)
        if config.engine.name == "vllm":
            write_engine(Path(folder), loaded, format_that_keeps(loaded.info.config, loaded.layer_config, loaded.draft_vocab is not None))
        config = replace(config, eval=replace(options, head=str(checkpoint), vllm_head=folder, runs=[run]))
        engine = ENGINES[config.engine.name](config, loaded, stops, max(len(one.token_ids) for one in prompts))
        engine.load(dtype_name(pick_dtype(options.dtype, pick_device(config.target.device))))
        decoded = engine.decode(run, prompts, options.batch_size, options.max_new_tokens, f"checkpoint {checkpoint.name}")
        engine.close()
    found = finite(summarise([decoded.completions[one.id].stats for one in prompts]))
    return {"step": read_state(checkpoint)["step"], "engine": engine.title, "K": run.num_draft_tokens, "temperature": run.temperature, **found}


def measure_all(run_dir: Path, engine: str | None, watch: bool) -> int:
    """Measure what is there (with `watch`: until the last step's checkpoint is); returns how many were measured."""
    root, num = run_dir / "checkpoints", 0
    if not (root / "config.yaml").exists():
        raise FileNotFoundError(f"{root} holds no config.yaml: is {run_dir} the run directory of a training?")
    config = cfg.read(root / "config.yaml")
    config = replace(config, engine=replace(config.engine, name=engine or config.train.validate_with or config.engine.name))
    tokenizer, stops = open_tokenizer(local_dir(config.target.path))
    prompts = read_prompts(str(prompts_path(run_dir)), tokenizer, config.eval.num_prompts or NUM_PROMPTS, config.data.template_kwargs)
    while True:
        left = unmeasured(run_dir)
        if not left:
            found = checkpoints(root)
            if not watch or (found and read_state(found[-1])["step"] >= config.train.num_steps):
                return num
            time.sleep(POLL_SECONDS)
            continue
        checkpoint = left[-1]  # the newest
        try:
            row = measure(config, checkpoint, prompts, stops)
            atomic_write(checkpoint / ACCEPTANCE, json.dumps(row, indent=2) + "\n")
        except FileNotFoundError:
            if checkpoint.exists():
                raise
            log.info("%s was pruned meanwhile", checkpoint)
            continue
        num += 1
        with (run_dir / DECODED).open("a") as file:
            file.write(json.dumps(row) + "\n")
        log.info("step %d: acceptance length %.3f, %s", row["step"], row["acceptance_length"]["value"] or 1.0, row["engine"])


def main() -> None:
    """Console script mtp-validate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="run directory of a training; its checkpoints/config.yaml says everything else")
    parser.add_argument("--engine", choices=("embedded", "vllm"), help="instead of train.validate_with")
    parser.add_argument("--watch", action="store_true", help="go on until the last step's checkpoint is measured")
    options = parser.parse_args()
    cli.set_up_logging()
    with cli.one_line_errors():
        log.info("%d checkpoints measured", measure_all(options.run_dir, options.engine, options.watch))


if __name__ == "__main__":
    main()
