"""The frozen ends of a target: embeddings, final norm and lm_head, read alone. Training a 70B head never loads the 70B.

What a family adds on top of plain Llama stands in ONE table. An unknown family is refused: a forgotten multiplier or gain does not crash,
it only makes every acceptance wrong.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import AutoConfig


@dataclass(frozen=True)
class Family:
    """What a model family adds. Each function reads the value from the config."""

    embed_scale: Callable[[Any], float] | None = None  # multiplies the embedding
    rounds_scale: bool = False  # the factor is first rounded to the weights' dtype
    logit_divisor: Callable[[Any], float] | None = None
    softcap: Callable[[Any], float | None] | None = None  # c * tanh(logits / c)
    gain_offset: float = 0.0  # the norm's gain is w + this, applied before rounding to the state's dtype


SWAP_ROWS = 64
INDEX = "model.safetensors.index.json"
EMBED = "embed_tokens.weight"

PLAIN = Family()
GEMMA = Family(
    embed_scale=lambda config: config.hidden_size**0.5,
    rounds_scale=True,
    softcap=lambda config: getattr(config, "final_logit_softcapping", None),
    gain_offset=1.0,
)
# Every row is held against transformers in tests/test_ends.py.
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "phi3", "smollm3"), PLAIN),
    "qwen3_next": Family(gain_offset=1.0),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), GEMMA),
    "granite": Family(embed_scale=lambda config: config.embedding_multiplier, logit_divisor=lambda config: config.logits_scaling),
}


def family_of(config: Any) -> Family:
    """The table's row. Raises ValueError for a family that is not in it."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"target family {config.model_type!r} is not known; known are {', '.join(sorted(FAMILIES))} (mtp_train/target/ends.py)")
    return FAMILIES[config.model_type]


