"""Both halves of the connector under vLLM's own scheduler, without servers and without a model: runs in vLLM's environment.

Prints one JSON object: what each check found, "" when it is as it should be. The agents are scripted; vLLM's scheduler asserts
by itself that every id is reported once, and only while it waits for it. Arguments: the directory of a model.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from scheduler_engine import BLOCK_TOKENS, Engine, key_of, landed, make_caches, make_config, prompt
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm_rig import source_params, target_params

from kvbaton.agent.engine_port import Drained, Granted, SourceEnded, TargetEnded
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import HandoffKey, Incarnation, Outcome
from kvbaton.engines.vllm import KVBatonConnector
from kvbaton.engines.vllm.connector import _Handshake
from kvbaton.engines.vllm.engine_calls import CallListener
from kvbaton.engines.vllm.engine_waits import EngineWaits
from kvbaton.engines.vllm.metrics import KVBatonStats
from kvbaton.engines.vllm.requests import HandoffInfo

# What becomes of a prefill.


def source_blocks_stay_until_the_sending_has_ended(model: str) -> None:
    engine = Engine("source", model)
    engine.add("a", prompt(40), source_params("tx"))
    (output,) = engine.run(1)
    assert output.kv_transfer_params["do_remote_prefill"]
    for _ in range(3):
        engine.step()
    assert engine.free_blocks == engine.blocks - 3
    engine.port.push(SourceEnded(key_of("tx"), Outcome.DELIVERED))
    engine.step()
    engine.assert_at_rest()


def source_of_a_prompt_shorter_than_a_block(model: str) -> None:
    engine = Engine("source", model)
    engine.add("a", prompt(3), source_params("tx"))
    assert engine.run(1)[0].kv_transfer_params["transfer_id"] == "tx"
    engine.port.push(SourceEnded(key_of("tx"), Outcome.EXPIRED))
    engine.run(2)
    engine.assert_at_rest()


def source_with_its_prompt_cached_offers_every_block(model: str) -> None:
    engine = Engine("source", model)
    for name in ("a", "b"):
        engine.add(name, prompt(48), source_params(name))
        engine.run(2)
        offer = [argument for call, argument in engine.port.calls if call == "offer"][-1]
        assert (offer.tokens, len(offer.blocks[0])) == (48, 3)
        engine.port.push(SourceEnded(key_of(name), Outcome.DELIVERED))
        engine.run(1)
    engine.assert_at_rest()


def source_aborted_in_mid_prefill(model: str) -> None:
    engine = Engine("source", model)
    request = engine.add("a", prompt(200), source_params("tx"))
    engine.step()
    engine.abort(request)
    engine.run(3)
    assert engine.free_blocks < engine.blocks, "a target may still be reading"
    engine.port.push(SourceEnded(key_of("tx"), Outcome.CANCELLED))
    engine.run(1)
    engine.assert_at_rest()


def source_preempted_in_mid_prefill_is_retracted_before_the_next_forward(model: str) -> None:
    engine = Engine("source", model, blocks=18)
    grower = engine.add("plain", prompt(62, 1), max_tokens=200)
    engine.run(1)
    engine.add("a", prompt(200, 2), source_params("tx"))
    for _ in range(400):
        engine.port.push(Granted(key_of("tx")), Drained(key_of("tx")))
        engine.step()
        if "retract" in engine.port.names():
            break
    assert "retract" in engine.port.names(), "the prefill was never preempted"
    after = engine.port.names().index("retract")
    assert "spans_ready" in engine.port.names()[:after]
    engine.abort(grower)
    engine.run(8)
    assert engine.port.names()[-1] == "offer"
    spans = [span for call, argument in engine.port.calls[after:] if call == "spans_ready" for span in argument[2]]
    assert (spans[0].number, spans[0].first_token, spans[-1].end_token) == (0, 0, 200)
    engine.port.push(SourceEnded(key_of("tx"), Outcome.DELIVERED))
    engine.run(2)
    engine.assert_at_rest()


def source_without_a_grant_leaves_room_for_the_largest_request(model: str) -> None:
    engine = Engine("source", model, blocks=36)
    for index in range(6):
        engine.add(f"{index:08x}", prompt(16, index), source_params(f"tx-{index}"))
    engine.run(3)
    assert engine.free_blocks == 32, "512 tokens fit"
    engine.port.push(Granted(key_of("tx-5")))
    engine.run(3)
    assert key_of("tx-5") in {argument.key for call, argument in engine.port.calls if call == "offer"}
    for index in range(6):
        engine.port.push(SourceEnded(key_of(f"tx-{index}"), Outcome.DELIVERED))
        engine.run(2)
    engine.assert_at_rest()


def sources_without_a_grant_leave_room_when_they_are_computed_in_chunks(model: str) -> None:
    """A step computes one block of each of two prompts of eight; when the second comes, the first has one."""
    engine = Engine("source", model, blocks=32 + 8 + 6 + 1)
    settings = engine.scheduler.scheduler_config
    threshold, settings.long_prefill_token_threshold = settings.long_prefill_token_threshold, BLOCK_TOKENS
    try:
        for index in range(2):
            engine.add(f"{index:08x}", prompt(128, index), source_params(f"tx-{index}"))
        for _ in range(20):
            engine.step()
            assert engine.free_blocks >= 32, "512 tokens do not fit any more"
        for index in range(2):
            engine.port.push(SourceEnded(key_of(f"tx-{index}"), Outcome.DELIVERED))
            engine.run(12)
    finally:
        settings.long_prefill_token_threshold = threshold
    engine.assert_at_rest()


def source_with_prompt_logprobs_leaves_room_too_and_computes_every_token(model: str) -> None:
    """vLLM asks the connector and ignores its answer, unless it is kept from that."""
    engine = Engine("source", model, blocks=32 + 3 + 1)
    engine.add("a", prompt(32, 1), source_params("tx-0"))
    engine.run(2)
    request = engine.add("b", prompt(32, 1), source_params("tx-1"), prompt_logprobs=1)
    engine.run(3)
    assert engine.free_blocks == 33
    engine.port.push(Granted(key_of("tx-1")))
    seen = [engine.step()[0].get(request.request_id, 0) for _ in range(4)]
    assert sum(seen) == 32, "its prompt is in the prefix cache, and prompt_logprobs must not use that"
    for index in range(2):
        engine.port.push(SourceEnded(key_of(f"tx-{index}"), Outcome.DELIVERED))
    engine.run(2)
    engine.assert_at_rest()


# What becomes of a load.


def target_waits_without_keeping_others_waiting_and_computes_one_token(model: str) -> None:
    engine = Engine("target", model)
    request = engine.add("a", prompt(40), target_params("tx"), max_tokens=2)
    plain = engine.add("b", prompt(20, 3), max_tokens=2)
    scheduled, _ = engine.step()
    assert set(scheduled) == {plain.request_id}
    engine.step()
    engine.port.push(landed("tx"))
    engine.step()
    scheduled, outputs = engine.step()
    assert scheduled == {request.request_id: 1}
    assert len(outputs) == 1
    engine.run(2)
    engine.assert_at_rest()


def target_that_finds_no_blocks_asks_for_none_and_is_served_later(model: str) -> None:
    engine = Engine("target", model, blocks=9)
    big = engine.add("big", prompt(100, 4), max_tokens=20)
    engine.run(2)
    engine.add("a", prompt(60, 5), target_params("tx"))
    engine.run(3)
    assert engine.port.names() == ["expect_source"]
    engine.abort(big)
    engine.run(1)
    assert engine.port.names() == ["expect_source", "allocated"]
    engine.port.push(landed("tx"))
    engine.run(3)
    engine.assert_at_rest()


def target_aborted_while_it_loads_keeps_its_blocks_until_no_write_can_land(model: str) -> None:
    engine = Engine("target", model)
    request = engine.add("a", prompt(40), target_params("tx"))
    engine.run(1)
    engine.abort(request)
    engine.run(3)
    assert engine.free_blocks == engine.blocks - 3
    engine.port.push(TargetEnded(key_of("tx"), Outcome.CANCELLED, ""))
    engine.run(1)
    engine.assert_at_rest()


def target_whose_load_failed_ends_with_an_error(model: str) -> None:
    engine = Engine("target", model)
    engine.add("a", prompt(40), target_params("tx"))
    engine.run(1)
    engine.port.push(TargetEnded(key_of("tx"), Outcome.FAILED, "lost"))
    outputs = engine.run(2)
    assert [str(output.finish_reason) for output in outputs] == ["error"], outputs
    engine.assert_at_rest()


def target_whose_load_failed_is_computed_where_that_is_the_policy(model: str) -> None:
    engine = Engine("target", model, "recompute")
    request = engine.add("a", prompt(40), target_params("tx"))
    engine.run(1)
    engine.port.push(TargetEnded(key_of("tx"), Outcome.FAILED, "lost"))
    engine.step()
    scheduled, outputs = engine.step()
    assert scheduled == {request.request_id: 40}
    assert outputs[0].kv_transfer_params["kvbaton"]["recomputed"]
    engine.run(1)
    engine.assert_at_rest()


def bad_parameters_fail_a_request_with_prompt_logprobs_too(model: str) -> None:
    bad = {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "tx"}
    engine = Engine("target", model)
    engine.add("a", prompt(40), bad, prompt_logprobs=1)
    outputs = engine.run(3)
    assert [str(output.finish_reason) for output in outputs] == ["error"], outputs
    engine.assert_at_rest()
    engine = Engine("target", model, "recompute")
    engine.add("a", prompt(40))
    engine.run(2)
    request = engine.add("b", prompt(40), bad, prompt_logprobs=1)
    seen = [engine.step()[0].get(request.request_id, 0) for _ in range(4)]
    assert sum(seen) == 40, "where that is the policy it is computed, without the prefix cache"
    engine.assert_at_rest()


def _asked(engine: Engine) -> list[int]:
    """For how many tokens from elsewhere blocks are allocated from now on, in turn."""
    half, asked = engine.connector._half, []
    allocated = half.allocated

    def noting(request: Any, blocks: Any, external_tokens: int) -> None:
        asked.append(external_tokens)
        allocated(request, blocks, external_tokens)

    half.allocated = noting
    return asked


def target_whose_hand_off_ended_before_it_had_blocks_takes_one_to_fail(model: str) -> None:
    for policy, ends in (("fail", "error"), ("recompute", "length")):
        engine = Engine("target", model, policy, blocks=9)
        big = engine.add("big", prompt(100, 4), max_tokens=20)
        engine.run(2)
        engine.add("a", prompt(60, 5), target_params("tx"))
        engine.run(1)
        engine.port.push(TargetEnded(key_of("tx"), Outcome.FAILED, "lost"))
        engine.run(2)
        asked = _asked(engine)
        engine.abort(big)
        outputs = [each for each in engine.run(4) if each.request_id != big.request_id]
        assert asked[0] == BLOCK_TOKENS, asked
        assert [str(output.finish_reason) for output in outputs if output.finish_reason] == [ends], outputs
        assert engine.port.names() == ["expect_source", "cancel"], "its one block was never to be filled"
        engine.assert_at_rest()


def nothing_of_a_failed_load_enters_the_prefix_cache(model: str) -> None:
    engine = Engine("target", model)
    engine.add("a", prompt(40), target_params("tx"))
    engine.run(1)
    engine.port.push(TargetEnded(key_of("tx"), Outcome.FAILED, "lost"))
    engine.run(2)
    plain = engine.add("b", prompt(40))
    scheduled, _ = engine.step()
    assert scheduled == {plain.request_id: 40}
    engine.run(1)
    engine.assert_at_rest()


def what_landed_is_cached_and_not_asked_for_again(model: str) -> None:
    engine = Engine("target", model)
    engine.add("a", prompt(40), target_params("tx"))
    engine.run(1)
    engine.port.push(landed("tx"))
    engine.run(3)
    engine.add("b", prompt(40), target_params("ty"))
    engine.run(1)
    assert engine.port.calls[-1][1].cached_tokens == 32
    engine.port.push(landed("ty"))
    engine.run(3)
    engine.assert_at_rest()


def target_preempted_after_it_landed_computes_by_itself(model: str) -> None:
    engine = Engine("target", model, blocks=9)
    first = engine.add("a", prompt(40, 6), max_tokens=90)
    engine.run(1)
    engine.add("b", prompt(40, 7), target_params("tx"), max_tokens=60)
    engine.run(1)
    engine.port.push(landed("tx"))
    engine.run(80)
    assert engine.scheduler.requests, "both have ended before there was a preemption"
    engine.abort(first)
    engine.run(70)
    assert engine.port.names().count("allocated") == 1
    engine.assert_at_rest()


def a_request_refused_before_admission_releases_its_source(model: str) -> None:
    """vLLM admits such a request only to end it at once."""
    engine = Engine("target", model)
    request = engine.add("a", prompt(1), target_params("tx"), is_refused=True)
    engine.abort(request)
    engine.run(2)
    assert engine.port.names() == ["decline"]
    engine.assert_at_rest()


def in_any_order_each_id_is_reported_once_and_every_block_returns(model: str) -> None:
    """Random requests, ends and aborts, in any order; vLLM's own assertions are the check."""
    _anything(model, range(60), is_async=False)


