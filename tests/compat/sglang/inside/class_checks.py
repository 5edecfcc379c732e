"""The backend's classes on SGLang's own pools, metadata buffers and arguments, without servers: runs in SGLang's environment.

Prints one JSON object: what each check found, "" when it is as it should be. Both sides live in this process, over real agents.
SGLang's schedulers are replaced by the calls that they make, in the order that they make them.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from reported_checks import REPORTED_CHECKS
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.utils import KVClassType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.plugins import load_plugins
from sides import ONE, PAGE, PORTS, PROMPT, TOKENS, Side, mha, mla, parallel, tensors, wait
from state_checks import STATE_CHECKS

from kvbaton.engines.sglang import backend
from kvbaton.engines.sglang.settings import CONFIG_VARIABLE
from kvbaton.errors import ConfigError


def hand_over(make_pool: Callable[[], Any], cached_pages: int = 0, make_draft: Callable[[], Any] = lambda: None) -> None:
    prefill = Side("prefill", make_pool(), PORTS.pick(), draft=make_draft())
    decode = Side("decode", make_pool(), 0, draft=make_draft())
    drafts = () if prefill.draft is None else ((prefill.draft, decode.draft),)
    try:
        torch.manual_seed(1)
        for pool in (prefill.pool, *(one for one, _ in drafts)):
            for tensor in tensors(pool):
                tensor.normal_()
        sender = prefill.make(KVClassType.SENDER, 99, PROMPT, prefill.port)
        receiver = decode.make(KVClassType.RECEIVER, 99, PROMPT, prefill.port)
        assert (sender.poll(), receiver.poll()) == (KVPoll.Bootstrapping, KVPoll.Bootstrapping)
        assert decode.manager.try_ensure_parallel_info(f"127.0.0.1:{prefill.port}")
        receiver.init(0)
        assert receiver.poll() == KVPoll.WaitingForInput
        target_pages = [2, 5, 9]
        receiver.send_metadata(np.array(target_pages[cached_pages:], np.int32), 3, [], cached_pages * PAGE)
        assert wait(sender, KVPoll.WaitingForInput) == KVPoll.WaitingForInput
        assert sender.pop_decode_prefix_len() == 0
        sender.init(3, 1)
        prefill.metadata.output_ids[1, 0] = 42
        prefill.metadata.bootstrap_room[1, 0] = 99
        sender.send(np.array([7, 3], np.int32), None)
        sender.send(np.array([1], np.int32), [])
        assert wait(sender, KVPoll.Success, KVPoll.Failed) == KVPoll.Success
        assert wait(receiver, KVPoll.Success, KVPoll.Failed) == KVPoll.Success
        for token in range(cached_pages * PAGE, TOKENS):
            here, there = [7, 3, 1][token // PAGE] * PAGE + token % PAGE, target_pages[token // PAGE] * PAGE + token % PAGE
            for pools in ((prefill.pool, decode.pool), *drafts):
                for source, target in zip(*map(tensors, pools), strict=True):
                    assert torch.equal(source[here], target[there]), token
        assert decode.metadata.get_buf(3)[0][0].item() == 42
        assert decode.metadata.bootstrap_room[3, 0].item() == 99
        assert sender.get_transfer_metric().transfer_total_bytes > 0
        sender.clear()
        receiver.clear()
    finally:
        prefill.close()
        decode.close()


def plain_attention_is_handed_over() -> None:
    hand_over(mha)


def the_latent_of_mla_is_handed_over() -> None:
    hand_over(mla)


def the_cache_of_a_draft_model_is_handed_over() -> None:
    """Its heads and layers are its own; its slots are those of the model."""
    hand_over(mha, make_draft=lambda: MHATokenToKVPool(64, PAGE, torch.float32, 4, 8, 1, "cpu", False))


def a_draft_model_on_one_side_only_is_refused_by_name() -> None:
    draft = MHATokenToKVPool(64, PAGE, torch.float32, 4, 8, 1, "cpu", False)
    prefill, decode = Side("prefill", mha(), PORTS.pick(), draft=draft), Side("decode", mha(), 0)
    try:
        sender = prefill.make(KVClassType.SENDER, 8, PROMPT, prefill.port)
        receiver = decode.make(KVClassType.RECEIVER, 8, PROMPT, prefill.port)
        receiver.init(0)
        wait(receiver, KVPoll.Failed)
        assert "2 (full, full draft)" in receiver.half.reason, receiver.half.reason
        wait(sender, KVPoll.Failed)
    finally:
        prefill.close()
        decode.close()


def cached_pages_are_left_out() -> None:
    hand_over(mha, cached_pages=1)


def a_failure_raises_its_reason_and_only_there() -> None:
    prefill = Side("prefill", mha(), PORTS.pick())
    try:
        sender = prefill.make(KVClassType.SENDER, 0, PROMPT, prefill.port)
        assert sender.poll() == KVPoll.Failed
        sender.init(3, 0)
        sender.send(np.array([1], np.int32))
        sender.abort()
        reason = ""
        try:
            sender.failure_exception()
        except backend.TransferFailed as error:
            reason = error.failure_reason
        assert "bootstrap_room is 0" in reason, reason
    finally:
        prefill.close()


def no_exception_leaves_a_sender_or_a_receiver() -> None:
    prefill = Side("prefill", mha(), PORTS.pick())
    try:
        sender = prefill.make(KVClassType.SENDER, 5, PROMPT, prefill.port)
        receiver = prefill.make(KVClassType.RECEIVER, 6, PROMPT, prefill.port)
        sender.half.begin = receiver.half.allocated = lambda *_: 1 / 0
        sender.init(3, 0)
        receiver.send_metadata(np.array([1], np.int32), 0)
        assert (sender.poll(), receiver.poll()) == (KVPoll.Failed, KVPoll.Failed)
        prefill.manager.submit_prefill_recompute(receiver, None)
    finally:
        prefill.close()


def a_prompt_that_is_too_long_for_decode_ends_its_prefill() -> None:
    """Through SGLang's own method: the hook on it has to be applied."""
    prefill, decode = Side("prefill", mha(), PORTS.pick()), Side("decode", mha(), 0)
    try:
        sender = prefill.make(KVClassType.SENDER, 7, PROMPT, prefill.port)
        request = SimpleNamespace(
            bootstrap_room=7,
            bootstrap_host="127.0.0.1",
            bootstrap_port=prefill.port,
            to_finish=None,
            finished_reason=SimpleNamespace(message="1300 tokens are too many"),
            finished=lambda: True,
        )
        DecodePreallocQueue.add(SimpleNamespace(_check_if_req_exceed_kv_capacity=lambda _: True), request)
        assert wait(sender, KVPoll.Failed) == KVPoll.Failed
        assert "decode refused it: 1300 tokens are too many" in sender.half.reason, sender.half.reason
    finally:
        prefill.close()
        decode.close()


