"""What comes to the control port of an embedded instance and is no message, or comes at the wrong time: dropped and counted."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest
from driver_rig import Intruder
from embedded_nodes import Node, digest_of, false_source, false_target, hand_off, key_of, names, prompt_of

from kvbaton.config import Trust
from kvbaton.core.handoff import Aux, Executor, HandoffKey, Incarnation, Mode, Outcome, Span
from kvbaton.core.messages import (
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Over,
    Prefilled,
    Refused,
    Release,
    Retracted,
    Stop,
    Stopped,
    encode,
)
from watching import wait_until

KEY = b"the key of this cluster"
AUX = Aux(65, -1.0)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Node, Node]]:
    with Node(trust=Trust(KEY)) as source, Node(trust=Trust(KEY)) as target:
        yield source, target


_seeds = iter(range(1, 10_000))


def assert_works(pair: tuple[Node, Node]) -> None:
    """The next hand-off gives the tokens of a single instance, and no error of our own was met."""
    source, target = pair
    prompt = prompt_of(next(_seeds))
    assert hand_off(source, target, prompt).tokens == source.alone(prompt).wait().tokens
    assert [node.driver.stats().errors_total for node in pair] == [0, 0]
    for node in pair:
        node.wait_idle()


def hello_frame(pair: tuple[Node, Node]) -> bytes:
    """A hello that a source would accept."""
    return encode(Incarnation("unknown"), "", Hello(pair[1].card, wants_answer=False))


def dropped(node: Node) -> int:
    return node.driver.stats().dropped_total.total()


class TestFramesThatAreNoMessages:
    """Garbage, oversized, truncated and unauthenticated frames are dropped and counted; the thread lives; others go on."""

    @pytest.mark.parametrize("side", [0, 1], ids=["source", "target"])
    def test_garbage_is_dropped_counted_and_survived(self, pair: tuple[Node, Node], side: int) -> None:
        node, dice = pair[side], random.Random(side)
        whole = hello_frame(pair)
        frames = [dice.randbytes(dice.randrange(1, 5000)) for _ in range(20)]
        frames += [b"", bytes(10_000_000), whole[:-1], whole[: len(whole) // 2], whole[1:], whole + b"x", whole[:37]]
        frames += [bytes(16) + whole, encode(Incarnation("x"), "", Release(key_of("x"), 1))]
        before = dropped(node)
        with Intruder(KEY) as intruder:
            intruder.dial(node.address)
            for frame in frames:
                intruder.send(frame)
            wait_until(lambda: dropped(node) >= before + len(frames), f"{len(frames)} frames are counted")
        assert dropped(node) == before + len(frames)
        assert_works(pair)

    def test_a_frame_with_the_right_seal_is_taken(self, pair: tuple[Node, Node]) -> None:
        """The control of the test above: only what is wrong with them makes them drop."""
        before = dropped(pair[0])
        with false_target(*pair, KEY):
            assert dropped(pair[0]) == before

    @pytest.mark.parametrize("count", [0, 2, 50])
    def test_missing_and_surplus_parts_are_counted(self, pair: tuple[Node, Node], count: int) -> None:
        before = dropped(pair[0])
        with Intruder(KEY) as intruder:
            intruder.dial(pair[0].address)
            intruder.send(*([b"part"] * count or [b""]))
            wait_until(lambda: dropped(pair[0]) > before, "it is counted")
        assert_works(pair)


class TestForeignProtocols:
    """Whatever comes to the port, the thread survives and the next hand-off works."""

    @pytest.mark.parametrize("side", [0, 1], ids=["source", "target"])
    @pytest.mark.parametrize(
        "text",
        [b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n", random.Random(5).randbytes(100_000), b"\xff" * 64, "é".encode() * 100],
        ids=["HTTP", "random bytes", "0xff", "no ASCII"],
    )
    def test_a_foreign_protocol_on_the_port(self, pair: tuple[Node, Node], side: int, text: bytes) -> None:
        with socket.create_connection(("127.0.0.1", pair[side].address.handshake), timeout=10) as connection:
            connection.sendall(text)
            assert_works(pair)

    def test_huge_counts_in_lists(self, pair: tuple[Node, Node]) -> None:
        """A list that claims four thousand million entries is no message; nothing is allocated for it."""
        before = dropped(pair[0])
        with Intruder(KEY) as intruder:
            intruder.dial(pair[0].address)
            frame = encode(Incarnation("x"), "", Announced(key_of("x"), 1, 1, ((1, 2, 3),), ()))
            cut = frame.index(bytes([0x93, 1, 2, 3]))
            huge = frame[:cut] + b"\xdd\xff\xff\xff\xff" + frame[cut + 1 :]
            intruder.send_sealed(huge)
            wait_until(lambda: dropped(pair[0]) == before + 1, "it is counted")
        assert_works(pair)


def every_message(key: HandoffKey, grant: int) -> list[Message]:
    """One of each kind, about one hand-off."""
    return [
        Grant(key, grant, "another prompt", Mode.PULL, Executor.TARGET_READS, 0, (), 0, grant or 1),
        Announced(key, grant, 1, ((7, 8, 9),), (Span(0, 0, 40, 0, 3),)),
        Prefilled(key, grant, 1, 1, 40, 0.0),
        AuxSent(key, grant, AUX),
        Retracted(key, grant, 9),
        ConfirmAsk(key, grant, 9),
        Confirmed(key, grant, 1, 1),
        Release(key, grant),
        Stop(key, grant, Outcome.FAILED, "late"),
        Stopped(key, grant),
        Over(key, grant, Outcome.FAILED, "late"),
        Heartbeat(True, ((key, grant),)),
        Heartbeat(False, ((key, grant),)),
        Refused("late", key, grant),
        Refused("late", key, grant, stale=True),
    ]


class TestValidMessagesInTheWrongState:
    """From peers with the key: every message when it is too late, too early or misdirected."""

    def test_after_the_end_at_the_source(self, pair: tuple[Node, Node]) -> None:
        source, target = pair
        name, prompt = next(names), prompt_of(next(_seeds))
        source.prefill(name, prompt).wait()
        with false_target(source, target, KEY) as peer:
            digest = digest_of(prompt)
            peer.intruder.send_message(
                Grant(key_of(name), 1, digest, Mode.PULL, Executor.TARGET_READS, 0, (), 0, 1), source.incarnation
            )
            announced = peer.intruder.receive_message(Announced).message
            assert isinstance(announced, Announced)
            peer.intruder.send_message(Release(key_of(name), 1), source.incarnation)
            source.wait_late("release")
            assert source.engine.stats().blocks_held == 3, "a release counts only after the confirmation"
            peer.intruder.send_message(ConfirmAsk(key_of(name), 1, announced.generation), source.incarnation)
            peer.intruder.receive_message(Confirmed)
            peer.intruder.send_message(Release(key_of(name), 1), source.incarnation)
            source.wait_idle()
            for message in every_message(key_of(name), 1) + every_message(key_of(name), 2) + every_message(key_of("x"), 0):
                peer.intruder.send_message(message, source.incarnation)
            peer.intruder.send_message(Hello(peer.intruder.card_like(target.card), wants_answer=True))
            peer.intruder.receive_message(Hello)
        late = source.driver.stats().late_total
        assert {"grant", "announced", "prefilled", "aux", "retracted", "confirmed", "stopped", "over", "refused"} <= set(late)
        assert_works(pair)

    def test_after_the_end_at_the_target(self, pair: tuple[Node, Node]) -> None:
        source, target = pair
        with false_source(target, source, prompt_of(next(_seeds)), KEY) as peer:
            peer.announce()
            peer.finish_prefill(AUX)
            peer.confirm()
            tokens = peer.request.wait().tokens
            before = target.driver.stats().late_total
            for message in every_message(peer.grant.key, peer.grant.grant):
                peer.intruder.send_message(message, target.incarnation)
            wait_until(lambda: target.driver.stats().late_total.total() >= before.total() + 9, "nine of them are late")
        assert tokens[0] == AUX.token_id
        assert_works(pair)

    def test_too_early_at_the_target(self, pair: tuple[Node, Node]) -> None:
        """A confirmation of what was not moved starts no decode."""
        source, target = pair
        with false_source(target, source, prompt_of(next(_seeds)), KEY) as peer:
            for early in (Confirmed(peer.grant.key, peer.grant.grant, 1, 1), Stopped(peer.grant.key, peer.grant.grant)):
                peer.intruder.send_message(early, target.incarnation)
            target.wait_late("confirmed")
            target.wait_late("stopped")
            assert not peer.request.is_over
            peer.announce()
            peer.finish_prefill(AUX)
            peer.confirm()
            assert peer.request.wait().tokens[0] == AUX.token_id
        assert_works(pair)
