"""Tiny targets that learnt a small Markov text, so that a head accepts some drafts and not others; and the run that trains a head for one."""

from __future__ import annotations

import json
import random
import shutil

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mtp_train.config import compose
from mtp_train.data.chat import tokenize
from mtp_train.export import export
from mtp_train.interfaces import Conversation
from mtp_train.train import stage as train
from precompute.run import stage as precompute
from tests.conftest import source
from tests.tiny import save_tiny, tiny_config
from tests.toy import toy_tokenizer

WORDS = ["red", "blue", "cat", "dog", "runs", "sleeps", "fast", "slow", "tree", "house", "under", "over"]


def sentence(rng, num):
    """Words of a chain: each has three followers, one of them likely."""
    word, out = rng.choice(WORDS), []
    for _ in range(num):
        out.append(word)
        at = WORDS.index(word)
        word = WORDS[(at * 5 + rng.choices([1, 4, 7], [6, 2, 1])[0]) % len(WORDS)]
    return " ".join(out)


def conversations(num, seed, domain="markov"):
    rng = random.Random(seed)
    for index in range(num):
        question, answer = sentence(rng, rng.randint(1, 4)), sentence(rng, rng.randint(6, 14))
        yield {"id": f"{domain}{index}", "domain": domain, "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def markov_target(family, folder, steps=150, **overrides):
    """Train a tiny model of a family on the text, in float32, and save it with the toy tokenizer."""
    torch.manual_seed(0)
    settings = {"initializer_range": 0.05, "max_position_embeddings": 512, **overrides}
    model = AutoModelForCausalLM.from_config(tiny_config(family, **settings), attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():  # norms away from 1, so that a forgotten one shows
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    tokenizer = toy_tokenizer()
    rows = []
    for row in conversations(600, seed=1):
        messages = tuple(row["messages"])
        rows.append(tokenize(Conversation(row["id"], row["domain"], messages, "here"), tokenizer, max_length=128, turns="all", template_kwargs={}).input_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        batch = [torch.tensor(row) for row in rng.sample(rows, 16)]
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
        logits = model(ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return save_tiny(model.eval(), folder)


INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
COMPRESSED = {  # as llm-compressor writes W8A8: weights by channel, activations by token
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {**INT8, "strategy": "channel", "dynamic": False},
        "input_activations": {**INT8, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip


def quantised(target, folder):
    """A copy of a saved target whose layers are int8; embeddings, norms and lm_head stay plain."""
    shutil.copytree(target, folder)
    tensors, out = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if ".layers." not in name or tensor.dim() != 2:
            out[name] = tensor
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 63  # not 127: vLLM's int8 product saturates on CPUs without VNNI
        out[name] = (tensor / scale).round().clamp(-128, 127).to(torch.int8)
        out[name.replace(".weight", ".weight_scale")] = scale
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": COMPRESSED}))
    return folder


def run_overrides(folder, target, *extra):
    """The command line of a small run in `folder`, with its data written."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: write(folder / f"{name}.jsonl", conversations(num, seed)) for name, num, seed in (("train", 60, 2), ("validation", 8, 3))}
    both = [row for index, domain in enumerate(("sun", "moon")) for row in conversations(12, 4 + index, domain)]
    return [
        "experiment=tiny", f'run_dir="{folder / "run"}"', f'target.path="{target}"', f"data.train=[{source(files['train'])}]",
        f"data.validation=[{source(files['validation'])}]", f'eval.prompts="{write(folder / "heldout.jsonl", both)}"', "data.max_length=128",
        "precompute.regenerate.max_new_tokens=48", "train.num_steps=60", "train.save_every=30", "train.validate_every=30", "train.optim.lr=5.0e-3",
        "eval.max_new_tokens=40", "eval.speed_prompts=0", "engine.enforce_eager=true", "engine.cpu_cache_gib=1", *extra,
    ]  # fmt: skip


def trained_run(folder, target, *extra, captured=None):
    """Precompute, train and export; returns the overrides. `captured` is a run whose rows and states are trained on."""
    overrides = run_overrides(folder, target, *extra)
    config = compose(*overrides)
    if captured:
        (folder / "run").mkdir()
        for name in ("data", "shards"):
            (folder / "run" / name).symlink_to(captured / name)
    for stage in (train, export) if captured else (precompute, train, export):
        stage(config)
    return overrides
