"""The error tree: the drawing at its top is true, and every error can be caught by where the fault lies."""

from __future__ import annotations

import re

import pytest

from kvbaton import errors
from kvbaton.errors import BadRequest, Incompatible, KVBatonError

TREE = {name: getattr(errors, name) for name in errors.__all__}


def _drawn() -> list[tuple[str, str]]:
    """(name, name of its parent) of every line of the drawing."""
    path: list[str] = []
    pairs: list[tuple[str, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"(?P<indent>[│├└─ ]*)(?P<name>[A-Z]\w+)(\s{3,}|$)", line)
        if match is None or match["name"] not in TREE:
            continue
        depth = len(match["indent"]) // 4
        path[depth:] = [match["name"]]
        if depth:
            pairs.append((match["name"], path[depth - 1]))
    return pairs


def test_the_drawing_shows_exactly_the_tree() -> None:
    real = {(name, kind.__bases__[0].__name__) for name, kind in TREE.items() if kind is not KVBatonError}
    assert set(_drawn()) == real


def test_all_errors_are_public() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == set(TREE)


def test_a_retry_helps_only_where_the_world_may_have_changed() -> None:
    assert {name for name, kind in TREE.items() if kind.retryable} == {"PeerLost", "QueueFull", "TransportError"}


@pytest.mark.parametrize("name", sorted(TREE))
def test_every_error_says_what_it_is(name: str) -> None:
    assert TREE[name].__doc__


def test_the_transfer_id_travels_along() -> None:
    assert errors.PeerLost("gone", transfer_id="tx-1").transfer_id == "tx-1"
    assert errors.PeerLost("gone").transfer_id is None
    assert Incompatible("shape", "tp1", "tp2", transfer_id="tx-2").transfer_id == "tx-2"


def test_incompatible_names_the_field_and_both_values() -> None:
    error = Incompatible("head_size", 64, 128)
    assert str(error) == "incompatible peer: head_size is 64 here and 128 there"
    assert (error.field, error.ours, error.theirs) == ("head_size", 64, 128)


def test_a_bad_request_names_its_field() -> None:
    assert BadRequest("max_tokens", "max_tokens is 0").field == "max_tokens"