class FrozenEnds(nn.Module):
    """`embed`, `final_norm` and `logits` of a target, equal to its own. Nothing in it is trained or saved."""

    def __init__(self, config: Any, embed_weight: Tensor, norm_weight: Tensor, head_weight: Tensor, head_bias: Tensor | None = None):
        """The same tensor as `embed_weight` and `head_weight` says that they are tied. Raises ValueError for sizes that the config does not have."""
        super().__init__()
        self.family = family_of(config)
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        matrix = (self.vocab_size, self.hidden_size)
        for name, tensor, shape in (("embedding", embed_weight, matrix), ("lm_head", head_weight, matrix), ("final norm", norm_weight, matrix[1:])):
            if tensor.shape != shape:
                raise ValueError(f"the target's {name} has shape {tuple(tensor.shape)}, but its config says {shape}")
        self.eps = config.rms_norm_eps
        self.embed_weight = nn.Parameter(embed_weight, requires_grad=False)
        self.norm_weight = nn.Parameter(norm_weight, requires_grad=False)
        self.head_weight = self.embed_weight if head_weight is embed_weight else nn.Parameter(head_weight, requires_grad=False)
        self.head_bias = None if head_bias is None else nn.Parameter(head_bias, requires_grad=False)
        self.embed_scale = self.family.embed_scale(config) if self.family.embed_scale else None
        self.logit_divisor = self.family.logit_divisor(config) if self.family.logit_divisor else None
        self.softcap = self.family.softcap(config) if self.family.softcap else None
        self._reduced: tuple[Tensor, Tensor, Tensor | None] | None = None  # vocab, its rows of lm_head, its biases

    @classmethod
    def from_model(cls, model: Any) -> FrozenEnds:
        """The ends of a loaded transformers causal LM, sharing its tensors."""
        base, head = model.get_decoder(), model.get_output_embeddings()
        embed = base.embed_tokens.weight.data
        head_weight = embed if head.weight is base.embed_tokens.weight else head.weight.data
        return cls(model.config.get_text_config(), embed, base.norm.weight.data, head_weight, None if head.bias is None else head.bias.data)

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: torch.dtype | None = None) -> FrozenEnds:
        """Read only the ends of a saved target (one file or an index of shards, tied or not, keys with a prefix or not).

        Args:
            path: directory or hub id.
            dtype: of the tensors; None: as saved.

        Raises:
            FileNotFoundError: no config, no weights, or (named) a shard that the index lists.
            ValueError: an unknown family; a missing, ambiguous, quantised or unreadable tensor; sizes unlike the config's.
        """
        folder = local_dir(path)
        whole = read_config(folder)
        config = whole.get_text_config()
        family_of(config)
        files = tensor_files(folder)
        tied = bool(getattr(config, "tie_word_embeddings", False) or getattr(whole, "tie_word_embeddings", False))
        embed_key, head_key, bias_key = (_only_key(files, name, folder) for name in (EMBED, "lm_head.weight", "lm_head.bias"))
        norm_key = _only_key(files, "norm.weight", folder) if embed_key is None else embed_key.removesuffix(EMBED) + "norm.weight"
        absent = [name for name, key in ((EMBED, embed_key), ("lm_head.weight", head_key)) if key is None]
        if len(absent) > (1 if tied else 0) or norm_key not in files:
            raise ValueError(f"{folder} has no tensor {' and no '.join(absent) or norm_key} (tie_word_embeddings is {tied})")
        embed, norm, head, bias = (None if key is None else _read(files[key], key, dtype) for key in (embed_key, norm_key, head_key, bias_key))
        # As transformers ties: one entry serves both; two that differ stay two, whatever the config says.
        if embed is None or head is None or (tied and torch.equal(embed, head)):
            embed = head = head if embed is None else embed
        assert embed is not None and norm is not None and head is not None
        return cls(config, embed, norm, head, bias)

    def embed(self, token_ids: Tensor) -> Tensor:
        """(…) int64 -> (…, H), as the target's first decoder layer receives them."""
        out = F.embedding(token_ids, self.embed_weight)
        if self.embed_scale is None:
            return out
        return out * (torch.tensor(self.embed_scale, dtype=out.dtype, device=out.device) if self.family.rounds_scale else self.embed_scale)

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        """The target's final RMSNorm, (…, H) -> (…, H)."""
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.family.gain_offset:
            return (wide * (self.family.gain_offset + self.norm_weight.float())).to(hidden_states.dtype)
        return self.norm_weight * wide.to(hidden_states.dtype)

    def logits(self, hidden_states: Tensor, vocab: Tensor | None = None, own: Tensor | None = None) -> Tensor:
        """(…, H) post-norm states -> (…, V) logits; only entries `vocab` (D,) int64: (…, D). With `own` (D, H), a head's lm_head, read by that alone."""
        if own is not None:
            return _project(hidden_states.to(own.dtype), own)
        weight, bias = (self.head_weight, self.head_bias) if vocab is None else self._rows(vocab)
        logits = _project(hidden_states.to(weight.dtype), weight)
        logits = logits if bias is None else logits + bias
        if self.logit_divisor is not None:
            logits = logits / self.logit_divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @property
    def dtype(self) -> torch.dtype:
        """Of embeddings and lm_head, and so of what training computes in."""
        return self.embed_weight.dtype

    @property
    def bytes_per_logit(self) -> int:
        """Bytes alive at once for each logit in `logits` and its backward pass (the gradient may overwrite the logits)."""
        weight = self.head_weight
        twice = self.logit_divisor is not None or self.head_bias is not None or (weight.dtype == torch.float32 and weight.device.type == "cpu")  # _project
        return weight.element_size() * (4 if self.softcap is not None else 2 if twice else 1)

    def _rows(self, vocab: Tensor) -> tuple[Tensor, Tensor | None]:
        """lm_head's rows of a draft vocabulary; the copy of the last one is kept."""
        kept, weight = self._reduced, self.head_weight
        if kept is None or kept[0] is not vocab or (kept[1].device, kept[1].dtype) != (weight.device, weight.dtype):
            kept = self._reduced = vocab, weight[vocab], None if self.head_bias is None else self.head_bias[vocab]
        return kept[1:]


