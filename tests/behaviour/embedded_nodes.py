"""Embedded instances inside the test's own process: real engines, drivers, sockets and transports, without the HTTP server.

For faults that cannot be produced from outside: a transport that fails on command, an engine that does not step, a peer that
follows the protocol and sends wrong values in it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
import secrets
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from driver_rig import Intruder

from kvbaton.agent.driver import Driver
from kvbaton.agent.rank_sets import LocalRanks
from kvbaton.agent.sockets import ControlSockets
from kvbaton.config import HandoffSettings, Limits, Trust
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.card import Card, RankCard
from kvbaton.core.handoff import Aux, HandoffKey, Incarnation, Mode, RequestId, Span, TransferId
from kvbaton.core.messages import Announced, AuxSent, ConfirmAsk, Confirmed, Grant, Hello, Prefilled, Release
from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.engine import Engine, EngineSettings
from kvbaton.engines.embedded.model import LlamaModel
from kvbaton.engines.embedded.request import (
    FinishReason,
    FromSource,
    GenerationRequest,
    Sampling,
    TokenOutput,
    ToTarget,
)
from kvbaton.engines.embedded.weights import LoadedModel, load_model
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.base import AfterEvent, Batch, PeerRank, Region, Ticket, TransportSettings
from kvbaton.transport.choose import open_transport
from kvbaton.transport.faulty import Faults, FaultyTransport
from kvbaton.transport.neighbour import this_process
from watching import wait_until

__all__ = [
    "PATIENT",
    "PROMPT_TOKENS",
    "PULL",
    "Collected",
    "FalseSource",
    "FalseTarget",
    "GatedTransport",
    "Node",
    "digest_of",
    "false_source",
    "false_target",
    "hand_off",
    "is_untouched",
    "key_of",
    "names",
    "prompt_of",
]

PATIENT = Limits()
"""The default limits: longer than any test waits, so that what ends within a test was notified and did not time out."""

PULL = HandoffSettings(mode=Mode.PULL)
PROMPT_TOKENS = 40
_BLOCK_TOKENS = 16
_POISON = 0x4B
_SOME_BLOCKS = ((1, 2, 3),)
_WHOLE = Span(0, 0, PROMPT_TOKENS, 0, 3)

names = (f"handoff-{number}" for number in itertools.count())
"""A name that no other hand-off has."""

Gate = Callable[[PeerRank], AfterEvent | None]


def key_of(name: str) -> HandoffKey:
    return HandoffKey(TransferId(name))


def prompt_of(seed: int, tokens: int = PROMPT_TOKENS) -> tuple[int, ...]:
    """A prompt of printable bytes; another one for each seed."""
    return tuple(random.Random(seed).choices(range(32, 127), k=tokens))


def digest_of(prompt: tuple[int, ...]) -> str:
    """What the embedded engine calls a prompt towards its peers."""
    return hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16).hexdigest()


@functools.cache
def _weights() -> LoadedModel:
    return load_model("tiny")


def tiny_model() -> LoadedModel:
    """The tiny model for one engine: the weights are shared, the scratch memory is its own."""
    loaded = _weights()
    return dataclasses.replace(loaded, model=LlamaModel(loaded.config, loaded.model.weights))


class GatedTransport(FaultyTransport):
    """A transport whose batches to some peers wait for an event; `gate` names it, or None."""

    gate: Gate = staticmethod(lambda _: None)

    def post(self, batch: Batch, after: AfterEvent | None = None) -> Ticket:
        return super().post(batch, self.gate(batch.peer) or after)


@dataclass
class Collected:
    """The sink of one request: all outputs of the engine for it."""

    outputs: list[TokenOutput] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, output: TokenOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self._is_over.set()

    def wait(self, timeout_s: float = 20.0) -> Self:
        """Wait for the last output."""
        assert self._is_over.wait(timeout_s), f"the request is not over: {self.outputs}"
        return self

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    @property
    def is_good(self) -> bool:
        return self.outputs[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)

    @property
    def tokens(self) -> list[int]:
        assert self.is_good, self.outputs[-1]
        return [output.token_id for output in self.outputs if output.token_id >= 0]

    @property
    def error(self) -> str:
        """Why it failed; fails itself when it did not."""
        assert self.outputs[-1].finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED), self.outputs[-1]
        return self.outputs[-1].error


class Node:
    """One embedded instance. With `thread` false, its engine only moves when the test steps it."""

    def __init__(
        self,
        *,
        transport: str = "local",
        limits: Limits = PATIENT,
        trust: Trust | None = None,
        handoff: HandoffSettings = PULL,
        faults: Faults | None = None,
        max_in_flight: int = 4096,
        blocks: int = 256,
        step_tokens: int = 256,
        port: int | None = None,
        thread: bool = True,
    ) -> None:
        loaded = tiny_model()
        self.incarnation = Incarnation(secrets.token_hex(8))
        self.cache = PagedCache(loaded.config, blocks, _BLOCK_TOKENS)
        self.cache.poison(range(blocks))
        sockets = ControlSockets(self.incarnation, "127.0.0.1", port or PortPicker().pick(), trust)
        region = Region.of(self.cache.data)
        settings = TransportSettings(self.incarnation, limits.transfer_timeout, max_in_flight)
        self.transport = GatedTransport(open_transport(transport, region, settings), region, faults or Faults())
        rank = RankCard(0, self.cache.layout(), (self.transport.endpoint(),))
        limit_s = (limits.defer_timeout, limits.transfer_timeout)
        self.card = Card(self.incarnation, loaded.name, loaded.fingerprint, "tp1", (rank,), this_process(), *limit_s)
        memory = self.cache.layout(), self.transport, limits.transfer_timeout, region.view
        ranks = LocalRanks(*memory, unfenced_writes=handoff.unfenced_writes)
        self.driver = Driver(self.card, ranks, limits, sockets, self._wake, handoff)
        self.engine = Engine(loaded, self.cache, self.driver, EngineSettings(step_tokens, poison=True, handoff=handoff))
        self._thread = thread

    def __enter__(self) -> Self:
        self.driver.start()
        if self._thread:
            self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.driver.close()

    @property
    def address(self) -> ControlAddress:
        return self.driver.address

    def alone(self, prompt: tuple[int, ...], max_tokens: int = 4) -> Collected:
        """A plain request."""
        return self._submit(next(names), prompt, max_tokens, None)

    def prefill(self, name: str, prompt: tuple[int, ...]) -> Collected:
        """The source's half of a hand-off."""
        return self._submit(name, prompt, 1, ToTarget(key_of(name)))

    def decode(
        self,
        name: str,
        prompt: tuple[int, ...],
        source: ControlAddress,
        incarnation: Incarnation | None = None,
        max_tokens: int = 4,
    ) -> Collected:
        """The target's half of a hand-off."""
        return self._submit(name, prompt, max_tokens, FromSource(key_of(name), source, incarnation))

    def cancel(self, name: str) -> None:
        """The client is gone."""
        self.engine.cancel(RequestId(name))

    def wait_idle(self) -> None:
        """Wait until no block is held or in use, and no hand-off lives."""

        def is_idle() -> bool:
            if not self._thread:
                self.engine.step()
            stats, agent = self.engine.stats(), self.driver.stats()
            return stats.blocks_held + stats.blocks_in_use + sum(agent.handoffs_live.values()) == 0

        wait_until(is_idle, "blocks and hand-offs are back to 0")

    def wait_dropped(self, cause: str, count: int = 1) -> None:
        """Wait until so many frames were dropped for `cause`."""
        wait_until(lambda: self.driver.stats().dropped_total[cause] >= count, f"{count} dropped as {cause!r}")

    def wait_late(self, event: str, count: int = 1) -> None:
        """Wait until so many messages were counted as late."""
        wait_until(lambda: self.driver.stats().late_total[event] >= count, f"{count} late {event!r}")

    def _submit(self, name: str, prompt: tuple[int, ...], most: int, handoff: ToTarget | FromSource | None) -> Collected:
        collected = Collected()
        sampling = Sampling(most, ignore_eos=True)
        self.engine.submit(GenerationRequest(RequestId(name), prompt, sampling, handoff), collected)
        return collected

    def _wake(self) -> None:
        self.engine.wake()


