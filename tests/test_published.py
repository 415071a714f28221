"""EAGLE-1 and EAGLE-3 in the engines' directories: the names there, the round trip, what is refused; and published heads that become ours."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.run import stage as evaluate
from mtp_train.checkpoint import HeadInfo, LoadedHead, choose, head_tensors, load_head, vocab_fingerprint, write_head
from mtp_train.config import compose
from mtp_train.export import export, write_engine
from mtp_train.heads.base import unroll
from mtp_train.heads.table import build_head, resolve, taps_of
from mtp_train.published import read_engine, read_published
from mtp_train.serving import choose_class
from mtp_train.setup import set_up
from mtp_train.target.ends import FrozenEnds
from mtp_train.target.identity import target_info
from mtp_train.train import train
from tests.test_heads import by_hand, draft_vocab, head_config, noisy_head
from tests.test_heads import captured as captured_states
from tests.test_train import HEADS, run_training
from tests.tiny import save_tiny, tiny_config, tiny_target

LAYER = (
    {f"self_attn.{name}_proj.weight" for name in "qkvo"} | {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")} | {"post_attention_layernorm.weight"}
)
WIDE = LAYER | {"hidden_norm.weight", "input_layernorm.weight"}
BIASES = {f"self_attn.{name}_proj.bias" for name in "qkv"}
OUTER = {"fc.weight", "norm.weight", "lm_head.weight"}
MAPS = {"d2t", "t2d"}
TAP_NORMS = {f"fc_norm.{index}.weight" for index in range(3)}


def under(prefix, names):
    return {prefix + name for name in names}


CASES = {  # target, head, format, class, architecture and model_type in config.json, tensors
    "eagle1": ("llama", {"kind": "eagle1"}, "vllm", "EagleLlamaForCausalLM", "LlamaForCausalLM", "llama", {"fc.weight"} | under("layers.0.", LAYER)),
    "eagle1, two layers": (
        "mistral", {"kind": "eagle1", "num_layers": 2}, "vllm", "EagleLlamaForCausalLM", "LlamaForCausalLM", "llama",
        {"fc.weight"} | under("layers.0.", LAYER) | under("layers.1.", LAYER | {"input_layernorm.weight"}),
    ),
    "eagle1, qwen2": (
        "qwen2", {"kind": "eagle1"}, "vllm", "EagleLlamaForCausalLM", "LlamaForCausalLM", "llama",
        {"fc.weight"} | under("layers.0.", LAYER | BIASES | {"self_attn.o_proj.bias"}),
    ),
    "eagle3": ("llama", {"kind": "eagle3"}, "vllm", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "llama", OUTER | under("midlayer.", WIDE)),
    "eagle3, draft vocabulary": (
        "llama_rope3", {"kind": "eagle3", "draft_vocab_size": 100, "norm_before_residual": True}, "vllm", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3",
        "llama", OUTER | MAPS | under("midlayer.", WIDE),
    ),
    "eagle3.1": (
        "qwen3", {"kind": "eagle31", "draft_vocab_size": 100}, "vllm", "Eagle3Qwen3ForCausalLM", "Eagle3Qwen3ForCausalLM", "qwen3",
        OUTER | MAPS | TAP_NORMS | under("midlayer.", WIDE | {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}),
    ),
    "speculators": (
        "llama", {"kind": "eagle3", "norm_before_fc": True, "draft_vocab_size": 100}, "speculators", "Eagle3DraftModel", "Eagle3DraftModel", None,
        OUTER | MAPS | {"input_norm.weight"} | under("layers.0.", WIDE),
    ),
    "sglang, eagle1": (
        "llama", {"kind": "eagle1"}, "sglang", "LlamaForCausalLMEagle", "LlamaForCausalLMEagle", "llama",
        {"fc.weight", "fc.bias"} | under("layers.0.", LAYER),  # its fc has a bias
    ),
    "sglang, eagle3": (
        "llama_8", {"kind": "eagle3", "taps": [2, 4, 5], "draft_vocab_size": 100}, "sglang", "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3", "llama",
        OUTER | MAPS | under("midlayer.", WIDE),
    ),
}  # fmt: skip
EVERY_CASE = pytest.mark.parametrize("case", CASES)


@cache
def target_of(name):
    """A random target; llama_8 has eight layers, deep enough for taps as published heads have them."""
    return tiny_target("llama", num_hidden_layers=8) if name == "llama_8" else tiny_target(name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a target."""

    @cache
    def save(name):
        return save_tiny(target_of(name), tmp_path_factory.mktemp("target") / name)

    return save


