"""One arm: a training step of specforge's EAGLE-3 model (its own forward; its loss as its own torch reference) on random data.

Started by ../train_step.py with the peer's own Python and one argument, the arm as JSON. Depends on nothing of ours but the two files beside it.
"""

from __future__ import annotations

import json
import sys

import specforge.algorithms.eagle3.model as eagle3
import torch
from eagle3_data import Data, make
from measure import measure_training
from specforge.core.loss import _compute_loss
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from transformers import LlamaConfig


class TorchLoss:
    """Its Triton loss does not run on a CPU: the reference in the same file of its own does."""

    apply = staticmethod(_compute_loss)


def build(arm: dict, data: Data) -> eagle3.OnlineEagle3Model:
    """The model with its frozen embedding; its lm_head is trained."""
    sizes = LlamaConfig(**arm["sizes"], num_hidden_layers=1, rms_norm_eps=1e-5, draft_vocab_size=len(data.d2t), pad_token_id=0, tie_word_embeddings=False)
    model = LlamaForCausalLMEagle3(sizes, attention_backend="sdpa")
    model.embed_tokens.weight.data.copy_(data.embed)
    model.embed_tokens.weight.requires_grad_(False)
    model.t2d.copy_(data.t2d)
    model.d2t.copy_(data.d2t)
    model.lm_head.weight.data.copy_(data.lm_head[data.t2d])
    return eagle3.OnlineEagle3Model(model, length=arm["unroll_steps"], attention_backend="sdpa")


def main() -> None:
    """Build and measure."""
    arm = json.loads(sys.argv[1])
    torch.set_num_threads(arm["threads"])
    eagle3.LogSoftmaxLoss = TorchLoss
    data = make(arm)
    model = build(arm, data)

    def loss() -> torch.Tensor:
        losses = model(
            input_ids=data.input_ids,
            attention_mask=torch.ones_like(data.input_ids, dtype=torch.bool),
            target=None,
            loss_mask=data.loss_mask[..., None].float(),
            hidden_states=data.taps,
            target_hidden_for_compact=data.last,
            target_head_weight=data.lm_head,
        )[0]
        return sum(losses)

    measure_training(model, loss, arm)


if __name__ == "__main__":
    main()
