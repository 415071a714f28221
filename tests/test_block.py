"""The head's block is the target's own layer, at every position and for every rope scaling; and what a head can start from."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from mtp_train.heads.attention import UnrollAttention
from mtp_train.heads.table import build_head
from mtp_train.target.ends import FrozenEnds, read_layer
from mtp_train.target.hf import Target
from tests.test_heads import head_config
from tests.test_heads import start as start_of
from tests.tiny import ROPE3, tiny_config, tiny_target

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
CASES = {
    **{family: (family, {}) for family in (
        "llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3", "granite",
        "deepseek_v2", "deepseek_v3",
    )},
    "llama, llama3": ("llama", {"rope_parameters": ROPE3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "qwen2 with window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN}),
    "phi3, partial rotary": ("phi3", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    "gemma3, nested": ("gemma3", {"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": PLAIN}}),
    "deepseek_v2, yarn": ("deepseek_v2", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v3, yarn": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}, "v_head_dim": 12}),
}  # fmt: skip
SEEN = {}


def record(module, query, key, value, attention_mask, scaling=None, softcap=None, **_):
    """A plain attention for transformers' models that keeps the rotated queries and keys of every layer."""
    SEEN[module.layer_idx] = query, key
    keys, values = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return ((scores + attention_mask).softmax(-1) @ values).transpose(1, 2), None


AttentionInterface.register("record", record)
AttentionMaskInterface.register("record", eager_mask)


class RecordingAttention(UnrollAttention):
    def __call__(self, layer, query, key, value, scaling, softcap):
        self.asked = query, key
        return super().__call__(layer, query, key, value, scaling, softcap)


