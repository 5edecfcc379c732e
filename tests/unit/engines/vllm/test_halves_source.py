"""Sources: what is told of a prefill and when, and that vLLM hears of its end exactly once, and only while it waits for it."""

from __future__ import annotations

import pytest
from vllm_rig import BLOCK_TOKENS, LAYERS, Request, Rig, Status, key_of, source_params

from kvbaton.agent.engine_port import Drained, SourceEnded
from kvbaton.core.handoff import Mode, Outcome, Span, span_problem
from kvbaton.engines.vllm.scheduler_half import Computing
from kvbaton.engines.vllm.specs import TokenCounts

BLOCKS = ((5, 6, 7),)


def begun(rig: Rig, **fields: object) -> Request:
    request = Request(source_params(), **fields)  # type: ignore[arg-type]
    rig.scheduler.begin(request)
    rig.blocks[request.request_id] = BLOCKS
    return request


def finished(rig: Rig, request: Request, status: Status = Status.FINISHED_LENGTH_CAPPED) -> tuple[bool, object]:
    request.status = status
    request.num_computed_tokens = request.num_prompt_tokens
    request.output_token_ids = (7,)
    return rig.scheduler.finish(request, BLOCKS)


def whole(tokens: int = 10) -> Span:
    return Span(0, 0, tokens, 0, LAYERS)


def test_only_a_step_that_keeps_no_result_waiting_waits_for_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """With async scheduling vLLM takes the tokens of a step, and its report, after the next one."""
    rig, waits = Rig(), 0

    def wait(_: float) -> bool:
        nonlocal waits
        waits += 1
        return False

    monkeypatch.setattr(rig.port.news, "wait", wait)
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 10))
    rig.step()
    assert waits == 0, "the first token of the step before was kept waiting"
    rig.step()
    assert waits == 1
    finished(rig, request)
    rig.step()
    rig.port.push(SourceEnded(key_of(), Outcome.DELIVERED))
    waits = 0
    assert rig.step().sending
    rig.step()
    assert waits == 0, "the report was kept waiting"


@pytest.mark.parametrize("chunks", [(10,), (4, 6), (3, 3, 4), (1,) * 10, (8, 2)])
def test_every_token_of_every_layer_is_told_once_however_the_prompt_is_cut(chunks: tuple[int, ...]) -> None:
    rig = Rig()
    request = begun(rig)
    done = 0
    for tokens in chunks:
        rig.step(Computing(request.request_id, done, tokens))
        done += tokens
    assert span_problem(rig.spans(), whole()) == ""
    assert [span.number for span in rig.spans()] == list(range(len(rig.spans())))


def test_a_block_is_told_of_only_when_nothing_more_is_written_to_it() -> None:
    rig = Rig()
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 7))
    assert {(span.first_token, span.end_token) for span in rig.spans()} == {(0, BLOCK_TOKENS)}
    before = len(rig.spans())
    rig.step(Computing(request.request_id, 7, 3))
    assert {(span.first_token, span.end_token) for span in rig.spans()[before:]} == {(BLOCK_TOKENS, 10)}


def test_what_the_prefix_cache_held_is_told_layer_by_layer_too() -> None:
    """Another request of the same step may be computing it."""
    rig = Rig()
    request = begun(rig)
    rig.step(Computing(request.request_id, 8, 2))
    assert span_problem(rig.spans(), whole()) == ""
    assert all(span.end_layer == span.first_layer + 1 for span in rig.spans())


@pytest.mark.parametrize("hooks", [(), (1,), (0, 2), (0, 0, 1)])
def test_layers_without_a_hook_are_told_after_the_forward(hooks: tuple[int, ...]) -> None:
    rig = Rig()
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 10), hooks=hooks)
    assert span_problem(rig.spans(), whole()) == ""


def test_in_pull_nothing_is_told_before_the_offer() -> None:
    rig = Rig(Mode.PULL)
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 10))
    assert rig.port.names() == ["expect_target"]
    assert finished(rig, request)[0] is True
    rig.step()
    assert rig.port.names() == ["expect_target", "offer"]


def test_tokens_that_a_source_decodes_are_none_of_the_hand_off() -> None:
    rig = Rig()
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 10))
    rig.step(Computing(request.request_id, 10, 1))
    assert span_problem(rig.spans(), whole()) == ""