def the_same_with_steps_that_overlap(model: str) -> None:
    """vLLM schedules the next step before it has the output of the last one (async_scheduling)."""
    _anything(model, range(100, 130), is_async=True)


def _anything(model: str, seeds: Iterable[int], *, is_async: bool) -> None:
    seen: set[str] = set()
    for seed in seeds:
        generator = random.Random(seed)
        policy, blocks = generator.choice(["fail", "recompute"]), generator.choice([34, 65])
        engine = Engine("both", model, policy, blocks, is_async=is_async)
        live: dict[str, Request] = {}
        ended: dict[str, str] = {}
        for number in range(60):
            _happen(engine, generator, live, ended, number)
            engine.step()
        for _ in range(400):
            for name in sorted(live.keys() - ended):
                _end(engine, name, generator, ended)
            engine.step()
            if not engine.scheduler.requests and not engine.worker.live:
                break
        engine.run(3)
        engine.assert_at_rest()
        seen |= {*ended.values()}
    assert seen == {"sent", "landed", "failed"}, f"only {seen}; this tests less than its name"


def _happen(engine: Engine, generator: random.Random, live: dict[str, Request], ended: dict[str, str], number: int) -> None:
    chance = generator.random()
    if chance < 0.4:
        side = generator.choice([source_params, target_params])
        name = f"{side.__name__}-{number}"
        tokens = prompt(generator.randrange(1, 120), generator.randrange(6))
        live[name] = engine.add(f"{number:08x}", tokens, side(name), generator.randrange(1, 6))
    elif chance < 0.6 and live:
        engine.abort(live[generator.choice(sorted(live))])
    elif chance < 0.9 and live.keys() - ended:
        _end(engine, generator.choice(sorted(live.keys() - ended)), generator, ended)