def ranks_of_dp_attention_share_a_bootstrap_port_without_collision() -> None:
    """Every rank has the same arguments, as SGLang passes them; each hands over the rooms that are its own."""
    port, sides = PORTS.pick(), []
    os.environ[CONFIG_VARIABLE] = '{"prefill_dp_size": 2}'
    try:
        decode = Side("decode", mha(), 0)
    finally:
        os.environ[CONFIG_VARIABLE] = ""
    try:
        for rank in range(2):
            with parallel(attn_dp_size=2, attn_dp_rank=rank, load_balance_method="follow_bootstrap_room"):
                sides.append(Side("prefill", mha(), port))
            for tensor in tensors(sides[rank].pool):
                tensor.fill_(rank + 1)
        assert decode.manager.try_ensure_parallel_info(f"127.0.0.1:{port}")
        known = decode.manager.prefill_info_table[f"127.0.0.1:{port}"]
        assert (known.dp_size, known.follow_bootstrap_room) == (2, True)
        for room in (20, 21):
            sender = sides[room % 2].make(KVClassType.SENDER, room, PROMPT, port)
            receiver = decode.make(KVClassType.RECEIVER, room, PROMPT, port)
            receiver.init(room % known.dp_size)
            receiver.send_metadata(np.array([2, 5, 9], np.int32), 3, [], 0)
            wait(sender, KVPoll.WaitingForInput)
            sender.init(3, 1)
            sender.send(np.array([7, 3, 1], np.int32), [])
            assert wait(receiver, KVPoll.Success, KVPoll.Failed) == KVPoll.Success
            assert {float(tensor[2 * PAGE].max()) for tensor in tensors(decode.pool)} == {room % 2 + 1}
        lost = sides[1].make(KVClassType.SENDER, 22, PROMPT, port)
        assert lost.poll() == KVPoll.Failed
        assert "at data-parallel rank 1, and decode expects it at 0 of 2" in lost.half.reason
    finally:
        for side in (*sides, decode):
            side.close()