@pytest.mark.parametrize("status", [Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_STOPPED])
def test_a_complete_prefill_is_offered_and_blocks_stay_until_it_has_ended(status: Status) -> None:
    """A first token that ends the text is no reason not to hand over: the target finds the same one."""
    rig = Rig()
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 10))
    stays, params = finished(rig, request, status)
    assert stays
    assert isinstance(params, dict)
    assert (params["transfer_id"], params["remote_port"], params["remote_engine_id"]) == ("tx-1", 7001, "p1")
    assert not rig.step().sending
    (offer,) = [argument for name, argument in rig.port.calls if name == "offer"]
    assert (offer.key, offer.blocks, offer.tokens, offer.aux.token_id) == (key_of(), BLOCKS, 10, 7)
    rig.port.push(SourceEnded(key_of(), Outcome.DELIVERED))
    assert rig.step().sending == {request.request_id}
    assert not rig.step().sending
    assert rig.worker.live == rig.scheduler.live == 0


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.FINISHED_ERROR])
def test_an_aborted_prefill_is_given_up_and_its_blocks_stay_until_nobody_reads_them(status: Status) -> None:
    rig = Rig()
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 10))
    assert finished(rig, request, status) == (True, None)
    assert not rig.step().sending
    assert rig.port.names()[-1] == "cancel"
    rig.port.push(SourceEnded(key_of(), Outcome.CANCELLED))
    assert rig.step().sending == {request.request_id}


def test_a_prefill_that_stopped_half_way_is_never_offered() -> None:
    rig = Rig()
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 4))
    request.status, request.num_computed_tokens = Status.FINISHED_STOPPED, 4
    assert rig.scheduler.finish(request, BLOCKS) == (True, None)
    rig.step()
    assert "offer" not in rig.port.names()


def test_an_end_that_comes_before_the_request_is_over_is_told_afterwards() -> None:
    """vLLM would die of an id that it does not wait for."""
    rig = Rig()
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 4))
    rig.port.push(SourceEnded(key_of(), Outcome.FAILED, "the target left"))
    assert not rig.step(Computing(request.request_id, 4, 6)).sending
    told = len(rig.spans())
    assert finished(rig, request)[0] is True
    assert rig.step().sending == {request.request_id}
    assert "offer" not in rig.port.names()
    assert len(rig.spans()) == told, "nothing more is told of what has ended"


def test_an_id_that_is_used_again_while_its_hand_off_is_ending_fails_at_once() -> None:
    """The second request would wait for a hand-off that nobody has begun for it."""
    rig = Rig()
    first = begun(rig)
    rig.step(Computing(first.request_id, 0, 10))
    finished(rig, first)
    second = begun(rig, request_id="cmpl-x-0-second")
    rig.step()
    assert rig.scheduler.matched_tokens(second, 0) == BLOCK_TOKENS, "a load"
    rig.scheduler.allocated(second, BLOCKS, second.num_prompt_tokens)
    assert rig.step().failed == {second.request_id}
    rig.port.push(SourceEnded(key_of(), Outcome.DELIVERED))
    assert rig.step().sending == {first.request_id}, "the first one is not disturbed"


def test_preempted_blocks_are_retracted_before_the_forward_and_told_anew_from_the_start() -> None:
    rig = Rig()
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 8))
    rig.port.push(Drained(key_of()))
    rig.step(preempted=[request.request_id])
    assert rig.port.names()[-1] == "retract"
    before = len(rig.spans())
    rig.step(Computing(request.request_id, 0, 10))
    again = rig.spans()[before:]
    assert span_problem(again, whole()) == ""
    assert again[0].number == 0


def test_a_forward_waits_until_retracted_blocks_are_drained() -> None:
    """The control: without the event it goes on only when its time is over, and gives the hand-off up."""
    rig = Rig(drain_s=0.05)
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 8))
    rig.step(preempted=[request.request_id])
    assert rig.port.names()[-2:] == ["retract", "cancel"]


def test_agents_that_refuse_to_retract_do_not_stop_the_engine() -> None:
    rig = Rig(drain_s=0.05)
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 8))
    rig.port.is_stuck = True
    rig.step(preempted=[request.request_id])
    finished(rig, request, Status.FINISHED_ABORTED)
    assert rig.step().sending == {request.request_id}


