"""What connectors for vLLM got wrong: settings, fixed sizes, what is on the wire, and which clock counts."""

from __future__ import annotations

import ast
import math
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from scenario import BOTH_DELIVERED, FLOWS, Flow, at_every_event, disturbed, every_flow, make, play, request, sides
from twosome import Twosome, entries

import kvbaton
from kvbaton.agent import coordinator as coordinator_module
from kvbaton.agent import source as source_module
from kvbaton.agent import target as target_module
from kvbaton.agent import timers
from kvbaton.agent.coordinator import Coordinator, Peers
from kvbaton.agent.source import SourceSide
from kvbaton.config import Limits, parse_limits
from kvbaton.core.grants import GrantWindows
from kvbaton.core.handoff import Mode, Outcome
from kvbaton.core.messages import Envelope, Message, Prefilled, decode
from kvbaton.errors import ConfigError, ProtocolError
from kvbaton.sim.run import LIMITS, Run
from kvbaton.sim.script import Fault, FaultKind

_marks: list[str] = []


def _mark() -> None:
    _marks.append("unpickled")


class _Payload:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _mark, ()


class TestBadLimits:
    """Times that are zero, negative, not a number, infinite or no number at all are refused at the start, by name."""

    NAMES = Limits.__dataclass_fields__
    BAD = (0, 0.0, -1, -0.001, math.nan, math.inf, -math.inf, "5", "soon", None, [5], True)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("value", BAD, ids=repr)
    def test_bad_times_are_refused_by_name(self, name: str, value: object) -> None:
        with pytest.raises(ConfigError, match=name):
            parse_limits({name: value})

    @pytest.mark.parametrize("name", NAMES)
    def test_a_misspelt_name_is_refused_with_the_right_one(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"did you mean '{name}'"):
            parse_limits({f"{name}s": 5.0})

    class Unchecked(Limits):
        """Limits that take anything."""

        def __post_init__(self) -> None:
            pass

    @pytest.mark.parametrize("flow", [flow for flow in FLOWS if flow.mode is Mode.PUSH], ids=str)
    @pytest.mark.parametrize("bad", [math.nan, math.inf], ids=repr)
    def test_unchecked_times_leave_a_target_waiting_for_ever(self, flow: Flow, bad: float) -> None:
        def prepare(run: Run) -> None:
            disturbed(run)
            run.is_probed = False

        unchecked = self.Unchecked(transfer_timeout=bad, defer_timeout=bad, stop_timeout=0.5, retry=0.1)
        scripts = at_every_event(make(flow), Fault(FaultKind.CRASH, who="p0", for_s=20.0), step=3)
        stories = (play(script, prepare=prepare, limits=unchecked) for script in scripts)
        assert max(story.back("d0") for story in stories if story.times("FAULT ")) > 5 * LIMITS.transfer_timeout