def hand_off(source: Node, target: Node, prompt: tuple[int, ...], max_tokens: int = 4) -> Collected:
    """One hand-off from start to end."""
    name = next(names)
    assert source.prefill(name, prompt).wait().is_good
    return target.decode(name, prompt, source.address, source.incarnation, max_tokens).wait()


def is_untouched(node: Node) -> bool:
    """Whether the cache of a node was never written to."""
    return bool((node.cache.data.view(np.uint8) == _POISON).all())


@dataclass
class FalseSource:
    """A peer with the key that has prefilled nothing, and to which a target has granted its blocks."""

    intruder: Intruder
    target: Node
    grant: Grant
    request: Collected

    def announce(self, blocks: tuple[tuple[int, ...], ...] | None = None, span: Span | None = None) -> None:
        """Announce where the cache lies."""
        lists, spans = _SOME_BLOCKS if blocks is None else blocks, (span or _WHOLE,)
        self.intruder.send_message(Announced(self.grant.key, self.grant.grant, 1, lists, spans), self.target.incarnation)

    def finish_prefill(self, aux: Aux | None = None) -> None:
        """Announce the end of prefill, and send the aux record if there is one."""
        key, number = self.grant.key, self.grant.grant
        self.intruder.send_message(Prefilled(key, number, 1, 1, PROMPT_TOKENS, 0.0), self.target.incarnation)
        if aux is not None:
            self.intruder.send_message(AuxSent(key, number, aux), self.target.incarnation)

    def confirm(self) -> None:
        """Wait until the target has everything, and confirm it."""
        self.intruder.receive_message(ConfirmAsk)
        self.intruder.send_message(Confirmed(self.grant.key, self.grant.grant, 1, 1), self.target.incarnation)
        self.intruder.receive_message(Release)


@contextmanager
def false_source(target: Node, like: Node, prompt: tuple[int, ...], key: bytes | None = None) -> Iterator[FalseSource]:
    """A false source that `target` takes for real; its memory is that of `like`."""
    name = next(names)
    with Intruder(key) as intruder:
        intruder.listen()
        request = target.decode(name, prompt, intruder.address)
        intruder.receive_message(Hello)
        intruder.send_message(Hello(intruder.card_like(like.card), wants_answer=False), target.incarnation)
        grant = intruder.receive_message(Grant).message
        assert isinstance(grant, Grant)
        try:
            yield FalseSource(intruder, target, grant, request)
        finally:
            target.cancel(name)


@dataclass
class FalseTarget:
    """A peer with the key whose card the source knows."""

    intruder: Intruder
    source: Node


@contextmanager
def false_target(source: Node, like: Node, key: bytes | None = None) -> Iterator[FalseTarget]:
    """A false target that `source` takes for real; its memory is that of `like`."""
    with Intruder(key) as intruder:
        intruder.dial(source.address)
        intruder.send_message(Hello(intruder.card_like(like.card), wants_answer=True))
        intruder.receive_message(Hello)
        yield FalseTarget(intruder, source)
