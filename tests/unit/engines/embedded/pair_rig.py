"""Two real engines with the tiny model, their agents and the `memory` transport, in one process; and one that stands alone."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import numpy as np
from engine_fakes import Answer, key_of

from kvbaton.agent.driver import Driver
from kvbaton.agent.rank_sets import LocalRanks
from kvbaton.agent.sockets import ControlSockets
from kvbaton.config import HandoffSettings, Limits, OnFailure
from kvbaton.core.card import Card, RankCard
from kvbaton.core.handoff import Incarnation, Mode, RequestId
from kvbaton.core.timeline import Note, Stage
from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.engine import Engine, EngineSettings
from kvbaton.engines.embedded.request import FromSource, GenerationRequest, RequestRecord, Sampling, TokenOutput, ToTarget
from kvbaton.engines.embedded.weights import load_model
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.base import Region, TransportSettings
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.memory import MemoryHub, MemoryTransport
from kvbaton.transport.neighbour import this_process
from watching import wait_until

__all__ = ["BLOCK_TOKENS", "EnginePair", "Instance", "PausingWaiter", "Waiter", "alone", "assert_equal", "prompt_of"]

BLOCK_TOKENS = 4
WAIT_S = 30.0
LIMITS = Limits(transfer_timeout=20.0, defer_timeout=40.0)
_LOGPROB_TOLERANCE = 1e-3


class Waiter(Answer):
    """Collects the outputs of one request, and can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._is_done = threading.Event()

    def __call__(self, output: TokenOutput) -> None:
        super().__call__(output)
        if output.finish_reason is not None:
            self._is_done.set()

    def wait(self) -> Self:
        assert self._is_done.wait(WAIT_S), f"not finished after {WAIT_S:g} s: {len(self.outputs)} outputs"
        return self

    @property
    def record(self) -> RequestRecord:
        record = self.wait().last.record
        assert record is not None
        return record


class PausingWaiter(Waiter):
    """Keeps the engine's thread after its n-th output until the n-th condition holds."""

    def __init__(self, *conditions: Callable[[], bool]) -> None:
        super().__init__()
        self._conditions = conditions

    def __call__(self, output: TokenOutput) -> None:
        super().__call__(output)
        for condition in self._conditions[len(self.outputs) - 1 : len(self.outputs)]:
            wait_until(condition, "the engine may go on", WAIT_S)


