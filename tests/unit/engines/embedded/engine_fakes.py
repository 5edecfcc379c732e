"""Stand-ins for the engine's tests: a model whose answers depend on every cached byte, a text-free tokenizer, joined ports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvbaton.agent.engine_port import (
    Allocation,
    Drained,
    EngineEvent,
    Granted,
    HandoffStats,
    Landed,
    Offer,
    SourceEnded,
    SourceRequest,
    SpansReady,
    TargetEnded,
)
from kvbaton.config import HandoffSettings
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import BlockLists, HandoffKey, Mode, Outcome, RequestId, TransferId
from kvbaton.core.handoff import Span as HandoffSpan
from kvbaton.core.timeline import Note, Side
from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.engines.embedded.engine import Engine, EngineSettings
from kvbaton.engines.embedded.model import TokenSpan, Written
from kvbaton.engines.embedded.request import ApiCall, FromSource, GenerationRequest, Sampling, TokenOutput, ToTarget
from kvbaton.engines.embedded.tokenizer import Tokenizer
from kvbaton.engines.embedded.weights import LoadedModel

VOCABULARY = 97
EOS = 96
BLOCK_TOKENS = 4
SOURCE = ControlAddress.of("127.0.0.1", 5000)
PULL = HandoffSettings(mode=Mode.PULL)
PUSH = HandoffSettings(mode=Mode.PUSH)


def make_config(context_tokens: int = 256) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        layers=2,
        hidden_size=4,
        heads=1,
        kv_heads=1,
        head_size=4,
        ffn_size=4,
        vocab_size=VOCABULARY,
        context_tokens=context_tokens,
        rope_theta=1e4,
        norm_epsilon=1e-5,
        tied_head=True,
    )


class FakeModel:
    """Writes a number per token, position and plane, and answers with a digest of all the numbers it finds in the blocks."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int]]] = []
        self.before_step: Callable[[], None] = lambda: None
        self.on_write: Callable[[int, int, int], None] | None = None

    def forward(self, spans: Sequence[TokenSpan], cache: PagedCache, written: Written | None = None) -> npt.NDArray[np.float32]:
        self.steps.append([(span.start, len(span.token_ids)) for span in spans])
        self.before_step()
        for layer in range(2):
            for span in spans:
                self._write(span, cache, layer)
            if written is not None:
                written(layer)
        return np.stack([self._logits(span, cache) for span in spans])

    def _write(self, span: TokenSpan, cache: PagedCache, layer: int) -> None:
        for offset, token_id in enumerate(span.token_ids):
            block, slot = divmod(span.start + offset, cache.block_tokens)
            if self.on_write is not None:
                self.on_write(layer, int(span.blocks[block]), slot)
            cache.data[layer, :, span.blocks[block], slot] = int(token_id) + 1
            if layer:
                cache.data[layer, :, span.blocks[block], slot, 0, 0] = span.start + offset

    def _logits(self, span: TokenSpan, cache: PagedCache) -> npt.NDArray[np.float32]:
        tokens = span.start + len(span.token_ids)
        cached = cache.data[:, :, span.blocks].reshape(2, 2, -1, 4)[:, :, :tokens].astype(np.int64)
        digest = 7
        for value in cached.transpose(2, 0, 1, 3).reshape(tokens, -1) @ (np.arange(16) * 31 + 1):
            digest = (digest * 1_000_003 + int(value)) % 2_147_483_647
        return (((np.arange(VOCABULARY) + 1) * digest) % 10_007 / 1_000).astype(np.float32)


class FakeTokenizer:
    """Token 1 is `b`, token 25 `z`, token 26 `a` again; tokens 90 and 91 are the two halves of `é`."""

    eos_ids = frozenset({EOS})

    def token_bytes(self, token_id: int) -> bytes:
        return {90: b"\xc3", 91: b"\xa9"}.get(token_id, bytes([97 + token_id % 26]))


