"""Cards: which pairs of instances may hand off, and that a refusal names the field and both values, ours first."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from caches import compact_group, layout_of, reshaped

from kvbaton.config import Limits
from kvbaton.core.aux_area import AuxArea
from kvbaton.core.card import PROTOCOL, Card, Endpoint, ProcessId, RankCard, check_compatible, make_card
from kvbaton.core.handoff import Incarnation
from kvbaton.core.layout import Group, HeadRange
from kvbaton.core.topology import Shape
from kvbaton.errors import ConfigError, Incompatible


def _card(**changes: Any) -> Card:
    fields: dict[str, Any] = {
        "incarnation": Incarnation("a1"),
        "model": "tiny",
        "fingerprint": "f00d",
        "shape": "tp1",
        "ranks": (RankCard(0, layout_of(compact_group()), ()),),
        "process": ProcessId("host", 1, 2),
        "defer_timeout": 60.0,
        "transfer_timeout": 30.0,
    }
    return Card(**(fields | changes))


def _refusal(source: Card, target: Card, ours: Card) -> Incompatible:
    with pytest.raises(Incompatible) as caught:
        check_compatible(source, target, ours=ours)
    return caught.value


def test_a_fitting_pair_passes_on_both_sides() -> None:
    source, target = _card(incarnation=Incarnation("a1")), _card(incarnation=Incarnation("b2"))
    check_compatible(source, target, ours=source)
    check_compatible(source, target, ours=target)


def test_numbers_of_blocks_may_differ() -> None:
    small = _card(ranks=(RankCard(0, layout_of(compact_group(blocks=3)), ()),))
    check_compatible(small, _card(), ours=small)


class TestPeersOfAnotherVersionOrModel:
    """Another version, model or shape is refused by both, before any address is used; block sizes may differ."""

    @pytest.mark.parametrize(
        ("change", "field", "theirs_shown"),
        [
            ({"protocol": PROTOCOL + 1}, "protocol", str(PROTOCOL + 1)),
            ({"fingerprint": "beef", "model": "tiny:1"}, "model", "tiny:1 (beef)"),
            ({"shape": "tp2"}, "what the ranks hold", "1 ranks where shape tp2 has 2"),
            ({"ranks": ()}, "what the ranks hold", "0 ranks where shape tp1 has 1"),
        ],
    )
    def test_a_difference_is_refused_with_the_field_and_both_values(
        self, change: dict[str, Any], field: str, theirs_shown: object
    ) -> None:
        ours, theirs = _card(), _card(**change)
        for source, target in ((ours, theirs), (theirs, ours)):
            here = _refusal(source, target, ours)
            there = _refusal(source, target, theirs)
            assert here.field == field
            assert here.theirs == theirs_shown
            assert (there.ours, there.theirs) == (here.theirs, here.ours)
            assert str(here.ours) in str(here)
            assert str(here.theirs) in str(here)

    def test_another_model_is_refused_with_what_differs_in_its_cache(self) -> None:
        wide = RankCard(0, layout_of(compact_group(head_size=8)), ())
        ours, theirs = _card(), _card(fingerprint="beef", model="wide", ranks=(wide,))
        for source, target in ((ours, theirs), (theirs, ours)):
            refusal = _refusal(source, target, ours)
            assert refusal.ours == "tiny (f00d), layout group 0 (full) plane k head_size 3"
            assert refusal.theirs == "wide (beef), layout group 0 (full) plane k head_size 8"

    def test_blocks_of_other_sizes_fit(self) -> None:
        large = _card(ranks=(RankCard(0, layout_of(compact_group(block_tokens=24)), ()),))
        check_compatible(large, _card(), ours=large)


def test_the_same_weights_under_another_name_pass() -> None:
    check_compatible(_card(model="mine"), _card(model="yours"), ours=_card(model="mine"))


@pytest.mark.parametrize(
    ("defer_timeout", "transfer_timeout"), [(30.0, 30.0), (29.0, 30.0), (float("nan"), 30.0), (60.0, float("nan"))]
)
def test_a_source_that_holds_no_longer_than_the_target_waits_is_refused(defer_timeout: float, transfer_timeout: float) -> None:
    source, target = _card(defer_timeout=defer_timeout), _card(transfer_timeout=transfer_timeout)
    for ours in (source, target):
        refusal = _refusal(source, target, ours)
        assert f"defer_timeout {defer_timeout}" in str(refusal)
        assert f"transfer_timeout {transfer_timeout}" in str(refusal)


def test_only_the_source_has_to_hold_and_only_the_target_to_give_up() -> None:
    check_compatible(_card(transfer_timeout=1e9), _card(defer_timeout=0.0), ours=_card())


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_is_checked(rank: int) -> None:
    fine = RankCard(0, layout_of(compact_group(heads=1)), ())
    other = RankCard(0, layout_of(compact_group(heads=1, head_size=8)), ())
    ranks = [fine, fine]
    ranks[rank] = other
    ours, theirs = _card(shape="tp2", ranks=(fine, fine)), _card(shape="tp2", ranks=tuple(ranks))
    refusal = _refusal(theirs, ours, ours)
    assert (refusal.field, refusal.ours, refusal.theirs) == ("layout group 0 (full) plane k head_size", 3, 8)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [((0, 0), "rank 0 is there twice"), ((1, 0), "rank 1 where rank 0 should be"), ((0, 7), "rank 7 where")],
)
def test_ranks_that_are_not_numbered_by_their_place_are_refused(numbers: tuple[int, int], words: str) -> None:
    """Both halves of the heads would be read from one rank."""
    halves = [layout_of(reshaped(compact_group(heads=1), total_heads=2, heads=(HeadRange(half, 1),))) for half in range(2)]
    theirs = _card(shape="tp2", ranks=tuple(RankCard(number, half, ()) for number, half in zip(numbers, halves, strict=True)))
    for source, target in ((theirs, ours := _card()), (ours, theirs)):
        refusal = _refusal(source, target, ours)
        assert refusal.field == "the numbers of the ranks"
        assert words in refusal.theirs
        assert refusal.ours == "fine"


def test_a_layout_difference_names_ours_first_at_the_source_too() -> None:
    ours = _card()
    theirs = _card(ranks=(RankCard(0, layout_of(compact_group(head_size=8)), ()),))
    refusal = _refusal(ours, theirs, ours)
    assert (refusal.ours, refusal.theirs) == (3, 8)


def test_ranks_that_are_not_a_whole_instance_are_refused_by_both() -> None:
    half = layout_of(reshaped(compact_group(heads=1), total_heads=2))
    ours, theirs = _card(), _card(ranks=(RankCard(0, half, ()),))
    for mine, other in ((ours, theirs), (theirs, ours)):
        refusal = _refusal(ours, theirs, mine)
        assert refusal.field == "what the ranks hold"
        broken = refusal.theirs if mine is ours else refusal.ours
        assert broken == "stage 0: no rank holds head 1 of 2 of group 0 plane k"
        assert other is not mine


def test_a_stride_beyond_64_bits_is_refused_though_it_leads_nowhere() -> None:
    """It has one head, so that its stride is never used; a number that overflows is refused all the same."""
    ours = _card(ranks=(RankCard(0, layout_of(compact_group(heads=1)), ()),))
    theirs = _card(ranks=(RankCard(0, layout_of(reshaped(compact_group(heads=1), head_stride=1 << 63)), ()),))
    assert "can be counted" in str(_refusal(theirs, ours, ours).theirs)


def test_a_shape_that_cannot_be_read_is_refused() -> None:
    assert "shape 'odd'" in str(_refusal(_card(shape="odd"), _card(shape="odd"), _card(shape="odd")))


_STATE = msgspec.structs.replace(compact_group(block_tokens=1), kind="ssm", block_tokens=0, page_tokens=0)

FIELDS = {
    "another model's layers": (compact_group(layers=3), "layers is '0, 1' here and '0-2' there"),
    "another type": (reshaped(compact_group(), dtype="bfloat16"), "dtype is 'float16' here and 'bfloat16' there"),
    "more heads": (compact_group(heads=4), "total_heads is 2 here and 4 there"),
    "another kind": (msgspec.structs.replace(compact_group(), kind="sliding"), "kind is 'full' here and 'sliding' there"),
    "state": (
        msgspec.structs.replace(compact_group(block_tokens=1), block_tokens=0, page_tokens=0),
        "block_tokens is 4 here and 0",
    ),
}


class TestLayoutsThatDiffer:
    """What differs in the layouts is refused at the handshake with both values, on either side; states included."""

    @pytest.mark.parametrize("name", FIELDS)
    def test_layouts_of_another_model_are_refused_with_both_values(self, name: str) -> None:
        group, words = FIELDS[name]
        theirs = _card(ranks=(RankCard(0, layout_of(group), ()),))
        refusals = [_refusal(theirs, _card(), theirs), _refusal(theirs, (mine := _card()), mine)]
        assert words in str(refusals[1])
        assert (refusals[0].ours, refusals[0].theirs) == (refusals[1].theirs, refusals[1].ours)

    @pytest.mark.parametrize(
        ("groups", "words"),
        [
            ((compact_group(),), r"layout groups is '2 \(full, ssm\)' here and '1 \(full\)' there"),
            ((_STATE, compact_group()), "layout group 0 kind is 'full' here and 'ssm' there"),
            ((compact_group(), reshaped(_STATE, dtype="float32")), "plane k dtype is 'float16' here and 'float32' there"),
            ((compact_group(), reshaped(_STATE, element_bytes=1)), "plane k element_bytes is 2 here and 1 there"),
        ],
    )
    def test_states_that_are_missing_elsewhere_or_of_another_type(self, groups: tuple[Group, ...], words: str) -> None:
        ours = _card(ranks=(RankCard(0, layout_of(compact_group(), _STATE), ()),))
        theirs = _card(ranks=(RankCard(0, layout_of(*groups), ()),))
        with pytest.raises(Incompatible, match=words):
            check_compatible(theirs, ours, ours=ours)


def test_a_card_survives_the_wire() -> None:
    card = _card()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(card), type=Card) == card


def _halves() -> tuple[RankCard, RankCard]:
    """Two ranks with one of two heads each."""
    half = compact_group(heads=1)
    first, second = (reshaped(half, heads=(HeadRange(head, 1),), total_heads=2) for head in range(2))
    endpoint, area = Endpoint("tcp", 64, {"port": 1}), AuxArea(0, 1, 64)
    return RankCard(0, layout_of(first), (endpoint,), area), RankCard(1, layout_of(second), ())


def _made(**changes: Any) -> Card:
    fields: dict[str, Any] = {
        "incarnation": Incarnation("a1"),
        "model": "tiny",
        "fingerprint": "f00d",
        "process": ProcessId("host", 1, 2),
        "limits": Limits(transfer_timeout=7.0, defer_timeout=9.0),
        "ranks": _halves(),
        "shape": Shape(tp=2),
    }
    return make_card(**(fields | changes))


class TestMakingACard:
    def test_it_carries_the_ranks_the_shape_and_the_limits_of_the_settings(self) -> None:
        card = _made()
        assert card.ranks == _halves()
        assert (card.shape, card.protocol) == ("tp2", PROTOCOL)
        assert (card.defer_timeout, card.transfer_timeout) == (9.0, 7.0)

    def test_an_instance_that_is_not_cut_has_one_rank(self) -> None:
        whole = RankCard(0, layout_of(compact_group()), ())
        card = make_card(
            incarnation=Incarnation("a1"),
            model="tiny",
            fingerprint="f00d",
            process=ProcessId("host", 1, 2),
            limits=Limits(),
            ranks=[whole],
        )
        assert (card.shape, card.ranks) == ("tp1", (whole,))
        check_compatible(card, _made(), ours=card)

    @pytest.mark.parametrize(
        ("ranks", "words"),
        [
            (_halves()[:1], "1 ranks where shape tp2 has 2"),
            ((_halves()[0], msgspec.structs.replace(_halves()[0], rank=1)), "no rank holds head 1 of 2"),
            (_halves()[::-1], "rank 1 where rank 0 should be"),
        ],
    )
    def test_ranks_that_are_not_the_whole_model_are_refused_at_start_up(self, ranks: list[RankCard], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            _made(ranks=ranks)
