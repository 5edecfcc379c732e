"""Targets: when a cache is asked for, what vLLM hears of it, and what becomes of requests that cannot have one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm_rig import BLOCK_TOKENS, Request, Rig, Status, key_of, source_params, target_params

from kvbaton.agent.engine_port import HandoffStats, Landed, TargetEnded
from kvbaton.core.handoff import Aux, Mode, Outcome
from kvbaton.core.timeline import Side
from kvbaton.engines.vllm.scheduler_half import Computing

BLOCKS = ((3, 9, 4),)
LANDED = Landed(
    key_of(), Aux(7, 0.0), HandoffStats(bytes_planned=5, bytes_moved=5, handover_s=0.1, wire_s=0.2, transport="tcp")
)
FAILED = TargetEnded(key_of(), Outcome.FAILED, "the source failed")


def begun(rig: Rig, params: dict[str, Any] | None = None, **fields: Any) -> Request:
    request = Request(target_params() if params is None else params, **fields)
    rig.scheduler.begin(request)
    return request


def loading(rig: Rig, request: Request, cached: int = 0) -> None:
    """Let vLLM ask, allocate and park the request."""
    tokens = rig.scheduler.matched_tokens(request, cached)
    assert tokens == request.num_prompt_tokens - cached
    rig.scheduler.allocated(request, BLOCKS, tokens)


def failing(rig: Rig, request: Request, cached: int = 0) -> None:
    """The same for a load that can only fail: one block is enough for it."""
    tokens = rig.scheduler.matched_tokens(request, cached)
    assert tokens == min(BLOCK_TOKENS, request.num_prompt_tokens - cached)
    rig.scheduler.allocated(request, BLOCKS[:1], tokens)


def finish(rig: Rig, request: Request, status: Status) -> dict[str, Any]:
    request.status = status
    stays, params = rig.scheduler.finish(request, BLOCKS)
    assert not stays
    assert params is not None
    return dict(params["kvbaton"])


def test_a_target_asks_once_and_goes_on_when_it_has_landed() -> None:
    rig = Rig()
    request = begun(rig)
    loading(rig, request)
    assert not rig.step().receiving
    assert rig.port.names() == ["expect_source", "allocated"]
    wanted, pull = (argument for _, argument in rig.port.calls)
    assert (wanted.key, wanted.source.handshake, wanted.mode) == (key_of(), 7001, Mode.PUSH)
    assert (pull.request, pull.blocks, pull.tokens, pull.cached_tokens) == (wanted, BLOCKS, 10, 0)
    rig.port.push(LANDED)
    finished = rig.step()
    assert (finished.receiving, finished.failed) == ({request.request_id}, set())
    assert not rig.step().receiving
    rig.scheduler.allocated(request, BLOCKS, 0)
    record = finish(rig, request, Status.FINISHED_STOPPED)
    assert record["handed_off"]
    assert not record["recomputed"]
    assert record["bytes_moved"] == 5
    rig.step()
    assert rig.worker.live == rig.scheduler.live == 0


@given(handover=st.floats(0, 1e7), wire=st.floats(0, 1e7))
@example(handover=0.009016435986268334, wire=1e-05)
def test_a_report_keeps_its_length_when_it_is_parsed_and_printed_again(handover: float, wire: float) -> None:
    """As vllm-router does: its parser loses the last digit of a long number, and its printer has its own way with exponents."""
    rig = Rig()
    request = begun(rig)
    loading(rig, request)
    rig.step()
    rig.port.push(Landed(key_of(), Aux(7, 0.0), HandoffStats(handover_s=handover, wire_s=wire, transport="tcp")))
    rig.step()
    record = finish(rig, request, Status.FINISHED_STOPPED)
    assert record["handoff_s"] == pytest.approx(handover + wire, abs=1e-4)
    for name in ("handover_s", "handoff_s"):
        printed = json.dumps(record[name])
        assert re.fullmatch(r"\d{1,8}\.\d{1,6}", printed), printed


def test_what_is_cached_is_not_asked_for_and_only_the_rest_is_poisoned() -> None:
    rig = Rig()
    request = begun(rig)
    loading(rig, request, cached=4)
    rig.step()
    assert rig.port.calls[-1][1].cached_tokens == 4
    assert rig.poisoned == [(BLOCKS, 4)]


def test_asking_is_free_and_gives_the_same_answer_each_time() -> None:
    rig = Rig()
    request = begun(rig)
    assert [rig.scheduler.matched_tokens(request, 4) for _ in range(3)] == [6, 6, 6]
    rig.step()
    assert rig.port.names() == ["expect_source"]


def test_a_load_that_failed_is_told_as_failed_and_never_asked_for_again() -> None:
    rig = Rig()
    request = begun(rig)
    loading(rig, request)
    rig.port.push(FAILED)
    finished = rig.step()
    assert finished.receiving == finished.failed == {request.request_id}
    assert rig.scheduler.matched_tokens(request, 0) == 0
    rig.scheduler.allocated(request, BLOCKS, 0)
    rig.step(Computing(request.request_id, 0, 10))
    record = finish(rig, request, Status.FINISHED_LENGTH_CAPPED)
    assert record["recomputed"]
    assert not record["handed_off"]


def test_a_failure_that_comes_before_there_are_blocks_is_told_when_vllm_waits_for_it() -> None:
    rig = Rig()
    request = begun(rig)
    rig.step()
    rig.port.push(FAILED)
    assert not rig.step().receiving
    failing(rig, request)
    assert rig.step().failed == {request.request_id}
    assert "allocated" not in rig.port.names()
    assert rig.worker.live == 0


def test_a_preempted_request_is_computed_here() -> None:
    rig = Rig()
    request = begun(rig)
    loading(rig, request)
    rig.port.push(LANDED)
    rig.step()
    rig.scheduler.allocated(request, BLOCKS, 0)
    assert rig.scheduler.matched_tokens(request, 0) == 0


def test_a_request_that_does_not_want_its_cache_lets_the_source_go() -> None:
    """vLLM loads nothing for prompt_logprobs."""
    rig = Rig()
    request = begun(rig)
    rig.scheduler.allocated(request, BLOCKS, 0)
    rig.step(Computing(request.request_id, 0, 10))
    assert rig.port.names() == ["expect_source", "cancel"]
    rig.port.push(TargetEnded(key_of(), Outcome.CANCELLED, ""))
    assert not rig.step().receiving
    finish(rig, request, Status.FINISHED_STOPPED)
    rig.step()
    assert rig.worker.live == 0


def test_aborted_before_it_had_blocks() -> None:
    rig = Rig()
    request = begun(rig)
    rig.step()
    finish(rig, request, Status.FINISHED_ABORTED)
    rig.step()
    assert rig.port.names() == ["expect_source", "cancel"]
    rig.port.push(TargetEnded(key_of(), Outcome.CANCELLED, ""))
    assert not rig.step().receiving, "vLLM does not wait for it"
    assert rig.worker.live == 0


def test_aborted_while_it_loads_is_told_once_nobody_writes_any_more() -> None:
    rig = Rig()
    request = begun(rig)
    loading(rig, request)
    rig.step()
    finish(rig, request, Status.FINISHED_ABORTED)
    assert not rig.step().receiving
    rig.port.push(TargetEnded(key_of(), Outcome.CANCELLED, ""))
    assert rig.step().receiving == {request.request_id}
    assert not rig.step().receiving
    assert rig.worker.live == 0


def test_aborted_in_the_step_in_which_it_landed_is_told_once() -> None:
    rig = Rig()
    request = begun(rig)
    loading(rig, request)
    rig.step()
    finish(rig, request, Status.FINISHED_ABORTED)
    rig.port.push(LANDED)
    assert rig.step().receiving == {request.request_id}
    assert not rig.step().receiving
    assert rig.worker.live == 0


def test_refused_before_admission_lets_the_source_go() -> None:
    """vLLM then submits a request that is over at once, with a prompt that is not the true one."""
    rig = Rig()
    request = begun(rig, prompt_token_ids=(0,), abort_immediately=True)
    request.status = Status.FINISHED_ABORTED
    assert rig.scheduler.finish(request, ((),)) == (False, None)
    assert not rig.step()
    ((name, (wanted, _)),) = rig.port.calls
    assert (name, wanted.key, wanted.source.handshake, wanted.prompt) == ("decline", key_of(), 7001, "")
    assert rig.worker.live == rig.scheduler.live == 0


BAD: dict[str, dict[str, Any]] = {
    "no transfer id": {"do_remote_prefill": True},
    "empty transfer id": {"do_remote_prefill": True, "transfer_id": ""},
    "long transfer id": {"do_remote_prefill": True, "transfer_id": "x" * 257},
    "number as transfer id": {"do_remote_prefill": True, "transfer_id": 7},
    "both sides": {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "tx-1"},
    "another source": {"do_remote_prefill": True, "transfer_id": "tx-1", "remote_host": "10.0.0.1", "remote_port": 1},
    "port out of range": {"do_remote_prefill": True, "transfer_id": "tx-1", "remote_host": "127.0.0.1", "remote_port": 65536},
    "port as text": {"do_remote_prefill": True, "transfer_id": "tx-1", "remote_host": "127.0.0.1", "remote_port": "7001"},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_fail_their_load_and_nothing_else(name: str) -> None:
    rig = Rig()
    request = begun(rig, BAD[name])
    failing(rig, request)
    finished = rig.step()
    assert finished.receiving == finished.failed == {request.request_id}
    assert rig.port.calls == []
    finish(rig, request, Status.FINISHED_ERROR)
    assert not rig.step().receiving


@pytest.mark.parametrize("request_id", ["cmpl-abc-0-12345678", "chatcmpl-___prefill_addr_junk", ""])
def test_a_request_that_names_no_source_fails_its_load(request_id: str) -> None:
    rig = Rig()
    request = begun(rig, request_id=request_id)
    failing(rig, request)
    assert rig.step().failed == {request_id}


def test_an_instance_that_is_no_target_fails_the_load() -> None:
    rig = Rig(is_target=False)
    request = begun(rig)
    failing(rig, request)
    assert rig.step().failed == {request.request_id}
    assert rig.port.calls == []


def test_two_requests_of_one_hand_off_never_share_it() -> None:
    rig = Rig()
    first = begun(rig)
    second = begun(rig, request_id=first.request_id.replace("1a2b3c4d", "ffffffff"))
    loading(rig, first)
    rig.step()
    failing(rig, second)
    finished = rig.step()
    assert finished.receiving == finished.failed == {second.request_id}
    rig.port.push(LANDED)
    assert rig.step().receiving == {first.request_id}


def test_a_plain_request_is_left_alone() -> None:
    rig = Rig()
    for params in (None, {}, {"do_remote_prefill": False}, {"something": "else"}):
        request = Request(params)
        rig.scheduler.begin(request)
        assert rig.scheduler.matched_tokens(request, 0) == 0
        rig.scheduler.allocated(request, BLOCKS, 0)
        rig.step(Computing(request.request_id, 0, 10))
        assert rig.scheduler.finish(request, BLOCKS) == (False, None)
    assert rig.port.calls == []


def test_agents_that_refuse_a_pull_fail_the_load() -> None:
    rig = Rig()
    request = begun(rig)
    rig.step()
    loading(rig, request)
    rig.port.is_stuck = True
    assert rig.step().failed == {request.request_id}
    assert rig.worker.live == 0


def has_mark(request: Request) -> bool:
    return request.skip_reading_prefix_cache


def test_a_request_that_may_not_read_the_prefix_cache_fails_for_bad_parameters_too() -> None:
    """vLLM would ignore the load and answer it; the mark is back before anything could be computed."""
    rig = Rig()
    request = begun(rig, BAD["both sides"], skip_reading_prefix_cache=True)
    tokens = rig.scheduler.matched_tokens(request, 0)
    assert tokens
    assert not has_mark(request), "else vLLM makes nothing of the answer"
    rig.scheduler.allocated(request, BLOCKS, tokens)
    assert rig.step().failed == {request.request_id}
    assert has_mark(request)


def test_a_sound_request_that_may_not_read_the_prefix_cache_keeps_its_mark() -> None:
    rig = Rig()
    request = begun(rig, skip_reading_prefix_cache=True)
    rig.scheduler.matched_tokens(request, 0)
    assert request.skip_reading_prefix_cache


def test_a_target_whose_hand_off_is_over_asks_for_no_more_than_it_takes_to_fail() -> None:
    rig = Rig()
    request = begun(rig)
    assert rig.scheduler.matched_tokens(request, 0) == request.num_prompt_tokens
    rig.step()
    rig.port.push(FAILED)
    assert rig.step().report.ended == {request.request_id}
    failing(rig, request)
    assert rig.step().failed == {request.request_id}
    assert "allocated" not in rig.port.names(), "the blocks of so small a load must never be filled"
    record = finish(rig, request, Status.FINISHED_ERROR)
    assert record["cached_tokens"] == 0
    assert rig.worker.live == rig.scheduler.live == 0


def test_a_target_that_is_given_up_leaves_a_source_of_the_same_key_alone() -> None:
    """An instance of kv_both may be both, for two requests."""
    rig = Rig()
    target = begun(rig)
    source = begun(rig, source_params(), request_id=target.request_id.replace("1a2b3c4d", "ffffffff"))
    rig.step()
    finish(rig, target, Status.FINISHED_ABORTED)
    rig.step()
    assert rig.port.calls[-1] == ("cancel", (key_of(), Side.TARGET))
    source.status = Status.FINISHED_ABORTED
    rig.scheduler.finish(source, BLOCKS)
    rig.step()
    assert rig.port.calls[-1] == ("cancel", (key_of(), Side.SOURCE))
