"""Many hand-offs at once: full queues, slow peers, dead peers; all of them end, and what is used for them is bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from embedded_nodes import Collected, Node, hand_off, names, prompt_of

from kvbaton.config import Limits
from kvbaton.core.addresses import ControlAddress
from kvbaton.launch.ports import PortPicker
from kvbaton.transport.base import AfterEvent, Completion, PeerRank
from kvbaton.transport.faulty import Faults
from watching import wait_until

_LONG_S = 90.0


def prepare(source: Node, seeds: range, tokens: int = 12) -> list[tuple[str, tuple[int, ...]]]:
    """Have the prompts of `seeds` prefilled; all are held at once. Steps the engine itself."""
    wanted = [(next(names), prompt_of(seed, tokens)) for seed in seeds]
    requests = [source.prefill(name, prompt) for name, prompt in wanted]
    while not all(request.is_over for request in requests):
        source.engine.step()
    assert all(request.is_good for request in requests)
    return wanted


def reference(node: Node, prompts: list[tuple[int, ...]], max_tokens: int) -> list[list[int]]:
    """What one instance alone answers."""
    requests = [node.alone(prompt, max_tokens) for prompt in prompts]
    return [request.wait(_LONG_S).tokens for request in requests]


@pytest.fixture(scope="module")
def single() -> Iterator[Node]:
    with Node(blocks=2048) as node:
        yield node


class TestBackPressure:
    """Back-pressure is a matter of waiting, not of failing; a thousand at once complete; a slow peer delays no other peer."""

    @pytest.mark.parametrize("transport", ["local", "tcp"])
    def test_a_full_queue_is_waited_for(self, single: Node, transport: str) -> None:
        slow = Faults(delay_s=0.02)
        with (
            Node(transport=transport, thread=False) as source,
            Node(transport=transport, max_in_flight=4, faults=slow) as target,
        ):
            wanted = prepare(source, range(60))
            requests = [target.decode(name, prompt, source.address) for name, prompt in wanted]
            answers = [request.wait(_LONG_S) for request in requests]
            assert [answer.outputs[-1].error for answer in answers if not answer.is_good] == []
            assert [answer.tokens for answer in answers] == reference(single, [prompt for _, prompt in wanted], 4)
            source.wait_idle()
            target.wait_idle()

    @pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.e2e)])
    def test_a_thousand_at_once_with_one_slow_peer_among_several(self, single: Node, count: int) -> None:
        is_released, share = threading.Event(), count // 4
        with ExitStack() as stack:
            sources = [stack.enter_context(Node(blocks=512, thread=False)) for _ in range(4)]
            target = stack.enter_context(Node(blocks=2048))

            def gate(peer: PeerRank) -> AfterEvent | None:
                return is_released.is_set if peer.incarnation == sources[0].incarnation else None

            target.transport.gate = gate
            wanted = [prepare(source, range(index * share, index * share + share)) for index, source in enumerate(sources)]
            requests = [
                [target.decode(name, prompt, source.address, max_tokens=2) for name, prompt in prompts]
                for source, prompts in zip(sources, wanted, strict=True)
            ]
            for of_source in requests[1:]:
                for request in of_source:
                    assert request.wait(_LONG_S).is_good
            assert not any(request.is_over for request in requests[0]), "the slow peer's own are still waiting"
            is_released.set()
            answers = [request.wait(_LONG_S).tokens for of_source in requests for request in of_source]
            assert answers == reference(single, [prompt for prompts in wanted for _, prompt in prompts], 2)
            for node in (*sources, target):
                node.wait_idle()
                node.engine._core.check_integrity()

    def test_a_slow_peer_that_fills_the_queue_delays_no_other_peer(self, single: Node) -> None:
        is_released = threading.Event()
        with Node(thread=False) as slow, Node(thread=False) as quick, Node(max_in_flight=8) as target:
            target.transport.gate = lambda peer: is_released.is_set if peer.incarnation == slow.incarnation else None
            held = [target.decode(name, prompt, slow.address) for name, prompt in prepare(slow, range(20))]
            wait_until(lambda: len(target.transport._posted) > 0, "the slow peer's copies are under way")
            wanted = prepare(quick, range(20, 30))
            requests = [target.decode(name, prompt, quick.address) for name, prompt in wanted]
            answers = [request.wait(10).tokens for request in requests]
            assert answers == reference(single, [prompt for _, prompt in wanted], 4)
            assert not any(request.is_over for request in held)
            is_released.set()
            assert all(request.wait(_LONG_S).is_good for request in held)


class TestErrorsOfAPost:
    """A post that is refused for now is tried again within a limit; a permanent error is one failure on both sides, by name."""

    def test_a_transient_error_is_tried_again(self, single: Node) -> None:
        with Node() as source, Node(faults=Faults(refuse_posts=25)) as target:
            assert hand_off(source, target, prompt_of(1)).tokens == single.alone(prompt_of(1)).wait().tokens
            assert target.engine.stats().handoffs_total == {("target", "delivered"): 1}

    def test_a_queue_that_never_has_room_is_a_failure_in_time(self) -> None:
        limits = Limits(transfer_timeout=0.5, defer_timeout=20.0, retry=0.1)
        with Node(limits=limits) as source, Node(limits=limits, faults=Faults(refuse_posts=10**9)) as target:
            assert "queue full" in hand_off(source, target, prompt_of(1)).error
            for node, side in ((source, "source"), (target, "target")):
                node.wait_idle()
                assert node.engine.stats().handoffs_total == {(side, "failed"): 1}

    def test_a_permanent_error_is_one_failure_on_both_sides(self) -> None:
        with Node() as source, Node(faults=Faults(fail_after=0)) as target:
            assert "failed on command" in hand_off(source, target, prompt_of(1)).error
            for node, side in ((source, "source"), (target, "target")):
                node.wait_idle()
                assert node.engine.stats().handoffs_total == {(side, "failed"): 1}
            target.transport.set_faults(Faults())
            assert hand_off(source, target, prompt_of(1)).tokens == source.alone(prompt_of(1)).wait().tokens


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class TestResourcesPerPeer:
    """A thousand hand-offs over fifty peers: sockets, threads and files follow the peers, never the hand-offs."""

    @pytest.mark.parametrize(("peers", "each"), [(10, 5), pytest.param(50, 20, marks=pytest.mark.e2e)])
    def test_bounded_by_peers(self, single: Node, peers: int, each: int) -> None:
        dead = ControlAddress.of("127.0.0.1", PortPicker().pick())
        with ExitStack() as stack:
            sources = [stack.enter_context(Node(blocks=40, thread=False)) for _ in range(peers)]
            target = stack.enter_context(Node(blocks=2048))
            first = [self.ask(target, sources, range(1)), [target.decode(next(names), prompt_of(0), dead)]]
            self.finish(first[0], sources)
            threads, files = threading.active_count(), descriptors()
            requests = self.ask(target, sources, range(1, each))
            lost = [target.decode(next(names), prompt_of(seed), dead) for seed in range(20)]
            peak = descriptors()
            self.finish(requests, sources)
            assert len(requests) + len(first[0]) == peers * each
            assert threading.active_count() == threads
            assert max(peak, descriptors()) <= files + 8
            assert not any(request.is_over for request in lost), "the dead peer's own requests have 30 s"
            prompts = [prompt_of(1000 * peer + seed, 12) for peer in range(peers) for seed in range(1, each)]
            assert [request.tokens for request in requests] == reference(single, prompts, 2)
            assert target.driver.stats().errors_total == 0

    def ask(self, target: Node, sources: list[Node], seeds: range) -> list[Collected]:
        requests = []
        for index, source in enumerate(sources):
            wanted = prepare(source, range(1000 * index + seeds.start, 1000 * index + seeds.stop))
            requests += [target.decode(name, prompt, source.address, max_tokens=2) for name, prompt in wanted]
        return requests

    def finish(self, requests: list[Collected], sources: list[Node]) -> None:
        for request in requests:
            request.wait(_LONG_S)
        for source in sources:
            source.wait_idle()

    def test_no_call_of_an_engine_waits_for_its_agents(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not even if their thread were stuck in a peer: the engine steps, answers plain requests and cancels."""
        is_stuck, go_on = threading.Event(), threading.Event()
        with Node() as source, Node(thread=False) as target:
            name, prompt = next(names), prompt_of(1)
            source.prefill(name, prompt).wait()

            def stick() -> list[Completion]:
                is_stuck.set()
                assert go_on.wait(_LONG_S)
                return []

            with monkeypatch.context() as stuck:
                stuck.setattr(target.transport, "poll", stick)
                request = target.decode(name, prompt, source.address)
                given_up = target.decode("given up", prompt_of(2), source.address)
                target.engine.step()
                assert is_stuck.wait(10)
                plain = target.alone(prompt_of(3))
                target.cancel("given up")
                while not plain.is_over:
                    target.engine.step()
                assert plain.is_good
                assert given_up.is_over
                assert not request.is_over
            go_on.set()

            def is_served() -> bool:
                target.engine.step()
                return request.is_over

            wait_until(is_served, "the agents go on")
            assert request.tokens == source.alone(prompt).wait().tokens
            target.wait_idle()
