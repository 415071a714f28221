"""A target's fingerprint: the same wherever it lies, another whenever something that changes its states or its ids does."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Gemma3Config

from mtp_train.target.identity import SAMPLE, target_info
from tests.tiny import save_tiny, tiny_config, tiny_target
from tests.toy import TEMPLATES, toy_tokenizer

FIELDS = ["weights_hash", "tokenizer_hash", "chat_template_hash", "dtype", "quantisation", "revision"]


def changed(folder, before):
    """The names of the fields that differ from `before`, as a manifest's check would find them."""
    after = target_info(folder)
    return {name for name in FIELDS if getattr(after, name) != getattr(before, name)}


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def copy(target_dir, tmp_path):
    return shutil.copytree(target_dir, tmp_path / "copy")


def test_what_it_says(target_dir):
    info = target_info(target_dir)
    assert (info.name, info.revision, info.model_type, info.dtype, info.quantisation) == (str(target_dir), "", "llama", "float32", "none")
    assert (info.hidden_size, info.num_layers, info.vocab_size) == (64, 4, 256)
    assert len({info.weights_hash, info.tokenizer_hash, info.chat_template_hash}) == 3


def test_it_does_not_depend_on_where_the_target_lies(target_dir, copy):
    assert not changed(copy, target_info(target_dir))
    target_info(copy).check(target_info(target_dir), "the shard set")
    assert target_info(copy, whole_files=True).weights_hash == target_info(target_dir, whole_files=True).weights_hash


def test_a_hub_snapshot_tells_its_commit(target_dir, tmp_path):
    folder = tmp_path / "models--a--b" / "snapshots" / "0123abc"
    shutil.copytree(target_dir, folder)
    assert target_info(folder).revision == "0123abc"


@pytest.mark.parametrize("shard", [False, True])
def test_other_weights_are_another_target(shard, tmp_path):
    first, second = (save_tiny(tiny_target("llama", seed=seed), tmp_path / str(seed), shard=shard) for seed in (0, 1))
    assert changed(second, target_info(first)) == {"weights_hash"}
    with pytest.raises(ValueError, match=r"made for another target.*weights_hash"):
        target_info(first).check(target_info(second), "the shard set")


def big_target(folder, target_dir):
    """A target with one file of 8 MiB, so that samples do not cover it."""
    shutil.copytree(target_dir, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"zz.filler": torch.zeros(8 * SAMPLE, dtype=torch.uint8)}, folder / "model.safetensors")
    return folder


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_samples_see_the_start_the_middle_and_the_end_and_whole_files_everything(target_dir, tmp_path):
    folder = big_target(tmp_path / "big", target_dir)
    weights = folder / "model.safetensors"
    size, header = weights.stat().st_size, 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    plain, whole = target_info(folder).weights_hash, target_info(folder, whole_files=True).weights_hash
    sampled = {header: True, header + SAMPLE - 1: True, size // 2: True, size - 1: True, header + 2 * SAMPLE: False, size - SAMPLE - 1: False}
    for offset, seen in sampled.items():
        flip(weights, offset)
        assert (target_info(folder).weights_hash != plain) == seen
        assert target_info(folder, whole_files=True).weights_hash != whole
        flip(weights, offset)
    assert target_info(folder).weights_hash == plain
    with weights.open("ab") as file:  # safetensors refuses a file that does not end where its header says
        file.write(b"\0")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        target_info(folder)


def test_the_header_and_the_index_count(tmp_path, copy):
    before = target_info(copy)
    tensors = load_file(copy / "model.safetensors")
    save_file({key.replace("lm_head", "lm_tail"): tensor for key, tensor in tensors.items()}, copy / "model.safetensors")
    assert changed(copy, before) == {"weights_hash"}
    sharded = save_tiny(tiny_target("llama"), tmp_path / "sharded", shard=True)
    before = target_info(sharded)
    edit(sharded / "model.safetensors.index.json", metadata={"total_size": 1})
    assert changed(sharded, before) == {"weights_hash"}


def test_tokenizer_and_its_special_tokens(copy):
    before = target_info(copy)
    for changes in ({"add_bos_token": True}, {"eos_token": "</s>"}, {"bos_token": "<|start|>"}):
        kept = (copy / "tokenizer_config.json").read_text()
        edit(copy / "tokenizer_config.json", **changes)
        assert changed(copy, before) == {"tokenizer_hash"}
        (copy / "tokenizer_config.json").write_text(kept)
    edit(copy / "tokenizer_config.json", name_or_path="/somewhere/else", eos_token={"content": "<|im_end|>", "lstrip": False})
    assert not changed(copy, before)
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text.replace("<|return|>", "<|retorn|>"))
    assert changed(copy, before) == {"tokenizer_hash"}


