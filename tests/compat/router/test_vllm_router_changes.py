"""Instances that come, go, stall and die under the real vllm-router: no answer is ever wrong, and it ends well."""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from real_stand import InstanceAnswer, RealStand, ask, requests_to_try

from kvbaton.core.handoff import Mode
from watching import wait_until

pytestmark = pytest.mark.compat

SHORT_PATIENCE = ("--transfer-timeout", "4", "--defer-timeout", "6", "--stop-timeout", "1")


@pytest.fixture(scope="module", params=list(Mode), ids=["WRITE" if mode is Mode.PUSH else "READ" for mode in Mode])
def stand(request: pytest.FixtureRequest) -> Iterator[RealStand]:
    """Two of each side. The tests of this module change them one after another."""
    with RealStand(mode=request.param) as stand:
        names = [f"{role}-{index}" for role in ("prefill", "decode") for index in range(2)]
        for name in names:
            stand.launch(name, name.partition("-")[0], *SHORT_PATIENCE)
        stand.wait_ready(*names)
        yield stand


def compare_many(stand: RealStand, first: int) -> None:
    """Enough requests that each pair has its turn."""
    for path, body, stream in requests_to_try(8, first):
        stand.compare(path, body, stream)


def answer_or_none(waiting: Future[InstanceAnswer]) -> InstanceAnswer | None:
    """None when the connection broke: the router cuts streams whose decode instance dies."""
    try:
        return waiting.result(60)
    except (OSError, http.client.HTTPException, AssertionError):
        return None


def test_an_instance_of_the_other_mode_is_not_used_and_the_others_keep_working(stand: RealStand) -> None:
    other = Mode.PULL if stand.mode is Mode.PUSH else Mode.PUSH
    stand.launch("odd", "decode", mode=other)
    stand.fleets["odd"].wait_healthy(60)
    wait_until(lambda: "transfer_mode mismatch" in stand.log(), "the router refuses it")
    compare_many(stand, 10)
    assert not stand.is_known("odd")
    stand.stop("odd")
    del stand.http_ports["odd"]


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_an_instance_restarted_on_another_port_is_used_again(stand: RealStand, name: str) -> None:
    was = stand.http_ports[name]
    stand.stop(name)
    assert stand.launch(name, name.partition("-")[0], *SHORT_PATIENCE) != was
    stand.wait_added(name)
    stand.wait_removed(was)
    compare_many(stand, 20)


def test_a_goodbye_is_not_taken_for_a_heartbeat(stand: RealStand) -> None:
    wait_until(lambda: "Unknown service type 'BYE'" in stand.log(), "the router has ignored the goodbyes of the test before")


def test_an_instance_restarted_on_the_same_port_is_reached_at_its_new_control_address(stand: RealStand) -> None:
    """The router keeps its entry and takes the new control address from the next heartbeat."""
    port = stand.http_ports["prefill-1"]
    stand.stop("prefill-1")
    stand.launch("prefill-1", "prefill", *SHORT_PATIENCE, port=port)
    stand.fleets["prefill-1"].wait_healthy(60)
    path, body, stream = requests_to_try(1, 31)[0]
    want = ask(stand.single, path, body, stream)
    wait_until(lambda: [ask(stand.client, path, body, stream) for _ in range(4)] == [want] * 4, "every pair answers right", 30)
    compare_many(stand, 30)


def test_a_killed_instance_and_a_stalled_one(stand: RealStand) -> None:
    """While the router still knows a dead instance, requests may fail, but none is answered wrongly.

    Another instance stands still for longer than the router's patience, and keeps its registration.
    """
    stalled = stand.fleets["prefill-1"].pid("prefill-1")
    os.kill(stalled, signal.SIGSTOP)
    try:
        stand.kill("decode-1")
        stand.wait_removed(stand.http_ports.pop("decode-1"))
        assert stand.is_known("prefill-1")
    finally:
        os.kill(stalled, signal.SIGCONT)
    compare_many(stand, 40)
    wait_until(stand.keeps_no_block, "every block is free again", 30)


def test_requests_around_a_kill_are_right_or_fail(stand: RealStand) -> None:
    stand.launch("decode-1", "decode", *SHORT_PATIENCE)
    stand.wait_added("decode-1")
    asked = requests_to_try(24, 50)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(ask, stand.client, *each) for each in asked]
        wait_until(lambda: any(each.done() for each in waiting), "some are answered")
        stand.kill("decode-1")
        port = stand.http_ports.pop("decode-1")
        answers = [answer_or_none(each) for each in waiting]
    right = [ask(stand.single, *each) for each in asked]
    wrong = [(a, r) for a, r in zip(answers, right, strict=True) if a is not None and a.status == 200 and a != r]
    assert wrong == []
    stand.wait_removed(port)
    compare_many(stand, 80)
    wait_until(stand.keeps_no_block, "every block is free again", 30)
