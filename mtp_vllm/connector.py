"""Hidden states out of vLLM, over a socket: no file a sample, nothing in /dev/shm, on CPU and GPU alike.

vLLM's method `extract_hidden_states` keeps the tapped states of a request in its KV cache. When the request has finished, `StatesConnector` (in
the engine's process; of tensor-parallel ranks, the first) copies them out and sends them to `receiver.Receiver`, which is in ours.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector, PendingSave, extract_from_kv_cache


class _Sent:
    """Stands where the stock connector keeps a CUDA event: sending is done when it returns."""

    def query(self) -> bool:
        return True


class StatesConnector(ExampleHiddenStatesConnector):
    """Sends where the stock connector writes files. A request's key is its `hidden_states_path`."""

    _connection: Connection | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.use_lock = False

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten().to(self._kv_cache.device)
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).cpu().contiguous()  # (T, L, H)
        header = {"key": pending.filename, "token_ids": pending.token_ids.tolist(), "shape": list(states.shape), "dtype": str(states.dtype)[6:]}
        if self._connection is None:
            option = self._kv_transfer_config.get_from_extra_config
            self._connection = Client(option("address", ""), family="AF_UNIX", authkey=bytes.fromhex(option("key", "")))
        self._connection.send_bytes(json.dumps(header).encode())
        self._connection.send_bytes(memoryview(states.view(torch.uint8).numpy()).cast("B"))
        self._req_copy_events[pending.req_id] = _Sent()