def _end(engine: Engine, name: str, generator: random.Random, ended: dict[str, str]) -> None:
    """Let the agents end a hand-off as they may: a target lands only when it has blocks."""
    calls = {(call, _key(argument)) for call, argument in engine.port.calls}
    key = key_of(name)
    if ("expect_target", key) in calls and generator.random() < 0.3:
        engine.port.push(Granted(key))
        return
    if ("expect_target", key) in calls:
        outcome = Outcome.DELIVERED if ("offer", key) in calls else Outcome.FAILED
        engine.port.push(SourceEnded(key, outcome))
        ended[name] = "sent"
    elif ("allocated", key) in calls and generator.random() < 0.5:
        engine.port.push(landed(name))
        ended[name] = "landed"
    elif ("expect_source", key) in calls:
        engine.port.push(TargetEnded(key, Outcome.FAILED, "by chance"))
        ended[name] = "failed"


def _key(argument: Any) -> Any:
    if isinstance(argument, HandoffKey):
        return argument
    return argument[0] if isinstance(argument, tuple) else getattr(argument, "key", None)


# What vLLM's MultiConnector asks.


def statistics_are_found_by_the_name_of_the_connector(model: str) -> None:
    counted = {"handoffs": 1}
    read = MultiConnector.build_kv_connector_stats({KVBatonConnector.__name__: counted})
    assert isinstance(read.data[KVBatonConnector.__name__], KVBatonStats)
    assert read.data[KVBatonConnector.__name__].data == counted


