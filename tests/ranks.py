"""Several processes that train together, started in a moment: forked from a server that has imported everything once.

What torchrun puts into the environment is put there by hand; one test of `test_distributed.py` uses torchrun itself.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _rank(log, environment, overrides):
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR2)
    import logging

    from mtp_train.config import compose
    from mtp_train.train import stage

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    stage(compose(*overrides))


class Ranks:
    """The processes of one training. `logs` are their output, one file a rank."""

    def __init__(self, folder, overrides, size, environment=None):
        os.environ.update(QUIET)  # the server inherits it
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mtp_train.train", "deepspeed"])
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"rank{rank}.log" for rank in range(size)]
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **(environment or {})}
        self.processes = [
            context.Process(target=_rank, args=(str(log), {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, overrides))
            for rank, log in enumerate(self.logs)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds=120):
        """Exit codes; none may be missing after `seconds`."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        if None in codes:
            for process in self.processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGUSR2)  # say where it hangs
            time.sleep(1)
            self.kill()
            raise AssertionError(f"exit codes {codes} after {seconds} s\n{self.text()}")
        return codes

    def kill(self):
        """SIGKILL to all that live."""
        for process in self.processes:
            process.kill()
            process.join()

    def text(self):
        return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in self.logs if log.exists())


def run(folder, overrides, size=2, environment=None, seconds=120):
    """Train to the end; every rank must be content."""
    ranks = Ranks(folder, overrides, size, environment)
    codes = ranks.wait(seconds)
    assert codes == [0] * size, f"{codes}\n{ranks.text()}"
