"""Limits: what is refused, by which name, and with which hint."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.config import BUSY_POLL_S, LONGEST_BUSY_POLL_S, HandoffSettings, Limits, parse_limits
from kvbaton.errors import ConfigError

NAMES = ("transfer_timeout", "defer_timeout", "stop_timeout", "retry", "queue_timeout")


def test_defaults_are_those_of_the_promises() -> None:
    limits = parse_limits({})
    assert limits == Limits()
    assert (limits.transfer_timeout, limits.defer_timeout) == (30.0, 60.0)
    assert set(limits.__dataclass_fields__) == set(NAMES)


def test_values_are_taken_over_and_whole_numbers_are_fine() -> None:
    limits = parse_limits({"transfer_timeout": 3, "defer_timeout": 4.5, "stop_timeout": 2, "retry": 0.25})
    assert limits == Limits(3.0, 4.5, 2.0, 0.25)


@given(st.floats(1e-3, 1e6))
def test_leases_are_renewed_several_times_within_both_patiences(transfer: float) -> None:
    limits = Limits(transfer_timeout=transfer, defer_timeout=transfer * 2, retry=transfer / 2)
    assert 0 < limits.beat_s <= limits.transfer_timeout / 3 < limits.defer_timeout / 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, -0.001, math.nan, math.inf, -math.inf])
def test_what_is_no_positive_finite_duration_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"\b{name} is .*must be a positive, finite number"):
        parse_limits({name: value})
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["30", "", None, [30], {"s": 30}, True, b"30"])
def test_what_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_limits({name: value})


@pytest.mark.parametrize(("transfer", "defer"), [(30.0, 30.0), (30.0, 29.9), (61.0, 60.0)])
def test_a_source_must_hold_longer_than_a_target_waits(transfer: float, defer: float) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_limits({"transfer_timeout": transfer, "defer_timeout": defer})
    assert f"defer_timeout ({defer:g} s) must be longer than transfer_timeout ({transfer:g} s)" in str(caught.value)


def test_a_retry_must_fit_into_the_wait() -> None:
    with pytest.raises(ConfigError, match=r"retry \(5 s\) must be shorter than transfer_timeout \(5 s\)"):
        parse_limits({"transfer_timeout": 5, "retry": 5})


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("transfer_timeuot", "transfer_timeout"),
        ("defer_time_out", "defer_timeout"),
        ("stop_timout", "stop_timeout"),
        ("retries", "retry"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{key}'; did you mean '{near}'"):
        parse_limits({key: 1})


def test_an_unknown_key_that_is_near_nothing_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_limits({"xyzzy": 1})
    assert all(name in str(caught.value) for name in ("xyzzy", *NAMES))


@given(st.dictionaries(st.sampled_from(NAMES), st.floats() | st.integers(-10, 10**400)))
def test_any_numbers_are_taken_or_refused(values: dict[str, float]) -> None:
    try:
        limits = parse_limits(values)
    except ConfigError:
        return
    assert limits.defer_timeout > limits.transfer_timeout > limits.retry > 0
    assert all(math.isfinite(getattr(limits, name)) for name in NAMES)


@pytest.mark.parametrize("seconds", [0, BUSY_POLL_S, LONGEST_BUSY_POLL_S])
def test_threads_may_look_before_they_sleep_or_not(seconds: float) -> None:
    assert HandoffSettings(busy_poll_s=seconds).busy_poll_s == seconds


@pytest.mark.parametrize("seconds", [-1e-9, LONGEST_BUSY_POLL_S + 1e-9, math.inf, math.nan])
def test_no_thread_looks_for_long(seconds: float) -> None:
    with pytest.raises(ConfigError, match="busy_poll_s is"):
        HandoffSettings(busy_poll_s=seconds)
