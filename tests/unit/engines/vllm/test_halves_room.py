"""Room that prefills leave to those whose target has blocks ready: who waits, for what, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from vllm_rig import BLOCK_TOKENS, Request, Rig, key_of, layer_groups, one_rank, source_params

from kvbaton.agent.engine_port import Granted, SourceEnded
from kvbaton.core.addresses import ControlAddress, make_request_id
from kvbaton.core.handoff import Mode, Outcome
from kvbaton.engines.vllm.scheduler_half import Computing, Room
from kvbaton.engines.vllm.worker_half import WorkerHalf, idle_wait_s

RESERVED = 4
WAIT_S = 60.0


@dataclass
class World:
    """How many blocks are free, and what time it is."""

    free: int
    now: float = 0.0
    held: dict[str, int] = field(default_factory=dict)

    def rig(self, mode: Mode = Mode.PUSH) -> Rig:
        """Halves in this world."""
        return Rig(mode, room=Room(RESERVED, WAIT_S, lambda: self.free, lambda name: self.held.get(name, 0), lambda: self.now))


def begun(rig: Rig, transfer_id: str = "tx-1", name: str = "1a2b3c4d") -> Request:
    request = Request(
        source_params(transfer_id), request_id=f"cmpl-x-0-{name}", prompt_token_ids=tuple(range(2 * BLOCK_TOKENS))
    )
    rig.scheduler.begin(request)
    return request


def test_a_prefill_that_leaves_room_starts_without_a_grant() -> None:
    rig = World(free=RESERVED + 2).rig()
    assert rig.scheduler.matched_tokens(begun(rig), 0) == 0


def test_a_prefill_that_would_take_the_last_blocks_waits_for_its_grant() -> None:
    rig = World(free=RESERVED + 1).rig()
    first, other = begun(rig), begun(rig, "tx-2", "ffffffff")
    assert rig.scheduler.matched_tokens(first, 0) is None
    rig.step()
    rig.port.push(Granted(key_of()))
    rig.step()
    assert rig.scheduler.matched_tokens(first, 0) == 0
    assert rig.scheduler.matched_tokens(other, 0) is None, "that was not its grant"


def test_a_grant_lasts_through_a_preemption() -> None:
    world = World(free=RESERVED + 2)
    rig = world.rig()
    request = begun(rig)
    rig.port.push(Granted(key_of()))
    rig.blocks[request.request_id] = ((1, 2),)
    rig.step(Computing(request.request_id, 0, 4))
    world.free = 0
    assert rig.scheduler.matched_tokens(request, 0) == 0


def test_in_pull_nobody_waits() -> None:
    rig = World(free=0).rig(Mode.PULL)
    assert rig.scheduler.matched_tokens(begun(rig), 0) == 0


def test_a_prefill_that_nobody_comes_for_becomes_a_load_that_fails() -> None:
    """It has no blocks and was told to nobody, so nothing has to be waited for."""
    world = World(free=0)
    rig = world.rig()
    request = begun(rig)
    assert rig.scheduler.matched_tokens(request, 0) is None
    rig.step()
    world.now = WAIT_S
    tokens = rig.scheduler.matched_tokens(request, 0)
    assert tokens == BLOCK_TOKENS, "one block is enough to fail"
    rig.scheduler.allocated(request, ((1,),), tokens)
    finished = rig.step()
    assert finished.failed == {request.request_id}
    assert not finished.sending
    assert rig.port.names() == ["expect_target", "cancel"]
    rig.port.push(SourceEnded(key_of(), Outcome.CANCELLED))
    assert not rig.step().sending, "vLLM does not wait for it"
    assert rig.worker.live == 0


def withdrawn(world: World, rig: Rig) -> None:
    """A prefill that found no room is given up; its load fails, and its request is over."""
    request = begun(rig)
    assert rig.scheduler.matched_tokens(request, 0) is None
    rig.step()
    world.now += WAIT_S
    tokens = rig.scheduler.matched_tokens(request, 0)
    assert tokens is not None
    rig.scheduler.allocated(request, ((1,),), tokens)
    assert rig.step().failed == {request.request_id}
    rig.scheduler.finish(request, ((1,),))


def test_the_end_of_a_prefill_that_was_given_up_does_not_pass_for_that_of_its_retry() -> None:
    """The agents stand still. Taken up at once, the retry would be taken for ended when the first one ends: vLLM would have its
    blocks back, and the agents would still offer them."""
    world = World(free=0)
    rig = world.rig()
    withdrawn(world, rig)
    world.free = RESERVED + 2
    retry = begun(rig, name="ffffffff")
    finished = rig.step()
    assert finished.report.ended == {retry.request_id}, "refused: the agents have yet to end the first one"
    assert rig.port.names() == ["expect_target", "cancel"]
    rig.port.push(SourceEnded(key_of(), Outcome.CANCELLED))
    assert not rig.step().sending
    assert rig.worker.live == 0


def test_a_retry_that_wakes_an_idle_vllm_is_taken_up_when_the_first_has_ended_meanwhile() -> None:
    """An idle vLLM takes no step, and so no event: the end of the first attempt lies there since long."""
    world = World(free=0)
    rig = world.rig()
    withdrawn(world, rig)
    rig.port.push(SourceEnded(key_of(), Outcome.CANCELLED))
    world.free = RESERVED + 2
    retry = begun(rig, name="ffffffff")
    assert rig.scheduler.matched_tokens(retry, 0) == 0
    rig.blocks[retry.request_id] = ((1, 2),)
    finished = rig.step(Computing(retry.request_id, 0, 2 * BLOCK_TOKENS))
    assert not finished.report.ended
    assert rig.port.names()[:3] == ["expect_target", "cancel", "expect_target"]
    assert rig.worker.live == 1


def test_the_error_names_the_target_that_the_request_id_names() -> None:
    world = World(free=0)
    rig = world.rig()
    source, target = ControlAddress.of("10.0.0.5", 5600), ControlAddress.of("10.0.0.7", 5700)
    name = f"cmpl-{make_request_id(str(source), str(target), '0' * 32)}-0-1a2b3c4d"
    request = Request(source_params("tx-1"), request_id=name, prompt_token_ids=tuple(range(2 * BLOCK_TOKENS)))
    rig.scheduler.begin(request)
    assert rig.scheduler.matched_tokens(request, 0) is None
    rig.step()
    world.now = WAIT_S
    assert rig.scheduler.matched_tokens(request, 0) == BLOCK_TOKENS
    assert f"before its target {target} has blocks" in rig.scheduler._targets[name].problem


def test_queueing_costs_no_patience_while_others_have_their_turn() -> None:
    world = World(free=0)
    rig = world.rig()
    last, others = begun(rig), [begun(rig, f"other-{index}", f"{index:08x}") for index in range(3)]
    for index, _ in enumerate(others):
        assert rig.scheduler.matched_tokens(last, 0) is None
        rig.step()
        world.now += 0.9 * WAIT_S
        rig.port.push(Granted(key_of(f"other-{index}")))
        rig.step()
    assert rig.scheduler.matched_tokens(last, 0) is None
    world.now += WAIT_S
    assert rig.scheduler.matched_tokens(last, 0) == BLOCK_TOKENS, "now nobody's turn comes any more"


def test_one_that_has_to_start_again_waits_anew() -> None:
    """It waited a while, found room, was computed for long, and was preempted."""
    world = World(free=0)
    rig = world.rig()
    request = begun(rig)
    assert rig.scheduler.matched_tokens(request, 0) is None
    world.free = RESERVED + 2
    assert rig.scheduler.matched_tokens(request, 0) == 0
    world.free, world.now = 0, 2 * WAIT_S
    assert rig.scheduler.matched_tokens(request, 0) is None
    world.now += WAIT_S
    assert rig.scheduler.matched_tokens(request, 0) == BLOCK_TOKENS


def test_a_prefill_whose_hand_off_ended_before_it_began_is_not_computed() -> None:
    """Its target left while it waited: computing it would be for nobody."""
    rig = World(free=100).rig()
    request = begun(rig)
    rig.step()
    rig.port.push(SourceEnded(key_of(), Outcome.CANCELLED))
    rig.step()
    tokens = rig.scheduler.matched_tokens(request, 0)
    assert tokens == BLOCK_TOKENS
    rig.scheduler.allocated(request, ((1,),), tokens)
    assert rig.step().failed == {request.request_id}
    assert rig.worker.live == 0


def test_one_that_was_preempted_while_its_client_had_tokens_goes_on_though_its_hand_off_is_over() -> None:
    rig = World(free=100).rig()
    request = begun(rig)
    rig.scheduler.allocated(request, ((1,),), 0)
    rig.step()
    request.output_token_ids = (7, 8)
    rig.port.push(SourceEnded(key_of(), Outcome.CANCELLED))
    rig.step(preempted=[request.request_id])
    assert rig.scheduler.matched_tokens(request, 0) == 0, "nothing is loaded, nothing fails"


def test_what_others_have_begun_without_a_grant_will_still_need_is_not_free() -> None:
    """Two prefills of two blocks each, computed in chunks: the first has one of its blocks so far."""
    world = World(free=RESERVED + 2)
    rig = world.rig()
    first, second = begun(rig), begun(rig, "tx-2", "ffffffff")
    assert rig.scheduler.matched_tokens(first, 0) == 0
    rig.scheduler.allocated(first, ((1,),), 0)
    world.held[first.request_id], world.free = 1, RESERVED + 2
    assert rig.scheduler.matched_tokens(second, 0) is None, "one of the free blocks belongs to the first"
    world.held[first.request_id] = 2
    assert rig.scheduler.matched_tokens(second, 0) == 0


def test_what_has_a_grant_or_was_preempted_or_is_over_owes_nothing() -> None:
    world = World(free=RESERVED + 2)
    rig = world.rig()
    first, second = begun(rig), begun(rig, "tx-2", "ffffffff")
    rig.scheduler.allocated(first, ((1,),), 0)
    world.held[first.request_id] = 1
    assert rig.scheduler.matched_tokens(second, 0) is None
    rig.step(preempted=[first.request_id])
    assert rig.scheduler.matched_tokens(second, 0) == 0
    rig.scheduler.allocated(first, ((1,),), 0)
    assert rig.scheduler.matched_tokens(second, 0) is None
    rig.port.push(Granted(key_of()))
    rig.step()
    assert rig.scheduler.matched_tokens(second, 0) == 0, "it may take what is kept for it"
    rig.scheduler.finish(first, ((1,),))
    assert rig.scheduler.matched_tokens(second, 0) == 0


def has_mark(request: Request) -> bool:
    return request.skip_reading_prefix_cache


def test_a_prefill_that_may_not_read_the_prefix_cache_waits_for_its_grant_too() -> None:
    """vLLM ignores what it is told of a request with the mark, and has used the prefix cache for one without it."""
    rig = World(free=RESERVED + 1).rig()
    request = begun(rig)
    request.skip_reading_prefix_cache = True
    for _ in range(2):
        assert rig.scheduler.matched_tokens(request, 0) is None
        assert not has_mark(request)
        rig.step()
        assert has_mark(request)
    rig.port.push(Granted(key_of()))
    rig.step()
    assert rig.scheduler.matched_tokens(request, 0) == 0
    assert has_mark(request)


def test_a_grant_that_is_there_is_told_without_a_wait_for_more() -> None:
    rig = World(free=0).rig()
    begun(rig)
    rig.step()
    waits = rig.port.news.waits
    rig.port.push(Granted(key_of()))
    assert rig.step().report.granted
    assert rig.port.news.waits == waits
    rig.step()
    assert rig.port.news.waits == waits, "with async scheduling vLLM takes the report after this step"
    rig.step()
    assert rig.port.news.waits == waits + 1, "an idle step waits for news"


@pytest.mark.parametrize(("cores", "wait_s"), [(1, 0.06), (2, 0.06), (4, 0.06), (8, 0.03), (12, 0.02), (192, 0.02)])
def test_an_idle_step_waits_longer_where_cores_are_few(cores: int, wait_s: float) -> None:
    assert idle_wait_s(cores) == pytest.approx(wait_s)


def test_an_idle_step_waits_for_as_long_as_it_was_given() -> None:
    rig = Rig(is_source=True, is_target=True)
    worker = WorkerHalf(rig.port, one_rank(rig.port), layer_groups(), rig.port.news, 0.01, idle_wait_s=0.001)
    rig.worker = worker
    begun(rig)
    for _ in range(3):
        rig.step()
    assert rig.port.news.timeout == 0.001


class _Idle:
    """A worker with a hand-off under way that computes nothing, on a clock that a wait takes on; all waits are kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waits = 50.0, list[float]()
        self.rig = Rig()
        port = self.rig.port
        clock = lambda: self.now  # noqa: E731
        self.worker = WorkerHalf(port, one_rank(port), layer_groups(), port.news, 0.01, idle_wait_s=0.06, clock=clock)
        self.rig.worker = self.worker
        monkeypatch.setattr(port.news, "wait", self._wait)
        begun(self.rig)
        self.rig.step()

    def _wait(self, timeout: float) -> bool:
        self.waits.append(timeout)
        if not self.rig.port.news.is_set():
            self.now += timeout
        return True

    def steps(self, count: int) -> list[float]:
        self.waits.clear()
        for _ in range(count):
            self.rig.step()
        return [round(each, 4) for each in self.waits]