def loaded_head(name, settings, folder):
    """A head whose every parameter matters, of a saved target."""
    model, config, info = target_of(name), head_config(**settings), target_info(folder)
    vocab = draft_vocab(config)
    head = noisy_head(model, FrozenEnds.from_model(model), config)
    return LoadedHead(head, HeadInfo(config, info, taps_of(config, info.num_layers), 3, 128, 10, vocab_fingerprint(vocab)), vocab, model.config.to_dict())


def written(case, saved, folder):
    """A head, and the directory that it was exported to."""
    name, settings, engine_format, *_ = CASES[case]
    loaded = loaded_head(name, settings, saved(name))
    folder.mkdir(exist_ok=True)
    write_engine(folder, loaded, engine_format)
    return loaded, folder


def assert_equal_heads(found, loaded):
    """Tensor by tensor, with the draft vocabulary."""
    mine, theirs = head_tensors(loaded.head, loaded.draft_vocab), head_tensors(found.head, found.draft_vocab)
    extra = {name for name in theirs.keys() - mine.keys() if name.endswith("o_proj.bias") and not theirs[name].any()}  # a Qwen2 layer as a Llama one
    assert theirs.keys() - extra == mine.keys()
    assert all(torch.equal(theirs[key], mine[key]) for key in mine)


