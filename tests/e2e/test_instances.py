"""A router and instances started one by one: sides that are missing, killed, restarted, or of another model; bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import pytest
import zmq
from system import Stand, blocks, stream_events

from watching import wait_until

pytestmark = pytest.mark.e2e

SHORT_LIMITS = ("--transfer-timeout", "3", "--defer-timeout", "5")


@pytest.fixture
def stand() -> Iterator[Stand]:
    with Stand() as stand:
        yield stand


@pytest.fixture(scope="module")
def pair() -> Iterator[Stand]:
    """One that stays up for all tests that do no harm to it."""
    with Stand() as stand:
        stand.start("prefill", "prefill")
        stand.start("decode", "decode")
        stand.wait_for("live", 2)
        yield stand


def _is_idle(port: int) -> bool:
    states = blocks(port)
    return states["held"] == 0 and states["in_use"] == 0


def test_a_missing_side_is_a_503_with_a_reason(stand: Stand) -> None:
    both = stand.client.complete()
    assert both.status == 503
    assert "no live prefill and no live decode instance" in both.error
    assert "Retry-After" in both.headers
    stand.start("prefill", "prefill")
    stand.wait_for("live", 1)
    one = stand.client.complete()
    assert one.status == 503
    assert "no live decode instance" in one.error
    stand.start("decode", "decode")
    stand.wait_for("live", 2)
    assert stand.client.complete().status == 200


def test_an_instance_that_stops_deregisters() -> None:
    """The router would keep a silent instance for ten minutes, so only a goodbye can have removed it."""
    with Stand(router_arguments=("--expire-after-s", "600")) as stand:
        stand.start("prefill", "prefill")
        stand.start("decode", "decode")
        stand.wait_for("live", 2)
        stand.fleets["decode"].stop()
        stand.wait_for("live", 1)
        assert stand.client.complete().status == 503


def test_a_killed_decode_instance_costs_the_prefill_instance_nothing(stand: Stand) -> None:
    prefill = stand.start("prefill", "prefill", "tiny", *SHORT_LIMITS)
    stand.start("decode", "decode", "tiny", *SHORT_LIMITS)
    stand.wait_for("live", 2)
    with ExitStack() as streams:
        body = {"prompt": "Hello there", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        answers = [streams.enter_context(stand.client.stream("/v1/completions", body)) for _ in range(4)]
        for answer in answers:
            next(stream_events(answer))
        with ThreadPoolExecutor(8) as pool:
            orphans = [pool.submit(stand.client.complete, f"number {i} " * 20, max_tokens=50) for i in range(8)]
            stand.kill("decode")
            statuses = {orphan.result(60).status for orphan in orphans}
        for answer in answers:
            last = list(stream_events(answer))[-1]
            assert last == "[DONE]" or "error" in json.loads(last)
    assert statuses <= {200, 502, 503}
    wait_until(lambda: _is_idle(prefill), "held and in_use blocks are back to 0", timeout_s=15)
    again = stand.start("decode again", "decode", "tiny", *SHORT_LIMITS)
    wait_until(lambda: stand.client.get("/health").status == 200, "the new decode instance is known")
    wait_until(lambda: len(stand.instances("live")) == 2, "the dead one is forgotten")
    reply = stand.client.complete()
    assert reply.status == 200
    assert reply.document["kvbaton"]["handed_off"] is True
    wait_until(lambda: _is_idle(prefill) and _is_idle(again), "all blocks are back")


def test_a_killed_prefill_instance_is_an_error_and_a_new_one_takes_over(stand: Stand) -> None:
    stand.start("prefill", "prefill")
    decode = stand.start("decode", "decode")
    stand.wait_for("live", 2)
    assert stand.client.complete().status == 200
    stand.kill("prefill")
    assert stand.client.complete().status in (502, 503)
    stand.start("prefill again", "prefill")
    wait_until(lambda: stand.client.complete().status == 200, "requests work again")
    wait_until(lambda: _is_idle(decode), "all blocks are back")


def test_an_instance_of_another_model_is_refused_with_both_values(stand: Stand) -> None:
    stand.start("prefill", "prefill", "tiny")
    stand.start("decode", "decode", "tiny")
    stand.wait_for("live", 2)
    stand.start("other", "decode", "tiny:1")
    stand.wait_for("refused", 1)
    (ours, _), (refused,) = stand.instances("live"), stand.instances("refused")
    assert ours["fingerprint"] != refused["fingerprint"]
    assert ours["fingerprint"] in refused["reason"]
    assert refused["fingerprint"] in refused["reason"]
    logged = [line for line in stand.lines if line.startswith("router |") and ours["fingerprint"] in line]
    assert any(refused["fingerprint"] in line for line in logged)
    for _ in range(4):
        assert stand.client.complete().status == 200


GARBAGE: dict[str, list[bytes]] = {
    "no fields": [msgspec.msgpack.encode({})],
    "no address": [msgspec.msgpack.encode({"type": "P", "transfer_mode": "READ"})],
    "a bad address": [
        msgspec.msgpack.encode({"type": "D", "http_address": "h:1", "zmq_address": "host:h", "transfer_mode": "READ"})
    ],
    "no msgpack": [b"\xc1\xff"],
    "many frames": [b"a", b"b", b"c"],
    "an unknown type": [msgspec.msgpack.encode({"type": "HELLO"})],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_a_malformed_registration_harms_no_other_request(pair: Stand, frames: list[bytes]) -> None:
    before = len(pair.lines)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(f"tcp://127.0.0.1:{pair.discovery_port}")
        socket.send_multipart(frames)
        wait_until(lambda: any("WARNING" in line for line in pair.lines[before:]), "the router logs that it was skipped")
    finally:
        context.destroy(linger=0)
    assert len(pair.instances("live")) == 2
    assert pair.client.complete().status == 200


BAD_INPUTS: dict[str, tuple[Any, str]] = {
    "a prompt longer than the context": ({"prompt": [5] * 100_000, "max_tokens": 1}, "context"),
    "max_tokens 0": ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    "max_tokens -1": ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    "max_tokens as text": ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
    "an unknown model": ({"prompt": "x", "model": "gpt-17"}, "gpt-17"),
    "max_tokens as a fraction": ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    "stream_options as a number": ({"prompt": "x", "stream_options": 5}, "stream_options"),
    "no prompt": ({"max_tokens": 1}, "prompt"),
    "an empty prompt": ({"prompt": ""}, "prompt"),
    "a token that does not exist": ({"prompt": [2**31]}, "prompt"),
    "a temperature that is no number": ({"prompt": "x", "temperature": "hot"}, "temperature"),
    "malformed JSON": (b'{"prompt": ', "JSON"),
    "no object": ([1, 2], "object"),
    "nothing": (b"", ""),
}


@pytest.mark.parametrize(("body", "named"), BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_bad_input_is_a_clear_4xx_and_harms_no_other_request(pair: Stand, body: Any, named: str) -> None:
    reply = pair.client.post("/v1/completions", body)
    assert 400 <= reply.status < 500
    assert named.lower() in reply.error.lower()
    assert "Traceback" not in reply.error
    assert pair.client.complete().status == 200


def test_chat_input_is_checked_too(pair: Stand) -> None:
    for messages in ([], [{"role": "user"}], "hello", [{"role": "wizard", "content": 5}]):
        reply = pair.client.post("/v1/chat/completions", {"messages": messages})
        assert 400 <= reply.status < 500, reply.content
        assert "messages" in reply.error


def test_nothing_is_logged_as_a_bug_and_all_blocks_are_back(pair: Stand) -> None:
    assert pair.client.complete().status == 200
    for instance in pair.instances("live"):
        port = int(instance["http_address"].rpartition(":")[2])
        wait_until(partial(_is_idle, port), f"all blocks of {instance['type']} are back")
    assert not [line for line in pair.lines if "Traceback" in line or "ERROR" in line]
