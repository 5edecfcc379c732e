"""What happens in a run: its set-up, its requests and its faults, as plain data that can be made from a seed, and shrunk."""

from __future__ import annotations

import enum
import random
from typing import Annotated

import msgspec

from kvbaton.core.handoff import AuxChannel, Integrity, Mode
from kvbaton.transport.base import LateWrites

__all__ = ["CALM", "HARMLESS", "LINK_FAULTS", "Fault", "FaultKind", "RequestScript", "Script", "VllmScript", "make_script"]


class FaultKind(enum.StrEnum):
    """What can go wrong, or at least otherwise."""

    CRASH = "crash"
    RESTART = "restart"
    PAUSE = "pause"
    PAUSE_RANK = "pause rank"
    CRASH_RANK = "crash rank"
    CLOCK_JUMP = "clock jump"
    CUT = "cut"
    SEVER = "sever"
    CLOG = "clog"
    LOSE = "lose"
    DOUBLE = "double"
    DELAY = "delay"
    SLOW = "slow"
    LOSSY = "lossy"
    COPY_FAILS = "copy fails"
    STALL = "stall"
    PREEMPT = "preempt"
    CANCEL_TARGET = "cancel at target"
    CANCEL_SOURCE = "cancel at source"
    LOSE_REVOKE = "lose revoke"
    CORRUPT = "corrupt"
    REFUSE = "refuse at target"
    QUEUE_FULL = "queue full"
    BAD_GRANT = "bad grant number"
    SILENT_ENGINE = "silent engine"
    STUCK_ENGINE = "stuck engine"
    REPLAY = "replay"
    STRAY = "stray"
    STALL_AGENT = "stall agent"
    TWIN = "twin"
    CRASH_LEADER = "crash leader"
    CORRUPT_FRAME = "corrupt frame"


LINK_FAULTS = frozenset(
    {
        FaultKind.CUT,
        FaultKind.SEVER,
        FaultKind.CLOG,
        FaultKind.LOSE,
        FaultKind.DOUBLE,
        FaultKind.DELAY,
        FaultKind.SLOW,
        FaultKind.LOSSY,
        FaultKind.REPLAY,
        FaultKind.CORRUPT_FRAME,
    }
)
"""Faults between two instances, which reach nothing but what they exchange."""

HARMLESS = frozenset({FaultKind.PREEMPT, FaultKind.DOUBLE, FaultKind.REPLAY, FaultKind.STRAY})
"""Faults that never excuse a failure."""

_WAITED_OUT = frozenset(
    {
        FaultKind.CUT,
        FaultKind.SEVER,
        FaultKind.CLOG,
        FaultKind.PAUSE,
        FaultKind.STALL,
        FaultKind.QUEUE_FULL,
        FaultKind.PAUSE_RANK,
        FaultKind.STALL_AGENT,
    }
)
_SHORT_S = 0.5

_ALONE = frozenset(
    {
        FaultKind.STRAY,
        FaultKind.CRASH_RANK,
        FaultKind.STALL_AGENT,
        FaultKind.TWIN,
        FaultKind.CRASH_LEADER,
        FaultKind.CORRUPT_FRAME,
    }
)
"""What drills alone, or runs with engines, draw.

Beside a message that is lost, a stray one may be believed, and rightly; a rank, or its leader, dies where it can.
"""

CALM = frozenset({FaultKind.PREEMPT, FaultKind.CANCEL_TARGET, FaultKind.CANCEL_SOURCE, FaultKind.REFUSE})
"""What engines do every day: agents and the network between them are not disturbed by it."""


class RequestScript(msgspec.Struct, frozen=True):
    """One request: when, between which instances, how large, and how its client and router behave."""

    at_s: float
    prefill: int
    decode: int
    tokens: int
    chunk: int
    mode: Mode
    prefix: int = 0
    shared: int = 0
    decode_delay_s: float = 0.0
    prefill_delay_s: float = 0.0
    """How much later than the target the source gets it, in push."""
    second_decode: int = -1
    """To which other target a router that is in doubt sends it, too, in push."""
    retries: int = 0
    retry_after_s: float = 0.05
    retries_once: bool = False
    """Whether its router tries again once, and not twice, when both sides report that an attempt has failed."""
    reuse_id: bool = False
    steal_id: int = -1
    """Whose transfer id to use instead of an own one."""
    transfer_id: str | None = None
    """What to call it, literally, in every attempt."""
    prompt_index: int = 0
    sample_index: int = 0
    outputs: int = 1
    """How many tokens an engine of production computes for it."""
    is_streamed: bool = True
    """Whether a model of an engine reports spans in push as it computes them; if not, it offers the whole cache at the end."""
    offer_after_s: float = 0.0
    """How long after its last span such a model offers the cache."""
    is_turned: bool = False
    """Whether the cache goes the other way: from the instance `decode` to the instance `prefill`."""

    @property
    def ends(self) -> tuple[str, str]:
        """Where its source and its target live."""
        ends = f"p{self.prefill}", f"d{self.decode}"
        return ends[::-1] if self.is_turned else ends


