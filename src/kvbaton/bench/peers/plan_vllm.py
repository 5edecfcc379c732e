"""Run in a vLLM environment: times the block planning of its MoRI-IO connector, layer by layer as it is used.

The first line of standard input is what to plan, as JSON; each line after it is the name of a plan to make once. Every line is
answered with one of JSON.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["main"]


def _plans(ask: dict[str, Any]) -> dict[str, Callable[[], int]]:
    """The plan of all layers with equal tensor parallelism; it returns how many runs it has made."""
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
    """Answer until standard input ends. What others print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    plans = _plans(json.loads(sys.stdin.readline()))
    print(json.dumps({"plans": list(plans), "version": importlib.metadata.version("vllm")}), file=answers, flush=True)
    for line in sys.stdin:
        since = time.perf_counter()
        runs = plans[line.strip()]()
        print(json.dumps({"seconds": time.perf_counter() - since, "runs": runs}), file=answers, flush=True)


if __name__ == "__main__":
    main()