def test_the_template_counts_by_its_text_wherever_it_is_kept(copy):
    before = target_info(copy)
    text = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").write_text(text + " ")
    assert changed(copy, before) == {"chat_template_hash"}
    (copy / "chat_template.jinja").unlink()
    assert changed(copy, before) == {"chat_template_hash"}
    for same in (text, [{"name": "default", "template": text}]):
        edit(copy / "tokenizer_config.json", chat_template=same)
        assert not changed(copy, before)
        assert AutoTokenizer.from_pretrained(copy).get_chat_template() == text
    edit(copy / "tokenizer_config.json", chat_template=[{"name": "default", "template": text}, {"name": "tool_use", "template": "x"}])
    assert changed(copy, before) == {"chat_template_hash"}
    # A file comes before the settings, as transformers reads it.
    edit(copy / "tokenizer_config.json", chat_template="an old one")
    (copy / "chat_template.jinja").write_text(text)
    assert not changed(copy, before) and AutoTokenizer.from_pretrained(copy).get_chat_template() == text


def test_named_templates_in_files_equal_those_in_the_settings(copy):
    named = {"default": TEMPLATES["chatml"], "tool_use": "für {{ messages }}"}
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = named
    (copy / "chat_template.jinja").unlink()
    edit(copy / "tokenizer_config.json", chat_template=[{"name": name, "template": text} for name, text in named.items()])
    before = target_info(copy)
    edit(copy / "tokenizer_config.json", chat_template=None)
    tokenizer.save_chat_templates(copy, {}, None, save_jinja_files=True)
    assert (copy / "additional_chat_templates" / "tool_use.jinja").exists()
    assert not changed(copy, before)


def test_no_template_is_a_state_of_its_own(tmp_path):
    model = tiny_target("llama")
    without, with_one = save_tiny(model, tmp_path / "a", template="none"), save_tiny(model, tmp_path / "b")
    assert changed(with_one, target_info(without)) == {"chat_template_hash"}


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ({"dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "dtype", "float16"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantisation", "fp8"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantisation", "compressed-tensors"),
    ],
)
def test_dtype_and_quantisation_are_the_configs(copy, config, field, value):
    before = target_info(copy)
    edit(copy / "config.json", **config)
    assert changed(copy, before) == {field} and getattr(target_info(copy), field) == value
    with pytest.raises(ValueError, match=f"{field}: '{getattr(before, field)}' there, '{value}' here"):
        before.check(target_info(copy), "the shard set")


@pytest.mark.parametrize("changes", [{"dtype": None, "text_config": {"dtype": "bfloat16"}}, {"text_config": {}, "dtype": "bfloat16"}])
def test_a_multimodal_config_keeps_them_one_level_down_or_not(copy, changes):
    config = Gemma3Config(text_config=tiny_config("gemma3").to_dict()).to_dict()
    config["text_config"] = {**config["text_config"], "dtype": None, **changes["text_config"]}
    (copy / "config.json").write_text(json.dumps({**config, "dtype": changes["dtype"]}))
    info = target_info(copy)
    assert (info.model_type, info.dtype, info.hidden_size, info.num_layers) == ("gemma3_text", "bfloat16", 64, 4)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, r"holds no config\.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), FileNotFoundError, "holds neither model"),
        (lambda folder: (folder / "tokenizer.json").unlink(), FileNotFoundError, "holds no tokenizer"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), ValueError, r"tokenizer_config\.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), ValueError, r"config\.json holds a list, not a JSON object"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), ValueError, r"model\.safetensors cannot be read"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model.safetensors.index.json").write_text("{}"), ValueError, "names no tensors"),
    ],
)
def test_what_is_missing_is_named(copy, damage, error, message):
    damage(copy)
    with pytest.raises(error, match=message):
        target_info(copy)
    with pytest.raises(FileNotFoundError, match="neither a directory nor a hub id"):
        target_info(copy / "nothing")
