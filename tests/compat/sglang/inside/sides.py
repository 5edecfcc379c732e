"""Instances of the backend's real classes over SGLang's own pools, metadata buffers and arguments, without servers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    MetadataBuffers,
    TransferBackend,
    get_kv_class,
    setup_state_kv_args,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from kvbaton.engines.sglang import backend, hooks
from kvbaton.launch.ports import PortPicker

PAGE, LAYERS, TOKENS, ROWS = 4, 3, 10, 8
PROMPT = list(range(TOKENS))
PORTS = PortPicker()
_numbers = itertools.count()
ONE = SimpleNamespace(attn_tp_size=1, attn_tp_rank=0, pp_size=1, pp_rank=0, dp_size=1, attn_dp_size=1, attn_cp_size=1)


def mha() -> Any:
    return MHATokenToKVPool(64, PAGE, torch.float32, 2, 8, LAYERS, "cpu", False)


def mla() -> Any:
    return MLATokenToKVPool(64, PAGE, torch.float32, 16, 8, LAYERS, "cpu", False)


@contextmanager
def parallel(**changes: Any) -> Iterator[None]:
    """Managers that are made meanwhile have these ranks."""
    backend.get_parallel = lambda: SimpleNamespace(**{**vars(ONE), **changes})  # type: ignore[attr-defined]
    try:
        yield
    finally:
        backend.get_parallel = lambda: ONE  # type: ignore[attr-defined]


class Side:
    """One instance: a manager of the real class over a real pool."""

    def __init__(self, role: str, pool: Any, port: int, **changes: Any) -> None:
        self.pool, self.port = pool, port
        self.metadata = MetadataBuffers(ROWS, changes.pop("hidden", 16), torch.float32, 16)
        config = SimpleNamespace(
            dtype=torch.float32,
            hf_config=SimpleNamespace(to_dict=dict),
            get_total_num_kv_heads=lambda: 2,
            num_hidden_layers=LAYERS,
        )
        worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=config))
        scheduler = SimpleNamespace(model_config=config, tp_worker=worker, sliding_window_size=changes.pop("window", None))
        self.draft = changes.pop("draft", None)
        hooks._queue = hooks.Queue(pool, self.metadata, scheduler, self.draft)
        args = KVArgs()
        args.page_size, args.num_draft_entries = changes.pop("page", PAGE), 0 if self.draft is None else 1
        setup_state_kv_args(args, pool)
        args.state_types = changes.pop("state_types", args.state_types)
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.metadata.get_buf_infos()
        server = {"host": "127.0.0.1", "port": 1, "disaggregation_bootstrap_port": port, "served_model_name": "m"}
        server |= {"model_path": "m", "kv_cache_dtype": "auto", "quantization": None, "nnodes": 1, **changes}
        manager = get_kv_class(TransferBackend(hooks.BACKEND), KVClassType.MANAGER)
        self.manager = manager(args, DisaggregationMode(role), SimpleNamespace(**server))

    def make(self, kind: KVClassType, room: int, prompt: list[int], port: int, host: str = "127.0.0.1") -> Any:
        hooks._keep_request(
            None, SimpleNamespace(bootstrap_room=room, origin_input_ids=prompt, rid=f"request {next(_numbers)}")
        )
        return get_kv_class(TransferBackend(hooks.BACKEND), kind)(self.manager, f"{host}:{port}", room)

    def close(self) -> None:
        if self.manager.instance is not None:
            self.manager.instance.close()


def tensors(pool: Any) -> list[Any]:
    return list(pool.kv_buffer) if isinstance(pool, MLATokenToKVPool) else [*pool.k_buffer, *pool.v_buffer]


def wait(half: Any, *states: int) -> int:
    until = time.monotonic() + 20
    while (state := half.poll()) not in states:
        assert time.monotonic() < until, f"still {state}: {half.half.reason}"
        time.sleep(0.002)
    return int(state)