# How the engine's process waits.


def _waited_s(waits: EngineWaits, queue: MessageQueue, reader: MessageQueue, *, has_forward: bool) -> float:
    """The processor time of a wait for a message that comes after half a second."""
    waits.step(has_forward=has_forward)
    waits.step(has_forward=has_forward)
    queue.enqueue("before")
    assert reader.dequeue(timeout=60) == "before"
    thread = threading.Timer(0.5, queue.enqueue, ("after",))
    thread.start()
    began = time.thread_time()
    assert reader.dequeue(timeout=60) == "after"
    thread.join()
    return time.thread_time() - began


def engine_sleeps_while_it_waits_for_a_step_without_a_forward(model: str) -> None:
    del model
    waits = EngineWaits()
    waits.guide(SpinCondition)
    queue = MessageQueue(n_reader=1, n_local_reader=1)
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    for each in (threading.Thread(target=queue.wait_until_ready), threading.Thread(target=reader.wait_until_ready)):
        each.start()
    asleep_s = _waited_s(waits, queue, reader, has_forward=False)
    polling_s = _waited_s(waits, queue, reader, has_forward=True)
    assert asleep_s < polling_s / 4, (asleep_s, polling_s)
    # Nothing is missed, however the ends of steps and the waits for them meet.
    waits.step(has_forward=False)
    waits.step(has_forward=False)
    rng, numbers = random.Random(5), list(range(2000))

    def write() -> None:
        for number in numbers:
            queue.enqueue(number)
            if rng.random() < 0.1:
                time.sleep(rng.choice((0.0, 0.0002, 0.002)))

    writer = threading.Thread(target=write)
    writer.start()
    assert [reader.dequeue(timeout=60) for _ in numbers] == numbers
    writer.join()


