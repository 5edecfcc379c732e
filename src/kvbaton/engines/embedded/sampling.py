"""Choosing a token from logits.

Randomness is counter-based: it depends on the seed and on the index of the output token only, so a request that moves to
another instance goes on as it would have, and no sampling state has to travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.engines.embedded.request import Sampling

__all__ = ["Sampled", "sample"]

_GREEDY_BELOW = 1e-5
_KEY_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token; `logprob` is 0.0 and `top_logprobs` empty unless logprobs were requested."""

    token_id: int
    logprob: float = 0.0
    top_logprobs: tuple[tuple[int, float], ...] = ()


def sample(logits_row: npt.NDArray[np.float32], sampling: Sampling, output_index: int, seed: int) -> Sampled:
    """Choose the token at `output_index` of an answer: the same for the same logits, seed and index, in any process.

    Logprobs are the log-softmax of the raw logits, whatever the temperature. Ties go to the lowest token id.
    """
    if sampling.temperature < _GREEDY_BELOW:
        token_id = int(logits_row.argmax())
    else:
        token_id = _draw(logits_row, sampling, output_index, seed)
    if sampling.logprobs is None:
        return Sampled(token_id)
    log_total = _log_sum_exp(logits_row)
    top = tuple((i, float(logits_row[i]) - log_total) for i in _top_ids(logits_row, sampling.logprobs))
    return Sampled(token_id, float(logits_row[token_id]) - log_total, top)


def _draw(logits_row: npt.NDArray[np.float32], sampling: Sampling, output_index: int, seed: int) -> int:
    scaled = (logits_row.astype(np.float64) - float(logits_row.max())) / sampling.temperature
    weights = np.exp(scaled)
    if sampling.top_p < 1.0:
        weights = _nucleus(weights, sampling.top_p)
    cumulative = weights.cumsum()
    point = _uniform(seed, output_index) * cumulative[-1]
    return int(min(np.searchsorted(cumulative, point, side="right"), np.flatnonzero(weights)[-1]))


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.float64]:
    """Zero all but the most likely tokens that together reach `top_p`. Only what can matter is sorted."""
    total = weights.sum()
    candidates = np.flatnonzero(weights > (1.0 - top_p) * total / (2 * weights.size))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    kept = order[: int(np.searchsorted(weights[order].cumsum(), top_p * total)) + 1]
    nucleus = np.zeros_like(weights)
    nucleus[kept] = weights[kept]
    return nucleus


def _uniform(seed: int, output_index: int) -> float:
    bits = np.random.Philox(key=seed & _KEY_MASK, counter=output_index << 64)
    return float(np.random.Generator(bits).random())


def _log_sum_exp(logits_row: npt.NDArray[np.float32]) -> float:
    highest = float(logits_row.max())
    return highest + float(np.log(np.exp(logits_row.astype(np.float64) - highest).sum()))


def _top_ids(logits_row: npt.NDArray[np.float32], count: int) -> list[int]:
    count = min(count, logits_row.size)
    if count < 1:
        return []
    threshold = np.partition(logits_row, -count)[-count]
    candidates = np.flatnonzero(logits_row >= threshold)
    order = candidates[np.argsort(-logits_row[candidates], kind="stable")]
    return [int(token_id) for token_id in order[:count]]
