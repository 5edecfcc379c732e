"""Push and pull under any order of events, in small pools: nothing announced is written, no request is left over."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from engine_fakes import BLOCK_TOKENS, SOURCE, Answer, Bench, FakePort, alone, key_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.agent.engine_port import Drained, EngineEvent, HandoffStats, Landed, Offer, SourceEnded, TargetEnded
from kvbaton.config import HandoffSettings, OnFailure
from kvbaton.core.handoff import Aux, BlockLists, HandoffKey, Mode, Outcome, Span, span_problem
from kvbaton.core.timeline import Side
from kvbaton.engines.embedded.request import FinishReason, FromSource, ToTarget
from kvbaton.engines.embedded.scheduler import Scheduler
from kvbaton.engines.embedded.sequence import Sequence as EngineSequence

Cell = tuple[int, int, int]
Action = tuple[str, int]

KINDS = {"plain": 3, "source": 4, "target": 2, "step": 15, "grant": 3, "drain": 1, "end": 1, "land": 1, "fail": 1, "cancel": 1}
SETTLED_STEPS = 600


class WatchedPort(FakePort):
    """Knows every cell that a peer may read or write, and that this engine must not write meanwhile.

    The engine catches what a port raises, so whatever is wrong is kept in `violations`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cells: dict[HandoffKey, set[Cell]] = {}
        self.prompts: dict[HandoffKey, Sequence[int]] = {}
        self.violations: list[str] = []
        self.bench: Bench

    def spans_ready(self, key: HandoffKey, blocks: BlockLists, spans: tuple[Span, ...]) -> None:
        self._demand(key not in self.retracted, f"{key} is announced while it is retracted")
        self._demand(key not in self.offers, f"{key} is announced after its offer")
        self._demand(self.span_blocks.setdefault(key, blocks) == blocks, f"{key} has other blocks than before")
        known = self.spans.setdefault(key, [])
        for span in spans:
            self._demand(span.number == len(known), f"{key}: span {span.number} comes after {len(known)} others")
            known.append(span)
            self._announce(key, blocks, span)

    def retract(self, key: HandoffKey) -> None:
        self._demand(key in self.spans and key not in self.offers, f"{key} cannot be retracted")
        super().retract(key)

    def offer(self, offer: Offer) -> None:
        self._demand(offer.key not in self.retracted, f"{offer.key} is offered while it is retracted")
        super().offer(offer)
        whole = Span(0, 0, offer.tokens, 0, 2)
        problem = span_problem(self.spans[offer.key], whole) if offer.key in self.spans else ""
        self._demand(not problem, f"{offer.key}: {problem}")
        self._announce(offer.key, offer.blocks, whole)

    def cancel(self, key: HandoffKey, side: Side | None = None) -> None:  # noqa: ARG002
        self.cancelled.append(key)

    def forget(self, key: HandoffKey, event: EngineEvent) -> None:
        """The peer is done with this; the engine gets the event."""
        self.cells.pop(key, None)
        self.news.append(event)

    def on_write(self, layer: int, block: int, slot: int) -> None:
        for key, cells in self.cells.items():
            self._demand((layer, block, slot) not in cells, f"layer {layer} of block {block} is announced for {key}")

    def check_contents(self) -> None:
        """What was announced still lies where it was announced."""
        for key, spans in self.spans.items():
            if key in self.cells:
                for span in spans:
                    self._check(key, self.span_blocks[key], span)

    def _announce(self, key: HandoffKey, blocks: BlockLists, span: Span) -> None:
        self._check(key, blocks, span)
        cells = self.cells.setdefault(key, set())
        for token in range(span.first_token, span.end_token):
            block, slot = divmod(token, BLOCK_TOKENS)
            cells |= {(layer, blocks[0][block], slot) for layer in range(span.first_layer, span.end_layer)}

    def _check(self, key: HandoffKey, blocks: BlockLists, span: Span) -> None:
        for token in range(span.first_token, span.end_token):
            block, slot = divmod(token, BLOCK_TOKENS)
            for layer in range(span.first_layer, span.end_layer):
                found = self.bench.cache.data[layer, 0, blocks[0][block], slot, 0, 1]
                self._demand(found == self.prompts[key][token] + 1, f"token {token} of {key} is not what it was announced as")

    def _demand(self, holds: bool, violation: str) -> None:
        if not holds:
            self.violations.append(violation)


