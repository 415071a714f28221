"""Regeneration and capture by vLLM: continuous batching for the answers, its hidden-state extraction for the states.

vLLM taps a layer's residual before the final norm, so the teacher state is normed here, with the family's gain. Two engines, one after
the other: one that generates, one that extracts; the second starts when the first is stopped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from mtp_train.config import EngineConfig
from mtp_train.interfaces import Ends, Sample, Tap, TokenRow
from mtp_train.spec_decode.engine import Completion, Request
from mtp_train.spec_decode.stats import AcceptanceStats
from mtp_train.target.ends import num_positions
from mtp_vllm import launch
from mtp_vllm.receiver import Receiver

WINDOW = 64  # captures under way: as many samples may wait in memory


class VllmEngine:
    """What `precompute.run` needs of an engine, by vLLM."""

    def __init__(self, path: str, taps: tuple[Tap, ...], ends: Ends, dtype: str, max_length: int, options: EngineConfig):
        launch.require_vllm()
        self.path, self.taps, self.ends, self.dtype = path, taps, ends, dtype
        self.max_length, self.options = max_length, options
        self.llm: Any = None

    @property
    def info(self) -> dict[str, str]:
        """For the manifest: states depend on the engine and its precision."""
        return {"name": "vllm", "version": launch.version(), "dtype": self.dtype}

    def _start(self, num_seqs: int, **more: Any) -> Any:
        self.close()
        if self.max_length == num_positions(self.path):  # vLLM asks room for a token after the longest row, which is never computed
            os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        self.llm = launch.make_llm(self.path, self.dtype, self.options, self.max_length + 1, num_seqs, **more)
        return self.llm

    def close(self) -> None:
        """Stop what runs."""
        if self.llm is not None:
            launch.stop(self.llm)
            self.llm = None

    def generate(self, requests: Iterable[Request], batch_size: int) -> Iterator[Completion]:
        """Answer requests by plain decoding, in the order in which they finish."""
        llm = self.llm or self._start(batch_size)
        for output in launch.stream(llm, requests, 4 * batch_size):
            (answer,) = output.outputs
            ids = list(answer.token_ids)
            yield Completion(output.request_id, ids, ["recovered"] * len(ids), AcceptanceStats(), "stop" if answer.finish_reason == "stop" else "length")

    def capture(self, rows: Sequence[TokenRow], batch_tokens: int) -> Iterator[Sample]:
        """The target's states of every row, with progress. Raises ValueError when vLLM is silent for engine.timeout_s."""
        if not rows:
            return
        self.close()
        launch.set_environment(self.options)
        layers = [tap.layer for tap in self.taps]  # vLLM sorts and de-duplicates; ours are sorted, and distinct but for the teacher's
        distinct = sorted(set(layers))
        hidden = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
        with Receiver(self.options.timeout_s) as receiver:
            llm = self._start(
                min(WINDOW, max(1, batch_tokens // 64)),
                max_num_batched_tokens=max(batch_tokens, self.max_length + 1),
                speculative_config={**hidden, "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": distinct}}},
                kv_transfer_config=receiver.config(),
            )
            requests = (Request(str(index), row.input_ids, 1, frozenset(), 0.0, 0) for index, row in enumerate(rows))
            with tqdm(total=sum(len(row.input_ids) for row in rows), unit="tok", unit_scale=True, desc="capture (vllm)", mininterval=5) as bar:
                for key, token_ids, states in self._arrivals(llm, requests, receiver, len(rows)):
                    row = rows[int(key)]
                    if token_ids != row.input_ids:
                        raise ValueError(f"row {row.id}: vLLM returned states of {len(token_ids)} other tokens than the {len(row.input_ids)} asked for")
                    yield self._sample(row, states[:, [distinct.index(layer) for layer in layers]])
                    bar.update(len(token_ids))
            self.close()

    def _arrivals(self, llm: Any, requests: Iterable[Request], receiver: Any, num: int) -> Iterator[tuple[str, list[int], torch.Tensor]]:
        """States as they come: those of a request leave the engine in the step after its last one."""
        taken = 0
        for _ in launch.stream(llm, requests, WINDOW, lambda one: {"extra_args": {"kv_transfer_params": {"hidden_states_path": one.id}}}):
            while receiver.has_arrived():
                taken += 1
                yield receiver.take()
        while taken < num:
            if launch.in_process(llm):
                llm.llm_engine.step()
            taken += 1
            yield receiver.take()

    def _sample(self, row: TokenRow, states: torch.Tensor) -> Sample:
        """States (T, L, H) as vLLM tapped them -> a sample, its teacher state after the final norm."""
        for index, tap in enumerate(self.taps):
            if tap.norm == "post":
                states[:, index] = self.ends.final_norm(states[:, index]).to(states.dtype)
        return Sample(row.id, row.domain, torch.tensor(row.input_ids), torch.tensor(row.loss_mask), states)