def edit_config(folder, **changes):
    """Change fields of a config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(folder, **changes):
    """Change tensors; None removes one. Double underscores are dots."""
    tensors = load_file(folder / "model.safetensors") | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


# ---------------------------------------------------------------- exports


@EVERY_CASE
def test_names_and_config_are_the_engines_and_the_head_comes_back_equal(case, saved, tmp_path):
    loaded, folder = written(case, saved, tmp_path / "out")
    target, _, engine_format, name, architecture, model_type, keys = CASES[case]
    assert set(load_file(folder / "model.safetensors")) == keys
    assert choose_class(loaded.info.config, loaded.layer_config, loaded.draft_vocab is not None, engine_format)[0].name == name
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config.get("model_type")) == ([architecture], model_type)
    method = {"eagle1": "eagle", "eagle3": "eagle3"}[loaded.info.config.kind]
    assert (f'"method": "{method}"' if engine_format != "sglang" else f"--speculative-algorithm {method.upper()} ") in (folder / "README.md").read_text()
    assert_equal_heads(read_engine(folder, loaded.info, loaded.layer_config), loaded)
    published = read_published(folder, str(saved(target)))
    assert_equal_heads(published, loaded)
    assert (published.info.taps, published.info.draft_vocab) == (loaded.info.taps, loaded.info.draft_vocab)
    assert published.head.config.layout == resolve(loaded.info.config, loaded.info.target.num_layers).layout


def test_a_draft_vocabulary_is_written_as_offsets(saved, tmp_path):
    loaded, folder = written("eagle3, draft vocabulary", saved, tmp_path / "out")
    tensors, ids = load_file(folder / "model.safetensors"), loaded.draft_vocab.tolist()
    assert [index + int(offset) for index, offset in enumerate(tensors["d2t"])] == ids
    assert [token for token, inside in enumerate(tensors["t2d"].tolist()) if inside] == ids
    config = json.loads((folder / "config.json").read_text())
    assert (config["draft_vocab_size"], config["eagle_aux_hidden_state_layer_ids"], config["norm_before_residual"]) == (100, [1, 2, 3], True)


def test_taps_are_written_for_sglang_in_its_numbering_and_in_vllms(saved, tmp_path):
    """SGLang counts from the first layer's output; where the first id is 1, each of its versions does."""
    _, folder = written("sglang, eagle3", saved, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


REFUSED = {
    "qk-norm in EAGLE-1": ("qwen3", {"kind": "eagle1"}, "vllm", "its layer is that of llama, mistral, qwen2, the target is 'qwen3'"),
    "a Gemma layer": ("gemma2", {"kind": "eagle1"}, "vllm", "the target is 'gemma2'"),
    "two classes refuse": ("mixtral", {"kind": "eagle3"}, "vllm", r"Eagle3LlamaForCausalLM does not fit.*Eagle3Qwen3ForCausalLM does not fit"),
    "another activation": ("llama", {"kind": "eagle3"}, "vllm", "it knows silu alone, the target has gelu"),
    "two taps in speculators": ("llama", {"kind": "eagle3", "taps": [1, 3]}, "speculators", "three tapped layers of this format, the head has 2"),
    "both norms in speculators": ("llama", {"kind": "eagle31", "norm_before_fc": True}, "speculators", "norm_before_fc or fc_norm, not both"),
    "EAGLE-1 in speculators": ("llama", {"kind": "eagle1"}, "speculators", "format speculators has no class for a head of kind eagle1"),
    "EAGLE-1 in our plugin": ("llama", {"kind": "eagle1"}, "vllm_plugin", "format vllm_plugin has no class for a head of kind eagle1"),
    "other taps in SGLang": ("llama", {"kind": "eagle3"}, "sglang", r"three taps that begin with 2, the head has \[1, 2, 3\]"),
    "EAGLE-3.1 in SGLang": ("llama", {"kind": "eagle31", "taps": [2, 3, 4]}, "sglang", "head.layout.fc_norm, recycled"),
    "biases in SGLang": ("qwen2", {"kind": "eagle3"}, "sglang", "the target is 'qwen2'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_class_computes_is_refused_with_the_reasons(case):
    family, settings, engine_format, reason = REFUSED[case]
    target = tiny_config(family).to_dict() | ({"hidden_act": "gelu"} if case == "another activation" else {})
    with pytest.raises(ValueError, match=reason):
        choose_class(head_config(**settings), target, False, engine_format)


def test_eagle1_says_that_a_draft_vocabulary_is_lost():
    said = choose_class(head_config("eagle1"), tiny_config("llama").to_dict(), True)[1]
    assert "it drafts from the whole vocabulary" in said and "vllm_plugin" not in said


# ---------------------------------------------------------------- the audit of a directory


@pytest.mark.parametrize("case", ["eagle1", "eagle3, draft vocabulary", "eagle3.1", "speculators"])
def test_missing_unknown_and_misshapen_tensors_are_named(case, saved, tmp_path):
    loaded, folder = written(case, saved, tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    for key in sorted(tensors.keys() - {"t2d"}):  # engines do not read t2d: nothing is lost without it
        for change in (None, tensors[key][:-1]):
            save_file(tensors, folder / "model.safetensors")
            edit_tensors(folder, **{key: change})
            for read in (lambda: read_engine(folder, loaded.info, loaded.layer_config), lambda: read_published(folder, str(saved(CASES[case][0])))):
                with pytest.raises(ValueError, match="lm_head has 100 rows, d2t gives 256" if key == "d2t" and change is None else key.replace(".", r"\.")):
                    read()
    save_file(tensors, folder / "model.safetensors")
    edit_tensors(folder, extra__weight=torch.ones(3))
    with pytest.raises(ValueError, match=r"unknown \['extra.weight'\]"):
        read_published(folder, str(saved(CASES[case][0])))


@pytest.mark.parametrize("with_t2d", [True, False])
def test_absolute_ids_where_offsets_belong_are_refused(with_t2d, saved, tmp_path):
    loaded, folder = written("eagle3, draft vocabulary", saved, tmp_path / "out")
    edit_tensors(folder, d2t=loaded.draft_vocab, **({} if with_t2d else {"t2d": None}))
    with pytest.raises(ValueError, match="absolute ids, where offsets from the index belong"):
        read_published(folder, str(saved("llama_rope3")))


def test_another_draft_vocabulary_than_the_heads_is_refused(saved, tmp_path):
    loaded, folder = written("eagle3, draft vocabulary", saved, tmp_path / "out")
    other = loaded.draft_vocab.clone()
    other[-1] = 255
    t2d = torch.zeros(256, dtype=torch.bool)
    t2d[other] = True
    edit_tensors(folder, d2t=other - torch.arange(100), t2d=t2d)
    with pytest.raises(ValueError, match="not the one that the head was trained with"):
        read_engine(folder, loaded.info, loaded.layer_config)


OTHER_CONFIG = {  # a field of config.json, another value, and what the audit says of it
    "taps off by one": ("eagle_aux_hidden_state_layer_ids", [0, 1, 2], r"'taps': \[0, 1, 2\].* there, .*'taps': \[1, 2, 3\].* here"),
    "the other residual": ("norm_before_residual", False, "'norm_before_residual': False"),
    "recycled post-norm": ("norm_output", True, "'recycled': 'post'"),
    "another rotation": ("rope_parameters", {"rope_theta": 5e5, "rope_type": "default"}, "rope_parameters: .*500000"),
    "more heads": ("num_key_value_heads", 4, "num_key_value_heads: 4 there, 2 here"),
    "another target": ("hidden_size", 32, "hidden_size=32, the target 64"),
}


@pytest.mark.parametrize("case", OTHER_CONFIG)
def test_a_config_of_another_head_is_refused_with_both_values(case, saved, tmp_path):
    loaded, folder = written("eagle3, draft vocabulary", saved, tmp_path / "out")
    field, value, said = OTHER_CONFIG[case]
    edit_config(folder, **{field: value})
    with pytest.raises(ValueError, match=said):
        read_engine(folder, loaded.info, loaded.layer_config)


UNCLEAR = {
    "taps in SGLang's numbering": (
        "sglang, eagle3", {"eagle_aux_hidden_state_layer_ids": None}, r"SGLang reads the residuals after layers \[2, 4, 5\], vLLM after \[1, 3, 4\]",
    ),
    "no tapped layers": ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "not an EAGLE-3 head"),
    "no residual told": ("speculators", {"norm_before_residual": None}, "norm_before_residual, which vLLM takes for true"),
    "another class": ("eagle3", {"architectures": ["MedusaModel"]}, "MedusaModel is none"),
    "another vocabulary": ("eagle1", {"vocab_size": 300}, "vocab_size=300, the target 256"),
    "another target's states": ("eagle3", {"target_hidden_size": 128}, "target_hidden_size=128, the target 64"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCLEAR)
def test_a_published_head_that_cannot_be_told_is_refused(case, saved, tmp_path):
    source, changes, said = UNCLEAR[case]
    _, folder = written(source, saved, tmp_path / "out")
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=said):
        read_published(folder, str(saved(CASES[source][0])))


def test_taps_within_eagle_config_are_read_where_both_engines_agree(saved, tmp_path):
    _, folder = written("sglang, eagle3", saved, tmp_path / "out")
    edit_config(folder, eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 6]})
    assert read_published(folder, str(saved("llama_8"))).info.config.layout["taps"] == [2, 4, 6]
    edit_config(folder, eagle_config=None)
    assert read_published(folder, str(saved("llama_8"))).info.config.layout["taps"] == [2, 4, 5], "as all of them have it by default: 2, L / 2 and L - 3"


def test_a_bias_that_the_head_lacks_must_be_zero(saved, tmp_path):
    loaded, folder = written("sglang, eagle1", saved, tmp_path / "out")
    edit_tensors(folder, fc__bias=torch.full((64,), 0.1))
    with pytest.raises(ValueError, match=r"no \['fc.bias'\], which must be zero"):
        read_engine(folder, loaded.info, loaded.layer_config)


# ---------------------------------------------------------------- a directory as somebody publishes it


def publish(folder, kind, target, rope_theta):
    """Half precision in a pytorch_model.bin, with a config.json as the authors of EAGLE write it: no taps, no rotation but the default."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    rand = lambda *shape: torch.randn(shape, generator=generator) * 0.1  # noqa: E731
    first, width = ("midlayer.", 128) if kind == "eagle3" else ("layers.0.", 64)
    tensors = {f"{first}self_attn.{name}_proj.weight": rand(rows, width) for name, rows in (("q", 64), ("k", 32), ("v", 32))}
    tensors |= {f"{first}self_attn.o_proj.weight": rand(64, 64), f"{first}post_attention_layernorm.weight": 1 + rand(64)}
    tensors |= {f"{first}mlp.{name}_proj.weight": rand(*shape) for name, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96)))}
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "vocab_size": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 1,
    }  # fmt: skip
    if kind == "eagle1":
        tensors |= {"fc.weight": rand(64, 128), "embed_tokens.weight": target.get_input_embeddings().weight.detach()}
        config |= {"architectures": ["LlamaForCausalLM"]}
    else:
        ids = torch.tensor([3, 7, 8, 20, 64, 130, 255])
        t2d = torch.zeros(256, dtype=torch.bool)
        t2d[ids] = True
        tensors |= {f"{first}{name}.weight": 1 + rand(64) for name in ("hidden_norm", "input_layernorm")} | {"norm.weight": 1 + rand(64)}
        tensors |= {"fc.weight": rand(64, 192), "lm_head.weight": rand(7, 64), "d2t": ids - torch.arange(7), "t2d": t2d}
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 7}
    torch.save({name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config | ({"rope_theta": rope_theta} if rope_theta else {})))
    return folder


@pytest.mark.parametrize("rope_theta", [None, 500.0])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_published_head_computes_what_its_own_config_says(kind, rope_theta, tmp_path):
    """Its layer is smaller than the target's and rotates otherwise (the target has Llama 3's scaling)."""
    model = tiny_target("llama_rope3", num_hidden_layers=8)
    target = save_tiny(model, tmp_path / "target")
    found = read_published(publish(tmp_path / "published", kind, model, rope_theta), str(target))
    assert [tap.layer for tap in found.info.taps] == ([2, 4, 5, 8] if kind == "eagle3" else [8])
    ends, [(ids, states)], batch = captured_states(model, config=found.info.config)
    angles = torch.arange(len(ids) - 1)[:, None] * (rope_theta or 10000.0) ** (-torch.arange(0, 16, 2) / 16)
    cos, sin = (torch.cat([one, one], dim=-1) for one in (angles.cos(), angles.sin()))
    with torch.no_grad():
        _, readout = by_hand(found.head, ends.embed(ids[1:]), states[:-1], cos, sin)
        torch.testing.assert_close(unroll(found.head, ends, batch, 1)[0, 0, :-1], readout, rtol=0, atol=1e-4)
    assert kind == "eagle1" or found.draft_vocab.tolist() == [3, 7, 8, 20, 64, 130, 255]


def test_embeddings_of_another_target_are_refused_to_draft_and_told_to_start_from(tmp_path, saved, caplog):
    folder = publish(tmp_path / "published", "eagle1", tiny_target("llama", seed=4), None)
    with pytest.raises(ValueError, match=r"embed_tokens.weight \(256, 64\) is not the target's"):
        read_published(folder, str(saved("llama")))
    assert read_published(folder, str(saved("llama")), strict=False).head.config.kind == "eagle1"
    assert "the target's own is used" in caplog.text


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content"), [("model.safetensors", POINTER), ("model.safetensors", b""), ("pytorch_model.bin", POINTER), ("pytorch_model.bin", b"")]
)
def test_weights_that_cannot_be_read_are_named(name, content, saved, tmp_path):
    folder = publish(tmp_path / "published", "eagle1", target_of("llama"), None)
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} cannot be read: .*Git LFS pointer"):
        read_published(folder, str(saved("llama")))


def test_a_speculators_config_that_says_little_is_refused_by_name_or_read(saved, tmp_path):
    loaded, folder = written("speculators", saved, tmp_path / "head")
    edit_config(folder, speculators_config=None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"speculators_config": None}))
    target = str(saved("llama"))
    assert_equal_heads(read_published(folder, target), loaded)
    del config["transformer_layer_config"]["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no model_type"):
        read_published(folder, target)


# ---------------------------------------------------------------- what the stages do with it


@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
def test_a_published_directory_is_measured_exported_again_and_started_from(captured, corpus, tmp_path, head):
    tensors, _ = run_training(captured, tmp_path / "a", "train.num_steps=3", *HEADS[head])
    run, overrides = captured
    base = (*overrides, f'run_dir="{tmp_path / "a"}"', *HEADS[head])
    engine_format = {"eagle1": "vllm", "eagle3": "speculators"}[head]
    export(compose(*base, f"export.formats=[{engine_format}]"))
    published = tmp_path / "published"
    os.rename(tmp_path / "a" / "export" / engine_format, published)

    short = ("eval.num_prompts=2", "eval.max_new_tokens=8", "eval.speed_prompts=0", f'eval.prompts="{corpus / "heldout.jsonl"}"')
    evaluate(compose(*base, f'eval.head="{published}"', f'eval.heads=["{published}"]', *short))
    report = json.loads((tmp_path / "a" / "eval" / "report.json").read_text())
    assert (report["head"]["kind"], report["lossless"]["num_equal"]) == (head, 2) and report["runs"][0]["overall"]["counters"]["num_drafts"] > 0
    assert [row["difference"] for row in report["heads"]] == [{"value": 0, "low": 0, "high": 0}] * 2

    export(compose(*base, f'export.checkpoint="{published}"', "export.formats=[hf,vllm]"))
    again = load_file(tmp_path / "a" / "export" / "hf" / "head.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)

    def warm(*extra):
        return compose(*overrides, f'run_dir="{tmp_path / "b"}"', f'train.init_from="{published}"', "train.num_steps=3", *HEADS[head], *extra)

    (tmp_path / "b").mkdir()
    os.symlink(run / "shards", tmp_path / "b" / "shards")
    setup = set_up(warm())
    setup.claim.close()
    started = head_tensors(setup.replica.head, setup.draft_vocab)
    assert all(torch.equal(started[name], tensors[name]) for name in tensors)
    with pytest.raises(ValueError, match=r"holds another head than is configured .*head\.num_layers: 1 there, 2 here"):
        set_up(warm("head.num_layers=2"))
    train(warm())
    last = choose(tmp_path / "b" / "checkpoints", "last")
    assert load_head(last).info.step == 3
    path = last / "target_config.json"  # as if the published head's layer had rotated otherwise than the target's
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    with pytest.raises(ValueError, match=r"rms_norm_eps: 1e-05 there, 1e-06 here"):
        set_up(warm("train.num_steps=4"))


@pytest.mark.parametrize(
    ("sizes", "message"), [({"hidden_size": 32}, "hidden_size=32, the target has 64"), ({"vocab_size": 300}, "vocab_size=300, the target has 256")]
)
@pytest.mark.parametrize("head", ["mtp", "eagle3"])
def test_a_start_from_a_head_of_other_sizes_is_refused_where_it_does_not_fit(captured, tmp_path, head, sizes, message):
    """The target's lm_head may have got more rows; a head's own may not."""
    target, config = tiny_config("llama", **sizes), head_config(**({"kind": "eagle3", "taps": [1, 2, 3]} if head == "eagle3" else {}))
    info = target_info(compose(*captured[1]).target.path)
    other = HeadInfo(config, replace(info, **sizes), taps_of(config, info.num_layers), 3, 128, 10)
    (tmp_path / "other").mkdir()
    write_head(tmp_path / "other", head_tensors(build_head(config, target), None), other, target.to_dict())
    start = (*HEADS[head], f'train.init_from="{tmp_path / "other"}"', "head.draft_vocab_size=null")
    if head == "mtp" and "vocab_size" in sizes:
        run_training(captured, tmp_path / "run", "train.num_steps=3", *start)
        assert load_head(choose(tmp_path / "run" / "checkpoints", "last")).layer_config["vocab_size"] == 256
        return
    with pytest.raises(ValueError, match=message):
        run_training(captured, tmp_path / "run", "train.num_steps=3", *start)


def test_formats_are_checked_before_training_and_the_plugins_is_left_out_where_it_is_not_needed(captured, tmp_path):
    with pytest.raises(ValueError, match=r"has no class for a head of kind eagle1\. Leave speculators out of export\.formats"):
        run_training(captured, tmp_path / "a", *HEADS["eagle1"], "export.formats=[hf,speculators]")
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
    whole = (*HEADS["eagle3"], "head.draft_vocab_size=256", "train.num_steps=3", "export.formats=[vllm,vllm_plugin,hf]")
    run_training(captured, tmp_path / "b", *whole)
    export(compose(*captured[1], f'run_dir="{tmp_path / "b"}"', *whole))
    assert {path.name for path in (tmp_path / "b" / "export").iterdir()} == {"vllm", "hf"}
    assert load_head(tmp_path / "b" / "export" / "hf").draft_vocab is None, "the whole vocabulary is none of its own"