class Instance:
    """One engine with its agents, on real threads."""

    def __init__(self, hub: MemoryHub, blocks: int, settings: EngineSettings, limits: Limits = LIMITS) -> None:
        self.incarnation = Incarnation(secrets.token_hex(8))
        loaded = load_model("tiny")
        self.cache = PagedCache(loaded.config, blocks, BLOCK_TOKENS)
        self.notes: list[Note] = []
        region = Region.of(self.cache.data)
        inner = MemoryTransport(region, hub, TransportSettings(incarnation=self.incarnation))
        self.transport = FaultyTransport(inner, region, Faults())
        sockets = ControlSockets(self.incarnation, "127.0.0.1", PortPicker().pick())
        rank = RankCard(0, self.cache.layout(), (self.transport.endpoint(),))
        defer_timeout, transfer_timeout = limits.defer_timeout, limits.transfer_timeout
        card = Card(
            self.incarnation,
            "tiny",
            "f00d",
            "tp1",
            (rank,),
            this_process(),
            defer_timeout=defer_timeout,
            transfer_timeout=transfer_timeout,
        )
        unfenced = settings.handoff.unfenced_writes
        ranks = LocalRanks(self.cache.layout(), self.transport, transfer_timeout, unfenced_writes=unfenced)
        self.driver = Driver(card, ranks, limits, sockets, self._wake, settings.handoff, self.notes.append)
        self.engine = Engine(loaded, self.cache, self.driver, settings, time.monotonic, self.notes.append)
        self.requests: list[GenerationRequest] = []

    def __enter__(self) -> Self:
        self.driver.start()
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.driver.close()

    def submit(
        self,
        prompt: Sequence[int],
        handoff: ToTarget | FromSource | None = None,
        waiter: Waiter | None = None,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Waiter:
        """Ask for an answer; greedy, with logprobs, unless set otherwise."""
        sampling = {"max_tokens": 8, "ignore_eos": True, "logprobs": 1} | sampling
        waiter = Waiter() if waiter is None else waiter
        name = RequestId(f"request-{len(self.requests)}")
        self.requests.append(GenerationRequest(name, tuple(prompt), Sampling(**sampling), handoff, cache_salt))
        self.engine.submit(self.requests[-1], waiter)
        return waiter

    def wait_empty(self) -> None:
        """Wait until nothing is live and every block is free, then recount."""
        wait_until(self._is_empty, f"everything is given back: {self.engine.stats()}")
        assert self.driver.errors_total == 0

    def has_noted(self, stage: Stage) -> bool:
        """Whether something has come to that stage."""
        return any(note.stage is stage for note in tuple(self.notes))

    def _is_empty(self) -> bool:
        stats = self.engine.stats()
        return stats.blocks_free == stats.blocks_total and not any(stats.requests.values())

    def _wake(self) -> None:
        self.engine.wake()


class EnginePair:
    """A prefill and a decode instance. `source` and `target` are settings of the one engine; the others are for both."""

    def __init__(
        self,
        mode: Mode,
        *,
        blocks: int = 64,
        on_failure: OnFailure = OnFailure.FAIL,
        source: dict[str, Any] | None = None,
        target: dict[str, Any] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        hub = MemoryHub()
        self.mode = mode
        handoff = HandoffSettings(mode=mode, on_failure=on_failure)
        common = EngineSettings(handoff=handoff, defer_timeout_s=limits.defer_timeout)
        source_settings, target_settings = source or {}, target or {}
        self.source = Instance(hub, source_settings.pop("blocks", blocks), replace(common, **source_settings), limits)
        self.target = Instance(
            hub, target_settings.pop("blocks", blocks), replace(common, poison=True, **target_settings), limits
        )
        self._parts = ExitStack()

    def __enter__(self) -> Self:
        self._parts.enter_context(self.source)
        self._parts.enter_context(self.target)
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def prefill(self, prompt: Sequence[int], name: str, **sampling: Any) -> Waiter:
        """The source's part."""
        return self.source.submit(prompt, ToTarget(key_of(name)), **{**sampling, "max_tokens": 1})

    def decode(self, prompt: Sequence[int], name: str, **sampling: Any) -> Waiter:
        """The target's part."""
        return self.target.submit(prompt, FromSource(key_of(name), self.source.driver.address), **sampling)

    def hand_off(self, prompt: Sequence[int], name: str, **sampling: Any) -> Waiter:
        """Both parts in the order of the mode; the decoded answer."""
        prefill = self.prefill(prompt, name, **sampling)
        if self.mode is Mode.PULL:
            prefill.wait()
        return self.decode(prompt, name, **sampling).wait()

    def wait_empty(self) -> None:
        """Wait until both have given everything back."""
        self.source.wait_empty()
        self.target.wait_empty()


def alone(prompt: Sequence[int], **sampling: Any) -> Waiter:
    """What one engine answers that does nothing else."""
    loaded = load_model("tiny")
    engine = Engine(loaded, PagedCache(loaded.config, 128, BLOCK_TOKENS), None, EngineSettings(step_tokens=1000))
    sampling = {"max_tokens": 8, "ignore_eos": True, "logprobs": 1} | sampling
    waiter = Waiter()
    engine.submit(GenerationRequest(RequestId("alone"), tuple(prompt), Sampling(**sampling)), waiter)
    while not waiter.is_finished:
        engine.step()
    return waiter


def assert_equal(answer: Waiter, expected: Waiter) -> None:
    """The same tokens, and logprobs that differ by rounding only."""
    assert answer.wait().last.error == ""
    assert answer.token_ids == expected.token_ids
    ours, theirs = ([output.logprob for output in one.outputs] for one in (answer, expected))
    np.testing.assert_allclose(ours, theirs, atol=_LOGPROB_TOLERANCE)


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """A prompt of so many random bytes."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, tokens)]
