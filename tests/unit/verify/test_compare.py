"""What "equal" means, at its edges."""

from __future__ import annotations

import math

import pytest

from kvbaton.verify.compare import TOLERANCE, TokenAnswer, Verdict, compare

FAR = 1.0


def _answer(*tokens: int, logprob: float = -1.0, gap: float = FAR, finish: str = "length") -> TokenAnswer:
    return TokenAnswer(tokens, (logprob,) * len(tokens), (gap,) * len(tokens), finish)


def test_the_tolerance_is_the_promised_one() -> None:
    assert TOLERANCE == 1e-3


def test_the_same_answer_is_equal() -> None:
    comparison = compare(_answer(1, 2, 3), _answer(1, 2, 3))
    assert comparison.verdict is Verdict.EQUAL
    assert comparison.largest_difference == 0.0


def test_a_logprob_within_the_tolerance_is_equal_and_reported() -> None:
    comparison = compare(_answer(1, 2, logprob=-1.0), _answer(1, 2, logprob=-1.0009))
    assert comparison.verdict is Verdict.EQUAL
    assert comparison.largest_difference == pytest.approx(0.0009)


def test_a_logprob_outside_the_tolerance_is_different() -> None:
    comparison = compare(_answer(1, 2, logprob=-1.0), _answer(1, 2, logprob=-1.0011))
    assert comparison.verdict is Verdict.DIFFERENT
    assert comparison.detail.startswith("token 0: logprob -1.00000 alone, -1.00110")


@pytest.mark.parametrize(
    ("alone", "handed_off"), [(math.nan, -1.0), (-1.0, math.nan), (math.nan, math.nan), (-math.inf, -1.0), (-1.0, math.inf)]
)
def test_a_logprob_that_is_no_number_is_different(alone: float, handed_off: float) -> None:
    comparison = compare(_answer(1, logprob=alone), _answer(1, logprob=handed_off))
    assert comparison.verdict is Verdict.DIFFERENT
    assert comparison.largest_difference == math.inf


def test_another_token_is_different() -> None:
    comparison = compare(_answer(1, 2, 3), _answer(1, 9, 3))
    assert comparison.verdict is Verdict.DIFFERENT
    assert comparison.detail == "token 1: 2 alone, 9 handed off"


def test_another_token_where_the_single_instance_nearly_tied_is_a_near_tie() -> None:
    comparison = compare(_answer(1, 2, gap=0.0009), _answer(1, 9))
    assert comparison.verdict is Verdict.NEAR_TIE
    assert "token 1: 2 alone, 9 handed off" in comparison.detail


@pytest.mark.parametrize("gap", [TOLERANCE, 0.5, math.inf, math.nan])
def test_a_tie_that_is_not_near_is_different(gap: float) -> None:
    assert compare(_answer(2, gap=gap), _answer(9, gap=0.0)).verdict is Verdict.DIFFERENT


def test_only_the_gap_at_the_first_other_token_counts() -> None:
    single = TokenAnswer((1, 2, 3), (-1.0,) * 3, (0.0, FAR, 0.0))
    assert compare(single, _answer(1, 9, 9)).verdict is Verdict.DIFFERENT


def test_the_comparison_stops_at_a_near_tie() -> None:
    single = _answer(1, 2, 3, gap=0.0)
    pair = TokenAnswer((1, 9), (-1.0, -50.0), (FAR, FAR), "stop")
    assert compare(single, pair).verdict is Verdict.NEAR_TIE


def test_a_near_tie_does_not_excuse_an_earlier_logprob() -> None:
    single = TokenAnswer((1, 2), (-1.0, -1.0), (0.0, 0.0))
    pair = TokenAnswer((1, 9), (-2.0, -1.0), (FAR, FAR))
    assert compare(single, pair).verdict is Verdict.DIFFERENT


def test_a_near_tie_does_not_excuse_a_logprob_of_the_same_token() -> None:
    assert compare(_answer(1, gap=0.0, logprob=-1.0), _answer(1, logprob=-2.0)).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize(("alone", "handed_off"), [((1, 2), (1,)), ((1,), (1, 2)), ((), (1,)), ((1,), ())])
def test_another_length_is_different(alone: tuple[int, ...], handed_off: tuple[int, ...]) -> None:
    comparison = compare(_answer(*alone), _answer(*handed_off))
    assert comparison.verdict is Verdict.DIFFERENT
    assert comparison.detail == f"{len(alone)} tokens alone, {len(handed_off)} handed off"


def test_another_end_is_different() -> None:
    comparison = compare(_answer(1, finish="stop"), _answer(1, finish="length"))
    assert comparison.verdict is Verdict.DIFFERENT
    assert "'stop' alone" in comparison.detail
