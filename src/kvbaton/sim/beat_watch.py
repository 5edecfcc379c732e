"""Whether heartbeats have everything that their peer waits for, and nothing else."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from kvbaton.agent.coordinator import Coordinator
from kvbaton.core.handoff import HandoffKey, Incarnation
from kvbaton.core.lifecycle import SourceState, TargetState
from kvbaton.core.messages import Heartbeat

__all__ = ["watch_beats"]

_CLOSING = frozenset({TargetState.STOPPING, TargetState.REVOKING, TargetState.ISOLATED})

_SIGNS = 6
"""How many signs of life of its source a target expects before it gives up."""

_LEAST_S = 0.05
_SMALL_S = 1e-6

_Waiting = dict[Incarnation, list[tuple[HandoffKey, int]]]


def watch_beats(coordinator: Coordinator, find: Callable[[str], None]) -> None:
    """From now on report each peer that waits for a sign of life, and would get none."""
    source, target = coordinator.source, coordinator.target
    of_source, of_target, limits = source.beat, target.beat, vars(coordinator)["_limits"]

    def source_beat() -> dict[Incarnation, Heartbeat]:
        waiting: _Waiting = defaultdict(list)
        for record in source.live.values():
            is_due = record.state is not SourceState.PARKED or record.parked_at >= source.busy_since
            if record.target is not None and is_due and record.state is not SourceState.STOPPING and not record.is_released:
                waiting[record.target].append((record.key, record.grant_number))
        known = [vars(vars(coordinator)["_peers"])["_cards"].get(each.target) for each in source.live.values()]
        needed_s = min((card.transfer_timeout / _SIGNS for card in known if card is not None), default=math.inf)
        if coordinator.beat_interval_s < min(limits.beat_s, needed_s) - _SMALL_S and needed_s > _LEAST_S:
            find(f"heartbeats are sent every {coordinator.beat_interval_s} s, and {needed_s} s are enough for all that wait")
        return looked_at(of_source(), waiting)

    def target_beat() -> dict[Incarnation, Heartbeat]:
        waiting: _Waiting = defaultdict(list)
        for record in target.live.values():
            if record.source is not None and record.state not in _CLOSING:
                waiting[record.source].append((record.key, record.grant))
        return looked_at(of_target(), waiting)

    def looked_at(beats: dict[Incarnation, Heartbeat], waiting: _Waiting) -> dict[Incarnation, Heartbeat]:
        shown = {peer: list(beat.live) for peer, beat in beats.items()}
        if shown != waiting:
            find(f"{dict(waiting)} wait for a sign of life, and get {shown}")
        return beats

    vars(source)["beat"], vars(target)["beat"] = source_beat, target_beat
