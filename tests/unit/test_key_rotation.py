"""The cluster key changes while processes run: at every step all uses go on, and a key that was removed is refused by name."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbaton.agent.sockets import ControlSockets, Dropped
from kvbaton.config import HTTP_KEY_HEADER, HttpTokens, KeyFile, Trust, http_token, parse_trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.auth import ClusterKey, Seal, Session
from kvbaton.core.handoff import Incarnation, TransferId
from kvbaton.core.messages import Heartbeat
from kvbaton.discovery.announcer import Announcer, ThreadAnnouncer
from kvbaton.discovery.listener import Listener
from kvbaton.discovery.messages import Cause, InstanceType, Malformed, Registration, TransferMode, decode_registration
from kvbaton.discovery.registry import Instance, Registry
from kvbaton.engines.embedded.shaped.rank_messages import RankKey
from kvbaton.engines.handoff_params import SourceCheck, TargetParams
from kvbaton.errors import ConfigError, ProtocolError
from kvbaton.launch.ports import PortPicker
from kvbaton.observe.handoffs_server import HandoffsServer
from kvbaton.observe.records import InstanceInfo
from kvbaton.observe.timelines import Timelines
from kvbaton.router.pair_template import InstanceLines, PairTemplate
from kvbaton.router.settings import RouterSettings
from kvbaton.transport.base import Batch, Direction, PeerRank, Region, TransportSettings
from kvbaton.transport.tcp import TcpTransport
from kvbaton.transport.tcp.wire import Secret
from watching import wait_until

OLD, NEW = b"the key that goes away", b"the key that is to stay"
STEPS = ((OLD,), (OLD, NEW), (NEW, OLD), (NEW,))
MET = [(one, other) for one, other in itertools.product(range(4), repeat=2) if abs(one - other) <= 1]
"""Steps that two parts may be at, one before the other."""
P, D = ControlAddress.of("10.0.0.1", 7001), ControlAddress.of("10.0.0.2", 7002)
SOURCE = PeerRank(Incarnation("source"))


class Keys:
    """A source whose keys the test sets."""

    def __init__(self, step: int) -> None:
        self.step = step

    def current(self) -> tuple[bytes, ...]:
        return STEPS[self.step]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, *keys: bytes) -> None:
    """Replace the file in one step, as Kubernetes and `mv` do."""
    fresh = path.with_name("fresh")
    fresh.write_bytes(b"\n".join(keys) + b"\n")
    fresh.chmod(0o600)
    fresh.replace(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    write(path, OLD)
    return path


class TestFile:
    def test_the_keys_are_those_of_the_file_looked_at_once_a_second(self, file: Path) -> None:
        clock = Clock()
        keys = KeyFile(file, clock)
        assert keys.current() == (OLD,)
        write(file, OLD, b"", NEW)
        clock.now = 0.9
        assert keys.current() == (OLD,)
        clock.now = 1.1
        assert keys.current() == (OLD, NEW)
        assert keys.current() is keys.current()
        write(file, NEW)
        clock.now = 2.2
        assert keys.current() == (NEW,)
        assert (keys.loads_total(), keys.failed_loads_total()) == (2, 0)

    @pytest.mark.parametrize("content", [b"", b"short\n", OLD + b"\nshort\n", b"\n".join([OLD] * 9), b"x" * 60_000])
    def test_what_cannot_be_used_changes_nothing_is_counted_and_not_shown(
        self, file: Path, caplog: pytest.LogCaptureFixture, content: bytes
    ) -> None:
        clock = Clock()
        keys = KeyFile(file, clock)
        write(file, NEW)
        file.write_bytes(content)
        clock.now = 2.0
        with caplog.at_level(logging.ERROR):
            assert keys.current() == (OLD,)
            assert keys.current() == (OLD,)
        assert (keys.loads_total(), keys.failed_loads_total()) == (0, 1)
        (line,) = [record.getMessage() for record in caplog.records]
        assert "the cluster keys stay as they were" in line
        assert str(file) in line
        assert OLD.decode() not in caplog.text
        write(file, NEW)
        clock.now = 4.0
        assert keys.current() == (NEW,)
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="--cluster-key-file"):
            KeyFile(file)

    def test_a_file_that_is_gone_or_has_become_a_pipe_changes_nothing(self, file: Path) -> None:
        clock = Clock()
        keys = KeyFile(file, clock)
        file.unlink()
        clock.now = 2.0
        assert keys.current() == (OLD,)
        os.mkfifo(file)  # which nothing writes to: opening it would wait for ever
        clock.now = 4.0
        assert keys.current() == (OLD,)
        assert keys.failed_loads_total() == 1

    def test_a_pipe_is_read_once_and_its_key_stays(self) -> None:
        for content in (OLD + b"\n", OLD + b"\n" + NEW + b"\n"):
            ours, theirs = os.pipe()
            os.write(theirs, content)
            os.close(theirs)
            try:
                if NEW in content:
                    with pytest.raises(ConfigError, match="is no file, and holds 2 keys"):
                        parse_trust(Path(f"/dev/fd/{ours}"))
                else:
                    assert parse_trust(Path(f"/dev/fd/{ours}")).key == OLD
            finally:
                os.close(ours)

    def test_another_process_gets_the_file_and_not_its_keys(self, file: Path) -> None:
        sent = RankKey.of(KeyFile(file))
        assert OLD not in sent.fixed + sent.file.encode()
        followed = sent.key()
        assert isinstance(followed, KeyFile)
        assert followed.current() == (OLD,)
        assert RankKey.of(OLD).key() == OLD


class TestUses:
    """Each use of the key, between two parts that are at most one step apart; and one that has only the removed key."""

    @pytest.mark.parametrize(("one", "other"), MET)
    def test_sealed_messages(self, one: int, other: int) -> None:
        sender, receiver = Seal(Keys(one)), Seal(Keys(other))
        assert receiver.open(sender.seal(b"message")) == b"message"

    def test_a_seal_follows_its_keys(self) -> None:
        keys = Keys(0)
        sender = Seal(keys)
        for keys.step in range(4):
            assert Seal(STEPS[keys.step][0]).open(sender.seal(b"message")) == b"message"

    @pytest.mark.parametrize("count", [1, 2])
    def test_a_seal_under_the_removed_key_is_refused(self, count: int) -> None:
        here = Seal(NEW) if count == 1 else Seal(Keys(1))
        text = "does not fit the cluster key" if count == 1 else "fits none of the 2 cluster keys"
        with pytest.raises(ProtocolError, match=rf"^wrong key: the seal {text} .* set here; set the same on both sides"):
            here.open(Seal(b"a key that was removed").seal(b"message"))

    @pytest.mark.parametrize(("one", "other"), MET)
    def test_control_connections(self, one: int, other: int) -> None:
        with ExitStack() as parts:
            alice, bob = (_sockets(parts, name, Keys(step)) for name, step in (("alice", one), ("bob", other)))
            alice.dial(bob.address, Heartbeat(True, ()))
            assert _senders(bob, alice) == ["alice"]
            bob.send(Incarnation("alice"), Heartbeat(True, ()))
            assert _senders(alice, bob) == ["bob"]
            assert alice.dropped_total.total() == bob.dropped_total.total() == 0

    @pytest.mark.parametrize(("one", "other"), [(0, 3), (3, 0)])
    def test_a_control_connection_under_the_removed_key_is_refused_on_both_sides(
        self, one: int, other: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        with ExitStack() as parts, caplog.at_level(logging.WARNING):
            alice, bob = (_sockets(parts, name, Keys(step)) for name, step in (("alice", one), ("bob", other)))
            alice.dial(bob.address, Heartbeat(True, ()))

            def are_refused() -> bool:
                assert _turn(alice) == _turn(bob) == []
                return all(each.dropped_total[Dropped.NOT_AUTHENTICATED] for each in (alice, bob))

            wait_until(are_refused, "both count it")
        lines = [record.getMessage() for record in caplog.records]
        assert len([line for line in lines if "wrong key: the first seal of the connection does not fit" in line]) == 2

    def test_a_connection_that_is_open_stays_open_when_its_key_is_removed(self) -> None:
        keys = Keys(0), Keys(0)
        with ExitStack() as parts:
            alice, bob = (_sockets(parts, name, each) for name, each in zip(("alice", "bob"), keys, strict=True))
            alice.dial(bob.address, Heartbeat(True, ()))
            assert _senders(bob, alice) == ["alice"]
            keys[0].step = keys[1].step = 3
            bob.send(Incarnation("alice"), Heartbeat(True, ()))
            assert _senders(alice, bob) == ["bob"]

    def test_a_recorded_proof_opens_no_other_connection(self) -> None:
        listener = Session(OLD, dialled=b"d1", accepted=b"a1", is_listener=True)
        with pytest.raises(ProtocolError, match=r"^wrong key: .* or was made for another connection"):
            Session.proved(Keys(1), dialled=b"d2", accepted=b"a1", proof=listener.seal(b""))

    @pytest.mark.parametrize(("one", "other"), MET)
    def test_tcp_data(self, one: int, other: int) -> None:
        assert _read_byte(Keys(one), Keys(other)) == ""

    @pytest.mark.parametrize(("one", "other"), [(0, 3), (3, 0)])
    def test_tcp_data_under_the_removed_key_is_refused(self, one: int, other: int) -> None:
        assert "cluster key is not that of this process" in _read_byte(Keys(one), Keys(other))

    def test_the_owner_of_memory_answers_under_the_key_that_was_proved(self) -> None:
        owner, reader = (Secret(b"t" * 16, Keys(step), "run") for step in (1, 2))
        challenge, nonce = b"c" * 16, b"n" * 16
        found = owner.fitting(reader.now().handshake(challenge, nonce), challenge)
        assert found is not None
        assert found.owner_proof(challenge, nonce) == reader.now().owner_proof(challenge, nonce)
        assert owner.fitting(Secret(b"t" * 16, b"another key", "run").handshake(challenge, nonce), challenge) is None

    @pytest.mark.parametrize(("one", "other"), MET)
    def test_tokens_of_requests(self, one: int, other: int) -> None:
        lines = InstanceLines(RouterSettings(cluster_key=Keys(one), instance_api_key="secret")).now().decode()
        token = dict(line.split(": ", 1) for line in lines.strip().split("\r\n"))[HTTP_KEY_HEADER]
        assert HttpTokens(Keys(other)).are_carried(token, "")
        assert HttpTokens(Keys(other)).are_carried("", f"Bearer {token}")
        assert "Authorization: Bearer secret" in lines

    def test_the_token_of_the_removed_key_is_refused(self) -> None:
        keys = Keys(2)
        tokens = HttpTokens(keys)
        assert tokens.are_carried(http_token(OLD), "")
        keys.step = 3
        assert not tokens.are_carried(http_token(OLD), "")
        assert tokens.are_carried(http_token(NEW), "")
        assert not HttpTokens(None)

    def test_timelines_are_served_to_either_key_until_one_is_removed(self) -> None:
        keys = Keys(1)
        timelines = Timelines(InstanceInfo("prefill", "127.0.0.1:1", Incarnation("p")))
        serving = HandoffsServer(timelines, "127.0.0.1", PortPicker().pick(), Trust(keys))
        serving.start()

        def status(key: bytes) -> int:
            url = f"http://127.0.0.1:{serving.port}/handoffs"
            request = urllib.request.Request(url, headers={HTTP_KEY_HEADER: http_token(key)})
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    assert json.load(answer)["handoffs"] == []
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code

        try:
            assert (status(OLD), status(NEW), status(b"another key")) == (200, 200, 401)
            keys.step = 3
            assert (status(OLD), status(NEW)) == (401, 200)
        finally:
            serving.close()

    @pytest.mark.parametrize(("one", "other"), [*MET, (0, 3), (3, 0)])
    def test_sources_that_a_router_has_paired(self, one: int, other: int) -> None:
        template, check = _template(Keys(one)), SourceCheck(Trust(Keys(other)), D)
        transfer = template.new_transfer_id(lambda: "0" * 32)
        params = TargetParams(TransferId(transfer), P, None, None, template.address_proof(transfer))
        is_met = (one, other) in MET
        assert (check.refusal(params) is None) is is_met
        assert (check.room_refusal(P, template.room(7)) is None) is is_met

    def test_what_a_router_has_made_ahead_is_dropped_with_its_key(self) -> None:
        keys = Keys(0)
        template, numbers = _template(keys), itertools.count()
        for keys.step in range(4):
            transfer = template.new_transfer_id(lambda: f"{next(numbers):032}")
            params = TargetParams(TransferId(transfer), P, None, None, template.address_proof(transfer))
            signing = STEPS[keys.step][0]
            assert SourceCheck(Trust(signing), D).refusal(params) is None
            assert SourceCheck(Trust(OLD if signing == NEW else NEW), D).refusal(params) is not None

    @pytest.mark.parametrize("kind", [Announcer, ThreadAnnouncer])
    def test_an_instance_stays_registered_through_every_step(
        self, kind: type[Announcer | ThreadAnnouncer], file: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The process beside the instance follows the file; the router is at most one step away."""
        keys, registry, port = Keys(0), Registry(expire_after_s=600.0), PortPicker().pick()
        listener = _Watching(registry, "127.0.0.1", port, cluster_key=keys)
        instance = _registration(InstanceType.PREFILL)
        with (
            caplog.at_level(logging.WARNING),
            listener,
            kind(instance, [f"127.0.0.1:{port}"], 0.05, cluster_key=KeyFile(file)),
        ):
            listener.wait_for(OLD)
            write(file, OLD, NEW)
            keys.step = 1
            listener.wait_for(OLD)
            write(file, NEW, OLD)
            listener.wait_for(NEW)
            keys.step = 2
            listener.wait_for(NEW)
            write(file, NEW)
            keys.step = 3
            listener.wait_for(NEW)
            assert len(registry.live(time.monotonic())) == 1
            assert listener.malformed_total()[Cause.NOT_SEALED] == 0
            write(file, OLD)
            wait_until(lambda: listener.malformed_total()[Cause.NOT_SEALED] > 0, "the removed key is counted", 60)
            wait_until(lambda: "refuses prefill instance" in caplog.text, "the instance is sent the reason", 60)
        wrong = "wrong key: the seal does not fit the cluster key that is set here"
        assert len([record for record in caplog.records if wrong in record.getMessage()]) >= 2, "on both sides"
        assert OLD.decode() not in caplog.text


