"""The embedded engine's steps beside the matrix products that its model consists of, in the same shapes and the same run.

The peer is all matrix products of the step and nothing else: rows by weights as `x @ w.T`, queries by keys, and attention
weights by values, with no norms, positions, softmax or bookkeeping round them. Both kinds are measured apart, and a row's
settings also give the ratio to the products with weights alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvbaton.bench.report import BenchReport, BenchRow, describe_hardware
from kvbaton.engines.base import Progress
from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.model import LlamaModel, TokenSpan
from kvbaton.engines.embedded.weights import load_model

__all__ = ["run_engine_bench"]

Array = npt.NDArray[np.float32]

_CONTEXT = 512
_BLOCK_TOKENS = 16
_LARGEST_BATCH = 8
_PEER = "matrix products"


@dataclass(frozen=True, slots=True)
class _EngineCase:
    name: str
    rows: int
    batch: int
    repeats: int

    @property
    def measured(self) -> tuple[str, str, str]:
        """The names under which the rounds hold this case: the step, its products with weights, those of attention."""
        return self.name, f"{self.name}: weight products", f"{self.name}: attention products"


_CASES = (
    _EngineCase("prefill 512 tokens", _CONTEXT, 1, 1),
    _EngineCase("decode step, batch 1", 1, 1, 5),
    _EngineCase("decode step, batch 8", 8, 8, 3),
)


def run_engine_bench(model: str, rounds: int, progress: Progress) -> BenchReport:
    """Measure `model` in `rounds` interleaved rounds; values are medians. Writes no files but the cached weights."""
    loaded = load_model(model, progress=progress)
    subject = _EngineSubject(loaded.model)
    results: list[dict[str, list[float]]] = []
    for index in range(rounds + 1):
        progress("warming up" if index == 0 else f"round {index} of {rounds}")
        taken = _round(subject)
        if index > 0:
            results.append(taken)
    rows = [_row(case, results, model) for case in _CASES]
    return BenchReport(rows, describe_hardware(), results)


def _round(subject: _EngineSubject) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {}
    for case in _CASES:
        step, products, attention = case.measured
        spans = subject.spans(case)
        for _ in range(case.repeats):
            taken.setdefault(step, []).append(_seconds(partial(subject.step, spans)))
            taken.setdefault(products, []).append(_seconds(partial(subject.products, case)))
            taken.setdefault(attention, []).append(_seconds(partial(subject.attention_products, case)))
    return taken


def _row(case: _EngineCase, results: list[dict[str, list[float]]], model: str) -> BenchRow:
    value, products, attention = (statistics.median(s for one in results for s in one[name]) for name in case.measured)
    settings: dict[str, str | int | float] = {
        "model": model,
        "batch": case.batch,
        "rows": case.rows,
        "context": _CONTEXT,
        "weight_products_s": products,
        "attention_products_s": attention,
        "ratio_to_weight_products": value / products,
        "rounds": len(results),
    }
    return BenchRow(case.name, value, "s", _PEER, value / (products + attention), settings)


class _EngineSubject:
    """A model with a filled cache, and the inputs of its products."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        config = model.config
        table_blocks = _CONTEXT // _BLOCK_TOKENS
        self._cache = PagedCache(config, _LARGEST_BATCH * table_blocks, _BLOCK_TOKENS)
        blocks = np.arange(_LARGEST_BATCH * table_blocks, dtype=np.int32)
        self._tables = blocks.reshape(_LARGEST_BATCH, table_blocks)
        rng = np.random.default_rng(0)
        self._prompt = rng.integers(0, config.vocab_size, _CONTEXT).astype(np.int32)
        self._model.forward([TokenSpan(self._prompt, 0, self._tables[0])], self._cache)
        for table in self._tables[1:]:
            self._cache.data[:, :, table] = self._cache.data[:, :, self._tables[0]]
        self._inputs = rng.standard_normal((_CONTEXT, max(config.hidden_size, config.query_size, config.ffn_size)), np.float32)
        self._scratch: dict[tuple[int, int], Array] = {}

    def spans(self, case: _EngineCase) -> list[TokenSpan]:
        """The spans of one step of `case`; a decode step computes the last token of its context anew."""
        count = case.rows // case.batch
        return [TokenSpan(self._prompt[-count:], _CONTEXT - count, table) for table in self._tables[: case.batch]]

    def step(self, spans: list[TokenSpan]) -> None:
        """One whole step of the model."""
        self._model.forward(spans, self._cache)

    def products(self, case: _EngineCase) -> None:
        """All products of rows and weights of such a step, with their inputs and outputs in place."""
        for layer in self._model.weights.layers:
            for weight in (layer.query_key_value, layer.attention_out, layer.gate_up, layer.down):
                self._product(case.rows, weight)
        self._product(case.batch, self._model.weights.head)

    def attention_products(self, case: _EngineCase) -> None:
        """Queries by keys and weights by values, for every layer and sequence; a prefill sees half its context on average."""
        config = self._model.config
        count = case.rows // case.batch * config.heads_per_kv_head
        seen = _CONTEXT if case.rows == case.batch else _CONTEXT // 2
        queries = self._buffer(config.kv_heads * count, config.head_size).reshape(config.kv_heads, count, config.head_size)
        scores = self._buffer(config.kv_heads * count, seen).reshape(config.kv_heads, count, seen)
        by_token = self._cache.data.reshape(config.layers, 2, -1, config.kv_heads, config.head_size)
        for keys, values in by_token:
            for table in self._tables[: case.batch]:
                tokens = slice(int(table[0]) * _BLOCK_TOKENS, int(table[0]) * _BLOCK_TOKENS + seen)
                np.matmul(queries, keys[tokens].transpose(1, 2, 0), out=scores)
                np.matmul(scores, values[tokens].transpose(1, 0, 2), out=queries)

    def _product(self, rows: int, weight: Array) -> None:
        outputs, inputs = weight.shape
        np.matmul(self._inputs[:rows, :inputs], weight.T, out=self._buffer(rows, outputs))

    def _buffer(self, rows: int, columns: int) -> Array:
        if (rows, columns) not in self._scratch:
            self._scratch[rows, columns] = np.zeros((rows, columns), np.float32)
        return self._scratch[rows, columns]


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
