"""Pairs of real vLLMs of any two shapes, with small models of every kind of cache, and what hand-offs between them show."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from vllm_handing import Client, Given, Pair, is_near_tie, prompt_of
from vllm_servers import Server, ServerSpec, starting

from kvbaton.core.handoff import Mode
from kvbaton.core.topology import Shape
from kvbaton.engines.vllm.setup.small_models import find_small_model
from kvbaton.verify.compare import Verdict, compare

__all__ = [
    "KIND_CASES",
    "LIMITS",
    "LLAMA_CASES",
    "VOCABULARY",
    "Servers",
    "ShapeCase",
    "Singles",
    "assert_control_shows",
    "assert_same_answers",
    "shaped_pair",
]

VOCABULARY = 251
LENGTHS = (3, 40, 127, 128, 129, 300, 620)
"""Of the prompts: below, at and above one block of 128 tokens, and far beyond a window of 128."""
TOKENS = 8
_RANKS = 8
"""That may run at the same time, of pairs: each takes about one gigabyte."""
LIMITS = {"transfer_timeout": 60, "defer_timeout": 90}
"""A rank that shares two cores with six others may stand still for long."""


@dataclass(frozen=True)
class ShapeCase:
    """A model, the shapes of the two sides, and the mode."""

    model: str
    prefill: str
    decode: str
    mode: Mode

    def __str__(self) -> str:
        return f"{self.model.removeprefix('small-')}-{self.prefill}-{self.decode}-{self.mode}"


def _cases(models: Sequence[str], pairs: Sequence[tuple[str, str]]) -> tuple[ShapeCase, ...]:
    """In the order in which `Servers` has to start the fewest: pairs that share a server follow each other."""
    return tuple(ShapeCase(model, *shapes, mode) for model in models for mode in Mode for shapes in pairs)


LLAMA_CASES = _cases(
    ["small-llama"],
    [
        ("tp2", "tp1"),
        ("pp2", "tp1"),
        ("pp2", "tp2"),
        ("tp2", "tp2"),
        ("tp1", "tp2"),
        ("pp2,tp2", "tp2"),
        ("tp1", "pp2"),
        ("pp2", "pp2"),
        ("pp3", "pp2"),
    ],
) + _cases(["small-llama-1h"], [("tp1", "tp2"), ("tp2", "tp1")])
"""Full attention: heads divided, merged and replicated, layers by stage."""

KIND_CASES = _cases(
    [
        "small-mistral",
        "small-gemma3",
        "small-gptoss",
        "small-mla",
        "small-falcon-h1",
        "small-granite4",
        "small-draft",
        "small-eagle",
        "small-mtp",
        "small-llama4",
    ],
    [("tp2", "tp1"), ("tp1", "tp1"), ("tp1", "tp2")],
)
"""Every other kind of cache."""


class Singles:
    """Plain servers of one rank, one per model: started when first asked for, ended with the tests."""

    def __init__(self, kept: ExitStack) -> None:
        self._kept = kept
        self._started: dict[str, Server] = {}

    def of(self, model: str) -> Server:
        """The one that serves this model. It starts while others do; a `Pair` waits for it. One at a time: memory is scarce."""
        if model not in self._started:
            self._kept.close()
            self._started.clear()
            (self._started[model],) = self._kept.enter_context(starting(ServerSpec("single", "both", model=model, forks=True)))
        return self._started[model]


class Servers:
    """Servers of pairs, which are kept as long as they fit in memory: one that the next pair needs too is not started again.

    Their connector drops what it should copy on command.
    """

    def __init__(self, kept: ExitStack) -> None:
        self._kept = kept
        self._serving: tuple[str, Mode] | None = None
        self._running: dict[tuple[str, str], tuple[ExitStack, Server]] = {}
        """By role and shape, that which was used last at the end."""

    def pair(self, case: ShapeCase, single: Server) -> Pair:
        """The two servers of a case; those that are missing start at the same time."""
        needed = [("prefill", case.prefill), ("decode", case.decode)]
        if self._serving != (case.model, case.mode):
            self._end(*self._running)
            self._serving = case.model, case.mode
        self._end(*(each for each, (_, server) in self._running.items() if not server.is_alive()))
        for each in [each for each in self._running if each not in needed]:
            if sum(Shape.parse(shape).ranks for _, shape in {*self._running, *needed}) > _RANKS:
                self._end(each)
        prefill, decode = [self._begun(case, *each) for each in needed]
        prefill.wait()
        decode.wait()
        return Pair(case.mode, prefill, decode, single, vocabulary=VOCABULARY)

    def _begun(self, case: ShapeCase, role: str, shape: str) -> Server:
        running = self._running.pop((role, shape), None)
        if running is None:
            stack = self._kept.enter_context(ExitStack())
            spec = ServerSpec(role, role, case.mode, settings=LIMITS, holds=True, model=case.model, shape=shape, forks=True)
            running = stack, stack.enter_context(starting(spec))[0]
        self._running[role, shape] = running
        return running[1]

    def _end(self, *ended: tuple[str, str]) -> None:
        for each in ended:
            self._running.pop(each)[0].close()


@contextmanager
def shaped_pair(case: ShapeCase, single: Server) -> Iterator[Pair]:
    """The two servers of a case, for this one only."""
    with ExitStack() as kept:
        yield Servers(kept).pair(case, single)


async def _ask(client: Client, seed: str) -> list[tuple[Given, Given]]:
    """Answers of the single server and of the pair, to prompts of every length, all at once."""
    # Servers are shared by cases: of a window, the prompts of an earlier case would be cached, and nothing left to hand over.
    pair = client.pair
    prompts = [prompt_of(length, f"{seed} {pair.prefill.url} {pair.decode.url}") for length in LENGTHS]
    given = await asyncio.gather(*(client.hand_off(prompt, TOKENS) for prompt in prompts))
    alone = await asyncio.gather(*(client.alone(prompt, TOKENS) for prompt in prompts))
    return list(zip(alone, given, strict=True))


async def assert_same_answers(client: Client) -> None:
    """Everything is handed over, whole, and every answer is that of the single server."""
    for alone, given in await _ask(client, "same"):
        assert given.record["handed_off"], given.record
        assert not given.record["recomputed"], given.record
        assert given.record["bytes_moved"] == given.record["bytes_planned"] > 0, given.record
        assert not is_near_tie(alone, given), (alone.answer, given.answer)
    await asyncio.to_thread(client.pair.wait_idle)


async def assert_control_shows(client: Client) -> None:
    """With nothing copied, the answers of most prompts of some length differ."""
    with client.pair.decode.holding("drop"):
        answers = await _ask(client, "control")
    different = [compare(alone.answer, given.answer).verdict is Verdict.DIFFERENT for alone, given in answers]
    assert sum(different) > len(different) / 2, different
    await asyncio.to_thread(client.pair.wait_idle)


@functools.cache
def drops_of(model: str) -> tuple[str, ...]:
    """What can be left out of a model, for a control of its own."""
    return find_small_model(model).kinds