class Fault(msgspec.Struct, frozen=True):
    """One fault. It strikes at `at_s`, or after `at_event` events of the world when that is not negative.

    `who` names an address; `other` the far end of a link, or what of a kind is meant (of copies that fail, those whose "last"
    reply is lost, those that move "short", and those that do not even "connect"); `number` a request, a rank or a count, as the
    kind needs it.
    """

    kind: FaultKind
    at_s: float = 0.0
    at_event: int = -1
    who: str = ""
    other: str = ""
    for_s: float = 0.0
    number: int = 0
    is_whole: bool = False
    """Whether what is refused is everything of the transfer id; or an instance is stopped in good order before it restarts;
    or a full transport takes a batch now and then."""

    @property
    def is_short(self) -> bool:
        """Whether it is over long before any limit: one of that kind makes no request fail."""
        return self.kind is FaultKind.LOSE or (self.kind in _WAITED_OUT and self.for_s <= _SHORT_S)


class VllmScript(msgspec.Struct, frozen=True):
    """How a vLLM with the connector of production is set up."""

    stages: int = 1
    """Of a pipeline; each has its part of the layers."""
    is_async: bool = False
    """Whether a step is built before the output of the one before it is taken."""
    has_fence: bool = True
    """Whether blocks are given back when no step that is under way can write to them any more."""
    has_hooks: bool = True
    """Whether layers report that they are computed one by one; in a full CUDA graph they do not."""


class CacheScript(msgspec.Struct, frozen=True):
    """The cache of an instance that runs an engine of production: the embedded one, or with `vllm` vLLM's connector."""

    ranks: int
    block_tokens: int
    blocks: int
    step_tokens: int = 5
    """How many tokens one step runs at most; of prefills, a block of them at least."""
    vllm: VllmScript | None = None
    is_reversed: bool = False
    """Whether the first rank has the last heads, so that first ranks may have nothing in common."""


class LoadScript(msgspec.Struct, frozen=True):
    """A request without a hand-off, which takes blocks of an engine of production from the others."""

    at_s: float
    who: str
    tokens: int
    outputs: int


class Script(msgspec.Struct, frozen=True):
    """Everything about one run."""

    seed: int
    late_writes: LateWrites
    unfenced_writes: bool
    one_host: bool
    ranks: int
    layers: int
    prefills: int
    decodes: int
    prefill_blocks: int
    decode_blocks: int
    requests: tuple[RequestScript, ...]
    faults: tuple[Fault, ...]
    drifts: tuple[float, ...] = ()
    offsets: tuple[float, ...] = ()
    """What the clocks show at the start; made from the seed when empty."""
    router_cancels: float = 0.7
    """How likely the router cancels the other side of an attempt that failed on one."""
    move_s: Annotated[float, msgspec.Meta(gt=0)] = 0.0005
    decode_s: float = 0.02
    step_s: float = 0.002
    integrity: Integrity = Integrity.OFF
    """How much the targets of this run check."""
    aux_channel: AuxChannel = AuxChannel.CONTROL
    """How aux records travel in this run."""
    without_area: tuple[str, ...] = ()
    """Addresses of instances that have no area for aux records; none has, where ranks live in processes of their own."""
    hasty: tuple[str, ...] = ()
    """Addresses of instances whose cards state that they wait for a silent source for less long than all others."""
    strangers: tuple[str, ...] = ()
    """Addresses of instances that serve another model, with a plus only when they come back, or with a tilde whose last rank is
    reached by none of the others' transports, or with a caret which wait for longer than any source keeps something: no other
    instance hands anything off to them, or takes it."""

    def is_strange(self, address: str, other: str) -> bool:
        """Whether nothing can be handed off between two instances, at least when one of them comes back."""
        return len({each.rstrip("+~^") for each in self.strangers}.intersection((address, other))) == 1

    library_writes: bool = False
    """Whether writes are what the shipped libraries promise, and not what a transport could that fences."""
    is_plain: bool = False
    """Whether transports do no more than they have to: none reports what arrives, and one that only reads fences nothing."""
    few_cells: int = 0
    """How many cells a rank sums in one turn, and moves in one batch; 0 for as many as in production."""
    uneven: float = 1.0
    """How many times slower every fourth batch of a transport is than the others."""
    is_forgetful: bool = False
    """Whether instances remember so few ends, grants and peers that each is soon forgotten."""
    most_peers: int = 0
    """How many cards of peers an instance keeps; 0 for as many as in production."""
    most_parked: int = 0
    """How many grants may wait at a source for their prefill; 0 for as many as in production."""
    rank_lag_s: float = 0.0
    """How long orders to ranks and their reports are under way at most; 0 where ranks live in their coordinator's process."""

    has_driver: bool = False
    """Whether the driver of production runs the instances; their ranks have to live in processes of their own."""
    has_sockets: bool = False
    """Whether the control sockets of production carry the messages, over virtual connections; needs the driver."""
    joins_messages: bool = False
    """Whether messages that leave at the same moment travel in one frame, which is lost, doubled and delayed as one."""

    stamp_slots: int = 0
    """How many stamps a source can show its targets at a time, which need to be on one host for it; 0 for none."""
    caches: tuple[CacheScript, ...] = ()
    """One per address where instances run the engine of production, under its driver; all requests have one mode."""
    loads: tuple[LoadScript, ...] = ()
    recomputes: bool = False
    """Whether an engine of production computes what could not be handed over."""

    @property
    def addresses(self) -> list[str]:
        """Where the instances live."""
        return [f"p{i}" for i in range(self.prefills)] + [f"d{i}" for i in range(self.decodes)]