class _Watching(Listener):
    """A router's discovery port that notes under which key messages were sealed."""

    _sealed: frozenset[bytes] = frozenset()

    def take(self, frames: list[bytes], sender: Any = None) -> Any:
        """Handle one message."""
        outcome = super().take(frames, sender)
        if not isinstance(outcome, Malformed):
            fit = [key for key in (OLD, NEW) if not isinstance(decode_registration(frames[-1], Seal(key)), Malformed)]
            self._sealed |= frozenset(fit)
        return outcome

    def wait_for(self, key: bytes) -> None:
        """Until a message under the key was taken, from now on."""
        self._sealed = frozenset()
        wait_until(lambda: key in self._sealed, "a message under the key", 60)


def _registration(kind: InstanceType, at: ControlAddress = P) -> Registration:
    return Registration(type=kind, http_address="10.0.0.9:80", zmq_address=str(at), transfer_mode=TransferMode.READ)


def _template(key: ClusterKey) -> PairTemplate:
    prefill, decode = (
        Instance(_registration(kind, at), 0.0, 0.0) for kind, at in ((InstanceType.PREFILL, P), (InstanceType.DECODE, D))
    )
    return PairTemplate(prefill, decode, None, None, key)


def _sockets(parts: ExitStack, name: str, key: ClusterKey) -> ControlSockets:
    sockets = ControlSockets(Incarnation(name), "127.0.0.1", PortPicker().pick(), Trust(key))
    parts.callback(sockets.close)
    return sockets


