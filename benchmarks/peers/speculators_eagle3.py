"""One arm: a training step of speculators' EAGLE-3 model (its own forward and KL loss) on random data.

Started by ../train_step.py with the peer's own Python and one argument, the arm as JSON. Depends on nothing of ours but the two files beside it.
"""

from __future__ import annotations

import json
import sys

import torch
from eagle3_data import Data, make
from measure import measure_training
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig


def build(arm: dict, data: Data) -> Eagle3DraftModel:
    """The model with its frozen ends; its lm_head is trained."""
    layer = LlamaConfig(**arm["sizes"], num_hidden_layers=1, rms_norm_eps=1e-5, tie_word_embeddings=False)
    layer._attn_implementation = "sdpa"  # its flex attention has no backward pass on a CPU
    greedy = GreedyTokenProposalConfig(speculative_tokens=arm["unroll_steps"])
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    about = SpeculatorsConfig(algorithm="eagle3", default_proposal_method="greedy", proposal_methods=[greedy], verifier=verifier)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(data.d2t),
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=about,
    )
    model = Eagle3DraftModel(config=config)
    model.load_vocab_mappings(data.t2d, data.d2t)
    for name in ("lm_head", "verifier_lm_head"):
        getattr(model, name).weight.data.copy_(data.lm_head[data.t2d])
    model.embed_tokens.weight.data.copy_(data.embed)
    model.lm_head.weight.requires_grad_(True)
    return model


def main() -> None:
    """Build and measure."""
    arm = json.loads(sys.argv[1])
    torch.set_num_threads(arm["threads"])
    data = make(arm)
    model = build(arm, data)
    loss_config = resolve_loss_config(json.dumps({"kl_div": 1.0}), "eager")
    documents = torch.zeros_like(data.input_ids)

    def loss() -> torch.Tensor:
        _, total, _ = model(
            hidden_states=data.taps,
            input_ids=data.input_ids,
            document_ids=documents,
            loss_mask=data.loss_mask,
            verifier_last_hidden_states=data.last,
            ttt_steps=arm["unroll_steps"],
            loss_config=loss_config,
        )
        return total

    measure_training(model, loss, arm)


if __name__ == "__main__":
    main()
