"""Block lists and aux records that make no sense, from a peer with the key: one request fails by name, no byte is written."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from embedded_nodes import (
    PROMPT_TOKENS,
    FalseSource,
    Node,
    digest_of,
    false_source,
    false_target,
    hand_off,
    key_of,
    names,
    prompt_of,
)

from kvbaton.core.handoff import Aux, Executor, Mode, Span
from kvbaton.core.messages import AuxSent, Grant, Message, Over, Stopped, encode
from kvbaton.core.segments import HOLE
from watching import wait_until

AUX = Aux(65, -1.0)
WHOLE = Span(0, 0, PROMPT_TOKENS, 0, 3)
Blocks = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Node, Node]]:
    with Node() as source, Node() as target:
        source.cache.data[:] = np.random.default_rng(1).standard_normal(source.cache.data.shape, np.float32)
        yield source, target


_seeds = iter(range(20_000, 30_000))


@pytest.fixture
def peer(pair: tuple[Node, Node]) -> Iterator[FalseSource]:
    """A peer that has been granted poisoned blocks; afterwards the next hand-off is right."""
    source, target = pair
    with false_source(target, source, prompt_of(next(_seeds))) as peer:
        yield peer
    assert_works(pair)


def assert_works(pair: tuple[Node, Node]) -> None:
    source, target = pair
    prompt = prompt_of(next(_seeds))
    assert hand_off(source, target, prompt).tokens == source.alone(prompt).wait().tokens
    assert [node.driver.stats().errors_total for node in pair] == [0, 0]
    for node in pair:
        node.wait_idle()


def untouched(target: Node) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The target's memory as it is now, to compare with later."""
    return target.cache.data.copy()


