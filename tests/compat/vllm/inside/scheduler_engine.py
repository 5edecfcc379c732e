"""vLLM's own scheduler with both halves of the connector, stepped by hand: what the checks beside it are made with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_rig import EXTERNAL_ID, INFO, LAYERS, ScriptedPort, layer_groups, one_rank

from kvbaton.agent.engine_port import HandoffStats, Landed
from kvbaton.core.handoff import Aux, HandoffKey, TransferId
from kvbaton.engines.vllm.connector import _WorkerMetadata
from kvbaton.engines.vllm.worker_half import WorkerHalf

__all__ = ["BLOCK_TOKENS", "Engine", "key_of", "landed", "make_caches", "make_config", "prompt"]

BLOCK_TOKENS = 16
_ROLES = {"source": "kv_producer", "target": "kv_consumer", "both": "kv_both"}


def key_of(transfer_id: str) -> HandoffKey:
    return HandoffKey(TransferId(transfer_id), 0, 0)


class Engine:
    """vLLM's scheduler with our connector, stepped by hand; a token is sampled wherever a prompt is complete."""

    def __init__(
        self, role: str, model: str, policy: str = "fail", blocks: int = 65, mode: str = "push", *, is_async: bool = False
    ) -> None:
        config = make_config(role, model, policy, mode, is_async)
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=make_caches(blocks),
            structured_output_manager=StructuredOutputManager(config),
            log_stats=True,
            block_size=BLOCK_TOKENS,
        )
        connector: Any = self.scheduler.connector
        connector._half.meet_worker(INFO)
        self.connector = connector
        self.port = ScriptedPort()
        self.worker = WorkerHalf(self.port, one_rank(self.port), layer_groups(), self.port.news, 0.01)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.blocks = blocks - 1
        self.is_async = is_async
        self.under_way: list[tuple[Any, Any]] = []

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self,
        name: str,
        tokens: Sequence[int],
        params: dict[str, Any] | None = None,
        max_tokens: int = 1,
        is_refused: bool = False,
        prompt_logprobs: int | None = None,
    ) -> Request:
        extra = {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, extra_args=extra, prompt_logprobs=prompt_logprobs)
        sampling.ignore_eos = True
        request = Request(
            f"cmpl-{EXTERNAL_ID}-0-{name}",
            list(tokens),
            sampling,
            None,
            block_hasher=self.hasher,
            abort_immediately=is_refused,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> tuple[dict[str, int], list[Any]]:
        """One step: how many tokens of which request were computed, and what went out.

        With `is_async` what went out is that of the step before, as when vLLM schedules a step while one is computed.
        """
        output = self.scheduler.schedule()
        self.worker.begin_step(output.kv_connector_metadata.orders)
        if output.total_num_scheduled_tokens:
            for layer in range(LAYERS):
                self.worker.layer_computed(layer)
        self.worker.forward_done()
        finished = self.worker.end_step()
        reported = KVConnectorOutput(
            finished_sending=finished.sending or None,
            finished_recving=finished.receiving or None,
            failed_recving=finished.failed,
            kv_connector_worker_meta=_WorkerMetadata(finished.report),
        )
        scheduled = dict(output.num_scheduled_tokens)
        names = list(scheduled)
        sampled = [[7] if self._is_complete(name) else [] for name in names]
        runner = ModelRunnerOutput(
            names, {name: index for index, name in enumerate(names)}, sampled, kv_connector_output=reported
        )
        self.under_way.append((output, runner))
        if self.is_async and len(self.under_way) < 2:
            return scheduled, []
        outputs = self.scheduler.update_from_output(*self.under_way.pop(0))
        return scheduled, [each for group in outputs.values() for each in group.outputs]

    def run(self, steps: int) -> list[Any]:
        return [each for _ in range(steps) for each in self.step()[1]]

    def _is_complete(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        if self.is_async:
            return not request.is_prefill_chunk
        return bool(request.num_computed_tokens >= request.num_tokens)

    def assert_at_rest(self) -> None:
        assert self.free_blocks == self.blocks, f"{self.blocks - self.free_blocks} blocks are not back"
        assert not self.scheduler.requests, list(self.scheduler.requests)
        assert self.worker.live == self.connector._half.live == 0


@functools.cache
def make_config(role: str, model: str, policy: str, mode: str, is_async: bool) -> VllmConfig:
    transfer = KVTransferConfig(
        kv_connector="KVBatonConnector",
        kv_connector_module_path="kvbaton.engines.vllm",
        kv_role=_ROLES[role],
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"control_port": 7001, "mode": mode},
    )
    model_config = ModelConfig(model=model, dtype="float32", max_model_len=512)
    cache = CacheConfig(block_size=BLOCK_TOKENS, gpu_memory_utilization=0.9, enable_prefix_caching=True)
    scheduler = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=512,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=is_async,
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache,
        scheduler_config=scheduler,
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.block_size = BLOCK_TOKENS
    return config


def make_caches(blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def prompt(length: int, seed: int = 0) -> list[int]:
    return [1000 * seed + index for index in range(length)]


def landed(transfer_id: str) -> Landed:
    return Landed(key_of(transfer_id), Aux(7, 0.0), HandoffStats(1, 1, 0.0, 0.0, "local"))
