"""Run in a vLLM environment: times the block planning of its MoRI-IO connector, layer by layer as it is used.

Reads the question as JSON from standard input, and prints the answer as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Time the plan of all layers, `rounds` times."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_layout import compute_block_transfer_offsets
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    ask: dict[str, Any] = json.load(sys.stdin)
    heads, size, tokens = ask["heads"] // ask["source_tp"], ask["head_size"], ask["block_tokens"]
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16)
    cache = torch.empty((ask["blocks"], heads, tokens, 2 * size), dtype=torch.bfloat16, device="meta")
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(ask["layers"])]
    specs = dict.fromkeys(names, spec)
    seconds, runs = [], 0
    for _ in range(ask["rounds"]):
        since = time.perf_counter()
        plans = [
            compute_block_transfer_offsets(name, cache, specs, ask["source"], ask["target"], ask["blocks"]) for name in names
        ]
        seconds.append(time.perf_counter() - since)
        runs = sum(len(sizes) for _, _, sizes in plans)
    json.dump({"equal": seconds, "runs": runs}, sys.stdout)


main()
