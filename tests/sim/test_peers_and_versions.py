"""Peers that die, drain, queue, share names, or have another version, as disaggregation in SGLang got them wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from scenario import (
    BOTH_DELIVERED,
    HOP_S,
    Flow,
    at_every_event,
    every_flow,
    every_push,
    first_broken,
    make,
    play,
    request,
    sides,
)
from twosome import Twosome, entries

from kvbaton.agent import coordinator as coordinator_module
from kvbaton.agent import source as source_module
from kvbaton.agent import target as target_module
from kvbaton.agent.coordinator import Peers
from kvbaton.agent.source import SourceRecord, SourceSide
from kvbaton.agent.target import TargetRecord, TargetSide
from kvbaton.core.card import PROTOCOL
from kvbaton.core.grants import GrantWindows
from kvbaton.core.handoff import HandoffKey, Outcome
from kvbaton.core.lifecycle import CopyEvent, CopyState
from kvbaton.core.messages import Envelope, decode
from kvbaton.errors import ProtocolError
from kvbaton.sim import instance as instance_module
from kvbaton.sim.instance import Bugs
from kvbaton.sim.run import LIMITS, Run
from kvbaton.sim.script import Fault, FaultKind, Script
from kvbaton.sim.transport import SimRank


class TestTargetKilled:
    """A target that is killed mid-transfer costs its source nothing for long, other targets nothing at all; it is served again
    when it is back, and dead peers do not pile up."""

    @staticmethod
    def _kills(flow: Flow) -> list[Script]:
        requests = request(flow), request(flow, decode=1), request(flow, at_s=5.0)
        script = make(flow, *requests, decodes=2, prefill_blocks=12)
        first = msgspec.structs.replace(script, requests=script.requests[:2])
        kills = at_every_event(first, Fault(FaultKind.RESTART, who="d0"), step=3)
        return [msgspec.structs.replace(script, faults=each.faults) for each in kills]

    @every_flow
    def test_a_killed_target_harms_no_other_and_is_served_again(self, flow: Flow) -> None:
        for script in self._kills(flow):
            story = play(script)
            assert not story.rules
            assert story.ends[1:] == [BOTH_DELIVERED, BOTH_DELIVERED]
            dead = story.times("p0#1: SourceEnded", "t0.1")
            assert dead[0] - story.fault_at < LIMITS.defer_timeout + 6 * HOP_S

    @every_flow
    def test_without_a_lease_its_blocks_are_lost(self, flow: Flow) -> None:
        class Hoarder(SourceSide):
            def _has_deadline(self, record: SourceRecord) -> bool:
                del record
                return False

        assert first_broken(self._kills(flow), sides(source=Hoarder)) == {"hard end"}

    @staticmethod
    def _restarts(monkeypatch: pytest.MonkeyPatch, limit: int) -> list[int]:
        """What a source and a target hold after a hundred, and after two hundred restarts of their peers."""
        for module in (source_module, target_module):
            monkeypatch.setattr(module, "_MAX_ENDS", 50)
        monkeypatch.setattr(source_module, "GrantWindows", partial(GrantWindows, limit=limit))
        monkeypatch.setattr(coordinator_module, "Peers", partial(Peers, limit=limit))
        world = Twosome()
        source = world.join("p")
        sizes = []
        for number in range(200):
            target = world.join(f"d#{number}")
            world.hand_off(source, target, f"t{number}", cancel=number % 2 == 1)
            del world.sides[target.name]
            if number in (99, 199):
                sizes.append(entries(source.coordinator))
        return sizes

    def test_the_peer_table_does_not_grow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hundred, two_hundred = self._restarts(monkeypatch, limit=50)
        assert hundred == two_hundred

    def test_without_a_limit_it_grows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hundred, two_hundred = self._restarts(monkeypatch, limit=10**9)
        assert two_hundred >= hundred + 200


class TestOneCopyFails:
    """When one of several posted copies fails, the others are drained before any of the memory is reported free."""

    @staticmethod
    def _failures(flow: Flow) -> list[Script]:
        """Many copies in flight, one of which fails; another request waits for the very blocks."""
        pair = request(flow, tokens=6, chunk=1), request(flow, at_s=0.004, tokens=6)
        script = make(flow, *pair, decode_blocks=6, move_s=0.01)
        worker = "p0" if flow.source_writes else "d0"
        fails = [Fault(FaultKind.COPY_FAILS, who=worker, number=rank) for rank in range(2)]
        return [each for fail in fails for each in at_every_event(script, fail, step=11)]

    @every_flow
    def test_posted_copies_are_drained_before_memory_is_free(self, flow: Flow) -> None:
        failed = 0
        for script in self._failures(flow):
            story = play(script)
            assert not story.rules
            failed += story.ends[0] == (Outcome.FAILED, Outcome.FAILED)
        assert failed

    @every_flow
    def test_memory_that_is_free_too_early_would_be_seen(self, flow: Flow) -> None:
        class Hasty(SimRank):
            def _settle(self, leg: Any) -> None:
                if leg.state in (CopyState.BROKEN, CopyState.STOPPING):
                    self._step(leg, CopyEvent.DRAINED)

        assert first_broken(self._failures(flow), Bugs(rank=Hasty)) & {"epoch", "foreign byte"}


class TestTimeLimits:
    """A time limit starts when its phase does, and measures lack of progress: neither queueing nor slowness eats it up."""

    @staticmethod
    def _slow(flow: Flow, why: str) -> Script:
        """Everything takes far longer than the limit, and goes on all the time."""
        long = 3 * LIMITS.transfer_timeout
        match why:
            case "queued at the target":
                return make(flow, request(flow), request(flow, at_s=0.001), decode_blocks=3, decode_s=long)
            case "slow prefill":
                return make(flow, request(flow, tokens=4), step_s=long / 4)
            case _:
                return make(flow, request(flow, tokens=6, chunk=6), layers=1, move_s=long / 6)

    @every_flow
    @pytest.mark.parametrize("why", ["queued at the target", "slow prefill", "slow copies"])
    def test_what_is_slow_but_goes_on_is_not_given_up(self, flow: Flow, why: str) -> None:
        story = play(self._slow(flow, why))
        assert not story.rules
        assert set(story.ends) == {BOTH_DELIVERED}
        assert max(story.back_at.values()) > 2 * LIMITS.transfer_timeout

    @every_push
    @pytest.mark.parametrize("why", ["queued at the target", "slow prefill", "slow copies"])
    def test_measuring_age_instead_would_be_seen(self, flow: Flow, why: str) -> None:
        class Aging(TargetSide):
            def tick(self) -> None:
                births: dict[HandoffKey, float] = self.__dict__.setdefault("births", {})
                for key, record in self.live.items():
                    record.give_up_at = births.setdefault(key, self._clock()) + LIMITS.transfer_timeout
                super().tick()

            def _deadline(self, record: TargetRecord) -> float:
                return record.give_up_at

        assert play(self._slow(flow, why), sides(target=Aging)).rules == {"spurious failure"}


class TestTransferIdNames:
    """Any name does for a transfer id, at once again when it is free, for many prompts and samples together, and on two
    sources at a time."""

    @every_flow
    @pytest.mark.parametrize("name", ["0", "-1", str(2**63 - 1), str(2**64), "../../etc", "ключ\u0000🗝"], ids=ascii)
    def test_any_name_does(self, flow: Flow, name: str) -> None:
        assert play(make(flow, request(flow, transfer_id=name))).ends == [BOTH_DELIVERED]

    @every_flow
    def test_a_name_is_free_as_soon_as_its_request_is_over(self, flow: Flow) -> None:
        first = request(flow, transfer_id="again")
        over = play(make(flow, first)).back_at
        for pause in (1e-6, 1e-4, 0.001):
            again = request(flow, at_s=max(over.values()) + pause, transfer_id="again", tokens=2)
            story = play(make(flow, first, again))
            assert not story.rules
            assert story.ends == [BOTH_DELIVERED, BOTH_DELIVERED]

    @staticmethod
    def _batch(flow: Flow) -> Script:
        places = [(prompt, sample) for prompt in range(3) for sample in range(2)]
        requests = [request(flow, transfer_id="batch", prompt_index=prompt, sample_index=sample) for prompt, sample in places]
        return make(flow, *requests)

    @every_flow
    def test_many_prompts_and_samples_share_a_transfer_id(self, flow: Flow) -> None:
        story = play(self._batch(flow))
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED] * 6

    @every_flow
    def test_without_the_indices_they_would_be_one(self, flow: Flow) -> None:
        class ByTransferId(dict[HandoffKey, Any]):
            """A table that forgets which prompt and sample a key is about."""

            def __setitem__(self, key: HandoffKey, value: Any) -> None:
                super().__setitem__(HandoffKey(key.transfer_id), value)

            def get(self, key: HandoffKey, default: Any = None) -> Any:
                return super().get(HandoffKey(key.transfer_id), default)

            def __delitem__(self, key: HandoffKey) -> None:
                super().__delitem__(HandoffKey(key.transfer_id))

        class Collapsing(SourceSide):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                self.live = ByTransferId()

        assert play(self._batch(flow), sides(source=Collapsing)).rules

    @every_flow
    def test_one_transfer_id_on_two_sources(self, flow: Flow) -> None:
        pair = [request(flow, prefill=side, decode=side, transfer_id="both") for side in range(2)]
        turns = [request(flow, at_s=1.0 + side, prefill=side, transfer_id="both") for side in range(2)]
        story = play(make(flow, *pair, *turns, prefills=2, decodes=2))
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED] * 4


class TestOtherVersions:
    """What a newer peer adds is skipped, what an older one leaves out has a default, and another version is refused by name at
    once, without harm to anybody else."""

    @staticmethod
    def _rewriting(change: Callable[[dict[str, Any]], None], address: str, both_ways: bool = False) -> Callable[[Run], None]:
        """Let `address` speak (and be spoken to) as `change` has it."""

        def prepare(run: Run) -> None:
            arrive = run.cluster.network.arrive

            def rewrite(reader: str, frame: bytes, sender: str) -> None:
                if sender == address or (both_ways and reader == address):
                    fields = msgspec.msgpack.decode(frame)
                    change(fields)
                    frame = msgspec.msgpack.encode(fields)
                arrive(reader, frame, sender)

            run.cluster.network.arrive = rewrite

        return prepare

    @staticmethod
    def _newer(fields: dict[str, Any]) -> None:
        """Add a field everywhere, and an element to every array that stands for a struct."""
        message = fields["message"]
        fields["hint"] = message["deadline_hint"] = {"later": [1, 2, 3]}
        if isinstance(message.get("key"), list):
            message["key"].append("shard 7")
        for span in message.get("spans", ()):
            span.append(b"checksum")
        for key, _ in message.get("live", ()):
            key.append(None)

    @staticmethod
    def _older(fields: dict[str, Any]) -> None:
        """Leave everything out that has a default."""
        message = fields["message"]
        for name in ("stale", "reason") if message["type"] in ("stop", "over", "refused") else ():
            if name == "stale" or message["type"] != "refused":
                message.pop(name, None)
        if message.get("key"):
            message["key"] = message["key"][:1]
        message["live"] = [[key[:1], grant] for key, grant in message.get("live", ())]

    @every_flow
    @pytest.mark.parametrize("change", [_newer, _older], ids=["newer", "older"])
    @pytest.mark.parametrize("who", ["p0", "d0"])
    def test_more_or_less_is_understood(self, flow: Flow, change: Callable[[dict[str, Any]], None], who: str) -> None:
        story = play(make(flow), prepare=self._rewriting(change, who))
        assert not story.rules
        assert story.ends == [BOTH_DELIVERED]

    @every_flow
    def test_a_decoder_that_skips_nothing_would_be_seen(self, flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
        def strict(frame: bytes) -> Envelope:
            envelope = decode(frame)
            if msgspec.msgpack.encode(envelope) != frame:
                raise ProtocolError("a field too many")
            return envelope

        monkeypatch.setattr(instance_module, "decode", strict)
        assert play(make(flow)).ends == [BOTH_DELIVERED]
        assert play(make(flow), prepare=self._rewriting(self._newer, "d0")).rules == {"wire"}

    def _foreign(self, run: Run) -> None:
        run.is_disturbed = run.cluster.has_foreigners = True

        def next_version(fields: dict[str, Any]) -> None:
            fields["version"] = PROTOCOL + 1

        self._rewriting(next_version, "d1", both_ways=True)(run)

    @every_flow
    def test_another_version_is_refused_by_name_at_once(self, flow: Flow) -> None:
        pair = request(flow), request(flow, decode=1)
        story = play(make(flow, *pair, decodes=2), prepare=self._foreign)
        assert not story.rules
        assert story.ends[0] == BOTH_DELIVERED
        assert story.ends[1][1] is Outcome.FAILED
        versions = f"protocol version is {PROTOCOL} here and {PROTOCOL + 1} there"
        ended = story.times("d1#3: TargetEnded", versions)
        asked = story.times("d1#3 -> p0: Hello(")
        assert ended[0] - asked[0] < HOP_S
        assert not story.said("d1#3 -> p0: Grant(")
        assert story.run.all_instances[0].dropped_total[versions] == 1

    @every_flow
    def test_without_the_version_check_it_would_be_taken_for_ours(self, flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
        decoder = msgspec.msgpack.Decoder(Envelope)
        monkeypatch.setattr(instance_module, "decode", decoder.decode)
        story = play(make(flow, request(flow, decode=1), decodes=2), prepare=self._foreign)
        assert story.ends == [BOTH_DELIVERED]
