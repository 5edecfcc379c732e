"""Who is who: cards by incarnation and by address, and what is forgotten when."""

from __future__ import annotations

import pytest
from agent_rig import card_of

from kvbaton.agent.coordinator import Peers
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Incarnation
from kvbaton.errors import TransportError

HERE, THERE = ControlAddress.of("127.0.0.1", 1), ControlAddress.of("127.0.0.1", 2)
A, B, C = (Incarnation(name) for name in "abc")


def test_a_peer_is_found_by_incarnation_and_by_the_address_it_answered_at() -> None:
    peers = Peers()
    assert peers.learn(card_of("a"), HERE, asked=0) is None
    assert peers.learn(card_of("b"), None, asked=0) is None
    assert peers.at(HERE) == peers.card(A) == card_of("a")
    assert peers.card(B) == card_of("b")
    assert peers.at(THERE) is None
    assert peers.card(C) is None


def test_another_incarnation_at_the_same_address_replaces_the_first() -> None:
    peers = Peers()
    peers.learn(card_of("a"), HERE, asked=0)
    assert peers.learn(card_of("b"), HERE, asked=0) == A
    assert peers.card(A) is None
    assert peers.at(HERE) == card_of("b")


def test_another_incarnation_needs_an_answer_to_a_question_of_after_the_card_that_is_known() -> None:
    peers = Peers()
    assert peers.replaces_after(A, HERE) is None
    peers.learn(card_of("a"), HERE, asked=4)
    peers.learn(card_of("a"), HERE, asked=6)
    assert peers.replaces_after(A, HERE) is None
    assert peers.replaces_after(B, HERE) == 4
    assert peers.replaces_after(B, THERE) is None
    assert peers.learn(card_of("b"), HERE, asked=7) == A
    assert peers.replaces_after(A, HERE) == 7


def test_the_same_incarnation_may_answer_again_and_elsewhere() -> None:
    peers = Peers()
    peers.learn(card_of("a"), HERE, asked=0)
    assert peers.learn(card_of("a"), HERE, asked=0) is None
    assert peers.learn(card_of("a"), THERE, asked=0) is None
    assert peers.at(HERE) == peers.at(THERE) == card_of("a")
    peers.forget(A)
    assert peers.at(HERE) is None
    assert peers.at(THERE) is None


def test_room_is_made_by_the_longest_unused_peer_that_is_idle() -> None:
    peers = Peers(limit=3)
    for name in "abc":
        assert peers.make_room(()) is None
        peers.learn(card_of(name), None, asked=0)
    peers.card(A)
    assert peers.make_room({B}) == C
    assert peers.card(C) is None
    assert peers.card(A) is not None
    assert peers.card(B) is not None


def test_a_peer_that_is_busy_is_never_forgotten_for_another() -> None:
    peers = Peers(limit=2)
    peers.learn(card_of("a"), HERE, asked=0)
    peers.learn(card_of("b"), THERE, asked=0)
    with pytest.raises(TransportError, match="2 peers have hand-offs here"):
        peers.make_room({A, B})
    assert peers.at(HERE) is not None
    assert peers.at(THERE) is not None


def test_addresses_are_bounded_too() -> None:
    peers = Peers(limit=2)
    for port in range(1, 10):
        peers.learn(card_of("a"), ControlAddress.of("127.0.0.1", port), asked=0)
    known = [port for port in range(1, 10) if peers.at(ControlAddress.of("127.0.0.1", port)) is not None]
    assert known == [8, 9]
