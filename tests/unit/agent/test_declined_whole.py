"""A request that was refused as a whole: every hand-off of its transfer id is let go, those to come included; and sides."""

from __future__ import annotations

import pytest
from agent_rig import AUX, BLOCKS, LIMITS, Net, card_of

from kvbaton.agent.engine_port import Allocation, Offer, SourceEnded, SourceRequest
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import HandoffKey, Mode, Outcome, TransferId
from kvbaton.core.messages import Stop
from kvbaton.core.timeline import Side

TOKENS = 3
KEYS = tuple(HandoffKey(TransferId("tx"), prompt, sample) for prompt in range(2) for sample in range(2))
OTHER = HandoffKey(TransferId("ty"))


def wanted(key: HandoffKey = KEYS[0], prompt: str = "") -> SourceRequest:
    return SourceRequest(key, prompt, ControlAddress.of("127.0.0.1", 1), None, Mode.PUSH)


class Two:
    """A source and a target that have not met."""

    def __init__(self) -> None:
        self.net = Net()
        self.source = self.net.add(card_of("s"), 1)
        self.target = self.net.add(card_of("t"), 2)

    def refuse(self, prompt: str = "") -> None:
        self.target.coordinator.decline(wanted(prompt=prompt), "too long")
        self.net.deliver_all()

    def expect(self, *keys: HandoffKey) -> None:
        for key in keys:
            self.source.coordinator.expect_target(key, f"prompt {key.prompt_index}")

    def live(self) -> set[HandoffKey]:
        return set(self.source.coordinator.source.live)

    def ended(self) -> set[HandoffKey]:
        return {event.key for event in self.source.events if isinstance(event, SourceEnded)}


@pytest.mark.parametrize("are_held", [False, True])
def test_every_prompt_and_sample_is_released_and_nothing_else(are_held: bool) -> None:
    two = Two()
    two.expect(*KEYS, OTHER)
    for key in KEYS if are_held else ():
        two.source.coordinator.offer(Offer(key, BLOCKS, TOKENS, AUX))
    two.refuse()
    assert two.ended() == set(KEYS)
    assert two.live() == {OTHER}
    assert not two.target.coordinator.target.decline_notices, "it was answered"


def test_a_refusal_that_knows_its_prompt_is_about_that_one_alone() -> None:
    two = Two()
    two.expect(*KEYS)
    two.refuse("prompt 0")
    assert two.ended() == {KEYS[0]}


def test_those_that_come_later_end_at_once_each_of_them_once() -> None:
    two = Two()
    two.expect(KEYS[0])
    two.refuse()
    two.expect(*KEYS[1:])
    assert two.ended() == set(KEYS)
    two.refuse()
    two.expect(*KEYS, OTHER)
    assert two.live() == {*KEYS, OTHER}, "a second request of that transfer id is not the one that was refused"


@pytest.mark.parametrize("is_held", [False, True])
def test_what_had_ended_before_is_not_meant_when_it_is_asked_for_again(is_held: bool) -> None:
    """vLLM reports a request whose load failed like one that it never took: its hand-off is over then, on both sides."""
    two = Two()
    two.expect(KEYS[0])
    if is_held:
        two.source.coordinator.offer(Offer(KEYS[0], BLOCKS, TOKENS, AUX))
        two.net.pass_time(LIMITS.defer_timeout + 1)
    else:
        two.source.coordinator.cancel(KEYS[0], Side.SOURCE)
    assert two.ended() == {KEYS[0]}
    two.refuse()
    two.expect(*KEYS)
    assert two.live() == {KEYS[0]}
    assert two.ended() == set(KEYS), "those of which nothing was known are not awaited by anybody"


def test_a_decline_is_forgotten_after_defer_timeout() -> None:
    two = Two()
    two.refuse()
    two.net.clock.now += LIMITS.defer_timeout + 1
    two.expect(*KEYS)
    assert two.live() == set(KEYS)


def test_what_has_a_grant_goes_on_and_what_a_target_wants_again_counts() -> None:
    two = Two()
    two.expect(KEYS[0])
    for key in KEYS[:2]:
        asked = wanted(key, f"prompt {key.prompt_index}")
        two.target.coordinator.expect_source(asked)
        if key == KEYS[0]:
            two.target.coordinator.allocated(Allocation(asked, BLOCKS, TOKENS, 0))
    two.net.deliver_all()
    two.refuse()
    assert two.live() == {KEYS[0]}
    two.net.pass_time(LIMITS.beat_s + 1)
    two.expect(*KEYS[1:])
    assert two.live() == set(KEYS[:2]), "heartbeats state that a request waits for the second"


def test_a_part_that_is_live_at_the_target_does_not_keep_the_rest_from_being_released() -> None:
    """The first prompt was admitted before the second one turned out to be wrong; then the first is given up too."""
    two = Two()
    two.expect(*KEYS)
    two.target.coordinator.expect_source(wanted(prompt="prompt 0"))
    two.net.letters.clear()
    two.target.coordinator.decline(wanted(), "a token that is none")
    two.target.coordinator.cancel(KEYS[0], Side.TARGET)
    two.net.pass_time(3 * LIMITS.retry)
    assert two.ended() == set(KEYS)
    assert {message.prompt for message in two.target.sent if isinstance(message, Stop)} == {""}


def test_a_grant_that_was_parked_is_let_go_and_so_is_the_request_that_comes_for_it() -> None:
    """The source's half of the request is still on its way: it would be computed and held for a target that is gone."""
    two = Two()
    asked = wanted(KEYS[0], "prompt 0")
    two.target.coordinator.expect_source(asked)
    two.target.coordinator.allocated(Allocation(asked, BLOCKS, TOKENS, 0))
    two.net.deliver_all()
    assert two.live() == {KEYS[0]}, "its grant is parked"
    two.refuse()
    assert not two.live()
    assert not two.ended(), "the engine has asked for nothing yet"
    two.expect(*KEYS)
    assert two.ended() == set(KEYS)
    two.expect(KEYS[0])
    assert two.live() == {KEYS[0]}, "each is declined once"


def both_sides() -> Two:
    """The target instance is also a source of the same key, for another instance."""
    two = Two()
    two.target.coordinator.expect_target(KEYS[0], "prompt 0")
    two.target.coordinator.expect_source(wanted(prompt="prompt 0"))
    two.net.deliver_all()
    return two


@pytest.mark.parametrize("side", [Side.SOURCE, Side.TARGET, None])
def test_giving_up_one_side_leaves_the_other_of_the_same_key_alone(side: Side | None) -> None:
    two = both_sides()
    two.target.coordinator.cancel(KEYS[0], side)
    coordinator = two.target.coordinator
    assert (KEYS[0] in coordinator.source.live) is (side is Side.TARGET)
    assert (KEYS[0] in coordinator.target.live) is (side is Side.SOURCE)
    ended = [event for event in two.target.events if isinstance(event, SourceEnded)]
    assert [event.outcome for event in ended] == ([] if side is Side.TARGET else [Outcome.CANCELLED])
