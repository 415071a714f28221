"""The frozen ends of every family, against transformers' own forward pass; and reading them alone from what people really save."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn

from mtp_train.target.ends import FAMILIES, FrozenEnds, local_dir
from tests import tiny
from tests.tiny import save_tiny, tiny_config, tiny_target

# 72 ** 0.5 is not exact in bf16, and a cap of 3 is felt by every logit: a forgotten rounding or cap shows.
GEMMAS = {"gemma": {"hidden_size": 72}, "gemma2": {"hidden_size": 72, "final_logit_softcapping": 3.0}, "gemma3": {"hidden_size": 72}}
DTYPES = [torch.float32, torch.bfloat16]
IDS = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))


def target(family, dtype=torch.float32):
    return tiny_target(family, dtype=dtype, **GEMMAS.get(family, {}))


@torch.no_grad()
def observed(model, ids=IDS):
    """What a plain forward pass hands from part to part: (first layer's input, norm's input, norm's output, logits)."""
    base, seen = model.get_decoder(), {}
    handles = [
        base.layers[0].register_forward_pre_hook(
            lambda _m, args, kwargs: seen.__setitem__("embeds", args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        ),
        base.norm.register_forward_hook(lambda _m, args, out: seen.update(pre=args[0], post=out)),
    ]
    logits = model(ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return seen["embeds"], seen["pre"], seen["post"], logits


def differences(ends, model, ids=IDS):
    """Largest difference of (embeddings, final norm, logits) from the model's own."""
    embeds, pre, post, logits = observed(model, ids)
    pairs = ((ends.embed(ids), embeds), (ends.final_norm(pre), post), (ends.logits(post), logits))
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    return [float((mine.float() - theirs.float()).abs().max()) for mine, theirs in pairs]


def equal(found, dtype=torch.float32):
    """bf16: to the bit. fp32: embeddings and norm to the bit; logits (up to 5 here) to the rounding of a differently blocked sum."""
    return found[:2] == [0, 0] and found[2] <= (0 if dtype == torch.bfloat16 else 1e-5)


# ---------------------------------------------------------------- the family table


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_ends_equal_the_targets_own(family, dtype):
    model = target(family, dtype)
    ends = FrozenEnds.from_model(model)
    for length in (1, 3, 17):  # one row, a few rows (the operands are swapped), many
        assert equal(differences(ends, model, IDS[:, :length]), dtype)


def test_every_family_of_the_table_is_tested_here():
    assert {tiny_config(family).model_type for family in tiny.FAMILIES} == set(FAMILIES)


def forget(**changes):
    """A fault: the family's row read wrongly."""

    def spoil(ends):
        for name, value in changes.items():
            if name in ("gain_offset", "rounds_scale"):
                ends.family = dataclasses.replace(ends.family, **{name: value})
            else:
                setattr(ends, name, value)

    return spoil


FAULTS = [
    *((family, torch.float32, forget(gain_offset=0.0), 1) for family in ("gemma", "gemma2", "gemma3", "qwen3_next")),
    ("llama", torch.float32, forget(gain_offset=1.0), 1),
    *((family, torch.float32, forget(embed_scale=None), 0) for family in ("gemma", "gemma2", "gemma3", "granite")),
    *((family, torch.bfloat16, forget(rounds_scale=False), 0) for family in ("gemma", "gemma2", "gemma3")),
    ("granite", torch.float32, forget(logit_divisor=None), 2),
    ("gemma2", torch.float32, forget(softcap=None), 2),
    *((family, torch.float32, forget(eps=1.0), 1) for family in ("llama", "gemma2")),
]


@pytest.mark.parametrize(("family", "dtype", "fault", "where"), FAULTS)
def test_a_forgotten_peculiarity_shows(family, dtype, fault, where):
    model = target(family, dtype)
    ends = FrozenEnds.from_model(model)
    assert equal(differences(ends, model), dtype)
    fault(ends)
    found = differences(ends, model)
    assert found[where] > 1e-3 and not equal(found, dtype)


def test_an_unknown_family_is_refused_with_the_known_ones(tmp_path):
    model = tiny_target("llama")
    model.save_pretrained(tmp_path)
    model.config.model_type = "mamba9"
    with pytest.raises(ValueError, match=r"'mamba9' is not known; known are .*gemma2.*llama"):
        FrozenEnds.from_model(model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "olmo"}))
    with pytest.raises(ValueError, match="'olmo' is not known"):
        FrozenEnds.from_pretrained(tmp_path)


def test_a_bias_of_lm_head_is_added_and_read(tmp_path):
    model = tiny_target("llama")
    weight, model.lm_head = model.lm_head.weight, nn.Linear(64, 256)
    model.lm_head.weight = weight
    ends = FrozenEnds.from_model(model)
    assert equal(differences(ends, model))
    model.save_pretrained(tmp_path)
    read = FrozenEnds.from_pretrained(tmp_path)
    assert equal(differences(read, model))
    vocab = torch.tensor([3, 250, 7])
    state = torch.randn(5, 64)
    torch.testing.assert_close(read.logits(state, vocab), model.lm_head(state)[:, vocab], rtol=0, atol=1e-5)
    read.head_bias = None
    assert differences(read, model)[2] > 1e-3


# ---------------------------------------------------------------- frozen, shared, reduced


def test_nothing_is_trained_and_gradients_pass_through():
    ends = FrozenEnds.from_model(tiny_target("gemma2"))
    assert not any(parameter.requires_grad for parameter in ends.parameters())
    state = torch.randn(3, 64, requires_grad=True)
    ends.logits(ends.final_norm(state)).sum().backward()
    assert state.grad is not None and all(parameter.grad is None for parameter in ends.parameters())


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_from_model_shares_memory_and_leaves_the_model_as_it_was(family):
    model = tiny_target(family)
    before = {name: (tensor.clone(), tensor.requires_grad) for name, tensor in model.named_parameters()}
    ends = FrozenEnds.from_model(model)
    assert ends.embed_weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert ends.head_weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert (ends.head_weight is ends.embed_weight) == (family == "llama_tied")
    assert all(torch.equal(tensor, before[name][0]) and tensor.requires_grad == before[name][1] for name, tensor in model.named_parameters())


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_a_draft_vocabulary_gives_just_these_entries(family):
    ends = FrozenEnds.from_model(target(family))
    state = torch.randn(2, 6, ends.hidden_size, generator=torch.Generator().manual_seed(1))
    whole = ends.logits(state)
    for vocab in (torch.tensor([9, 2, 255, 0]), torch.arange(100, 140), torch.tensor([5])):
        for _ in range(2):
            torch.testing.assert_close(ends.logits(state, vocab), whole[..., vocab], rtol=0, atol=1e-5)


def test_the_kept_rows_of_a_draft_vocabulary_follow_a_cast():
    ends = FrozenEnds.from_model(tiny_target("llama"))
    vocab, state = torch.tensor([4, 8]), torch.randn(3, 64)
    assert ends.logits(state, vocab).dtype == torch.float32
    ends.to(torch.bfloat16)
    assert ends.logits(state, vocab).dtype == torch.bfloat16


# ---------------------------------------------------------------- read alone from disk


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "gemma3", "granite", "deepseek_v3"])
def test_read_alone_equals_the_model(family, shard, tmp_path):
    model = target(family)
    save_tiny(model, tmp_path, shard=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == shard
    ends = FrozenEnds.from_pretrained(tmp_path)
    assert equal(differences(ends, model))
    assert (ends.head_weight is ends.embed_weight) == model.config.tie_word_embeddings
    half = FrozenEnds.from_pretrained(str(tmp_path), dtype=torch.bfloat16)
    assert equal(differences(half, model.to(torch.bfloat16)), torch.bfloat16)


def test_a_multimodal_targets_language_model_is_found(tmp_path):
    """Keys with a prefix, the config one level down, and another model's tensors beside it."""
    model = tiny_target("multimodal")
    model.save_pretrained(tmp_path)
    assert not any(key.startswith("model.embed") for key in load_file(tmp_path / "model.safetensors"))
    assert equal(differences(FrozenEnds.from_model(model), model))
    assert equal(differences(FrozenEnds.from_pretrained(tmp_path), model))


def rewrite(folder, change):
    """Rewrite a one-file target's tensors."""
    tensors = load_file(folder / "model.safetensors")
    save_file({key: tensor.contiguous() for key, tensor in change(tensors).items()}, folder / "model.safetensors")


def set_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model.", "text."])
def test_any_prefix_of_the_keys(prefix, tmp_path):
    model = tiny_target("llama")
    save_tiny(model, tmp_path)
    rewrite(tmp_path, lambda tensors: {prefix + key: tensor for key, tensor in tensors.items()} | {"vision.norm.weight": torch.ones(3)})
    assert equal(differences(FrozenEnds.from_pretrained(tmp_path), model))


def test_mtp_layers_that_repeat_the_ends_do_not_confuse(tmp_path):
    """As DeepSeek-V3 is published: layer L holds the MTP head with its own copy of the embedding, head and norm."""
    model = tiny_target("deepseek_v3")
    save_tiny(model, tmp_path)
    extra = {"embed_tokens.weight": torch.zeros(256, 64), "shared_head.head.weight": torch.zeros(256, 64), "shared_head.norm.weight": torch.zeros(64)}
    rewrite(tmp_path, lambda tensors: tensors | {f"model.layers.4.{key}": tensor for key, tensor in extra.items()})
    assert equal(differences(FrozenEnds.from_pretrained(tmp_path), model))


def test_only_the_ends_are_read(tmp_path):
    """The layers' shard may be unreadable: nobody looks into it."""
    model = tiny_target("llama")
    save_tiny(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = {key: "layers.safetensors" if ".layers." in key else "ends.safetensors" for key in tensors}
    save_file({key: tensor for key, tensor in tensors.items() if ".layers." not in key}, tmp_path / "ends.safetensors")
    (tmp_path / "layers.safetensors").write_bytes(b"not a tensor")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert equal(differences(FrozenEnds.from_pretrained(tmp_path), model))
    (tmp_path / "ends.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ValueError, match=r"ends\.safetensors cannot be read"):
        FrozenEnds.from_pretrained(tmp_path)


def reloaded(folder):
    return type(tiny_target("llama")).from_pretrained(folder).eval()


def test_ties_are_resolved_as_transformers_does(tmp_path):
    """A flag that says tied beside two entries: equal ones are one, different ones stay two; and either may be the one that is there."""
    model = tiny_target("llama")
    save_tiny(model, tmp_path)
    set_config(tmp_path, tie_word_embeddings=True)
    ends = FrozenEnds.from_pretrained(tmp_path)
    assert ends.head_weight is not ends.embed_weight and equal(differences(ends, reloaded(tmp_path)))
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    ends = FrozenEnds.from_pretrained(tmp_path)
    assert ends.head_weight is ends.embed_weight and equal(differences(ends, reloaded(tmp_path)))
    rewrite(tmp_path, lambda tensors: {key: tensor for key, tensor in tensors.items() if "embed_tokens" not in key})
    assert equal(differences(FrozenEnds.from_pretrained(tmp_path), reloaded(tmp_path)))


def test_one_file_comes_before_a_stale_index_as_in_transformers(tmp_path):
    model = tiny_target("llama")
    save_tiny(tiny_target("llama", seed=1), tmp_path, shard=True)
    index = (tmp_path / "model.safetensors.index.json").read_text()
    save_tiny(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert equal(differences(FrozenEnds.from_pretrained(tmp_path), model)) and equal(differences(FrozenEnds.from_model(reloaded(tmp_path)), model))


def without(*words):
    return lambda folder: rewrite(folder, lambda tensors: {key: tensor for key, tensor in tensors.items() if not any(word in key for word in words)})


def replaced(key, tensor):
    return lambda folder: rewrite(folder, lambda tensors: tensors | {key: tensor})


BROKEN = [
    (without("lm_head"), ValueError, r"no tensor lm_head\.weight \(tie_word_embeddings is False\)"),
    (without("embed_tokens"), ValueError, r"no tensor embed_tokens\.weight"),
    (without("embed_tokens", "lm_head"), ValueError, "no tensor embed_tokens.weight and no lm_head.weight"),
    (without("model.norm"), ValueError, r"no tensor model\.norm\.weight"),
    (replaced("audio.embed_tokens.weight", torch.zeros(2, 2)), ValueError, r"found .*audio\.embed_tokens\.weight"),
    (replaced("lm_head.weight", torch.zeros(255, 64)), ValueError, r"lm_head has shape \(255, 64\), but its config says \(256, 64\)"),
    (replaced("model.norm.weight", torch.zeros(63)), ValueError, r"final norm has shape \(63,\), but its config says \(64,\)"),
    (replaced("lm_head.weight", torch.zeros(256, 64).to(torch.float8_e4m3fn)), ValueError, r"lm_head\.weight is quantised"),
    (replaced("lm_head.weight", torch.zeros(256, 32, dtype=torch.uint8)), ValueError, r"lm_head\.weight is quantised"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"\x40\x00\x00\x00"), ValueError, r"model\.safetensors cannot be read"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), FileNotFoundError, r"neither model\.safetensors nor .*index"),
    (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, r"holds no config\.json"),
    (lambda folder: (folder / "config.json").write_text("{"), ValueError, r"config\.json is not JSON"),
    (lambda folder: set_config(folder, hidden_size=32), ValueError, r"embedding has shape \(256, 64\), but its config says \(256, 32\)"),
]


@pytest.mark.parametrize(("damage", "error", "message"), BROKEN)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_what_is_broken_is_named(damage, error, message, dtype, target_dir, tmp_path):
    shutil.copytree(target_dir, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(error, match=message):
        FrozenEnds.from_pretrained(tmp_path / "copy", dtype)


def test_a_shard_that_the_index_names_but_is_not_there_is_named(tmp_path):
    save_tiny(tiny_target("llama"), tmp_path, shard=True)
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=gone.name):
        FrozenEnds.from_pretrained(tmp_path)
    (tmp_path / "elsewhere").rename(gone)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    home = index["weight_map"]["lm_head.weight"]
    index["weight_map"]["lm_head.weight"] = next(name for name in index["weight_map"].values() if name != home)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks the tensor lm_head\.weight"):
        FrozenEnds.from_pretrained(tmp_path)


def test_a_cached_hub_snapshot_is_found_by_its_id(target_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(target_dir, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert local_dir("someone/tiny") == repository / "snapshots" / commit
    assert equal(differences(FrozenEnds.from_pretrained("someone/tiny"), tiny_target("llama")))
    for wrong in ("someone/else", "/no/such/dir", "./neither"):
        with pytest.raises(FileNotFoundError, match=wrong):
            FrozenEnds.from_pretrained(wrong)
