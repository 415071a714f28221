"""Which target this is: a fingerprint of weights, tokenizer and template that does not depend on where they lie."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mtp_train.interfaces import TargetInfo
from mtp_train.target.ends import INDEX, local_dir, read_json, tensor_files, text_config

SAMPLE = 1 << 20  # bytes hashed at the start, middle and end of each weight file
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt")
SPECIAL_TOKENS = ("bos_token", "eos_token", "add_bos_token", "add_eos_token")


def _hash_weights(folder: Path, whole_files: bool) -> str:
    """Of the index, and of each weight file: its name, size, safetensors header, and samples (or all) of its bytes."""
    digest = hashlib.sha256()
    paths = sorted(set(tensor_files(folder).values()))
    if paths != [folder / "model.safetensors"]:
        digest.update((folder / INDEX).read_bytes())
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            if whole_files:
                digest.update(hashlib.file_digest(file, "sha256").digest())
                continue
            header = 8 + int.from_bytes(file.read(8), "little")
            for start, length in ((0, min(header, size)), (header, SAMPLE), (max(header, size // 2), SAMPLE), (max(header, size - SAMPLE), SAMPLE)):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _hash_tokenizer(folder: Path) -> str:
    """Of its vocabulary files and of the special tokens it adds or ends with."""
    digest = hashlib.sha256()
    names = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    if not names:
        raise FileNotFoundError(f"{folder} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    for name in names:
        content = (folder / name).read_bytes()
        digest.update(f"{name}:{len(content)}:".encode() + content)
    settings = _optional(folder / "tokenizer_config.json")
    special = {key: settings.get(key) for key in SPECIAL_TOKENS}
    # A token is written as text or as a dictionary around it.
    plain = {key: value["content"] if isinstance(value, dict) else value for key, value in special.items()}
    digest.update(json.dumps(plain).encode())
    return digest.hexdigest()


def _hash_template(folder: Path) -> str:
    """Of the chat template's text, wherever the tokenizer keeps it: files come before tokenizer_config.json, as in transformers."""
    main, more = folder / "chat_template.jinja", sorted((folder / "additional_chat_templates").glob("*.jinja"))
    named = {path.stem: path.read_text(encoding="utf-8") for path in more}
    if main.exists():
        named["default"] = main.read_text(encoding="utf-8")
    saved = named or _optional(folder / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(saved, list):
        saved = {one["name"]: one["template"] for one in saved}
    if isinstance(saved, dict) and list(saved) == ["default"]:
        saved = saved["default"]
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()


def target_info(path: str | Path, whole_files: bool = False) -> TargetInfo:
    """The identity of a saved target.

    Args:
        path: directory or hub id.
        whole_files: hash every byte of the weights instead of samples.

    Raises:
        FileNotFoundError: no config.json, no weights or no tokenizer there.
        ValueError: a file that cannot be read.
    """
    folder = local_dir(path)
    config = text_config(folder)
    raw = read_json(folder / "config.json")
    both = (raw, raw.get("text_config") or {})  # a multimodal config keeps some settings one level down
    dtype = next((part[key] for part in both for key in ("dtype", "torch_dtype") if part.get(key)), "float32")
    quantisation: dict[str, Any] = next((part["quantization_config"] for part in both if part.get("quantization_config")), {})
    return TargetInfo(
        name=str(path),
        revision=folder.name if folder.parent.name == "snapshots" else "",
        weights_hash=_hash_weights(folder, whole_files),
        model_type=config.model_type,
        dtype=str(dtype),
        quantisation=str(quantisation.get("quant_method", "none")),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        tokenizer_hash=_hash_tokenizer(folder),
        chat_template_hash=_hash_template(folder),
    )
