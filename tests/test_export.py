"""Export: the exact key list of vLLM's class, the round trip, and what does not fit is refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtp_train.checkpoint import HeadInfo, LoadedHead, head_tensors
from mtp_train.export import VLLM_KEYS, check_vllm, from_vllm, read_vllm, to_vllm, write_vllm
from mtp_train.interfaces import Tap
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
    shapes = {name: tuple(tensor.shape) for name, tensor in to_vllm(head_tensors(loaded.head, None)).items()}
    assert shapes == {
        "fc.weight": (64, 128), "enorm.weight": (64,), "hnorm.weight": (64,), "norm.weight": (64,), "layers.0.self_attn.qkv_proj.weight": (128, 64),
        "layers.0.self_attn.o_proj.weight": (64, 64), "layers.0.mlp.gate_proj.weight": (128, 64), "layers.0.mlp.up_proj.weight": (128, 64),
        "layers.0.mlp.down_proj.weight": (64, 128), "layers.0.input_layernorm.weight": (64,), "layers.0.post_attention_layernorm.weight": (64,),
    }  # fmt: skip
    again = read_vllm(tmp_path, loaded.info, config).head.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in loaded.head.state_dict().items())


@pytest.mark.parametrize("key", VLLM_KEYS)
def test_a_dropped_or_added_tensor_fails_by_name(loaded, key):
    tensors = to_vllm(head_tensors(loaded.head, None))
    shapes = {name: parameter.shape for name, parameter in loaded.head.named_parameters()}
    with pytest.raises(ValueError, match=key):
        from_vllm({name: tensor for name, tensor in tensors.items() if name != key}, shapes)
    with pytest.raises(ValueError, match=VLLM_KEYS[key][0]):
        to_vllm({name: tensor for name, tensor in head_tensors(loaded.head, None).items() if name != VLLM_KEYS[key][0]})
    with pytest.raises(ValueError, match="no place for"):
        to_vllm({**head_tensors(loaded.head, None), "extra.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"concat": "he"}, "joins"), ({"mask_position_0": True}, "position 0"), ({"recycled": "pre"}, "post-norm"), ({"num_layers": 2}, "one layer")],
)
def test_a_layout_that_the_class_does_not_compute_is_refused(loaded, change, reason):
    other = LoadedHead(loaded.head, replace(loaded.info, config=head_config(**change)), None)
    with pytest.raises(ValueError, match=reason):
        check_vllm(other, tiny_config("llama").to_dict())


@pytest.mark.parametrize(("family", "reason"), [("qwen3", "qwen3"), ("gemma3", "gemma3"), ("deepseek_v2", "deepseek_v2")])
def test_a_target_that_the_class_does_not_compute_is_refused(loaded, family, reason):
    with pytest.raises(ValueError, match=reason):
        check_vllm(loaded, tiny_config(family).to_dict())
