"""Stand-ins for vLLM and for the agents: a request as the scheduler sees it, a scripted port, and two real halves together."""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbaton.agent.engine_port import Allocation, EngineEvent, Offer, SourceRequest, SpansReady
from kvbaton.core.addresses import ControlAddress, make_request_id
from kvbaton.core.handoff import BlockLists, HandoffKey, Incarnation, Mode, Span, TransferId
from kvbaton.core.layout import Axis, Group, HeadRange, Layout, Plane
from kvbaton.core.timeline import Note, Side
from kvbaton.engines.vllm.computed_spans import ComputedSpans, LayerGroups
from kvbaton.engines.vllm.requests import HandoffInfo, SourceCheck
from kvbaton.engines.vllm.scheduler_half import Computing, Room, SchedulerHalf
from kvbaton.engines.vllm.specs import TokenCounts
from kvbaton.engines.vllm.worker_half import Finished, WorkerHalf
from kvbaton.errors import LocalError

__all__ = [
    "BLOCK_TOKENS",
    "INFO",
    "LAYERS",
    "Request",
    "Rig",
    "ScriptedPort",
    "Status",
    "key_of",
    "layer_groups",
    "one_rank",
    "source_params",
    "target_params",
]

BLOCK_TOKENS = 4
LAYERS = 3
P = ControlAddress.of("127.0.0.1", 7001)
D = ControlAddress.of("127.0.0.1", 7002)
INFO = HandoffInfo(P, Incarnation("p1"))
EXTERNAL_ID = make_request_id(str(P), str(D), "0" * 32)


class Status(enum.Enum):
    """The names that vLLM gives to ends."""

    RUNNING = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()


def source_params(transfer_id: str = "tx-1") -> dict[str, Any]:
    """What a router sends to a prefill instance."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def target_params(transfer_id: str = "tx-1") -> dict[str, Any]:
    """What a router sends to a decode instance, in push: the address comes in the request id."""
    return {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id}


def key_of(transfer_id: str = "tx-1", prompt: int = 0, sample: int = 0) -> HandoffKey:
    """The key of a hand-off."""
    return HandoffKey(TransferId(transfer_id), prompt, sample)


@dataclass
class Request:
    """A vLLM request, as much of it as the connector reads."""

    kv_transfer_params: dict[str, Any] | None
    request_id: str = f"cmpl-{EXTERNAL_ID}-0-1a2b3c4d"
    prompt_token_ids: Sequence[int] | None = tuple(range(10))
    status: Status = Status.RUNNING
    num_computed_tokens: int = 0
    output_token_ids: Sequence[int] = ()
    abort_immediately: bool = False
    skip_reading_prefix_cache: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """How long the prompt is."""
        return len(self.prompt_token_ids or ())


class News(threading.Event):
    """An event that counts who waits for it, and keeps for how long."""

    waits = 0
    timeout: float | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Count, and wait."""
        self.waits += 1
        self.timeout = timeout
        return super().wait(timeout)


@dataclass
class ScriptedPort:
    """Agents that only remember what they are told; `push` makes them say something. `is_stuck` refuses every call."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    queue: list[EngineEvent] = field(default_factory=list)
    news: News = field(default_factory=News)
    is_stuck: bool = False

    def push(self, *events: EngineEvent) -> None:
        """Let the engine hear of these."""
        self.queue += events
        self.news.set()

    def names(self) -> list[str]:
        """What was called, in order."""
        return [name for name, _ in self.calls]

    def _call(self, name: str, argument: Any) -> None:
        if self.is_stuck:
            raise LocalError("the agent is stuck")
        self.calls.append((name, argument))

    def expect_target(self, key: HandoffKey, prompt: str) -> None:
        """Remember."""
        self._call("expect_target", (key, prompt))

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        """Remember."""
        self._call("spans_ready", (key, blocks, spans))

    def spans_ready_all(self, ready: Sequence[SpansReady]) -> None:
        """Remember each."""
        for each in ready:
            self.spans_ready(*each)

    def retract(self, key: HandoffKey) -> None:
        """Remember."""
        self._call("retract", key)

    def offer(self, offer: Offer) -> None:
        """Remember."""
        self._call("offer", offer)

    def expect_source(self, request: SourceRequest) -> None:
        """Remember."""
        self._call("expect_source", request)

    def allocated(self, allocation: Allocation) -> None:
        """Remember."""
        self._call("allocated", allocation)

    def decline(self, request: SourceRequest, reason: str) -> None:
        """Remember."""
        self._call("decline", (request, reason))

    def refuse(self, key: HandoffKey, reason: str) -> None:
        raise AssertionError(f"this engine refuses no prefill before admission: {key}, {reason}")

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:
        """Remember."""
        self._call("cancel", (key, side))

    def events(self) -> list[EngineEvent]:
        """What was pushed since the last call."""
        taken, self.queue = self.queue, []
        return taken


def one_rank(port: ScriptedPort) -> ComputedSpans:
    """The layers of an instance that is not cut."""
    return ComputedSpans(port, dict.fromkeys(range(LAYERS), 1), lambda given: given)


def layer_groups(layers: int = LAYERS, least_bytes: int = 0) -> LayerGroups:
    """The layers of one rank, whose tokens have a byte each in each layer."""
    offsets = tuple(range(0, layers * BLOCK_TOKENS, BLOCK_TOKENS))
    plane = Plane("keys", "u8", 1, (HeadRange(0, 1),), 1, (Axis(1, 1),), offsets, layers * BLOCK_TOKENS, 0, 1, 1)
    group = Group("full", tuple(range(layers)), 1, BLOCK_TOKENS, BLOCK_TOKENS, (plane,))
    return LayerGroups(Layout(layers * BLOCK_TOKENS, (group,)), least_bytes)


class Rig:
    """Both halves of one instance over a scripted port, stepped as vLLM steps them."""

    def __init__(
        self,
        mode: Mode = Mode.PUSH,
        *,
        is_source: bool = True,
        is_target: bool = True,
        drain_s: float = 5.0,
        room: Room | None = None,
        sources: SourceCheck | None = None,
        counts: TokenCounts = TokenCounts((BLOCK_TOKENS,)),  # noqa: B008 - frozen
    ) -> None:
        self.port = ScriptedPort()
        self.poisoned: list[tuple[BlockLists, int]] = []
        self.notes: list[Note] = []
        self.scheduler = SchedulerHalf(mode, counts, is_source, is_target, room, sources)
        self.scheduler.meet_worker(INFO)
        poison = lambda blocks, cached: self.poisoned.append((blocks, cached))  # noqa: E731
        self.worker = WorkerHalf(
            self.port, one_rank(self.port), layer_groups(), self.port.news, drain_s, poison, self.notes.append
        )
        self.blocks: dict[str, tuple[tuple[int, ...], ...]] = {}

    def step(self, *computing: Computing, preempted: Sequence[str] = (), hooks: Sequence[int] = range(LAYERS)) -> Finished:
        """One step: orders, a forward with these layer hooks if anything is computed, and what has finished."""
        orders = self.scheduler.orders(computing, preempted, self.blocks.__getitem__, bool(computing))
        self.worker.begin_step(orders)
        if computing:
            for layer in hooks:
                self.worker.layer_computed(layer)
        self.worker.forward_done()
        finished = self.worker.end_step()
        self.scheduler.take_report(finished.report)
        return finished

    def spans(self) -> list[Span]:
        """Every span that was told, in order."""
        return [span for name, argument in self.port.calls if name == "spans_ready" for span in argument[2]]