class Run:
    """One engine, and a world that does things to it."""

    def __init__(self, blocks: int, step_tokens: int, most: int, handoff: HandoffSettings) -> None:
        self.port = WatchedPort()
        self.bench = Bench(
            blocks=blocks, port=self.port, context_tokens=40, step_tokens=step_tokens, max_sequences=most, handoff=handoff
        )
        self.port.bench = self.bench
        self.bench.model.on_write = self.port.on_write
        self.answers: dict[str, tuple[Answer, list[int]]] = {}
        self.sources: list[HandoffKey] = []
        self.targets: list[HandoffKey] = []

    def do(self, kind: str, number: int) -> None:
        match kind:
            case "plain" | "source" | "target":
                self._submit(kind, number)
            case "step":
                self.step()
            case "cancel" if self.answers:
                self.bench.cancel(sorted(self.answers)[number % len(self.answers)])
            case "grant":
                self._pick(self.sources, number, self.port.grant)
            case "drain":
                self._pick(self.port.retracted, number, self.drain)
            case "end":
                self._pick(self.sources, number, self.end_source)
            case "land":
                self._pick(list(self.port.pulls), number, self.land)
            case "fail":
                self._pick(self.targets, number, self.fail)

    def step(self) -> None:
        self.bench.step()
        self.port.check_contents()
        assert not self.port.violations

    def settle(self) -> None:
        """Everything that is owed happens; then every request must end."""
        for _ in range(SETTLED_STEPS):
            for key in tuple(self.sources):
                if key in self.port.cancelled or key in self.port.offers:
                    self.end_source(key)
                else:
                    self.port.grant(key)
            for key in tuple(self.port.retracted):
                self.drain(key)
            for key in tuple(self.targets):
                if key in self.port.cancelled:
                    self.fail(key)
                elif key in self.port.pulls:
                    self.land(key)
            self.step()
            if all(answer.is_finished for answer, _ in self.answers.values()) and not (self.sources or self.targets):
                break
        else:
            raise AssertionError(f"a request never ends: {self.bench.engine.stats()}")
        self.step()
        self.bench.assert_empty()

    def check_answers(self) -> None:
        for answer, prompt in self.answers.values():
            if answer.last.finish_reason is FinishReason.LENGTH:
                expected = alone(prompt, max_tokens=len(answer.token_ids)).token_ids
                assert answer.token_ids == expected

    def drain(self, key: HandoffKey) -> None:
        self.port.retracted.remove(key)
        del self.port.spans[key], self.port.span_blocks[key]
        self.port.forget(key, Drained(key))

    def end_source(self, key: HandoffKey) -> None:
        self.sources.remove(key)
        if key in self.port.retracted:
            self.port.retracted.remove(key)
        del self.port.expected_targets[key]
        for known in (self.port.spans, self.port.span_blocks, self.port.offers):
            known.pop(key, None)
        self.port.forget(key, SourceEnded(key, Outcome.FAILED))

    def land(self, key: HandoffKey) -> None:
        """Fill the blocks as the source would, and say so."""
        pull, data = self.port.pulls.pop(key), self.bench.cache.data
        for token in range(pull.cached_tokens, pull.tokens):
            block, slot = divmod(token, BLOCK_TOKENS)
            data[:, :, pull.blocks[0][block], slot] = self.port.prompts[key][token] + 1
            data[1, :, pull.blocks[0][block], slot, 0, 0] = token
        self.targets.remove(key)
        (first,) = alone(self.port.prompts[key], max_tokens=1).token_ids
        self.port.forget(key, Landed(key, Aux(first, -1.0), HandoffStats()))

    def fail(self, key: HandoffKey) -> None:
        self.port.pulls.pop(key, None)
        self.targets.remove(key)
        self.port.forget(key, TargetEnded(key, Outcome.FAILED, "no"))

    def _submit(self, kind: str, number: int) -> None:
        name = f"r{len(self.answers):02}"
        capacity = min(40, self.bench.cache.blocks * BLOCK_TOKENS)
        prompt = [number % 3, *[number % 5] * 100][: 1 + number % min(24, capacity - 1)]
        handoff = None if kind == "plain" else ToTarget(key_of(name)) if kind == "source" else FromSource(key_of(name), SOURCE)
        self.port.prompts[key_of(name)] = prompt
        answer = self.bench.submit(prompt, name=name, handoff=handoff, max_tokens=1 + number % 25)
        self.answers[name] = (answer, prompt)
        self.bench.engine.step()
        if kind != "plain":
            (self.sources if kind == "source" else self.targets).append(key_of(name))

    def _pick(self, keys: Sequence[HandoffKey], number: int, act: Callable[[HandoffKey], None]) -> None:
        if keys:
            act(keys[number % len(keys)])


def run(actions: list[Action], blocks: int, step_tokens: int, most: int, handoff: HandoffSettings) -> None:
    world = Run(blocks, step_tokens, most, handoff)
    for kind, number in actions:
        world.do(kind, number)
    world.settle()
    world.check_answers()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(4, 12),
    st.sampled_from([1, 5]),
    st.integers(1, 5),
    st.sampled_from([Mode.PUSH, Mode.PUSH, Mode.PULL]),
    st.sampled_from(list(OnFailure)),
)
def test_any_order_of_events(seed: int, blocks: int, step_tokens: int, most: int, mode: Mode, on_failure: OnFailure) -> None:
    chance = random.Random(seed)
    kinds = chance.choices(list(KINDS), list(KINDS.values()), k=chance.randrange(80))
    actions = [(kind, chance.randrange(100)) for kind in kinds]
    run(actions, blocks, step_tokens, most, HandoffSettings(mode=mode, on_failure=on_failure))


PUSH = HandoffSettings(mode=Mode.PUSH)
CROWDED: list[Action] = [("plain", 98), ("source", 23), ("grant", 0), *[("step", 0)] * 5]


def test_the_crowded_case_retracts() -> None:
    world = Run(8, 1, 4, PUSH)
    for kind, number in CROWDED:
        world.do(kind, number)
    assert world.port.retracted == [key_of("r01")]
    world.settle()
    world.check_answers()


def test_a_retraction_without_waiting_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: blocks that go back before they are drained are written while they are announced."""

    def too_early(self: Scheduler, sequence: EngineSequence, plan: object) -> None:
        self._leave(sequence)
        self.pool.release(sequence.blocks)
        sequence.preempted()
        self._waiting.add_first(sequence)

    monkeypatch.setattr(Scheduler, "_preempt", too_early)
    with pytest.raises(AssertionError, match=r"r01/0\.0"):
        run([*CROWDED, *[("step", 0)] * 8], 8, 1, 4, PUSH)