def fake_tokenizer() -> Tokenizer:
    return cast(Tokenizer, FakeTokenizer())


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@dataclass
class Answer:
    """Collects the outputs of one request."""

    outputs: list[TokenOutput] = field(default_factory=list)

    def __call__(self, output: TokenOutput) -> None:
        assert not self.is_finished, f"{output} after the last output"
        self.outputs.append(output)

    @property
    def token_ids(self) -> list[int]:
        return [output.token_id for output in self.outputs if output.token_id >= 0]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def is_finished(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    @property
    def last(self) -> TokenOutput:
        assert self.is_finished
        return self.outputs[-1]


class Bench:
    """One engine with a fake model, stepped by the test; it pulls, unless it is set to push."""

    def __init__(self, blocks: int = 64, port: Any = None, context_tokens: int = 256, **settings: Any) -> None:
        self.model = FakeModel()
        self.clock = FakeClock()
        self.cache = PagedCache(make_config(context_tokens), blocks, BLOCK_TOKENS)
        loaded = SimpleNamespace(
            config=make_config(context_tokens), model=self.model, tokenizer=FakeTokenizer(), name="fake", fingerprint="f"
        )
        self.port = port
        settings.setdefault("handoff", PULL)
        self.notes: list[Note] = []
        self.engine = Engine(
            cast(LoadedModel, loaded), self.cache, port, EngineSettings(**settings), self.clock, self.notes.append
        )
        self._names = 0

    def submit(
        self,
        prompt: Sequence[int],
        name: str = "",
        handoff: ToTarget | FromSource | None = None,
        call: ApiCall | None = None,
        **sampling: Any,
    ) -> Answer:
        self._names += 1
        answer = Answer()
        sampling.setdefault("max_tokens", 8)
        sampling.setdefault("ignore_eos", True)
        request_id = RequestId(name or f"request-{self._names}")
        request = GenerationRequest(request_id, tuple(prompt), Sampling(**sampling), handoff, call=call or ApiCall())
        self.engine.submit(request, answer)
        return answer

    def cancel(self, name: str) -> None:
        self.engine.cancel(RequestId(name))

    def step(self) -> bool:
        worked = self.engine.step()
        self.engine._core.check_integrity()
        return worked

    def run(self, *answers: Answer, most_steps: int = 500) -> None:
        for _ in range(most_steps):
            if all(answer.is_finished for answer in answers):
                return
            self.step()
        raise AssertionError(f"not finished after {most_steps} steps: {self.engine.stats()}")

    def assert_empty(self) -> None:
        stats = self.engine.stats()
        assert (stats.blocks_in_use, stats.blocks_held, stats.blocks_free) == (0, 0, stats.blocks_total)
        assert not any(stats.requests.values())


class FakePort:
    """Records the calls of the engine, and delivers the events of the test."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, HandoffKey]] = []
        self.spans: dict[HandoffKey, list[HandoffSpan]] = {}
        self.span_blocks: dict[HandoffKey, BlockLists] = {}
        self.retracted: list[HandoffKey] = []
        self.offers: dict[HandoffKey, Offer] = {}
        self.pulls: dict[HandoffKey, Allocation] = {}
        self.expected_targets: dict[HandoffKey, str] = {}
        self.expected_sources: dict[HandoffKey, SourceRequest] = {}
        self.cancelled: list[HandoffKey] = []
        self.declined: list[tuple[SourceRequest, str]] = []
        self.news: list[EngineEvent] = []

    def expect_target(self, key: HandoffKey, prompt: str) -> None:
        self.expected_targets[key] = prompt

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[HandoffSpan, ...]) -> None:
        assert key in self.expected_targets
        assert key not in self.offers
        assert key not in self.retracted
        self.calls.append(("spans", key))
        self.spans.setdefault(key, []).extend(spans)
        assert self.span_blocks.setdefault(key, blocks) == blocks

    def spans_ready_all(self, ready: Sequence[SpansReady]) -> None:
        for each in ready:
            self.spans_ready(each.key, each.blocks, each.spans)

    def retract(self, key: HandoffKey) -> None:
        self.calls.append(("retract", key))
        self.retracted.append(key)

    def expect_source(self, request: SourceRequest) -> None:
        self.expected_sources[request.key] = request

    def offer(self, offer: Offer) -> None:
        self.calls.append(("offer", offer.key))
        self.offers[offer.key] = offer

    def allocated(self, allocation: Allocation) -> None:
        self.pulls[allocation.key] = allocation

    def decline(self, request: SourceRequest, reason: str) -> None:
        self.declined.append((request, reason))

    def refuse(self, key: HandoffKey, reason: str) -> None:
        raise AssertionError(f"this engine refuses no prefill before admission: {key}, {reason}")

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:  # noqa: ARG002
        self.cancelled.append(key)
        if key in self.expected_targets and key not in self.offers:
            self.news.append(SourceEnded(key, Outcome.CANCELLED, "cancelled"))
        if key in self.expected_sources and key not in self.pulls:
            self.news.append(TargetEnded(key, Outcome.CANCELLED, "cancelled"))

    def events(self) -> list[EngineEvent]:
        news, self.news = self.news, []
        return news

    def grant(self, key: HandoffKey) -> None:
        self.news.append(Granted(key))

    def drain(self, key: HandoffKey) -> None:
        self.retracted.remove(key)
        del self.spans[key], self.span_blocks[key]
        self.news.append(Drained(key))

    def end_source(self, key: HandoffKey, outcome: Outcome = Outcome.DELIVERED) -> None:
        del self.offers[key]
        self.news.append(SourceEnded(key, outcome))

    def end_target(self, key: HandoffKey, outcome: Outcome, reason: str = "") -> None:
        del self.pulls[key]
        self.news.append(TargetEnded(key, outcome, reason))


class Pair:
    """A prefill and a decode engine; `move` copies what has been offered and pulled from one cache to the other."""

    def __init__(self, **settings: Any) -> None:
        self.source = Bench(port=FakePort(), **settings)
        self.target = Bench(port=FakePort(), poison=True, **settings)

    def hand_off(self, prompt: Sequence[int], name: str, *, copies: bool = True, **sampling: Any) -> tuple[Answer, Answer]:
        prefill = self.source.submit(prompt, handoff=ToTarget(key_of(name)), **{**sampling, "max_tokens": 1})
        self.source.run(prefill)
        decode = self.target.submit(prompt, handoff=FromSource(key_of(name), SOURCE), **sampling)
        self.target.step()
        self.move(key_of(name), copies=copies)
        self.source.step()
        self.target.run(decode)
        return prefill, decode

    def move(self, key: HandoffKey, *, copies: bool = True) -> None:
        offer, pull = self.source.port.offers[key], self.target.port.pulls.pop(key)
        assert offer.tokens == pull.tokens
        moved = range(pull.cached_tokens, pull.tokens) if copies else ()
        for token in moved:
            block, slot = divmod(token, BLOCK_TOKENS)
            copied = self.source.cache.data[:, :, offer.blocks[0][block], slot]
            self.target.cache.data[:, :, pull.blocks[0][block], slot] = copied
        self.source.port.end_source(key)
        stats = HandoffStats(bytes_planned=len(moved), bytes_moved=len(moved), handover_s=0.5, transport="fake")
        self.target.port.news.append(Landed(key, offer.aux, stats))


def key_of(name: str) -> HandoffKey:
    return HandoffKey(TransferId(name))


def alone(prompt: Sequence[int], **sampling: Any) -> Answer:
    """What an engine that does nothing else answers."""
    bench = Bench(step_tokens=1000)
    answer = bench.submit(prompt, **sampling)
    bench.run(answer)
    return answer