def _project(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """(…, H) x (V, H) -> (…, V). A few rows against a wide matrix run up to 3 times faster on CPU in float32 with the operands swapped."""
    rows = hidden_states.shape[:-1].numel()
    if 1 < rows <= SWAP_ROWS and weight.dtype == torch.float32 and weight.device.type == "cpu":
        return (weight @ hidden_states.reshape(rows, -1).t()).t().contiguous().view(*hidden_states.shape[:-1], -1)
    return F.linear(hidden_states, weight)


def local_dir(path: str | Path) -> Path:
    """A target's directory: itself, or the hub's snapshot of an id, cached or fetched. Raises FileNotFoundError."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(f"target {path} is neither a directory nor a hub id that can be had here ({type(error).__name__})") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises FileNotFoundError or ValueError, naming the file."""
    if not path.exists():
        raise FileNotFoundError(f"{path.parent} holds no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a JSON object")
    return content


def read_config(folder: Path) -> Any:
    """A target's transformers config. Raises FileNotFoundError or ValueError, naming the file."""
    read_json(folder / "config.json")
    return AutoConfig.from_pretrained(folder)


def text_config(path: str | Path) -> Any:
    """The config of a target's language model, which a multimodal one keeps one level down. Raises as `read_config`."""
    return read_config(local_dir(path)).get_text_config()


def num_positions(path: str | Path) -> float:
    """How many positions a target was made for, by its config.json; infinity where that does not say."""
    return getattr(text_config(path), "max_position_embeddings", None) or math.inf


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor; one file comes before an index, as in transformers.

    Raises:
        FileNotFoundError: no safetensors there, or (named) a shard that the index lists and the folder lacks.
        ValueError: a file that cannot be read, or an index without tensors.
    """
    index, single = folder / INDEX, folder / "model.safetensors"
    if single.exists():
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    if not index.exists():
        raise FileNotFoundError(f"{folder} holds neither {single.name} nor {INDEX} (weights are read from safetensors only)")
    files = {key: folder / name for key, name in read_json(index).get("weight_map", {}).items()}
    if not files:
        raise ValueError(f"{index} names no tensors (weight_map)")
    missing = sorted({file.name for file in files.values() if not file.exists()})
    if missing:
        raise FileNotFoundError(f"{index} names files that are not there: {', '.join(missing)}")
    return files


def read_layer(path: str | Path, index: int) -> dict[str, Tensor]:
    """A saved target's tensors of decoder layer `index` alone, by their names within the layer; none where there is no such layer.

    Raises:
        FileNotFoundError: as `tensor_files`.
        ValueError: a quantised or unreadable tensor, by name.
    """
    folder = local_dir(path)
    files = tensor_files(folder)
    prefix = (_only_key(files, EMBED, folder) or f"model.{EMBED}").removesuffix(EMBED) + f"layers.{index}."
    return {key.removeprefix(prefix): _read(file, key, None) for key, file in files.items() if key.startswith(prefix)}


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read(path: Path, key: str, dtype: torch.dtype | None) -> Tensor:
    with _open(path) as file:
        if key not in file.keys():  # noqa: SIM118 (not a dictionary)
            raise ValueError(f"{path} lacks the tensor {key}, which the index says it holds")
        tensor: Tensor = file.get_tensor(key)
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{path}: {key} is quantised ({tensor.dtype}); what is read of a target must be plain")
    return tensor if dtype is None else tensor.to(dtype)


def _only_key(files: dict[str, Path], suffix: str, folder: Path) -> str | None:
    """The one tensor of this name, whatever its prefix, outside the layers (MTP layers repeat some); None without one."""
    found = [key for key in files if (key == suffix or key.endswith("." + suffix)) and ".layers." not in key]
    if len(found) > 1:
        raise ValueError(f"{folder}: expected one tensor named *{suffix}, found {', '.join(found)}")
    return found[0] if found else None