_DURATIONS = (0.05, 0.5, 2.0, 5.0, 9.0)
_STOPPED_S = (0.5, 5.0, 36.0)
"""How long an engine does nothing; also longer than anything may wait for it."""


def make_script(seed: int, *, faults: bool = True) -> Script:
    """The random run that belongs to a seed."""
    rng = random.Random(f"script {seed}")
    is_disturbed = faults and rng.random() >= 0.15
    late_writes = rng.choice(list(LateWrites))
    prefills, decodes = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2)))
    tiny = rng.random() < (0.3 if is_disturbed else 0.6)
    count = rng.randint(1, 8)
    requests = tuple(_request(rng, prefills, decodes, tiny, count, is_disturbed) for _ in range(count))
    script = Script(
        seed=seed,
        late_writes=late_writes,
        unfenced_writes=late_writes is LateWrites.UNFENCED and rng.random() < 0.5,
        one_host=rng.random() < 0.5,
        ranks=rng.choice((1, 1, 2, 3)),
        layers=rng.choice((1, 2, 3)),
        prefills=prefills,
        decodes=decodes,
        prefill_blocks=rng.randint(8, 10) if tiny else 24,
        decode_blocks=rng.randint(8, 10) if tiny else 24,
        requests=requests,
        faults=(),
        drifts=tuple(rng.choice((1.0, 1.0, 0.99, 1.01)) for _ in range(prefills + decodes)),
        move_s=rng.choice((0.0002, 0.002, 0.02, 0.2)),
        decode_s=rng.choice((0.01, 0.2, 2.0)),
        step_s=rng.choice((0.002, 0.02, 0.1)),
        integrity=rng.choice(list(Integrity)),
        aux_channel=rng.choice(list(AuxChannel)),
        # No slower: a copy that takes longer than `stop_timeout` is fenced, and then a failure of its neighbours is right.
        uneven=rng.choice((1.0, 1.0, 2.0)),
        rank_lag_s=rng.choice((0.0, 0.001, 0.01, 0.1)),
        joins_messages=random.Random(f"joins {seed}").random() < 0.5,
    )
    script = msgspec.structs.replace(script, library_writes=script.unfenced_writes and rng.random() < 0.5)
    if not is_disturbed:
        return script
    chosen = [_fault(rng, script) for _ in range(rng.randint(0, 6))]
    for _ in range(rng.choice((0, 1, 1, 2))):
        chosen += rng.choice(_RECIPES)(rng, script)
    return msgspec.structs.replace(script, faults=tuple(chosen))


def _request(rng: random.Random, prefills: int, decodes: int, tiny: bool, count: int, faults: bool) -> RequestScript:
    tokens = rng.randint(1, 4 if tiny else 6)
    return RequestScript(
        at_s=rng.uniform(0.0, 0.5),
        prefill=rng.randrange(prefills),
        decode=rng.randrange(decodes),
        tokens=tokens,
        chunk=rng.randint(1, 3),
        mode=rng.choice(list(Mode)),
        prefix=rng.randrange(2),
        shared=rng.randint(0, tokens),
        decode_delay_s=rng.choice((0.0, 0.0, 0.005, 0.05, 0.5)),
        retries=rng.choice((0, 0, 1, 2)),
        retry_after_s=rng.choice((0.05, 0.05, 0.5)),
        reuse_id=rng.random() < 0.4,
        steal_id=rng.randrange(count) if rng.random() < 0.1 and faults else -1,
    )


