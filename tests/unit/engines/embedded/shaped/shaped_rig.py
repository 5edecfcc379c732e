"""Small models in tests: prompts, answers, and all ranks of an instance as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt

from kvbaton.engines.embedded.model import TokenSpan
from kvbaton.engines.embedded.shaped.blueprint import BLUEPRINTS, Cut
from kvbaton.engines.embedded.shaped.memory import ShapedCache
from kvbaton.engines.embedded.shaped.model import LoadedShaped, ShapedModel, load_shaped
from kvbaton.engines.embedded.shaped.weights import Array, make_weights

BLOCKS, BLOCK_TOKENS = 24, 4
PROMPT = tuple(np.random.default_rng(7).integers(0, 250, 61).tolist())
TABLE = np.random.default_rng(8).permutation(BLOCKS).astype(np.int32)
WAIT_S = 30.0

Logits = npt.NDArray[np.float32]


@cache
def model_of(name: str) -> LoadedShaped:
    return load_shaped(name)


def span(tokens: tuple[int, ...], start: int, table: npt.NDArray[np.int32] = TABLE) -> TokenSpan:
    return TokenSpan(np.array(tokens, np.int32), start, table)


def fresh_cache(loaded: LoadedShaped, dtype: str = "float32") -> ShapedCache:
    made = ShapedCache(loaded.blueprint, BLOCKS, BLOCK_TOKENS, dtype=dtype)
    made.poison(range(BLOCKS))
    return made


def prefill(loaded: LoadedShaped, memory: ShapedCache, chunk: int = 1000, prompt: tuple[int, ...] = PROMPT) -> Logits:
    """Run a prompt in chunks; the logits that follow it."""
    parts = [span(prompt[start : start + chunk], start) for start in range(0, len(prompt), chunk)]
    rows: Logits = [loaded.model.forward([part], memory) for part in parts][-1]
    row: Logits = rows[0]
    return row


def decode(loaded: LoadedShaped, memory: ShapedCache, logits: Logits, count: int) -> list[Logits]:
    """Answer greedily; the logits after each token."""
    rows = [logits]
    for position in range(len(PROMPT), len(PROMPT) + count):
        chosen = (int(rows[-1].argmax()),)
        rows.append(loaded.model.forward([span(chosen, position)], memory)[0])
    return rows[1:]


class Ranks:
    """Every rank of a cut model, stepped in threads; sums go through a table that all of them wait for."""

    def __init__(self, name: str, pp_size: int, tp_size: int) -> None:
        blueprint, self._tp = BLUEPRINTS[name], tp_size
        weights = make_weights(blueprint)
        self.cuts = [Cut(pp, pp_size, tp, tp_size) for pp in range(pp_size) for tp in range(tp_size)]
        self._parts: list[dict[int, Array]] = [{} for _ in range(pp_size)]
        self._gates = [threading.Barrier(tp_size) for _ in range(pp_size)]
        self.caches = [ShapedCache(blueprint, BLOCKS, BLOCK_TOKENS, cut) for cut in self.cuts]
        self._models = [ShapedModel(blueprint, weights, cut, self._reduce(cut)) for cut in self.cuts]

    def forward(self, spans: list[TokenSpan]) -> Logits:
        hidden = self._models[0].embed(spans)
        for first in range(0, len(self.cuts), self._tp):
            stage = list(zip(self._models, self.caches, strict=True))[first : first + self._tp]
            with ThreadPoolExecutor(self._tp) as threads:
                rows = [threads.submit(model.run, hidden, spans, memory) for model, memory in stage]
                results = [row.result(WAIT_S) for row in rows]
            assert all((result == results[0]).all() for result in results)
            hidden = results[0]
        return self._models[-1].logits(hidden, spans)

    def _reduce(self, cut: Cut) -> Callable[[Array], Array]:
        parts, gate = self._parts[cut.pp_rank], self._gates[cut.pp_rank]

        def reduce(part: Array) -> Array:
            parts[cut.tp_rank] = part
            gate.wait(WAIT_S)
            total = sum((parts[rank] for rank in range(1, cut.tp_size)), start=parts[0])
            gate.wait(WAIT_S)
            return total

        return reduce
