"""One arm: a training step of speculators' MTP model (hard labels, its own forward and loss) on random data.

Started by ../train_step.py with the peer's own Python and one argument, the arm as JSON. Depends on nothing of ours but measure.py beside it.
"""

from __future__ import annotations

import json
import sys

import torch
from measure import measure_training
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig, compute_step_weights
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config


def build(sizes: dict, num_steps: int) -> MTPDraftModel:
    """The model with random frozen ends (they would be the target's)."""
    layer = Qwen3Config(**sizes, num_hidden_layers=1, tie_word_embeddings=False)
    layer._attn_implementation = "sdpa"
    greedy = GreedyTokenProposalConfig(speculative_tokens=num_steps)
    verifier = VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"])
    about = SpeculatorsConfig(algorithm="mtp", default_proposal_method="greedy", proposal_methods=[greedy], verifier=verifier)
    model = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=about))
    del model.verifier_lm_head  # as its own loading does: the forward pass never reads it
    for name in ("embed_tokens", "lm_head"):
        torch.nn.init.normal_(getattr(model, name).weight, std=0.02).requires_grad_(False)
    return model


def main() -> None:
    """Build and measure."""
    arm = json.loads(sys.argv[1])
    torch.set_num_threads(arm["threads"])
    torch.manual_seed(0)
    sizes, num_tokens, num_steps = arm["sizes"], arm["tokens"], arm["unroll_steps"]
    model = build(sizes, num_steps)
    input_ids = torch.randint(0, sizes["vocab_size"], (1, num_tokens))
    hidden_states = torch.randn(1, num_tokens, sizes["hidden_size"])
    loss_mask = torch.arange(num_tokens)[None] >= num_tokens - round(num_tokens * arm["share"])
    weights = compute_step_weights(num_steps=num_steps)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=arm["dtype"] == "bfloat16"):
            _, total, _ = model(input_ids=input_ids, hidden_states=hidden_states, loss_mask=loss_mask, step_weights=weights)
        return total

    measure_training(model, loss, arm)


if __name__ == "__main__":
    main()
