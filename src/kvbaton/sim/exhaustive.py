"""Every single fault at every stage of every flow: one small hand-off, disturbed once, at each of its events in turn."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from kvbaton.core.handoff import AuxChannel, Integrity, Mode
from kvbaton.sim.run import run_script
from kvbaton.sim.script import Fault, FaultKind, RequestScript, Script
from kvbaton.transport.base import LateWrites

__all__ = ["FLOWS", "flow_script", "flow_scripts", "makes_difference", "single_faults"]

FLOWS: dict[str, tuple[Mode, LateWrites, bool, float, int, bool]] = {
    f"{mode}, {kind}{', writes' if writes else ''}, target {when}, {ranks} rank{'s' if ranks > 1 else ''}"
    f"{', stamps' if stamps else ''}": (mode, kind, writes, delay, ranks, stamps)
    for mode in Mode
    for kind, writes in (
        (LateWrites.IMPOSSIBLE, False),
        (LateWrites.REVOCABLE, False),
        (LateWrites.UNFENCED, False),
        (LateWrites.UNFENCED, True),
    )
    for when, delay in (("first", 0.0), ("during prefill", 0.005), ("after prefill", 0.1))
    for ranks in (1, 2)
    for stamps in (False, True)
    if mode is Mode.PUSH or (when == "first" and not writes)
    if not stamps or kind is LateWrites.IMPOSSIBLE
}
"""Name -> (mode, promise about late writes, unfenced writes allowed, when the target gets the request, ranks, whether the
target looks at stamps, which it does where it reads)."""

_LONG_S = 9.0


def flow_script(name: str) -> Script:
    """The undisturbed run of a flow: two requests that share a prefix, so that cached blocks are left out of the second.

    With several ranks everything is checked with checksums and aux records travel by data, with one neither.
    """
    mode, late_writes, writes, delay, ranks, stamps = FLOWS[name]
    request = RequestScript(0.0, 0, 0, 3, 2, mode, prefix=0, shared=1, decode_delay_s=delay, retries=1)
    return Script(
        seed=1,
        late_writes=late_writes,
        unfenced_writes=writes,
        one_host=stamps,
        ranks=ranks,
        layers=2,
        prefills=1,
        decodes=1,
        prefill_blocks=7,
        decode_blocks=7,
        requests=(request, msgspec.structs.replace(request, at_s=0.01, tokens=2, decode_delay_s=0.0)),
        faults=(),
        move_s=0.002,
        integrity=Integrity.FULL if ranks > 1 else Integrity.OFF,
        aux_channel=AuxChannel.DATA if ranks > 1 else AuxChannel.CONTROL,
        stamp_slots=1 if stamps else 0,
    )


def flow_scripts(name: str) -> Iterator[Script]:
    """A flow undisturbed, and then with each fault at each event of the undisturbed run, where that makes a difference."""
    script = flow_script(name)
    yield script
    undisturbed = run_script(script)
    for event in range(1, undisturbed.events + 1):
        for fault in single_faults(script, event):
            if makes_difference(fault, undisturbed.uses):
                yield msgspec.structs.replace(script, faults=(fault,))


def makes_difference(fault: Fault, uses: Collection[tuple[int, str]]) -> bool:
    """Whether the fault differs from the same one an event later; `uses` are those of the undisturbed run.

    A fault that lies in wait for the next frame, post or move does not, unless the next event has one.
    """
    match fault.kind:
        case FaultKind.LOSE | FaultKind.DOUBLE | FaultKind.DELAY | FaultKind.CORRUPT_FRAME:
            awaited = f"frame {fault.who} {fault.other}"
        case FaultKind.COPY_FAILS:
            awaited = f"post {fault.who} {fault.number}"
        case FaultKind.CORRUPT:
            awaited = f"move {fault.who} {fault.number}"
        case _:
            return True
    return (fault.at_event + 1, awaited) in uses


def single_faults(script: Script, event: int) -> Iterator[Fault]:
    """Every fault that can strike one pair, at one event."""
    ends = (("p0", "d0"), ("d0", "p0"))
    for who, other in ends:
        yield Fault(FaultKind.CRASH, at_event=event, who=who, for_s=1.0)
        yield Fault(FaultKind.RESTART, at_event=event, who=who)
        yield Fault(FaultKind.PAUSE, at_event=event, who=who, for_s=_LONG_S)
        yield Fault(FaultKind.CLOCK_JUMP, at_event=event, who=who, for_s=_LONG_S)
        yield Fault(FaultKind.STALL, at_event=event, who=who, for_s=_LONG_S)
        yield Fault(FaultKind.SILENT_ENGINE, at_event=event, who=who, for_s=4 * _LONG_S)
        yield Fault(FaultKind.STUCK_ENGINE, at_event=event, who=who, for_s=4 * _LONG_S)
        yield Fault(FaultKind.REPLAY, at_event=event, who=who, other=other, for_s=1.0)
        yield Fault(FaultKind.QUEUE_FULL, at_event=event, who=who, for_s=0.1)
        yield Fault(FaultKind.QUEUE_FULL, at_event=event, who=who, for_s=_LONG_S)
        yield Fault(FaultKind.CUT, at_event=event, who=who, other=other, for_s=_LONG_S)
        yield Fault(FaultKind.CLOG, at_event=event, who=who, other=other, for_s=_LONG_S)
        yield Fault(FaultKind.SLOW, at_event=event, who=who, other=other, for_s=1.0, number=2)
        yield Fault(FaultKind.LOSSY, at_event=event, who=who, other=other, for_s=1.0)
        yield Fault(FaultKind.LOSE, at_event=event, who=who, other=other, number=1)
        yield Fault(FaultKind.DOUBLE, at_event=event, who=who, other=other, number=1)
        yield Fault(FaultKind.DELAY, at_event=event, who=who, other=other, for_s=1.0)
        yield Fault(FaultKind.CORRUPT_FRAME, at_event=event, who=who, other=other, number=1)
        for rank in range(script.ranks):
            yield Fault(FaultKind.COPY_FAILS, at_event=event, who=who, number=rank)
            yield Fault(FaultKind.CORRUPT, at_event=event, who=who, number=rank)
            yield Fault(FaultKind.PAUSE_RANK, at_event=event, who=who, number=rank, for_s=_LONG_S)
    yield Fault(FaultKind.SEVER, at_event=event, who="p0", other="d0", for_s=1.0)
    yield Fault(FaultKind.SEVER, at_event=event, who="p0", other="d0", for_s=_LONG_S)
    yield Fault(FaultKind.PREEMPT, at_event=event, who="p0")
    yield Fault(FaultKind.REFUSE, at_event=event, who="d0")
    yield Fault(FaultKind.BAD_GRANT, at_event=event, who="d0", number=2)
    yield Fault(FaultKind.CANCEL_SOURCE, at_event=event, number=0)
    yield Fault(FaultKind.CANCEL_TARGET, at_event=event, number=0)
