"""The bounded map against a dict, and what makes room for what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.bounded import BoundedMap
from kvbaton.errors import Bug


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.integers())))
def test_it_holds_the_entries_that_were_set_last(limit: int, entries: list[tuple[int, int]]) -> None:
    bounded: BoundedMap[int, int] = BoundedMap(limit)
    model: dict[int, int] = {}
    for key, value in entries:
        bounded[key] = value
        model.pop(key, None)
        model[key] = value
    assert list(bounded.items()) == list(model.items())[-limit:]


@given(st.integers(1, 5), st.lists(st.integers(0, 9)))
def test_a_key_that_is_there_becomes_the_newest_and_only_a_new_one_makes_the_oldest_leave(limit: int, keys: list[int]) -> None:
    evicted: list[tuple[int, int]] = []
    bounded: BoundedMap[int, int] = BoundedMap(limit, lambda key, value: evicted.append((key, value)))
    for number, key in enumerate(keys):
        before, gone = list(bounded.items()), len(evicted)
        bounded[key] = number
        others = [entry for entry in before if entry[0] != key]
        leaves = others[:1] if len(others) == len(before) == limit else []
        assert list(bounded.items()) == [*others[len(leaves) :], (key, number)]
        assert evicted[gone:] == leaves
        assert len(bounded) <= limit


def test_what_has_to_make_room_is_handed_out_and_what_is_deleted_is_not() -> None:
    evicted: list[tuple[str, int]] = []
    bounded: BoundedMap[str, int] = BoundedMap(2, lambda key, value: evicted.append((key, value)))
    for number, key in enumerate("abc"):
        bounded[key] = number
    assert evicted == [("a", 0)]
    del bounded["b"]
    assert bounded.pop("missing", None) is None
    bounded["d"] = 3
    assert (list(bounded), evicted) == (["c", "d"], [("a", 0)])


def test_reading_does_not_keep_an_entry_and_touching_does() -> None:
    bounded: BoundedMap[str, int] = BoundedMap(2)
    bounded["a"], bounded["b"] = 1, 2
    assert bounded.get("a") == 1
    bounded["c"] = 3
    assert "a" not in bounded
    bounded.touch("b")
    bounded.touch("missing")
    bounded["d"] = 4
    assert list(bounded) == ["b", "d"]


def test_a_million_entries_are_remembered_in_bounds() -> None:
    bounded: BoundedMap[int, int] = BoundedMap(100)
    for key in range(1_000_000):
        bounded[key] = key
    assert len(bounded) == 100
    assert bounded.get(999_900) == 999_900
    assert bounded.get(999_899) is None


@pytest.mark.parametrize("limit", [0, -1])
def test_a_map_without_room_is_a_bug(limit: int) -> None:
    with pytest.raises(Bug, match=str(limit)):
        BoundedMap(limit)
