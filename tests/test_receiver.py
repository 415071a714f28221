"""What takes in vLLM's states: the samples as they were sent, a bounded wait, and a clear error when the sender is gone. No vLLM needed."""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Client
from types import SimpleNamespace

import pytest
import torch

from eval.engine_vllm import completion
from mtp_vllm import launch
from mtp_vllm.receiver import Receiver


def client(receiver):
    extra = receiver.config()["kv_connector_extra_config"]
    return Client(extra["address"], family="AF_UNIX", authkey=bytes.fromhex(extra["key"]))


def send(connection, key, ids, states):
    header = {"key": key, "token_ids": ids, "shape": list(states.shape), "dtype": str(states.dtype)[6:]}
    connection.send_bytes(json.dumps(header).encode())
    connection.send_bytes(states.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_arrive_as_they_were_sent(dtype):
    generator = torch.Generator().manual_seed(0)
    sent = {str(index): torch.randn(3 + index, 2, 4, generator=generator).to(dtype) for index in range(5)}
    with Receiver(timeout_s=20) as receiver, client(receiver) as connection:
        for key, states in sent.items():
            send(connection, key, list(range(len(states))), states)
        for _ in sent:
            key, ids, states = receiver.take()
            assert ids == list(range(len(sent[key])))
            assert states.dtype == dtype and torch.equal(states, sent[key])
        assert not receiver.has_arrived()


def test_waiting_is_bounded():
    with Receiver(timeout_s=0.05) as receiver, pytest.raises(ValueError, match=r"engine\.timeout_s"):
        receiver.take()


def test_a_sender_that_died_in_the_middle_is_an_error_not_a_wait():
    with Receiver(timeout_s=20) as receiver:
        connection = client(receiver)
        connection.send_bytes(b'{"key": "0", "token_ids": [1], "shape": [1, 1, 1], "dtype": "float32"}')
        connection.close()
        with pytest.raises(ValueError, match="ended while it was sending"):
            receiver.take()


def test_a_stranger_without_the_key_is_not_listened_to():
    with Receiver(timeout_s=20) as receiver, pytest.raises(Exception, match="digest"):
        Client(receiver.address, family="AF_UNIX", authkey=b"wrong")
    with Receiver(timeout_s=20) as receiver:
        with pytest.raises(Exception, match="digest"):
            Client(receiver.address, family="AF_UNIX", authkey=b"wrong")
        with client(receiver) as connection:  # the engine comes after
            send(connection, "0", [1], torch.ones(1, 1, 2))
            assert receiver.take()[0] == "0"


@pytest.mark.parametrize(
    ("accepted", "length", "kinds", "cut"),
    [
        ([2, 0], 5, ["first", "accepted", "accepted", "bonus", "recovered"], 0),
        ([1, 2], 4, ["first", "accepted", "recovered", "accepted"], 2),
        ([], 1, ["first"], 0),
    ],
)
def test_a_request_of_vllm_is_told_step_by_step(accepted, length, kinds, cut):
    metrics = SimpleNamespace(per_step_accepted=accepted, per_step_drafted=[2] * len(accepted))
    answer = SimpleNamespace(token_ids=list(range(length)), spec_decode_metrics=metrics, finish_reason="length")
    one = completion(SimpleNamespace(request_id="a", outputs=[answer]), 2)
    assert one.kinds == kinds
    assert one.stats.num_accepted_tokens == sum(accepted)
    assert one.stats.num_cut_tokens == cut
    assert one.stats.num_drafts == len(accepted)


def test_without_vllm_there_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    with pytest.raises(ValueError, match="make vllm"):
        launch.require_vllm()