def engine_is_left_alone_where_the_setting_asks_for_that(model: str) -> None:
    SpinCondition.wait = getattr(SpinCondition.wait, "__wrapped__", SpinCondition.wait)
    for sleeps in (False, True):
        config = make_config("target", model, "fail", "push", is_async=False)
        config.kv_transfer_config.kv_connector_extra_config["engine_sleeps"] = sleeps
        config.cache_config.num_gpu_blocks = 65
        KVBatonConnector(config, KVConnectorRole.SCHEDULER, make_caches(65))
        assert hasattr(SpinCondition.wait, "__wrapped__") is sleeps


def engine_calls_its_worker_unless_the_setting_forbids_it(model: str) -> None:
    for sleeps in (False, True):
        name, can_call = Incarnation(f"checks-{os.getpid()}-{sleeps}"), threading.Event()

        def note(_: bool, can_call: threading.Event = can_call) -> None:
            can_call.set()

        listener = CallListener(name, note, threading.Event().set)
        listener.start()
        config = make_config("target", model, "fail", "push", is_async=False)
        config.kv_transfer_config.kv_connector_extra_config["engine_sleeps"] = sleeps
        config.cache_config.num_gpu_blocks = 65
        connector = KVBatonConnector(config, KVConnectorRole.SCHEDULER, make_caches(65))
        info = HandoffInfo(ControlAddress.of("127.0.0.1", 7001), name)
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): _Handshake(info)})
        assert hasattr(EngineCore.preprocess_add_request, "__wrapped__") is sleeps
        assert can_call.wait(30 if sleeps else 0.2) is sleeps
        connector.shutdown()
        listener.close()


CHECKS: tuple[Callable[[str], None], ...] = (
    source_blocks_stay_until_the_sending_has_ended,
    source_of_a_prompt_shorter_than_a_block,
    source_with_its_prompt_cached_offers_every_block,
    source_aborted_in_mid_prefill,
    source_preempted_in_mid_prefill_is_retracted_before_the_next_forward,
    source_without_a_grant_leaves_room_for_the_largest_request,
    sources_without_a_grant_leave_room_when_they_are_computed_in_chunks,
    source_with_prompt_logprobs_leaves_room_too_and_computes_every_token,
    target_waits_without_keeping_others_waiting_and_computes_one_token,
    target_that_finds_no_blocks_asks_for_none_and_is_served_later,
    target_aborted_while_it_loads_keeps_its_blocks_until_no_write_can_land,
    target_whose_load_failed_ends_with_an_error,
    target_whose_load_failed_is_computed_where_that_is_the_policy,
    bad_parameters_fail_a_request_with_prompt_logprobs_too,
    target_whose_hand_off_ended_before_it_had_blocks_takes_one_to_fail,
    nothing_of_a_failed_load_enters_the_prefix_cache,
    what_landed_is_cached_and_not_asked_for_again,
    target_preempted_after_it_landed_computes_by_itself,
    a_request_refused_before_admission_releases_its_source,
    in_any_order_each_id_is_reported_once_and_every_block_returns,
    the_same_with_steps_that_overlap,
    statistics_are_found_by_the_name_of_the_connector,
    engine_sleeps_while_it_waits_for_a_step_without_a_forward,
    engine_is_left_alone_where_the_setting_asks_for_that,
    engine_calls_its_worker_unless_the_setting_forbids_it,
)


def main() -> None:
    init_none_hash(sha256)
    found = {}
    for check in CHECKS:
        try:
            check(sys.argv[1])
            found[check.__name__] = ""
        except Exception:  # noqa: BLE001 - whatever it was, it is what the check has found
            found[check.__name__] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
