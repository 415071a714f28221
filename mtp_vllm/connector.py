"""Hidden states out of vLLM, over a socket: no file a sample, nothing in /dev/shm, on CPU and GPU alike.

vLLM's method `extract_hidden_states` keeps the tapped states of a request in its KV cache. When the request has finished, `StatesConnector` (in
the engine's process; of tensor-parallel ranks, the first) copies them out and sends them; `Receiver` (in ours) takes them in. A
reader that is too slow stops the sender: nothing piles up.
"""

from __future__ import annotations

import json
import queue
import secrets
import tempfile
import threading
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector, PendingSave, extract_from_kv_cache

BUFFERED = 256  # samples received and not yet taken: more than are ever under way, so that the engine never waits for a reader that waits for it


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


class Receiver:
    """Listens for one engine. Use as a context; `take` waits for a bounded time."""

    def __init__(self, timeout_s: float):
        self.timeout_s, self.key = timeout_s, secrets.token_bytes(16)
        self.folder = tempfile.TemporaryDirectory(prefix="mtp-states-")
        self.address = str(Path(self.folder.name) / "socket")
        self.listener = Listener(self.address, family="AF_UNIX", authkey=self.key)
        self.arrived: queue.Queue[tuple[str, list[int], Tensor] | Exception] = queue.Queue(BUFFERED)
        threading.Thread(target=self._receive, daemon=True, name="mtp-states").start()

    def config(self) -> dict[str, Any]:
        """What vLLM must be told: its `kv_transfer_config`."""
        return {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "mtp_vllm.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"address": self.address, "key": self.key.hex(), "allow_custom_save_path": True},
        }

    def _receive(self) -> None:
        try:
            with self.listener.accept() as connection:
                while True:
                    header = json.loads(connection.recv_bytes())
                    data = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=getattr(torch, header["dtype"]))
                    self.arrived.put((header["key"], header["token_ids"], data.view(header["shape"])))
        except (EOFError, OSError) as error:  # the engine is gone, or we are
            self.arrived.put(error)

    def has_arrived(self) -> bool:
        """Whether `take` returns at once."""
        return not self.arrived.empty()

    def take(self) -> tuple[str, list[int], Tensor]:
        """(key, token ids (T,), states (T, L, H)) of the next request that has finished. Raises ValueError when none comes in time."""
        try:
            item = self.arrived.get(timeout=self.timeout_s)
        except queue.Empty:
            raise ValueError(f"vLLM sent no hidden states for {self.timeout_s:.0f} s (engine.timeout_s): see its log above") from None
        if isinstance(item, Exception):
            raise ValueError(f"vLLM's process ended while it was sending hidden states ({type(item).__name__}): see its log above")
        return item

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        self.folder.cleanup()