def _turn(sockets: ControlSockets) -> list[str]:
    sockets.wait(0.01, [])
    return [envelope.sender for envelope, _ in sockets.receive()]


def _senders(receiver: ControlSockets, other: ControlSockets) -> list[str]:
    """Who has sent what the receiver takes next."""
    taken: list[str] = []

    def has_some() -> bool:
        _turn(other)
        taken.extend(_turn(receiver))
        return bool(taken)

    wait_until(has_some, "a message")
    return taken


def _transports(parts: ExitStack, *keys: ClusterKey) -> Iterator[TcpTransport]:
    for name, key in zip(("source", "target"), keys, strict=True):
        settings = TransportSettings(incarnation=Incarnation(name), cluster_key=key)
        transport = TcpTransport(Region.of(bytearray(b"x" * 8)), settings)
        parts.callback(transport.close)
        yield transport


def _read_byte(owner: ClusterKey, reader: ClusterKey) -> str:
    """How a reader fares; empty when it got its byte."""
    with ExitStack() as parts:
        source, target = _transports(parts, owner, reader)
        target.connect(SOURCE, source.endpoint())
        target.post(Batch(SOURCE, Direction.READ, np.array([[0, 0, 1]], np.uint64)))
        ended = []

        def is_over() -> bool:
            ended.extend(target.poll())
            return bool(ended)

        wait_until(is_over, "a completion")
        return str(ended[0].error)