def test_what_was_never_told_need_not_be_retracted() -> None:
    rig = Rig(Mode.PULL)
    request = begun(rig)
    rig.step(Computing(request.request_id, 0, 8))
    rig.step(preempted=[request.request_id])
    assert "retract" not in rig.port.names()


def assert_fails(rig: Rig, request: Request) -> None:
    """It is told to wait for a load, and the load fails: vLLM's policy decides what becomes of it."""
    tokens = rig.scheduler.matched_tokens(request, 0)
    assert tokens == BLOCK_TOKENS
    rig.scheduler.allocated(request, BLOCKS, tokens)
    assert rig.step().failed == {request.request_id}
    assert rig.scheduler.matched_tokens(request, 0) == 0
    assert finished(rig, request)[0] is False


def test_a_second_request_of_the_same_hand_off_fails() -> None:
    rig = Rig()
    begun(rig)
    second = begun(rig, request_id="cmpl-x-0-ffffffff")
    assert_fails(rig, second)
    assert rig.port.names() == ["expect_target"]


@pytest.mark.parametrize("transfer_id", ["", "x" * 257, 7, ["tx"]])
def test_a_transfer_id_that_is_none_fails_its_request(transfer_id: object) -> None:
    rig = Rig()
    request = Request({"do_remote_decode": True, "transfer_id": transfer_id})
    rig.scheduler.begin(request)
    assert_fails(rig, request)
    assert rig.port.calls == []


def test_a_key_that_is_still_being_stopped_is_not_taken_up_again() -> None:
    rig = Rig()
    first = begun(rig)
    finished(rig, first, Status.FINISHED_ABORTED)
    second = begun(rig, request_id="cmpl-x-0-ffffffff")
    assert not rig.step().sending
    finished(rig, second)
    assert rig.step().sending == {second.request_id}
    rig.port.push(SourceEnded(key_of(), Outcome.CANCELLED))
    assert rig.step().sending == {first.request_id}


def test_a_request_that_was_not_taken_up_does_not_cancel_the_hand_off_that_has_its_key() -> None:
    rig = Rig()
    first = begun(rig)
    rig.step(Computing(first.request_id, 0, 10))
    finished(rig, first)
    rig.step()
    second = begun(rig, request_id="cmpl-x-0-ffffffff")
    rig.step()
    finished(rig, second, Status.FINISHED_ABORTED)
    assert rig.step().sending == {second.request_id}
    assert "cancel" not in rig.port.names()


def test_agents_that_refuse_calls_keep_no_blocks_for_ever() -> None:
    rig = Rig()
    request = begun(rig)
    rig.port.is_stuck = True
    rig.step(Computing(request.request_id, 0, 10))
    finished(rig, request)
    assert rig.step().sending == {request.request_id}
    assert rig.worker.live == 0


def test_an_instance_that_is_no_source_fails_the_request() -> None:
    rig = Rig(is_source=False)
    request = begun(rig)
    assert_fails(rig, request)
    assert rig.port.calls == []


@pytest.mark.parametrize("prompt", [1, 2])
@pytest.mark.parametrize("mode", list(Mode))
def test_a_prompt_of_which_nothing_is_handed_over_is_answered_all_the_same(
    prompt: int, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.engines.vllm.scheduler_half.shorten_prompt", lambda *_: None)
    rig = Rig(mode, counts=TokenCounts((BLOCK_TOKENS,), backoff=1))
    request = begun(rig, prompt_token_ids=tuple(range(prompt)))
    rig.step(Computing(request.request_id, 0, prompt))
    stays, params = finished(rig, request)
    assert stays
    assert isinstance(params, dict)
    assert (params["do_remote_prefill"], params["transfer_id"]) == (True, "tx-1")
    rig.step()
    assert ("offer" in rig.port.names()) is (prompt == 2)
    assert ("cancel" in rig.port.names()) is (prompt == 1)


def test_a_source_that_must_compute_its_whole_prompt_hands_over_nothing_where_one_token_less_is_needed() -> None:
    rig = Rig(counts=TokenCounts((BLOCK_TOKENS,), backoff=1))
    request = begun(rig, skip_reading_prefix_cache=True)
    rig.step(Computing(request.request_id, 0, 10))
    finished(rig, request)
    rig.step()
    assert "spans_ready" not in rig.port.names()
    assert "offer" not in rig.port.names()
    assert "cancel" in rig.port.names()
