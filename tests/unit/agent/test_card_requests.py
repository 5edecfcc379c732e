"""Questions for cards: their numbers, how often one is asked, and when an address is dialled no longer."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent_rig import LIMITS, Clock, Post, card_of

from kvbaton.agent.card_requests import CardRequests, is_answer_after
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import Hello

HERE, THERE = ControlAddress.of("127.0.0.1", 1), ControlAddress.of("127.0.0.1", 2)
SOON_S = LIMITS.retry / 4


@dataclass
class Rig:
    clock: Clock = field(default_factory=Clock)
    post: Post = field(default_factory=Post)

    def __post_init__(self) -> None:
        self.requests = CardRequests(card_of("t1"), LIMITS, self.clock, self.post)

    def asked(self) -> list[tuple[object, int]]:
        """Whom a question was sent to since the last call, and its number."""
        sent: list[tuple[object, int]] = [
            (to, message.question) for to, message in self.post.sent if isinstance(message, Hello)
        ]
        self.post.sent.clear()
        return sent


def test_questions_are_numbered_over_all_addresses_and_answer_nothing() -> None:
    rig = Rig()
    rig.requests.dial(HERE)
    rig.requests.dial(THERE)
    assert rig.requests.ask() == Hello(card_of("t1"), wants_answer=True, question=3, answers=0, takes_several=True)
    assert rig.asked() == [(HERE, 1), (THERE, 2)]
    assert rig.requests.asked == 3


def test_one_question_does_for_all_that_wait_and_is_repeated_when_it_has_no_answer() -> None:
    rig = Rig()
    rig.requests.dial(HERE)
    rig.clock.now += SOON_S
    rig.requests.dial(HERE)
    assert rig.asked() == [(HERE, 1)]
    rig.clock.now += LIMITS.retry / 2 - SOON_S
    rig.requests.dial(HERE)
    assert rig.asked() == [(HERE, 2)]
    rig.requests.on_answer(HERE)
    rig.requests.dial(HERE)
    assert rig.asked() == [(HERE, 3)], "an answer ends the wait"


def test_a_question_that_was_asked_too_early_does_not_do() -> None:
    rig = Rig()
    rig.requests.dial(HERE)
    rig.requests.dial(HERE, after=1)
    rig.requests.dial(HERE, after=1)
    assert rig.asked() == [(HERE, 1), (HERE, 2)]


def test_only_an_answer_to_a_later_question_shows_what_has_happened_since() -> None:
    assert not is_answer_after(3, 2)
    assert not is_answer_after(3, 3)
    assert is_answer_after(3, 4)
    assert not is_answer_after(0, 0), "a card that answers nothing may be of any age"
    assert is_answer_after(3, None), "a release that does not number its answers"


def test_an_address_that_nothing_needs_is_dialled_no_longer() -> None:
    rig = Rig()
    assert rig.requests.next_deadline() is None
    rig.requests.dial(HERE)
    rig.clock.now += SOON_S
    rig.requests.dial(THERE)
    assert rig.requests.next_deadline() == rig.clock.now - SOON_S + LIMITS.retry
    rig.clock.now += LIMITS.retry - SOON_S
    rig.requests.hang_up({THERE})
    assert rig.post.hung_up == [HERE]
    assert rig.requests.next_deadline() == rig.clock.now + LIMITS.retry
    rig.requests.hang_up(set())
    assert rig.post.hung_up == [HERE, THERE]
    assert rig.requests.next_deadline() is None


def test_an_unknown_peer_is_asked_once_however_much_it_sends_and_again_when_it_does_not_answer() -> None:
    rig = Rig()
    for _ in range(50):
        rig.requests.ask_back(Incarnation("s1"))
    rig.requests.ask_back(Incarnation("s2"))
    assert rig.asked() == [("s1", 1), ("s2", 2)]
    rig.clock.now += LIMITS.retry / 2 - 0.001
    rig.requests.ask_back(Incarnation("s1"))
    assert rig.asked() == []
    rig.clock.now += 0.002
    rig.requests.ask_back(Incarnation("s1"))
    assert rig.asked() == [("s1", 3)]


def test_a_peer_that_has_answered_and_is_forgotten_once_more_is_asked_at_once() -> None:
    rig = Rig()
    rig.requests.ask_back(Incarnation("s1"))
    rig.requests.on_card_of(Incarnation("s1"))
    rig.requests.ask_back(Incarnation("s1"))
    assert rig.asked() == [("s1", 1), ("s1", 2)]
