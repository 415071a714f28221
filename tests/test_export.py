"""Export: the exact key list of each engine class, the round trip, and what does not fit is refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from mtp_train.checkpoint import HeadInfo, LoadedHead, head_tensors
from mtp_train.config import compose
from mtp_train.export import write_engine
from mtp_train.interfaces import Tap
from mtp_train.planner import read_target
from mtp_train.published import read_engine
from mtp_train.serving import STOCK, check_formats, choose_class
from mtp_train.target.ends import FrozenEnds
from mtp_train.target.identity import target_info
from tests.test_heads import head_config, noisy_head
from tests.tiny import tiny_config, tiny_target


@pytest.fixture(scope="module")
def loaded(target_dir):
    model = tiny_target("llama")
    head = noisy_head(model, FrozenEnds.from_model(model), head_config())
    return LoadedHead(head, HeadInfo(head_config(), target_info(target_dir), (Tap(4, "post"),), 3, 128, 10), None, model.config.to_dict())


def test_exported_names_and_shapes_are_those_of_the_engine_class(loaded, tmp_path):
    config = tiny_config("llama").to_dict()
    write_engine(tmp_path, loaded)
    shapes = {name: tuple(tensor.shape) for name, tensor in STOCK.to_engine(head_tensors(loaded.head, None), config).items()}
    assert shapes == {
        "fc.weight": (64, 128), "enorm.weight": (64,), "hnorm.weight": (64,), "norm.weight": (64,), "layers.0.self_attn.qkv_proj.weight": (128, 64),
        "layers.0.self_attn.o_proj.weight": (64, 64), "layers.0.mlp.gate_proj.weight": (128, 64), "layers.0.mlp.up_proj.weight": (128, 64),
        "layers.0.mlp.down_proj.weight": (64, 128), "layers.0.input_layernorm.weight": (64,), "layers.0.post_attention_layernorm.weight": (64,),
    }  # fmt: skip
    again = read_engine(tmp_path, loaded.info, config).head.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in loaded.head.state_dict().items())


STOCK_KEYS = [
    "fc.weight", "enorm.weight", "hnorm.weight", "norm.weight", "layers.0.self_attn.qkv_proj.weight", "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight", "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
]  # fmt: skip


@pytest.mark.parametrize("key", STOCK_KEYS)
def test_a_dropped_or_added_tensor_fails_by_name(loaded, key):
    config, mine = tiny_config("llama").to_dict(), head_tensors(loaded.head, None)
    tensors = STOCK.to_engine(mine, config)
    assert set(tensors) == set(STOCK_KEYS)
    shapes = {name: parameter.shape for name, parameter in loaded.head.named_parameters()}
    with pytest.raises(ValueError, match=key):
        STOCK.from_engine({name: tensor for name, tensor in tensors.items() if name != key}, shapes, config)
    with pytest.raises(ValueError, match="lacks"):
        STOCK.to_engine({name: tensor for name, tensor in mine.items() if name != next(iter(mine))}, config)
    with pytest.raises(ValueError, match="no place for"):
        STOCK.to_engine({**mine, "extra.weight": torch.zeros(1)}, config)


def family_head(family, **change):
    """A head of another family, and the target's config."""
    model = tiny_target(family)
    config = head_config(**change)
    return noisy_head(model, FrozenEnds.from_model(model), config), config, model.config.to_dict()


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_deepseek_heads_round_trip_with_their_real_fields(loaded, family, dense):
    head, config, target = family_head(family, dense_mlp=dense)
    kind, _ = choose_class(config, target, False)
    assert kind.name == "EagleDeepSeekMTPModel"
    mine = head_tensors(head, None)
    engine = kind.to_engine(mine, target)
    assert "layers.0.self_attn.kv_a_proj_with_mqa.weight" in engine
    assert ("layers.0.mlp.experts.3.down_proj.weight" in engine) != dense
    again = kind.from_engine(engine, {name: tensor.shape for name, tensor in mine.items()}, target)
    assert again.keys() == mine.keys() and all(torch.equal(again[name], mine[name]) for name in mine)
    fields = kind.config(replace(loaded.info, config=config), target, None)
    assert fields["kv_lora_rank"] == target["kv_lora_rank"]
    assert (fields["first_k_dense_replace"] > 1000) == dense


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3", "granite"])
def test_other_families_go_to_the_plugin_with_what_they_add(loaded, family, tmp_path):
    head, config, target = family_head(family)
    kind, why = choose_class(config, target, False)
    assert kind.name == "EagleMTPTrainHead"
    assert "EagleDeepSeekMTPModel does not fit" in why
    info = replace(loaded.info, config=config)
    write_engine(tmp_path, LoadedHead(head, info, torch.arange(10), target), "vllm_plugin")
    section = json.loads((tmp_path / "config.json").read_text())["mtp_train"]
    ends = FrozenEnds.from_model(tiny_target(family))
    assert (section["embed_scale"], section["logit_divisor"], section["softcap"]) == (ends.embed_scale, ends.logit_divisor, ends.softcap)
    assert section["gain_offset"] == ends.family.gain_offset
    again = read_engine(tmp_path, info, target)
    assert torch.equal(again.draft_vocab, torch.arange(10))
    assert all(torch.equal(value, again.head.state_dict()[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"concat": "he"}, "joins"), ({"mask_position_0": True}, "position 0"), ({"recycled": "pre"}, "post-norm"), ({"num_layers": 2}, "one layer")],
)
def test_a_layout_that_the_stock_class_does_not_compute_is_refused(change, reason):
    config, target = head_config(**change), tiny_config("llama").to_dict()
    assert any(reason in one for one in STOCK.refuses(config, target))
    assert reason in choose_class(config, target, False)[1], "the plugin is chosen, and why"


