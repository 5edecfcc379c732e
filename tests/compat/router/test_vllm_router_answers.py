"""Embedded instances under the real vllm-router: every answer equals the single instance's, and every cache was handed over."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from real_stand import RealStand, ask, handed_over, requests_to_try

from kvbaton.core.handoff import Mode
from watching import wait_until

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module", params=list(Mode), ids=["WRITE" if mode is Mode.PUSH else "READ" for mode in Mode])
def stand(request: pytest.FixtureRequest) -> Iterator[RealStand]:
    with RealStand(mode=request.param) as stand:
        stand.launch("prefill-0", "prefill")
        stand.launch("decode-0", "decode")
        stand.wait_ready("prefill-0", "decode-0")
        yield stand


@pytest.mark.parametrize("index", range(8))
def test_one_prefill_and_one_decode_instance_answer_like_one_instance(stand: RealStand, index: int) -> None:
    """Completions and chat, streamed and not."""
    before = handed_over(stand.http_ports["decode-0"])
    ((path, body, stream),) = requests_to_try(1, index)
    stand.compare(path, body, stream)
    assert handed_over(stand.http_ports["decode-0"]) == before + 1


def test_two_prefill_and_two_decode_instances_answer_like_one_instance(stand: RealStand) -> None:
    stand.launch("prefill-1", "prefill")
    stand.launch("decode-1", "decode")
    stand.wait_added("prefill-1", "decode-1")
    ports = [stand.http_ports[name] for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
    before = [handed_over(port) for port in ports]
    asked = requests_to_try(16, 100)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: ask(stand.client, *each), asked))
    assert answers == [ask(stand.single, *each) for each in asked]
    wait_until(lambda: sum(map(handed_over, ports)) == sum(before) + 32, "both sides count all hand-offs as delivered")
    assert all(handed_over(port) > was for port, was in zip(ports, before, strict=True))


def test_a_client_that_leaves_frees_both_sides(stand: RealStand) -> None:
    """Before the first byte and after it."""
    for index, reads in enumerate((0, 1, 0, 1)):
        ((_, body, _),) = requests_to_try(1, 200 + 2 * index)
        connection = http.client.HTTPConnection("127.0.0.1", stand.router_port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body | {"max_tokens": 100, "stream": True}))
        if reads:
            connection.getresponse().read(10)
        connection.close()
    wait_until(stand.keeps_no_block, "nobody holds anything", 60)


def test_instances_in_pull_work_under_a_router_of_three_fields_too() -> None:
    """Its default connector reads type and addresses alone, and makes no transfer id: prefill makes one up."""
    with RealStand(mode=Mode.PULL, connector="nixl") as stand:
        stand.launch("prefill-0", "prefill")
        stand.launch("decode-0", "decode")
        stand.wait_ready("prefill-0", "decode-0")
        for path, body, stream in requests_to_try(8):
            stand.compare(path, body, stream)
        assert handed_over(stand.http_ports["decode-0"]) == 8


@pytest.mark.parametrize("mode", Mode, ids=["WRITE" if mode is Mode.PUSH else "READ" for mode in Mode])
def test_a_router_that_makes_ranks_up_is_told_of_and_answers_are_right(mode: Mode) -> None:
    with RealStand(mode=mode, flags=("--intra-node-data-parallel-size", "2", "--api-key", "none")) as stand:
        stand.launch("prefill-0", "prefill")
        stand.launch("decode-0", "decode")
        stand.wait_ready("prefill-0", "decode-0")
        for path, body, stream in requests_to_try(8):
            stand.compare(path, body, stream)
        assert handed_over(stand.http_ports["decode-0"]) == 8
        assert any("--intra-node-data-parallel-size 1" in line for line in stand.lines)


def test_control_a_decode_instance_that_gets_no_bytes_answers_otherwise() -> None:
    """The comparison can fail: with every write dropped, no answer is the single instance's."""
    with RealStand(mode=Mode.PUSH) as stand:
        stand.launch("prefill-0", "prefill")
        stand.launch("decode-0", "decode", "--drop-writes")
        stand.wait_ready("prefill-0", "decode-0")
        for path, body, stream in requests_to_try(2):
            assert ask(stand.client, path, body, stream) != ask(stand.single, path, body, stream)