def _some_moment(rng: random.Random, script: Script) -> tuple[int, RequestScript, float]:
    """A request, and a time at which it is likely to be under way: any, or while its bytes move."""
    number = rng.randrange(len(script.requests))
    request = script.requests[number]
    if rng.random() < 0.5:
        return number, request, request.at_s + rng.uniform(0.0, rng.choice((0.02, 0.2, 1.0, 3.0)))
    prefill_s = -(-request.tokens // request.chunk) * script.layers * script.step_s
    moving_s = request.tokens * script.layers * script.move_s
    is_pull = request.mode is Mode.PULL
    start_s = prefill_s + request.decode_delay_s if is_pull else max(prefill_s, request.decode_delay_s)
    return number, request, request.at_s + start_s + rng.uniform(0.0, 1.1 * moving_s)


def _cancelled_unnoticed(rng: random.Random, script: Script) -> list[Fault]:
    """The target gives up while its messages do not reach the source, or the other way round."""
    number, request, at_s = _some_moment(rng, script)
    ends = (f"d{request.decode}", f"p{request.prefill}")
    kind, (who, other) = rng.choice(((FaultKind.CANCEL_TARGET, ends), (FaultKind.CANCEL_SOURCE, ends[::-1])))
    cut_off = rng.choice(
        (
            Fault(FaultKind.CUT, at_s, who=who, other=other, for_s=rng.choice(_DURATIONS)),
            Fault(FaultKind.LOSE, at_s, who=who, other=other, number=1),
            Fault(FaultKind.PAUSE, at_s, who=other, for_s=rng.choice(_DURATIONS)),
        )
    )
    return [cut_off, Fault(kind, at_s + 1e-4, number=number)]


def _expired_unnoticed(rng: random.Random, script: Script) -> list[Fault]:
    """The source releases a cache, and its message about that does not reach the target."""
    number, request, at_s = _some_moment(rng, script)
    source, target = f"p{request.prefill}", f"d{request.decode}"
    lost = Fault(FaultKind.CUT, at_s, who=source, other=target, for_s=rng.choice((0.2, 0.5, 1.0, 1.8)))
    gone = rng.choice(
        (
            Fault(FaultKind.CLOCK_JUMP, at_s + 1e-4, who=source, for_s=9.0),
            Fault(FaultKind.CANCEL_SOURCE, at_s + 1e-4, number=number),
        )
    )
    return [lost, gone]


def _restart_with_mail(rng: random.Random, script: Script) -> list[Fault]:
    """A source restarts while frames for its earlier life are still on their way."""
    _, request, _ = _some_moment(rng, script)
    at_s = request.at_s + request.decode_delay_s + rng.choice((rng.uniform(0.0, 0.01), rng.uniform(0.0, 0.3)))
    source, target = f"p{request.prefill}", f"d{request.decode}"
    late = Fault(FaultKind.SLOW, at_s, who=target, other=source, for_s=0.3, number=rng.randint(1, 3))
    return [late, Fault(FaultKind.RESTART, at_s + rng.uniform(0.0, 0.05), who=source)]


def _late_answers(rng: random.Random, script: Script) -> list[Fault]:
    """Messages of the source arrive when the target has given up and tries again."""
    number, request, at_s = _some_moment(rng, script)
    source, target = f"p{request.prefill}", f"d{request.decode}"
    late = Fault(FaultKind.SLOW, at_s, who=source, other=target, for_s=rng.choice((0.1, 0.3)), number=rng.randint(1, 2))
    kind = rng.choice((FaultKind.CANCEL_TARGET, FaultKind.CANCEL_SOURCE))
    return [late, Fault(kind, at_s + rng.choice((0.0001, 0.003, 0.05)), number=number)]


def _preempted(rng: random.Random, script: Script) -> list[Fault]:
    """A source runs short of blocks while it streams."""
    _, request, at_s = _some_moment(rng, script)
    return [Fault(FaultKind.PREEMPT, at_s, who=f"p{request.prefill}") for _ in range(rng.randint(1, 2))]


_RECIPES = (_cancelled_unnoticed, _expired_unnoticed, _restart_with_mail, _late_answers, _preempted)


def _fault(rng: random.Random, script: Script) -> Fault:
    kind = rng.choice([kind for kind in FaultKind if kind not in _ALONE])
    who = rng.choice(script.addresses)
    other = rng.choice([address for address in script.addresses if address[0] != who[0]])
    if kind is FaultKind.PREEMPT:
        who = rng.choice([address for address in script.addresses if address.startswith("p")])
    return Fault(
        kind=kind,
        at_s=rng.choice((rng.uniform(0.0, 0.7), rng.uniform(0.0, 3.0))),
        who=who,
        other=other,
        for_s=rng.choice(_STOPPED_S if kind in (FaultKind.SILENT_ENGINE, FaultKind.STUCK_ENGINE) else _DURATIONS),
        number=rng.randrange(max(1, len(script.requests))) if "cancel" in kind else rng.randint(1, 3),
    )