class TestFixedSizes:
    """However many hand-offs there were, tables, caches and windows keep a fixed size."""

    ENOUGH = 5_000
    """More than any table here remembers."""

    def _grow(self, coordinator: type[Coordinator] = Coordinator) -> tuple[int, int]:
        """How much two coordinators hold after many hand-offs, and after half as many again."""
        world = Twosome(coordinator)
        source, target = world.join("p"), world.join("d")
        sizes = []
        for first, last in ((0, self.ENOUGH), (self.ENOUGH, self.ENOUGH * 3 // 2)):
            for number in range(first, last):
                world.hand_off(source, target, f"t{number}", cancel=number % 3 == 0)
            sizes.append(entries(source.coordinator, target.coordinator))
        return sizes[0], sizes[1]

    def test_many_hand_offs_leave_tables_at_a_fixed_size(self) -> None:
        before, after = self._grow()
        assert after == before

    def test_without_a_limit_they_grow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (source_module, target_module):
            monkeypatch.setattr(module, "_MAX_ENDS", 10**9)
        before, after = self._grow()
        assert after > before + self.ENOUGH / 2

    def test_many_peers_leave_tables_at_a_fixed_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (source_module, target_module):
            monkeypatch.setattr(module, "_MAX_ENDS", 50)
        monkeypatch.setattr(source_module, "GrantWindows", partial(GrantWindows, limit=50))
        monkeypatch.setattr(coordinator_module, "Peers", partial(Peers, limit=50))
        monkeypatch.setattr(timers, "_MAX_PEERS", 50)
        monkeypatch.setattr(target_module, "_MAX_SOURCES", 50)
        world = Twosome()
        fixed = world.join("p"), world.join("d")
        sizes = []
        for generation in range(3):
            for number in range(100):
                comers = world.join(f"p{generation}.{number}"), world.join(f"d{generation}.{number}")
                world.hand_off(comers[0], fixed[1], f"from {number} {generation}")
                world.hand_off(fixed[0], comers[1], f"to {number} {generation}")
                for comer in comers:
                    del world.sides[comer.name]
            sizes.append(entries(*(side.coordinator for side in fixed)))
        assert sizes[0] == sizes[1] == sizes[2]


class TestNoPickle:
    """Pickle is never used on the network: a frame is data, and reading one runs nothing."""

    WAYS_TO_RUN_CODE = frozenset(
        {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
    )
    CALLS = frozenset({"send_pyobj", "recv_pyobj", "eval", "exec"})

    @classmethod
    def _offences(cls, text: str) -> Iterator[str]:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in cls.WAYS_TO_RUN_CODE)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in cls.WAYS_TO_RUN_CODE:
                yield str(node.module)
            elif isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                if name in cls.CALLS or (name == "allow_pickle"):
                    yield name

    def test_no_module_can_unpickle(self) -> None:
        sources = sorted(Path(kvbaton.__file__).parent.rglob("*.py"))
        assert len(sources) > 50
        assert {path.name: found for path in sources if (found := list(self._offences(path.read_text())))} == {}

    @pytest.mark.parametrize("text", ["import pickle", "from pickle import loads", "import dill as d", "s.recv_pyobj()"])
    def test_the_search_would_find_it(self, text: str) -> None:
        assert list(self._offences(text))

    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_a_pickled_frame_is_refused_and_runs_nothing(self, protocol: int) -> None:
        _marks.clear()
        frame = pickle.dumps(_Payload(), protocol)
        with pytest.raises(ProtocolError):
            decode(frame)

        def prepare(run: Run) -> None:
            run.cluster.has_foreigners = True
            run.world.at(0.005, None, partial(run.cluster.arrive, "p0", frame, "d0"))

        story = play(make(FLOWS[0]), prepare=prepare)
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED]
        assert sum(story.run.all_instances[0].dropped_total.values()) == 1
        assert _marks == []

    def test_a_decoder_that_unpickles_would_be_seen(self) -> None:
        _marks.clear()
        pickle.loads(pickle.dumps(_Payload()))  # noqa: S301
        assert _marks == ["unpickled"]


class TestClocks:
    """No point in time crosses a wire, so it does not matter what the clocks of two processes show."""

    def _frames(self, flow: Flow, offsets: tuple[float, ...], source: type[SourceSide] = SourceSide) -> list[str]:
        """Everything that is said in a run, with durations to a microsecond."""
        requests = (request(flow, at_s=0.1 * number, decode_delay_s=0.2, retries=1) for number in range(3))
        faults = (Fault(FaultKind.CUT, at_s=0.25, who="d0", other="p0", for_s=3.0),)
        run = Run(make(flow, *requests, faults=faults, offsets=offsets), sides(source=source))
        said: list[str] = []
        arrive = run.cluster.network.arrive

        def listen(address: str, frame: bytes, sender: str) -> None:
            message = decode(frame).message
            if isinstance(message, Prefilled):
                message = msgspec.structs.replace(message, held_s=round(message.held_s, 6))
            said.append(f"{sender} -> {address}: {message}")
            arrive(address, frame, sender)

        run.cluster.network.arrive = listen
        assert not run.run().violations
        return said

    @every_flow
    def test_the_same_messages_whatever_the_clocks_show(self, flow: Flow) -> None:
        plain = self._frames(flow, (0.0, 0.0))
        assert len(plain) > 20
        for offsets in ((1e6, 0.0), (0.0, 1e6), (-1e5, 7e5)):
            assert self._frames(flow, offsets) == plain

    @every_flow
    def test_a_point_in_time_on_the_wire_would_be_seen(self, flow: Flow) -> None:
        class Dated(SourceSide):
            def send_prefilled(self, record: Any) -> None:
                record.held_since = 0.0
                super().send_prefilled(record)

        assert self._frames(flow, (1e3, 0.0), Dated) != self._frames(flow, (0.0, 0.0), Dated)

    @every_flow
    @pytest.mark.parametrize("drifts", [(1.01, 0.99), (0.99, 1.01)], ids=str)
    def test_clocks_that_drift_and_jump_only_shorten_or_stretch_timeouts(self, flow: Flow, drifts: tuple[float, float]) -> None:
        script = make(flow, request(flow, retries=9), drifts=drifts, offsets=(3e8, 0.0), router_cancels=1.0)
        for who in ("p0", "d0"):
            for each in at_every_event(script, Fault(FaultKind.CLOCK_JUMP, who=who, for_s=100.0), step=9):
                story = play(each)
                assert not story.rules
                assert story.ends[-1][1] is Outcome.DELIVERED

    def test_every_time_in_a_message_is_a_duration(self) -> None:
        fields = dict(_fields(Envelope, set()))
        times = {name for name, kind in fields.items() if kind is float or float in get_args(kind)}
        assert times == {"defer_timeout", "transfer_timeout", "held_s", "queue_s", "prefill_s", "step_age_s", "logprob"}
        # A stamp of core/stamps.py is a number that is compared, and no time.
        others = set(fields) - {"stamp", "stamps", "reads_stamps"}
        dates = ("_at", "_until", "_time", "_ns")
        assert not [name for name in others if name.endswith(dates) or "deadline" in name or "stamp" in name]
        assert {kind for kind in get_args(Message) if kind not in msgspec_structs()} == set()

    def test_a_date_in_a_message_would_be_seen(self) -> None:
        class Dated(msgspec.Struct):
            expires_at: float

        assert dict(_fields(Dated, set())) == {"expires_at": float}


def msgspec_structs() -> set[type]:
    """Every struct that a frame may hold."""
    found: set[type] = set()
    list(_fields(Envelope, found))
    return found


def _fields(kind: Any, seen: set[type]) -> Iterator[tuple[str, Any]]:
    """Every field of every struct that a value of `kind` may hold, and its type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind in seen:
            return
        seen.add(kind)
        for field in msgspec.structs.fields(kind):
            yield field.name, field.type
            yield from _fields(field.type, seen)
    for part in get_args(kind):
        yield from _fields(part, seen)
