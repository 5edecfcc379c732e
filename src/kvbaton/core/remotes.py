"""What is known of remote engines, stage by stage: the counterpart of vLLM's `TransferTopology`."""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import Incarnation
from kvbaton.core.layout import HeadRange
from kvbaton.core.pair import common_heads
from kvbaton.core.topology import head_range
from kvbaton.errors import ConfigError, Incompatible

__all__ = ["RemoteEngines", "RemoteStage"]


@dataclass(frozen=True, slots=True)
class RemoteStage:
    """One stage of a remote engine. `end_layer` is the first layer after it; without pipelines the last three are 0."""

    tp_size: int
    block_bytes: int
    block_tokens: int
    pages_per_block: int = 1
    pp_rank: int = 0
    start_layer: int = 0
    end_layer: int = 0


class RemoteEngines:
    """Stages by (engine, pp rank), of at most `limit` engines. The first registration counts until the incarnation changes."""

    def __init__(self, tp_size: int, tp_rank: int, total_heads: int, limit: int = 1024) -> None:
        self._tp_size = tp_size
        self._tp_rank = tp_rank
        self._total_heads = total_heads
        self._engines: BoundedMap[str, tuple[Incarnation, dict[int, RemoteStage]]] = BoundedMap(limit)

    def register(self, engine: str, incarnation: Incarnation, stage: RemoteStage) -> RemoteStage:
        """Keep a stage unless it is known; another incarnation replaces all stages. Returns the stage that is known now."""
        known = self._engines.get(engine)
        if known is None or known[0] != incarnation:
            known = (incarnation, {})
        self._engines[engine] = known
        return known[1].setdefault(stage.pp_rank, stage)

    def forget(self, engine: str) -> None:
        """Forget all stages of an engine."""
        self._engines.pop(engine, None)

    def stage(self, engine: str, pp_rank: int = 0) -> RemoteStage:
        """What is known of a stage; raises ConfigError for one that was never registered."""
        _, stages = self._engines.get(engine, ("", {}))
        if pp_rank not in stages:
            known = ", ".join(map(str, sorted(stages))) or "none"
            raise ConfigError(f"pp rank {pp_rank} of engine {engine} is not known (known: {known}); wait for its handshake")
        return stages[pp_rank]

    def is_replicated(self, engine: str, pp_rank: int = 0) -> bool:
        """Whether several ranks of that stage hold the same heads."""
        return self.stage(engine, pp_rank).tp_size > self._total_heads

    def ranks_to_read(self, engine: str, pp_rank: int = 0) -> tuple[int, ...]:
        """The tp ranks of that stage that hold our heads, one per head; raises Incompatible where heads cannot be split so."""
        theirs = self.stage(engine, pp_rank).tp_size
        ours = _heads(self._total_heads, self._tp_size, self._tp_rank)
        chosen: dict[HeadRange, int] = {}
        for rank in range(theirs):
            held = _heads(self._total_heads, theirs, rank)
            if common_heads([held], [ours]):
                copies = max(1, theirs // self._total_heads)
                # Ranks that need the same head read from different replicas.
                if held not in chosen or rank % copies == self._tp_rank % copies:
                    chosen[held] = rank
        return tuple(chosen.values())


def _heads(total: int, tp_size: int, tp_rank: int) -> HeadRange:
    try:
        return head_range(total, tp_size, tp_rank)
    except ConfigError:
        raise Incompatible("heads for this tensor parallelism", f"{total} heads", f"tp{tp_size}") from None