@pytest.mark.parametrize("family", ["phi3", "mixtral", "qwen3_moe"])
def test_a_target_that_no_class_computes_is_refused_with_every_reason(family):
    with pytest.raises(ValueError, match=r"EagleDeepSeekMTPModel does not fit.*EagleMTPTrainHead does not fit"):
        choose_class(head_config(), tiny_config(family).to_dict(), False)


def test_a_reduced_draft_vocabulary_is_said_to_be_lost_in_the_stock_class():
    target = tiny_config("llama").to_dict()
    assert "vllm_plugin" in choose_class(head_config(), target, True)[1]
    assert "vllm_plugin" not in choose_class(head_config(), target, False)[1]


ATTENTION_V3 = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
SWIGLU = ("gate_proj", "up_proj", "down_proj")
NEXTN_KEYS = {  # what load_weights of sglang/srt/models/deepseek_nextn.py takes, for four experts
    *(f"model.layers.0.{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm", "mlp.gate")),
    *(f"model.layers.0.self_attn.{name}.weight" for name in ATTENTION_V3),
    *(f"model.layers.0.mlp.{place}.{name}.weight" for place in ("shared_experts", *(f"experts.{index}" for index in range(4))) for name in SWIGLU),
    "model.layers.0.mlp.gate.e_score_correction_bias",
}
MIMO_KEYS = {  # of sglang/srt/models/mimo_mtp.py
    *(f"model.mtp_layers.0.{name}.weight" for name in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")),
    *(f"model.mtp_layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj")),
    *(f"model.mtp_layers.0.self_attn.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")),
    *(f"model.mtp_layers.0.mlp.{name}.weight" for name in SWIGLU),
}
AS_MIMO = {"concat": "he", "mask_position_0": True}


@pytest.mark.parametrize(
    ("family", "layout", "name", "keys"),
    [
        ("deepseek_v3", {}, "DeepseekV3ForCausalLMNextN", NEXTN_KEYS),
        ("llama", AS_MIMO, "MiMoMTP", MIMO_KEYS),
        ("qwen2", AS_MIMO, "MiMoMTP", MIMO_KEYS),
    ],
)
def test_sglang_gets_the_names_of_its_classes(loaded, tmp_path, family, layout, name, keys):
    head, config, target = family_head(family, dense_mlp=False, **layout)
    target |= {"topk_method": "noaux_tc"} if family == "deepseek_v3" else {}
    write_engine(tmp_path, LoadedHead(head, replace(loaded.info, config=config), None, target), "sglang")
    assert set(load_file(tmp_path / "model.safetensors")) == keys
    again = read_engine(tmp_path, replace(loaded.info, config=config), target)
    assert all(torch.equal(value, again.head.state_dict()[key]) for key, value in head.state_dict().items())
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["num_hidden_layers"], written["num_nextn_predict_layers"]) == (1, 1)
    card = (tmp_path / "README.md").read_text()
    assert name in card and "sglang.launch_server" in card and "--speculative-num-draft-tokens 4" in card


@pytest.mark.parametrize(
    ("family", "layout", "reason"),
    [("llama", {}, "head.layout.concat=he"), ("llama", {"concat": "he"}, "zeroes the embedding at position 0"), ("deepseek_v2", {"dense_mlp": True}, "experts"),
     ("gemma3", AS_MIMO, "Qwen2 layer")],
)  # fmt: skip
def test_what_sglang_does_not_compute_is_refused(family, layout, reason):
    with pytest.raises(ValueError, match=reason):
        choose_class(head_config(**{"dense_mlp": False, **layout}), tiny_config(family).to_dict(), False, "sglang")


def test_a_quantised_target_goes_to_the_plugin_whose_head_is_plain(loaded):
    target = tiny_config("llama").to_dict() | {"quantization_config": {"quant_method": "compressed-tensors"}}
    kind, why = choose_class(head_config(), target, False)
    assert (kind.name, "in the target's quantisation" in why) == ("EagleMTPTrainHead", True)
    assert "quantization_config" not in kind.config(loaded.info, target, None)
    with pytest.raises(ValueError, match="in the target's quantisation"):
        choose_class(head_config(), tiny_config("deepseek_v2").to_dict() | {"quantization_config": {"quant_method": "fp8"}}, False)


@pytest.mark.parametrize("head", ["mtp", "eagle1", "eagle3", "eagle31"])
@pytest.mark.parametrize("recipe", ["llama-3.2-1b", "llama-3.1-8b", "llama-3.3-70b", "deepseek-v2-lite"])
def test_the_recipes_export_what_some_class_serves(recipe, head):
    config = compose(f"experiment={recipe}", f"head={head}")
    target = read_target(config.target).to_dict()
    if recipe == "deepseek-v2-lite" and head != "mtp":
        with pytest.raises(ValueError, match=r"Leave vllm out of export\.formats"):
            check_formats(config.export.formats, config.head, target, False)
    else:
        check_formats(config.export.formats, config.head, target, config.head.draft_vocab_size is not None)
