"""Run in an environment of another package, as `plan_peers.py vllm|sglang`: times its planning code as it is installed there.

The first line of standard input is what to plan, as JSON; each line after it is the name of a plan to make once. Every line is
answered with one of JSON. kvbaton is not importable here.
"""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import json
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

__all__ = ["main"]


class _Now(concurrent.futures.Executor):
    """Runs what is submitted at once: threads could not plan any faster under one interpreter lock."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _manager(kind: Any, ask: dict[str, Any], counted: list[int]) -> Any:
    """A manager without sockets and engine, with what its planning looks at."""

    def transfer(_session: str, blocks: Any) -> int:
        counted[0] += len(blocks)
        return 0

    class Manager(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def _transfer_data(self, session: str, blocks: Any) -> int:
            return transfer(session, blocks)

    page = ask["heads"] // ask["source_tp"] * ask["block_tokens"] * ask["head_size"] * 2
    manager = Manager()
    pointers = [1 << 40 | number << 32 for number in range(2 * ask["layers"])]
    manager.kv_args = types.SimpleNamespace(
        kv_data_ptrs=pointers,
        kv_item_lens=[page] * len(pointers),
        kv_layer_ids=[],
        page_size=ask["block_tokens"],
        kv_head_num=ask["heads"] // ask["source_tp"],
        total_kv_head_num=ask["heads"],
        engine_rank=0,
        prefill_start_layer=0,
        prefill_end_layer=ask["layers"],
        mla_compression_ratios=None,
    )
    engine = types.SimpleNamespace(batch_transfer_sync=lambda _session, source, _target, _sizes: transfer("", source))
    values = {"engine": engine, "attn_tp_size": ask["source_tp"], "pp_size": 1, "pp_rank": 0, "is_mla_backend": False}
    values |= {
        "is_hybrid_mla_backend": False,
        "enable_custom_mem_pool": False,
        "custom_mem_pool_type": None,
        "enable_deferred_decode_kv_release": False,
    }
    for name, value in (values | {"state_strides_validated": set(), "max_transfer_batch_indices": 0}).items():
        setattr(manager, name, value)
    return manager


def _sglang_plans(ask: dict[str, Any]) -> dict[str, Callable[[], int]]:
    """SGLang's Mooncake backend: the plan of all layers with equal and with halved tensor parallelism.

    Copies are only counted; what is timed is what SGLang does between having the page lists and handing transfers to its
    engine.
    """
    operators = _vision_operators()
    import numpy as np
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    counted = [0]
    manager = _manager(MooncakeKVManager, ask, counted)
    manager.vision_operators = operators
    source, target = (np.asarray(ask[side], np.int32) for side in ("source", "target"))
    pointers = list(manager.kv_args.kv_data_ptrs)
    page = manager.kv_args.kv_item_lens[0] * ask["source_tp"] // ask["target_tp"]
    generic = getattr(manager, "_send_kvcache_generic")  # noqa: B009

    def equal() -> int:
        counted[0] = 0
        generic("", pointers, pointers, manager.kv_args.kv_item_lens, source, target, _Now())
        return counted[0]

    def split() -> int:
        counted[0] = 0
        manager.send_kvcache_slice("", source, pointers, target, 0, ask["target_tp"], page, _Now())
        return counted[0]

    return {"equal": equal, "split": split}


def _vision_operators() -> Any:
    """Operators that torchvision wants to find, and has not on CPUs; they are there as long as what is returned."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _vllm_plans(ask: dict[str, Any]) -> dict[str, Callable[[], int]]:
    """vLLM's MoRI-IO connector, layer by layer as it is used: the plan of all layers with equal tensor parallelism."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_layout import compute_block_transfer_offsets
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    heads, size, tokens = ask["heads"] // ask["source_tp"], ask["head_size"], ask["block_tokens"]
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16)
    cache = torch.empty((ask["blocks"], heads, tokens, 2 * size), dtype=torch.bfloat16, device="meta")
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(ask["layers"])]
    specs = dict.fromkeys(names, spec)

    def equal() -> int:
        plans = [
            compute_block_transfer_offsets(name, cache, specs, ask["source"], ask["target"], ask["blocks"]) for name in names
        ]
        return sum(len(sizes) for _, _, sizes in plans)

    return {"equal": equal}


def main() -> None:
    """Answer until standard input ends, on the descriptor that is the last argument: what others print goes elsewhere."""
    name, answers = sys.argv[1], os.fdopen(int(sys.argv[2]), "w")
    plans = {"vllm": _vllm_plans, "sglang": _sglang_plans}[name](json.loads(sys.stdin.readline()))
    print(json.dumps({"plans": list(plans), "version": importlib.metadata.version(name)}), file=answers, flush=True)
    for line in sys.stdin:
        since = time.perf_counter()
        runs = plans[line.strip()]()
        print(json.dumps({"seconds": time.perf_counter() - since, "runs": runs}), file=answers, flush=True)


if __name__ == "__main__":
    main()
