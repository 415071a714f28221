"""Takes in what `connector.StatesConnector` sends: hidden states of finished requests, over a local socket. Needs no vLLM.

A reader that is too slow stops the sender: at most BUFFERED samples wait in memory.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import tempfile
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUFFERED = 256  # samples received and not yet taken: more than are ever under way, so that the engine never waits for a reader that waits for it


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
            with self._accept() as connection:
                while True:
                    header = json.loads(connection.recv_bytes())
                    data = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=getattr(torch, header["dtype"]))
                    self.arrived.put((header["key"], header["token_ids"], data.view(header["shape"])))
        except (EOFError, OSError) as error:  # the engine is gone, or we are
            self.arrived.put(error)

    def _accept(self) -> Connection:
        """The engine's connection; whoever comes without the key is sent away."""
        while True:
            with contextlib.suppress(AuthenticationError):
                return self.listener.accept()

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
