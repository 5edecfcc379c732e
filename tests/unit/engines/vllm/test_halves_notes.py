"""What is noted for the timeline of a hand-off: what vLLM does, in the order in which it does it, on either side."""

from __future__ import annotations

from vllm_rig import LAYERS, Request, Rig, Status, key_of, source_params, target_params

from kvbaton.agent.engine_port import HandoffStats, Landed, TargetEnded
from kvbaton.core.handoff import Aux, Mode, Outcome
from kvbaton.core.timeline import Side, Stage
from kvbaton.engines.vllm.scheduler_half import Computing

BLOCKS = ((5, 6, 7),)


def stages(rig: Rig, side: Side) -> list[Stage]:
    assert all(note.key == key_of() for note in rig.notes)
    assert [note.at for note in rig.notes] == sorted(note.at for note in rig.notes)
    return [note.stage for note in rig.notes if note.side is side]


def begun(rig: Rig, params: dict[str, object]) -> Request:
    request = Request(params)
    rig.scheduler.begin(request)
    rig.blocks[request.request_id] = BLOCKS
    return request


def test_a_source_in_push() -> None:
    rig = Rig()
    request = begun(rig, source_params())
    rig.step()
    assert stages(rig, Side.SOURCE) == [Stage.ARRIVED]
    rig.step(Computing(request.request_id, 0, 8))
    rig.step(Computing(request.request_id, 8, 2))
    assert stages(rig, Side.SOURCE) == [Stage.ARRIVED, Stage.STARTED, Stage.COMPUTED, Stage.COMPUTED]
    chunks = [(note.first_token, note.end_token, note.end_layer) for note in rig.notes if note.stage is Stage.COMPUTED]
    assert chunks == [(0, 8, LAYERS), (8, 10, LAYERS)]


def test_a_source_in_pull_starts_too() -> None:
    rig = Rig(Mode.PULL)
    request = begun(rig, source_params())
    rig.step(Computing(request.request_id, 0, 10))
    rig.step(Computing(request.request_id, 10, 1))
    assert stages(rig, Side.SOURCE) == [Stage.ARRIVED, Stage.STARTED]


def loading(rig: Rig) -> Request:
    request = begun(rig, target_params())
    rig.scheduler.allocated(request, BLOCKS, 10)
    rig.step()
    return request


def test_a_target_that_lands() -> None:
    rig = Rig()
    request = loading(rig)
    assert stages(rig, Side.TARGET) == [Stage.ARRIVED, Stage.ALLOCATED]
    rig.port.push(Landed(key_of(), Aux(7, 0.0), HandoffStats()))
    rig.step()
    rig.step(Computing(request.request_id, 9, 1))
    rig.step(Computing(request.request_id, 10, 1))
    assert stages(rig, Side.TARGET) == [Stage.ARRIVED, Stage.ALLOCATED, Stage.FIRST_STEP]


def test_a_target_that_computes_by_itself_has_no_first_step_of_a_landed_cache() -> None:
    rig = Rig()
    request = loading(rig)
    rig.port.push(TargetEnded(key_of(), Outcome.FAILED, "gone"))
    rig.step()
    rig.step(Computing(request.request_id, 0, 10))
    assert Stage.FIRST_STEP not in stages(rig, Side.TARGET)


def test_nothing_is_kept_of_requests_that_never_ran() -> None:
    rig = Rig()
    request = begun(rig, source_params())
    request.status = Status.FINISHED_ABORTED
    rig.scheduler.finish(request, BLOCKS)
    rig.step(Computing(request.request_id, 0, 10))
    assert Stage.STARTED not in stages(rig, Side.SOURCE)