def test_idle_steps_wait_ever_longer_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = _Idle(monkeypatch)
    assert idle.steps(7) == [0.02, 0.02, 0.03, 0.045, 0.06, 0.06, 0.06]
    idle.worker.set_callable(True)
    idle.steps(2)
    assert idle.steps(10) == [0.02, 0.02, 0.02, 0.03, 0.045, 0.0675, 0.1013, 0.1519, 0.2278, 0.25]
    assert idle.steps(1) == [0.25]
    begun(idle.rig, transfer_id="tx-2")
    assert idle.steps(2) == [0.02, 0.02], "what was begun may end soon"
    idle.worker.set_callable(False)
    idle.steps(20)
    assert idle.steps(1) == [0.06]


def test_a_call_ends_the_wait_and_that_of_the_step_which_was_built_before(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = _Idle(monkeypatch)
    idle.worker.set_callable(True)
    idle.steps(20)
    assert idle.steps(2) == [0.25, 0.25]
    idle.worker.hurry()
    assert idle.rig.port.news.is_set(), "a step that waits already ends"
    assert idle.steps(2) == []
    assert idle.steps(2) == [0.02, 0.02]


def test_calls_that_follow_each_other_closely_leave_pauses_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = _Idle(monkeypatch)
    idle.worker.set_callable(True)
    idle.steps(20)
    idle.worker.hurry()
    assert idle.steps(2) == []
    idle.worker.hurry()
    assert idle.steps(2) == [0.02, 0.02]
    idle.now += 1.0
    idle.worker.hurry()
    assert idle.steps(2) == []