def is_same(target: Node, before: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bool:
    return bool((target.cache.data.view(np.uint8) == before.view(np.uint8)).all())


BAD_BLOCKS: dict[str, tuple[Blocks, str]] = {
    "one beyond the last": (((1, 2, 256),), "source block 256 is outside 0..255"),
    "2^31": (((1, 2**31, 3),), f"source block {2**31} is outside 0..255"),
    "2^32 + 1, which is 1 in 32 bits": (((1, 2**32 + 1, 3),), f"source block {2**32 + 1} is outside 0..255"),
    "2^61": (((2**61, 1, 2),), f"source block {2**61} is outside 0..255"),
    "no block": (((HOLE, 1, 2),), "has an entry without a block where tokens have to be moved"),
    "twice the same": (((5, 6, 5),), "source block 5 is listed twice"),
    "none": (((),), "source block list has 0 blocks where 3 are needed"),
    "too few": (((1, 2),), "source block list has 2 blocks where 3 are needed"),
    "no group": ((), "source block lists are for 0 groups where the layout has 1"),
    "two groups": (((1, 2, 3), (1, 2, 3)), "source block lists are for 2 groups where the layout has 1"),
}


class TestBlockLists:
    """A page index outside the region, above 32 bits, missing or doubled: an error that names it, and nothing is written."""

    @pytest.mark.parametrize(("blocks", "text"), BAD_BLOCKS.values(), ids=BAD_BLOCKS.keys())
    def test_source_blocks(self, peer: FalseSource, blocks: Blocks, text: str) -> None:
        before = untouched(peer.target)
        peer.announce(blocks)
        peer.finish_prefill(AUX)
        assert text in peer.request.wait().error
        assert is_same(peer.target, before)

    def test_blocks_that_exist_are_written(self, peer: FalseSource) -> None:
        """The control: only what is wrong with the lists above keeps the memory as it was."""
        before = untouched(peer.target)
        peer.announce(((3, 200, 7),))
        peer.finish_prefill(AUX)
        peer.confirm()
        assert peer.request.wait().tokens[0] == AUX.token_id
        assert not is_same(peer.target, before)

    @pytest.mark.parametrize(
        ("span", "text"),
        [
            (Span(0, 0, 2**62, 0, 3), "of a sequence of 40 were asked for"),
            (Span(0, 0, PROMPT_TOKENS, 0, 2), "layer 2 ends at token 0"),
            (Span(0, 16, PROMPT_TOKENS, 0, 3), "token 0 to come next"),
            (Span(0, 0, PROMPT_TOKENS, 0, 2**62), ""),
        ],
        ids=["tokens beyond counting", "a layer is missing", "the beginning is missing", "layers beyond counting"],
    )
    def test_spans(self, peer: FalseSource, span: Span, text: str) -> None:
        peer.announce(((1, 2, 3),), span)
        peer.finish_prefill(AUX)
        assert text in peer.request.wait().error

    @pytest.mark.parametrize("number", [-1, -(2**31), 2**62 + 1, 2**63])
    def test_numbers_that_no_list_can_hold_are_no_message(self, peer: FalseSource, number: int) -> None:
        target = peer.target
        before, count = untouched(target), target.driver.stats().dropped_total["not a message"]
        peer.announce(((1, 2, number),))
        target.wait_dropped("not a message", count + 1)
        assert is_same(target, before)
        assert not peer.request.is_over, "the request has its own timeout"

    @pytest.mark.parametrize("blocks", [((1, 2, 999),), ((5, 5, 5),), ((),), ()], ids=["beyond", "doubled", "none", "no group"])
    def test_target_blocks_in_a_grant_that_asks_the_source_to_write(self, pair: tuple[Node, Node], blocks: Blocks) -> None:
        """A source that cannot write anyway refuses by name; its own cache and the target's stay as they were."""
        source, target = pair
        name, prompt = next(names), prompt_of(next(_seeds))
        source.prefill(name, prompt).wait()
        before = untouched(target)
        with false_target(source, target) as peer:
            grant = Grant(key_of(name), 1, digest_of(prompt), Mode.PUSH, Executor.SOURCE_WRITES, 0, blocks, 0, 1)
            peer.intruder.send_message(grant, source.incarnation)
            over = peer.intruder.receive_message(Over).message
            assert isinstance(over, Over)
            assert "block" in over.reason or "does not write" in over.reason
        assert is_same(target, before)
        assert_works(pair)


class TestOneBadListAmongOthers:
    """Block ids and group counts out of range fail one request with its error; the engine lives."""

    def test_a_bad_list_fails_one_request_while_another_goes_on(self, pair: tuple[Node, Node]) -> None:
        source, target = pair
        prompts = [prompt_of(next(_seeds)) for _ in range(3)]
        with false_source(target, source, prompts[0]) as bad, false_source(target, source, prompts[1]) as good:
            bad.announce(((1, 2, 3), (4, 5, 6)))
            assert "2 groups where the layout has 1" in bad.request.wait().error
            assert not good.request.is_over
            good.announce()
            good.finish_prefill(AUX)
            good.confirm()
            assert good.request.wait().is_good
        assert_works(pair)


def aux_frame(peer: FalseSource, **changes: object) -> bytes:
    """The frame of an aux record with some fields changed into what they must not be."""
    frame = encode(peer.intruder.incarnation, peer.target.incarnation, AuxSent(peer.grant.key, peer.grant.grant, AUX))
    document = msgspec.msgpack.decode(frame)
    document["message"]["aux"] |= changes
    return msgspec.msgpack.encode(document)


class TestAuxRecords:
    """Aux records of a wrong type, for no hand-off, for an earlier grant, twice, or too large: dropped and counted."""

    @pytest.mark.parametrize(
        "changes",
        [{"token_id": "A"}, {"token_id": None}, {"token_id": 1.5}, {"logprob": "x"}, {"top_logprobs": [[1]]}],
        ids=str,
    )
    def test_wrong_types_are_no_message(self, peer: FalseSource, changes: dict[str, object]) -> None:
        count = peer.target.driver.stats().dropped_total["not a message"]
        peer.announce()
        peer.finish_prefill()
        peer.intruder.send(aux_frame(peer, **changes))
        peer.target.wait_dropped("not a message", count + 1)
        assert not peer.request.is_over, "without its aux record nothing is complete"
        peer.intruder.send_message(AuxSent(peer.grant.key, peer.grant.grant, AUX), peer.target.incarnation)
        peer.confirm()
        assert peer.request.wait().tokens[0] == AUX.token_id

    @pytest.mark.parametrize("which", ["another hand-off", "an earlier grant", "a grant to come", "no grant"])
    def test_for_another_hand_off(self, peer: FalseSource, which: str) -> None:
        wrong = Aux(90, -9.0)
        key, number = peer.grant.key, peer.grant.grant
        stray: dict[str, Message] = {
            "another hand-off": AuxSent(key_of("unknown"), number, wrong),
            "an earlier grant": AuxSent(key, number - 1, wrong),
            "a grant to come": AuxSent(key, number + 1, wrong),
            "no grant": AuxSent(key, 0, wrong),
        }
        late = peer.target.driver.stats().late_total["aux"]
        peer.announce()
        peer.finish_prefill(AUX)
        peer.intruder.send_message(stray[which], peer.target.incarnation)
        peer.target.wait_late("aux", late + 1)
        peer.confirm()
        assert peer.request.wait().tokens[0] == AUX.token_id

    def test_twice_before_and_once_after_the_end(self, peer: FalseSource) -> None:
        late = peer.target.driver.stats().late_total["aux"]
        peer.announce()
        peer.finish_prefill(AUX)
        peer.intruder.send_message(AuxSent(peer.grant.key, peer.grant.grant, AUX), peer.target.incarnation)
        peer.confirm()
        tokens = peer.request.wait().tokens
        assert len(tokens) == 4
        peer.intruder.send_message(AuxSent(peer.grant.key, peer.grant.grant, Aux(90, 0.0)), peer.target.incarnation)
        peer.target.wait_late("aux", late + 1)
        assert tokens[0] == AUX.token_id

    @pytest.mark.parametrize("token", [-1, 259, 2**31, -(2**63)])
    def test_a_first_token_that_the_model_does_not_have(self, peer: FalseSource, token: int) -> None:
        peer.announce()
        peer.finish_prefill(Aux(token, -1.0))
        peer.confirm()
        assert f"{token}; the model has 0 to 258" in peer.request.wait().error

    @pytest.mark.parametrize("token", [-1, 2**62])
    def test_candidates_that_the_model_does_not_have(self, peer: FalseSource, token: int) -> None:
        peer.announce()
        peer.finish_prefill(Aux(65, -1.0, ((65, -1.0), (token, -2.0))))
        peer.confirm()
        assert f"{token}; the model has 0 to 258" in peer.request.wait().error

    def test_larger_than_any_frame(self, peer: FalseSource) -> None:
        count = peer.target.driver.stats().dropped_total["not a message"]
        peer.announce()
        peer.finish_prefill()
        huge = Aux(65, -1.0, tuple((number, -1.0) for number in range(500_000)))
        peer.intruder.send_message(AuxSent(peer.grant.key, peer.grant.grant, huge), peer.target.incarnation)
        peer.target.wait_dropped("not a message", count + 1)
        assert not peer.request.is_over

    def test_a_record_whose_slot_is_used_again(self, pair: tuple[Node, Node]) -> None:
        """The aux of a hand-off that was given up does not become that of the next one under the same name."""
        source, target = pair
        prompt = prompt_of(next(_seeds))
        with false_source(target, source, prompt) as peer:
            peer.announce()
            target.cancel(peer.grant.key.transfer_id)
            peer.request.wait()
            peer.intruder.send_message(Stopped(peer.grant.key, peer.grant.grant), target.incarnation)
            target.wait_idle()
            again = target.decode(peer.grant.key.transfer_id, prompt, peer.intruder.address)
            fresh = peer.intruder.receive_message(Grant).message
            assert isinstance(fresh, Grant)
            assert fresh.grant > peer.grant.grant
            late = target.driver.stats().late_total["aux"]
            peer.intruder.send_message(AuxSent(peer.grant.key, peer.grant.grant, Aux(90, 0.0)), target.incarnation)
            target.wait_late("aux", late + 1)
            repeat = FalseSource(peer.intruder, target, fresh, again)
            repeat.announce()
            repeat.finish_prefill(AUX)
            repeat.confirm()
            assert again.wait().tokens[0] == AUX.token_id
        assert_works(pair)

    def test_nothing_is_left_of_all_that(self, pair: tuple[Node, Node]) -> None:
        wait_until(lambda: sum(pair[1].driver.stats().handoffs_live.values()) == 0, "no hand-off lives")
        pair[1].engine._core.check_integrity()
