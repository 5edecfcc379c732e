"""Clients have turns inside an instance, and so have the requests of one client: large ones starve no other."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engine_fakes import Answer, Bench, alone
from hypothesis import given
from hypothesis import strategies as st
from served import Client, Reply, ScriptedEngine, run, serving

from kvbaton.config import CLIENT_HEADER, HTTP_KEY_HEADER, Trust, http_token
from kvbaton.engines.embedded.fair_queue import FairQueue
from kvbaton.engines.embedded.request import ApiCall, EngineBusy, FinishReason, TokenOutput
from kvbaton.engines.embedded.sequence import Sequence

KEY = b"the key of this cluster"


def waiting(number: int, call: ApiCall) -> Sequence:
    return cast(Sequence, SimpleNamespace(number=number, request=SimpleNamespace(call=call)))


def order(*calls: ApiCall) -> list[ApiCall]:
    """In which order sequences of these requests are served that all wait at the same time."""
    queue = FairQueue()
    for number, call in enumerate(calls):
        queue.add(waiting(number, call))
    return [queue.take().request.call for _ in calls]


def test_one_request_is_served_in_order_of_arrival() -> None:
    queue, call = FairQueue(), ApiCall()
    for number in range(5):
        queue.add(waiting(number, call))
    assert [queue.take().number for _ in range(5)] == list(range(5))
    assert queue.peek() is None


def test_requests_of_one_client_have_turns() -> None:
    a, b, c = ApiCall(), ApiCall(), ApiCall()
    assert order(a, a, a, a, b, b, c) == [a, b, c, a, b, a, a]


def test_clients_have_turns_whatever_the_number_of_their_requests() -> None:
    a, b, c = ApiCall("x"), ApiCall("x"), ApiCall("y")
    assert order(a, a, b, b, c, c, c) == [a, c, b, c, a, c, b]


def test_a_newcomer_waits_for_one_round() -> None:
    queue, crowd = FairQueue(), [ApiCall(f"client {number % 3}") for number in range(10)]
    for number in range(1000):
        queue.add(waiting(number, crowd[number % 10]))
    for _ in range(100):
        queue.take()
    late = waiting(1000, ApiCall("late"))
    queue.add(late)
    assert late in [queue.take() for _ in range(2 * 3 + 1)], "the rest of this round and the next one"


@given(st.integers(0, 2**32))
def test_no_stream_of_newcomers_passes_a_request_over_for_ever(seed: int) -> None:
    """More come than are served, each a request of its own, of the same client or of another one."""
    chance, queue, batch, served = random.Random(seed), FairQueue(), ApiCall("x"), 0
    for number in range(20):
        queue.add(waiting(number, batch))
    for round_number in range(200):
        for more in range(2):
            queue.add(waiting(100 + 2 * round_number + more, ApiCall(chance.choice("xyz"))))
        served += queue.take().request.call is batch
    assert served >= 2


@given(st.lists(st.tuples(st.sampled_from(["add", "first", "take", "remove"]), st.integers(0, 5)), max_size=60))
def test_what_goes_in_comes_out_once(actions: list[tuple[str, int]]) -> None:
    queue, inside = FairQueue(), list[Sequence]()
    calls = [ApiCall(f"client {number % 2}") for number in range(6)]
    for number, (action, which) in enumerate(actions):
        if action in ("add", "first"):
            sequence = waiting(number, calls[which])
            inside.append(sequence)
            (queue.add if action == "add" else queue.add_first)(sequence)
        elif inside:
            chosen = queue.peek() if action == "take" else inside[which % len(inside)]
            assert chosen is not None
            if action == "take":
                assert queue.take() is chosen
            else:
                queue.remove(chosen)
            inside.remove(chosen)
        assert len(queue) == len(inside)
        assert {each.number for each in queue} == {each.number for each in inside}
        assert all(each in queue for each in inside)
    while inside:
        inside.remove(queue.take())
    assert queue._clients == {}, "nothing is remembered of clients that have nothing here"


def submit_batch(bench: Bench, count: int, client: str = "") -> list[Answer]:
    call = ApiCall(client, count)
    return [bench.submit([1 + number % 50, 2, 3], call=call, max_tokens=2) for number in range(count)]


@pytest.mark.parametrize("client", ["", "another"], ids=["same client", "another client"])
def test_ten_large_requests_starve_no_other(client: str) -> None:
    bench = Bench(max_sequences=4, blocks=32)
    crowd = [answer for _ in range(10) for answer in submit_batch(bench, 100)]
    for _ in range(10):
        bench.step()
    before = sum(answer.is_finished for answer in crowd)
    single = bench.submit([7, 8, 9], call=ApiCall(client), max_tokens=2)
    bench.run(single)
    passed = sum(answer.is_finished for answer in crowd) - before
    assert single.token_ids == alone([7, 8, 9], max_tokens=2).token_ids
    assert passed <= 20, "one round of the ten, and what was running; not the hundreds that came before"


def test_a_late_prefill_shares_the_steps_of_running_ones() -> None:
    """In the order of their turns: not all 15 prompts of another request before it."""
    bench = Bench(max_sequences=16, blocks=128, step_tokens=8)
    call = ApiCall("large", 15)
    crowd = [bench.submit([number + 1] * 24, call=call, max_tokens=1) for number in range(15)]
    single = bench.submit([77] * 8, max_tokens=1)
    bench.run(single)
    assert sum(answer.is_finished for answer in crowd) <= 2


def test_the_largest_request_gives_way_when_blocks_run_out() -> None:
    """Not the youngest of all: it would be preempted again and again for those that came before."""
    bench = Bench(blocks=16, max_sequences=8)
    call = ApiCall("large", 5)
    crowd = [bench.submit([number + 1] * 3, call=call, max_tokens=20) for number in range(5)]
    single = bench.submit([77] * 3, call=ApiCall("small"), max_tokens=20)
    bench.run(single, *crowd)
    assert bench.engine.stats().preemptions_total > 0
    assert bench.model.steps, "it ran"
    prefills = Counter(count for step in bench.model.steps for start, count in step if start == 0)
    assert single.last.record is not None
    assert single.token_ids == alone([77] * 3, max_tokens=20).token_ids
    assert sum(prefills.values()) > 6, "something was computed again"
    bench.assert_empty()


class TestFullQueue:
    def full(self, client: str = "") -> tuple[Bench, list[Answer]]:
        bench = Bench(max_waiting=8, max_sequences=1)
        crowd = submit_batch(bench, 8, client)
        bench.step()
        return bench, [*crowd, bench.submit([5], call=ApiCall(client), max_tokens=2)]

    @pytest.mark.parametrize("client", ["", "another"])
    def test_the_largest_request_makes_room_for_a_small_one(self, client: str) -> None:
        bench, crowd = self.full()
        bench.step()
        single = bench.submit([7, 8, 9], call=ApiCall(client), max_tokens=2)
        bench.step()
        ended = [answer for answer in crowd if answer.is_finished and answer.last.finish_reason is FinishReason.CROWDED_OUT]
        assert len(ended) == 1
        assert "max_waiting is 8" in ended[0].last.error
        bench.run(single)
        assert single.token_ids == alone([7, 8, 9], max_tokens=2).token_ids

    def test_but_not_for_one_as_large(self) -> None:
        bench, _ = self.full()
        bench.step()
        with pytest.raises(EngineBusy, match="max_waiting is 8"):
            bench.submit([7], call=ApiCall("", 8))

    def test_of_many_small_requests_of_one_client_the_newest_is_refused(self) -> None:
        bench = Bench(max_waiting=3, max_sequences=1)
        answers = [bench.submit([1], max_tokens=20)]
        bench.step()
        answers += [bench.submit([token], max_tokens=20) for token in range(2, 5)]
        bench.step()
        with pytest.raises(EngineBusy):
            bench.submit([9])
        assert not any(answer.is_finished for answer in answers)

    def test_it_stays_bounded(self) -> None:
        """Newcomers that other clients give way to come between two steps, and nothing makes room before the next."""
        bench, _ = self.full()
        bench.step()
        for number in range(8):
            bench.submit([3], call=ApiCall(f"client {number}"))
        with pytest.raises(EngineBusy):
            bench.submit([3], call=ApiCall("client 8"))
        bench.step()
        assert bench.engine.stats().requests["waiting"] <= 8

    def test_a_client_sees_429(self) -> None:
        def crowded_out(_: object) -> list[TokenOutput]:
            return [TokenOutput(-1, "", finish_reason=FinishReason.CROWDED_OUT, error="max_waiting is 8 for all")]

        async def work() -> Reply:
            async with serving(ScriptedEngine(crowded_out)) as client:
                return await client.complete()

        reply = run(work())
        assert (reply.status, reply.error["code"]) == (429, "too_many_sequences")
        assert "Retry-After" in reply.headers


def clients_of(trust: Trust, *headers: dict[str, str], **body: Any) -> list[ApiCall]:
    async def ask(client: Client) -> None:
        for each in headers:
            assert (await client.complete(each, **body)).status == 200

    async def work() -> None:
        async with serving(engine, trust=trust) as client:
            await ask(client)

    engine = ScriptedEngine()
    run(work())
    return [request.call for request in engine.submitted]


def test_all_sequences_of_a_request_share_a_turn() -> None:
    calls = clients_of(Trust(), {}, {}, prompt=["a", "b"], n=2)
    assert len(calls) == 8
    assert len(set(calls[:4])) == len(set(calls[4:])) == 1
    assert calls[0] != calls[4]
    assert calls[0].sequences == 4


TOKEN = {HTTP_KEY_HEADER: http_token(KEY)}


def test_a_router_with_the_key_names_its_clients() -> None:
    sent = [{**TOKEN, CLIENT_HEADER: "a"}, {**TOKEN, CLIENT_HEADER: "b"}, TOKEN, {}]
    assert len({call.client for call in clients_of(Trust(KEY), *sent)}) == 3
    assert clients_of(Trust(KEY), TOKEN)[0].client == clients_of(Trust(KEY), {})[0].client == "at 127.0.0.1"


@pytest.mark.parametrize("trust", [Trust(), Trust(KEY)], ids=["no key", "key"])
def test_a_client_cannot_name_itself(trust: Trust) -> None:
    sent = [{CLIENT_HEADER: "a"}, {CLIENT_HEADER: "b", "Authorization": "Bearer x"}, {}]
    assert {call.client for call in clients_of(trust, *sent)} == {"at 127.0.0.1"}