def of_the_blocks_kind(config):
    """The last of the target's layers that has full attention and a rotation (windows are wider than these rows)."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * 4
    rotated = getattr(config, "no_rope_layers", None) or [1] * 4
    return max(i for i in range(4) if kinds[i] == "full_attention" and rotated[i])


@torch.no_grad()
def both(model, start, size=7, spoil=None):
    """((output, query, key) of a target's layer, the same of the block with its weights) at positions from `start` on."""
    base, seen, index = model.get_decoder(), {}, of_the_blocks_kind(model.config)
    ids = torch.randint(0, 256, (1, size), generator=torch.Generator().manual_seed(6))
    positions = torch.arange(start, start + size)[None]
    handle = base.layers[index].register_forward_hook(lambda _m, args, out: seen.update(into=args[0], out=out[0] if isinstance(out, tuple) else out))
    base.config._attn_implementation = "record"
    base(ids, position_ids=positions, use_cache=False)
    handle.remove()
    dense = not any("experts" in name for name, _ in base.layers[index].named_modules())
    block = build_head(head_config(dense_mlp=dense), model.config).block.eval()
    block.layers[0].load_state_dict(base.layers[index].state_dict())
    if spoil:
        spoil(block)
    attention = RecordingAttention(torch.zeros(size, dtype=torch.long), torch.arange(0))
    out = block(seen["into"], positions, attention)
    return (seen["out"], *SEEN[index]), (out, *attention.asked)


@pytest.mark.parametrize("case", CASES)
def test_the_block_is_the_targets_own_layer_at_every_position(case):
    family, settings = CASES[case]
    model = tiny_target(family, **settings)
    for start in (0, 60, 5000):  # 60..66 holds 63, the last of yarn's and llama3's original length; 5000 lies far beyond
        theirs, mine = both(model, start)
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def plain_rope(family):
    """A fault: the rotation of a config whose scaling was lost."""
    return lambda block: setattr(block, "rotary", build_head(head_config(), tiny_config(family, rope_parameters=dict(PLAIN))).block.rotary)


@pytest.mark.parametrize("case", ["llama, llama3", "llama, yarn", "llama, linear", "qwen3, yarn"])
def test_a_lost_rope_scaling_shows(case):
    family, settings = CASES[case]
    theirs, mine = both(tiny_target(family, **settings), 5000, spoil=plain_rope(family))
    assert float((mine[2] - theirs[2]).abs().max()) > 1e-2


@pytest.mark.parametrize("family", ["mixtral"])
def test_a_dense_mlp_that_the_target_does_not_have_is_refused(family):
    with pytest.raises(ValueError, match="no dense MLP"):
        build_head(head_config(), tiny_config(family))


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_an_experts_target_may_have_a_dense_head(family):
    for dense in (True, False):
        names = [name for name, _ in build_head(head_config(dense_mlp=dense), tiny_config(family)).named_parameters()]
        assert any("experts" in name for name in names) != dense


# ---------------------------------------------------------------- what the stored states say


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3", "llama", "qwen3", "deepseek_v3"])
def test_stored_states_give_the_targets_own_next_token_on_every_position(family):
    """fp32: all of them. bf16 states: 99 of 100, and each flip lies within what rounding a state to 8 bits can do to two logits."""
    model = tiny_target(family)
    ids = torch.randint(0, 256, (1, 400), generator=torch.Generator().manual_seed(8))
    target = Target(model, 1, 400)
    states = target.prefill(ids, torch.tensor([400]), "none").hidden_states[0, :, -1]  # (T, H)
    with torch.no_grad():
        best = model(ids, use_cache=False).logits[0].argmax(-1)
    logits = target.ends.logits(states)
    assert torch.equal(logits.argmax(-1), best)
    stored = target.ends.logits(states.bfloat16().float()).argmax(-1)
    flipped = (stored != best).nonzero().flatten()
    assert len(flipped) <= 4
    rows = target.ends.head_weight
    for position in flipped.tolist():
        apart = (rows[best[position]] - rows[stored[position]]).abs() @ states[position].abs() * 2.0**-8
        assert logits[position, best[position]] - logits[position, stored[position]] <= apart
    pre = target.ends.logits(states * 1.7 + 0.3).argmax(-1)  # seeded fault: another state
    assert (pre != best).float().mean() > 0.01


# ---------------------------------------------------------------- what a head starts from


def saved(model, folder, shard=False):
    model.save_pretrained(folder, max_shard_size="60KB" if shard else "5GB")
    return folder


def started(model, folder, **settings):
    return build_head(head_config(**settings), model.config, start_of(FrozenEnds.from_model(model), None, lambda index: read_layer(folder, index)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_last_layer_is_read_from_the_checkpoint_alone(family, tmp_path):
    model = tiny_target(family)
    experts = family in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
    if family == "deepseek_v3":
        model.model.layers[3].mlp.gate.e_score_correction_bias.normal_()
    head = started(model, saved(model, tmp_path), dense_mlp=not experts, init="last_layer")
    mine, theirs = head.block.layers[0].state_dict(), model.get_decoder().layers[of_the_blocks_kind(model.config)].state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert mine.keys() == dict(head.block.layers[0].named_parameters()).keys(), "all of it is saved with the head"
    e, h = torch.randn(2, 3, 64)
    assert torch.equal(head.eh_proj(torch.cat([e, h], -1)), h)


def test_two_layers_start_from_the_last_two(tmp_path):
    model = tiny_target("llama")
    head = started(model, saved(model, tmp_path), num_layers=2, init="last_layer")
    for mine, theirs in zip(head.block.layers, model.model.layers[2:]):
        assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in mine.state_dict().items())


def test_only_the_files_of_the_layer_are_opened(tmp_path):
    """The other shards are broken after saving: whoever opens them fails."""
    model = tiny_target("llama")
    saved(model, tmp_path, shard=True)
    for file in tmp_path.glob("*.safetensors"):
        if not any(".layers.3." in key for key in load_file(file)):
            file.write_bytes(b"broken")
    assert len(read_layer(tmp_path, 3)) == 9
    assert read_layer(tmp_path, 4) == {}


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_a_layer_that_does_not_fit_is_refused_by_name(tmp_path):
    model, key = tiny_target("llama"), "model.layers.3.mlp.up_proj.weight"
    folder = saved(model, tmp_path / "a")
    edit(folder, lambda tensors: tensors.update({key: tensors[key].to(torch.float8_e4m3fn)}))
    with pytest.raises(ValueError, match=r"model\.layers\.3\.mlp\.up_proj\.weight is quantised"):
        started(model, folder, init="last_layer")
    edit(folder, lambda tensors: tensors.pop(key))
    with pytest.raises(ValueError, match=r"missing: layers\.0\.mlp\.up_proj\.weight"):
        started(model, folder, init="last_layer")
    experts = tiny_target("qwen3_moe")
    with pytest.raises(ValueError, match=r"see head\.dense_mlp"):
        started(experts, saved(experts, tmp_path / "b"), init="last_layer")
    with pytest.raises(ValueError, match=r"the target has 2 layers of the block's kind, head\.num_layers is 3"):
        started(tiny_target("gemma3"), folder, num_layers=3, init="last_layer")


def with_native_layer(tmp_path):
    """A tiny DeepSeek-V3 with an MTP layer in its checkpoint, and the modules that it was written from."""
    model, bigger = tiny_target("deepseek_v3"), tiny_target("deepseek_v3", seed=1, num_hidden_layers=5)
    layer = bigger.model.layers[4]
    layer.mlp.gate.e_score_correction_bias.normal_()
    source = saved(bigger, tmp_path / "bigger")
    prefix, generator = "model.layers.4.", torch.Generator().manual_seed(2)
    norms = {name: 1 + 0.3 * torch.randn(64, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")}
    joined = 0.1 * torch.randn(64, 128, generator=generator)
    native = {key: tensor for key, tensor in load_file(source / "model.safetensors").items() if key.startswith(prefix)}
    native |= {f"{prefix}{name}.weight": tensor for name, tensor in norms.items()} | {f"{prefix}eh_proj.weight": joined}
    native |= {f"{prefix}embed_tokens.weight": torch.zeros(256, 64), f"{prefix}shared_head.head.weight": torch.zeros(256, 64)}
    folder = saved(model, tmp_path / "target")
    edit(folder, lambda tensors: tensors.update(native))
    return model, bigger, folder, norms, joined


@pytest.mark.parametrize("concat", ["eh", "he"])
def test_native_weights_compute_what_the_mtp_layer_computes(concat, tmp_path):
    model, bigger, folder, norms, joined = with_native_layer(tmp_path)
    head = started(model, folder, concat=concat, dense_mlp=False, init="native").eval()
    e, h = torch.randn(2, 1, 9, 64, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(9)[None]
    normed = [nn.functional.rms_norm(x, (64,), norms[name], bigger.config.rms_norm_eps) for x, name in ((e, "enorm"), (h, "hnorm"))]
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    with torch.no_grad():
        x = torch.cat(normed, -1) @ joined.T
        x = bigger.model.layers[4](x, attention_mask=mask, position_ids=positions, position_embeddings=bigger.model.rotary_emb(x, positions))
        expected = nn.functional.rms_norm(x, (64,), norms["shared_head.norm"], bigger.config.rms_norm_eps)
        out = head(e, h, positions, UnrollAttention(torch.zeros(9, dtype=torch.long), torch.arange(0)))
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)


def test_native_is_refused_where_there_is_none(tmp_path):
    model = tiny_target("llama")
    folder = saved(model, tmp_path / "a")
    with pytest.raises(ValueError, match=r"no MTP layer of DeepSeek-V3's form; its checkpoint lacks layers\.4\.enorm\.weight"):
        started(model, folder, init="native")
    with pytest.raises(ValueError, match=r"head\.init=native is one layer, head\.num_layers is 2"):
        started(model, folder, init="native", num_layers=2)
    native = with_native_layer(tmp_path / "b")
    with pytest.raises(ValueError, match=r"see head\.dense_mlp"):
        started(native[0], native[2], init="native")
