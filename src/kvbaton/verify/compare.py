"""What "equal" means: the same tokens, and logprobs within 1e-3; near ties of the single instance are counted apart."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

__all__ = ["TOLERANCE", "TokenAnswer", "Comparison", "Verdict", "compare"]

TOLERANCE = 1e-3


class Verdict(enum.StrEnum):
    """How two answers to one request relate."""

    EQUAL = "equal"
    NEAR_TIE = "near tie"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """One answer, token by token; `gaps` is the distance between the best two candidates at each position."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict, and in words where it was decided."""

    verdict: Verdict
    detail: str = ""
    largest_difference: float = 0.0


def compare(single: TokenAnswer, pair: TokenAnswer) -> Comparison:
    """Hold the pair's answer against the single instance's."""
    largest = 0.0
    for index, (ours, theirs) in enumerate(zip(single.tokens, pair.tokens, strict=False)):
        if ours != theirs:
            return _other_token(single, index, ours, theirs, largest)
        difference = abs(single.logprobs[index] - pair.logprobs[index])
        if not difference <= TOLERANCE:
            detail = f"token {index}: logprob {single.logprobs[index]:.5f} alone, {pair.logprobs[index]:.5f} handed off"
            return Comparison(Verdict.DIFFERENT, detail, difference if math.isfinite(difference) else math.inf)
        largest = max(largest, difference)
    if len(single.tokens) != len(pair.tokens):
        detail = f"{len(single.tokens)} tokens alone, {len(pair.tokens)} handed off"
        return Comparison(Verdict.DIFFERENT, detail, largest)
    if single.finish_reason != pair.finish_reason:
        detail = f"ended by {single.finish_reason!r} alone, by {pair.finish_reason!r} handed off"
        return Comparison(Verdict.DIFFERENT, detail, largest)
    return Comparison(Verdict.EQUAL, largest_difference=largest)


def _other_token(single: TokenAnswer, index: int, ours: int, theirs: int, largest: float) -> Comparison:
    detail = f"token {index}: {ours} alone, {theirs} handed off"
    if single.gaps[index] < TOLERANCE:
        return Comparison(Verdict.NEAR_TIE, f"{detail} (best two {single.gaps[index]:.6f} apart)", largest)
    return Comparison(Verdict.DIFFERENT, detail, largest)
