"""Export: the exact key list of each engine class, the round trip, and what does not fit is refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from mtp_train.checkpoint import HeadInfo, LoadedHead, head_tensors
from mtp_train.export import read_vllm, write_plugin, write_vllm
from mtp_train.interfaces import Tap
from mtp_train.serving import choose_class, from_stock, to_stock
from mtp_train.target.ends import FrozenEnds
from mtp_train.target.identity import target_info
from tests.test_heads import head_config, noisy_head
from tests.tiny import tiny_config, tiny_target


@pytest.fixture(scope="module")
def loaded(target_dir):
    model = tiny_target("llama")
    head = noisy_head(model, FrozenEnds.from_model(model), head_config())
    return LoadedHead(head, HeadInfo(head_config(), target_info(target_dir), (Tap(4, "post"),), 3, 128, 10), None)


def test_exported_names_and_shapes_are_those_of_the_engine_class(loaded, tmp_path):
    config = tiny_config("llama").to_dict()
    write_vllm(tmp_path, loaded, config)
    shapes = {name: tuple(tensor.shape) for name, tensor in to_stock(head_tensors(loaded.head, None), config).items()}
    assert shapes == {
        "fc.weight": (64, 128), "enorm.weight": (64,), "hnorm.weight": (64,), "norm.weight": (64,), "layers.0.self_attn.qkv_proj.weight": (128, 64),
        "layers.0.self_attn.o_proj.weight": (64, 64), "layers.0.mlp.gate_proj.weight": (128, 64), "layers.0.mlp.up_proj.weight": (128, 64),
        "layers.0.mlp.down_proj.weight": (64, 128), "layers.0.input_layernorm.weight": (64,), "layers.0.post_attention_layernorm.weight": (64,),
    }  # fmt: skip
    again = read_vllm(tmp_path, loaded.info, config).head.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in loaded.head.state_dict().items())


STOCK_KEYS = [
    "fc.weight", "enorm.weight", "hnorm.weight", "norm.weight", "layers.0.self_attn.qkv_proj.weight", "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight", "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
]  # fmt: skip


@pytest.mark.parametrize("key", STOCK_KEYS)
def test_a_dropped_or_added_tensor_fails_by_name(loaded, key):
    config, mine = tiny_config("llama").to_dict(), head_tensors(loaded.head, None)
    tensors = to_stock(mine, config)
    assert set(tensors) == set(STOCK_KEYS)
    shapes = {name: parameter.shape for name, parameter in loaded.head.named_parameters()}
    with pytest.raises(ValueError, match=key):
        from_stock({name: tensor for name, tensor in tensors.items() if name != key}, shapes, config)
    with pytest.raises(ValueError, match="lacks"):
        to_stock({name: tensor for name, tensor in mine.items() if name != next(iter(mine))}, config)
    with pytest.raises(ValueError, match="no place for"):
        to_stock({**mine, "extra.weight": torch.zeros(1)}, config)


def family_head(family, **change):
    """A head of another family, and the target's config."""
    model = tiny_target(family)
    config = head_config(**change)
    return noisy_head(model, FrozenEnds.from_model(model), config), config, model.config.to_dict()


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_deepseek_heads_round_trip_with_their_real_fields(family, dense):
    head, config, target = family_head(family, dense_mlp=dense)
    kind, _ = choose_class(config, target, False)
    assert kind.name == "EagleDeepSeekMTPModel"
    mine = head_tensors(head, None)
    engine = kind.to_engine(mine, target)
    assert "layers.0.self_attn.kv_a_proj_with_mqa.weight" in engine
    assert ("layers.0.mlp.experts.3.down_proj.weight" in engine) != dense
    again = kind.from_engine(engine, {name: tensor.shape for name, tensor in mine.items()}, target)
    assert again.keys() == mine.keys() and all(torch.equal(again[name], mine[name]) for name in mine)
    fields = kind.config(config, target, None)
    assert fields["kv_lora_rank"] == target["kv_lora_rank"]
    assert (fields["first_k_dense_replace"] > 1000) == dense


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3", "granite"])
def test_other_families_go_to_the_plugin_with_what_they_add(loaded, family, tmp_path):
    head, config, target = family_head(family)
    kind, why = choose_class(config, target, False)
    assert kind.name == "EagleMTPTrainHead"
    assert "EagleDeepSeekMTPModel does not fit" in why
    info = replace(loaded.info, config=config)
    write_plugin(tmp_path, LoadedHead(head, info, torch.arange(10)), target)
    section = json.loads((tmp_path / "config.json").read_text())["mtp_train"]
    ends = FrozenEnds.from_model(tiny_target(family))
    assert (section["embed_scale"], section["logit_divisor"], section["softcap"]) == (ends.embed_scale, ends.logit_divisor, ends.softcap)
    assert section["gain_offset"] == ends.family.gain_offset
    again = read_vllm(tmp_path, info, target)
    assert torch.equal(again.draft_vocab, torch.arange(10))
    assert all(torch.equal(value, again.head.state_dict()[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"concat": "he"}, "joins"), ({"mask_position_0": True}, "position 0"), ({"recycled": "pre"}, "post-norm"), ({"num_layers": 2}, "one layer")],
)
def test_a_layout_that_the_stock_class_does_not_compute_is_refused(change, reason):
    config, target = head_config(**change), tiny_config("llama").to_dict()
    with pytest.raises(ValueError, match=reason):
        choose_class(config, target, False, "stock")
    assert reason in choose_class(config, target, False)[1], "the plugin is chosen, and why"


@pytest.mark.parametrize("family", ["phi3", "mixtral", "qwen3_moe"])
def test_a_target_that_no_class_computes_is_refused_with_every_reason(family):
    with pytest.raises(ValueError, match=r"EagleDeepSeekMTPModel does not fit.*EagleMTPTrainHead does not fit"):
        choose_class(head_config(), tiny_config(family).to_dict(), False)


def test_a_reduced_draft_vocabulary_is_said_to_be_lost_in_the_stock_class():
    target = tiny_config("llama").to_dict()
    assert "vllm_plugin" in choose_class(head_config(), target, True)[1]
    assert "vllm_plugin" not in choose_class(head_config(), target, False)[1]
