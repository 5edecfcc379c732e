"""Sources that are dead, silent or slow: the wait is bounded by the target's timeout, and no other request waits."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from driver_rig import Intruder
from embedded_nodes import Node, hand_off, names, prompt_of

from kvbaton.config import Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Aux, Span
from kvbaton.core.messages import Announced, AuxSent, ConfirmAsk, Confirmed, Grant, Hello, Prefilled
from kvbaton.launch.ports import PortPicker

SHORT_LIMITS = Limits(transfer_timeout=3.0, defer_timeout=4.0, retry=0.1)


@contextmanager
def dead() -> Iterator[ControlAddress]:
    """An address without a listener."""
    yield ControlAddress.of("127.0.0.1", PortPicker().pick())


@contextmanager
def black_hole() -> Iterator[ControlAddress]:
    """A port whose connections the kernel accepts and no process serves."""
    port = PortPicker().pick()
    with socket.create_server(("127.0.0.1", port), backlog=16):
        yield ControlAddress.of("127.0.0.1", port)


@contextmanager
def mute() -> Iterator[ControlAddress]:
    """A ZeroMQ peer that sends nothing."""
    with Intruder() as intruder:
        intruder.listen()
        yield intruder.address


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Node, Node]]:
    with Node(limits=SHORT_LIMITS) as source, Node(limits=SHORT_LIMITS) as target:
        yield source, target


class TestSourcesThatDoNotAnswer:
    """A dead host, a black-holed port and a mute peer cost their own requests a bounded time, and other peers nothing."""

    def test_the_wait_is_bounded_and_no_other_request_waits(self, pair: tuple[Node, Node]) -> None:
        source, target = pair
        with ExitStack() as stack:
            addresses = [stack.enter_context(kind()) for kind in (dead, black_hole, mute)]
            patient = stack.enter_context(Node())
            lost = [target.decode(next(names), prompt_of(index), address) for index, address in enumerate(addresses * 5)]
            waiting = [patient.decode(next(names), prompt_of(index), address) for index, address in enumerate(addresses)]
            for seed in range(100, 103):
                prompt = prompt_of(seed)
                assert hand_off(source, target, prompt).tokens == source.alone(prompt).wait().tokens
            assert not any(request.is_over for request in lost), "what came later from a healthy source was done earlier"
            for request in lost:
                assert "no progress for 3 s while handshaking" in request.wait().error
            assert not any(request.is_over for request in waiting), "the bound is transfer_timeout and nothing else"
        target.wait_idle()
        assert target.driver.stats().errors_total == 0

    def test_it_is_asked_again_and_again_more_and_more_rarely(self, pair: tuple[Node, Node]) -> None:
        _, target = pair
        with Intruder() as intruder:
            intruder.listen()
            request = target.decode(next(names), prompt_of(1), intruder.address)
            request.wait()
            greetings = 0
            while intruder._socket.poll(100):
                intruder.receive_message(Hello)
                greetings += 1
        assert 4 <= greetings <= 10, "every 0.1 s would be 30, never again would be 1"

    def test_a_slow_peer_is_waited_for_within_the_bound(self, pair: tuple[Node, Node]) -> None:
        """It answers the third greeting, and everything else one beat later."""
        source, target = pair
        with Intruder() as intruder:
            intruder.listen()
            request = target.decode(next(names), prompt_of(2), intruder.address)
            for _ in range(3):
                intruder.receive_message(Hello)
            assert hand_off(source, target, prompt_of(3)).is_good
            intruder.send_message(Hello(intruder.card_like(source.card), wants_answer=False), target.incarnation)
            intruder.receive_message(Grant)
            grant = intruder.receive_message(Grant).message
            assert isinstance(grant, Grant)
            key, number = grant.key, grant.grant
            intruder.send_message(Announced(key, number, 1, ((1, 2, 3),), (Span(0, 0, 40, 0, 3),)), target.incarnation)
            intruder.send_message(Prefilled(key, number, 1, 1, 40, 0.0), target.incarnation)
            intruder.send_message(AuxSent(key, number, Aux(65, -1.0)), target.incarnation)
            intruder.receive_message(ConfirmAsk)
            intruder.receive_message(ConfirmAsk)
            intruder.send_message(Confirmed(key, number, 1, 1), target.incarnation)
            assert request.wait().tokens[0] == 65