def _refused(named: str, role: str = "prefill", **changes: Any) -> None:
    refusal = ""
    try:
        Side(role, changes.pop("pool", None) or mha(), PORTS.pick(), **changes).close()
    except ConfigError as error:
        refusal = str(error)
    assert named in refusal, refusal or f"{named} was not refused"


def what_cannot_be_handed_over_is_refused_when_the_server_starts() -> None:
    _refused("several nodes", nnodes=2)
    for name in ("attn_cp_size", "attn_dcp_size"):
        with parallel(**{name: 2}):
            _refused("context parallelism of decode", "decode")
    for name in ("enable_kv_cache_sharding", "enable_dsa_cache_layer_split", "enable_cp_tp_group_sharing"):
        with parallel(**{name: True}, attn_cp_size=2, attn_cp_rank=0):
            _refused(f"{name} is set with attn_cp_size 2")
    with parallel(attn_dp_size=2, attn_dp_rank=1, load_balance_method="round_robin"):
        _refused("load_balance_method is 'round_robin' with 2 data-parallel ranks")
    with parallel(attn_dp_size=2, attn_dp_rank=0, dp_size=2):
        _refused("dp_size is 2 and attn_dp_size is 2")
    for state in ("mamba", "swa", "dsa", "swa_ring"):
        _refused(f"MHATokenToKVPool with {state}", state_types=[state])
    _refused("Unknown", pool=type("UnknownPool", (), {"start_layer": 0})())
    os.environ["SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"] = "3"
    try:
        _refused("DEFERRED_DECODE_KV_RELEASE_TIMEOUT is 3")
    finally:
        del os.environ["SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"]


CHECKS = (
    plain_attention_is_handed_over,
    the_latent_of_mla_is_handed_over,
    the_cache_of_a_draft_model_is_handed_over,
    a_draft_model_on_one_side_only_is_refused_by_name,
    cached_pages_are_left_out,
    a_failure_raises_its_reason_and_only_there,
    no_exception_leaves_a_sender_or_a_receiver,
    a_prompt_that_is_too_long_for_decode_ends_its_prefill,
    ranks_of_dp_attention_share_a_bootstrap_port_without_collision,
    what_cannot_be_handed_over_is_refused_when_the_server_starts,
    *STATE_CHECKS,
    *REPORTED_CHECKS,
)


def main() -> None:
    """Run all checks."""
    load_plugins()
    backend.get_parallel = lambda: ONE  # type: ignore[attr-defined]
    found = {}
    for check in CHECKS:
        started = time.monotonic()
        try:
            check()
            found[check.__name__] = ""
        except Exception:  # noqa: BLE001 - every check is reported
            found[check.__name__] = traceback.format_exc()
        sys.stderr.write(f"{check.__name__}: {time.monotonic() - started:.1f} s\n")
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
