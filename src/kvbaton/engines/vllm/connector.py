"""`KVBatonConnector`: vLLM's hooks, each passed on to the half that it belongs to. Imports vLLM, as only `metrics` does too."""

from __future__ import annotations

import contextlib
import logging
import platform
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvbaton.engines.base import Role
from kvbaton.engines.instance import ModelIdentity
from kvbaton.engines.vllm.device import EngineDevice, device_of, shareable_memory
from kvbaton.engines.vllm.fingerprint import fingerprint
from kvbaton.engines.vllm.instance import WorkerInstance
from kvbaton.engines.vllm.metrics import KVBatonMetrics, KVBatonStats
from kvbaton.engines.vllm.orders import StepOrders, StepReport
from kvbaton.engines.vllm.requests import HandoffInfo
from kvbaton.engines.vllm.scheduler_half import Computing, Room, SchedulerHalf
from kvbaton.engines.vllm.settings import ConnectorSettings, parse_settings
from kvbaton.engines.vllm.tensors import CacheSpec, RegisteredCache, read_tensors
from kvbaton.errors import Bug, ConfigError

__all__ = ["KVBatonConnector"]

log = logging.getLogger(__name__)

_SIZES = tuple(f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data", "prefill_context", "decode_context"))


def _hit_source() -> Any:
    """As what vLLM counts tokens that came from another instance; releases before 0.32 do not ask."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ModuleNotFoundError:
        return None
    return CacheHitSource.P2P


@dataclass
class _Metadata(KVConnectorMetadata):
    orders: StepOrders


@dataclass
class _WorkerMetadata(KVConnectorWorkerMetadata):
    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> _WorkerMetadata:
        return _WorkerMetadata(self.report.aggregate(other.report))


@dataclass
class _Handshake(KVConnectorHandshakeMetadata):
    info: HandoffInfo


class KVBatonConnector(KVConnectorBase_V1, SupportsHMA):
    """One half of kvbaton in vLLM: the scheduler process turns the calls of vLLM into orders, the worker carries them out."""

    instance_class = WorkerInstance
    _cache_hit_source = _hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        self._settings: ConnectorSettings = parse_settings(self._kv_transfer_config.kv_connector_extra_config or {})
        _check_shape(vllm_config, kv_cache_config)
        is_producer, is_consumer = self._kv_transfer_config.is_kv_producer, self._kv_transfer_config.is_kv_consumer
        self._role = _role(is_producer, is_consumer)
        if self._role == "both" and self._settings.routers:
            log.warning("kv_role is kv_both: it serves clients by itself and registers with no router; `routers` has no effect")
        self._scheduler: SchedulerHalf | None = None
        self._instance: WorkerInstance | None = None
        self._caches: dict[str, Any] = {}
        self._layer_index: dict[str, int] = {}
        self._bound: StepOrders | None = None
        self._report = StepReport()
        if role is KVConnectorRole.SCHEDULER:
            block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            largest = -(-vllm_config.model_config.max_model_len // block_tokens)
            room = Room(largest, self._settings.defer_timeout, self._free_blocks, self._held_blocks)
            self._scheduler = SchedulerHalf(self._settings.mode, block_tokens, is_producer, is_consumer, room)

    # In the worker.

    def get_mem_pool_context(self) -> Any:
        """Where vLLM allocates the caches: its own choice, unless that is virtual memory, which CUDA IPC cannot share."""
        is_virtual = getattr(self._vllm_config.model_config, "enable_cumem_allocator", False)
        return shareable_memory(torch) if is_virtual else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describe the cache, and start the agents over it."""
        self._caches = kv_caches
        device = device_of(kv_caches.values(), (platform.machine(), torch.backends.cpu.get_cpu_capability()))
        cache = RegisteredCache(read_tensors(kv_caches), _spec(self._vllm_config, self._kv_cache_config), device)
        self._layer_index = cache.layer_index
        self._instance = self.instance_class(self._settings, cache, _model(self._vllm_config, device), self._role)
        self._instance.start()
        log.info("kvbaton listens at %s, incarnation %s", self._instance.info.control_address, self._instance.info.incarnation)

    def get_handshake_metadata(self) -> _Handshake | None:
        """Where this instance listens; vLLM carries it to the scheduler half."""
        return None if self._instance is None else _Handshake(self._instance.info)

    def handle_preemptions(self, kv_connector_metadata: _Metadata) -> None:
        """Carry out the orders of this step; retracted blocks are free when this returns."""
        self._take_orders(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: _Metadata) -> None:
        """Carry out the orders of this step, where `handle_preemptions` was not called."""
        super().bind_connector_metadata(connector_metadata)
        self._take_orders(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads begin when their blocks are there."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no request runs before its whole cache has landed."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer of this step is computed: let it stream."""
        layer = self._layer_index.get(layer_name)
        if layer is not None and self._instance is not None:
            self._instance.half.layer_computed(layer)

    def finish_forward(self) -> None:
        """The forward is over, or queued: let the layers stream that had no hook, as in a full CUDA graph."""
        if self._instance is not None:
            self._instance.half.forward_done()

    def wait_for_save(self) -> None:
        """The same, for releases that do not call `finish_forward`. Blocks stay until the sending is reported."""
        if self._instance is not None:
            self._instance.half.forward_done()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has finished, each id once."""
        if self._instance is None:
            return KVConnectorTransferResults()
        finished = self._instance.half.end_step()
        self._report = finished.report
        return KVConnectorTransferResults(finished.sending, finished.receiving, finished.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same for callers that do not know of failures."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_kv_connector_stats(self) -> KVBatonStats | None:
        """What happened since the last call, for vLLM's log and its metrics."""
        if self._instance is None:
            return None
        data = self._instance.half.counts.take(self._instance.driver.stats())
        return None if data is None else KVBatonStats(data=data)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVBatonStats:
        """Statistics from what `get_kv_connector_stats` returned."""
        return KVBatonStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVBatonMetrics:
        """Series for Prometheus."""
        return KVBatonMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def build_connector_worker_meta(self) -> _WorkerMetadata | None:
        """What the scheduler half receives beside the ids."""
        report, self._report = self._report, StepReport()
        return _WorkerMetadata(report) if report else None

    # In the scheduler.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], _Handshake]) -> None:
        """Learn where the worker listens. Keys are (pp rank, tp rank)."""
        if set(metadata) != {(0, 0)}:
            raise ConfigError(f"workers {sorted(metadata)} sent handshake metadata; one worker (TP 1, PP 1) is possible so far")
        self._half.meet_worker(metadata[0, 0].info)

    def on_new_request(self, request: Any) -> None:
        """A request was admitted."""
        self._half.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much of the prompt comes from a source, asynchronously; None for a prefill that has to wait."""
        tokens = self._half.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there."""
        self._half.allocated(request, tuple(tuple(ids) for ids in blocks.get_block_ids()), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> _Metadata:
        """The orders for this step."""
        orders = self._half.orders(
            _computing(scheduler_output),
            scheduler_output.preempted_req_ids or (),
            self._block_ids,
            scheduler_output.total_num_scheduled_tokens > 0,
        )
        return _Metadata(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the worker reported after a step."""
        if isinstance(connector_output.kv_connector_worker_meta, _WorkerMetadata):
            self._half.take_report(connector_output.kv_connector_worker_meta.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over."""
        return self._half.finish(request, (tuple(block_ids),))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """A request is over."""
        return self._half.finish(request, tuple(tuple(ids) for ids in block_ids))

    def shutdown(self) -> None:
        """End every hand-off, and give everything back."""
        if self._instance is not None:
            self._instance.close()
            self._instance = None

    @property
    def _half(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise Bug("vLLM asked the worker's half of the connector what only the scheduler's half knows")
        return self._scheduler

    def _take_orders(self, metadata: _Metadata) -> None:
        if metadata.orders is not self._bound and self._instance is not None:
            self._bound = metadata.orders
            self._instance.half.begin_step(metadata.orders)

    def _free_blocks(self) -> int:
        return 0 if self._kv_cache_manager is None else int(self._kv_cache_manager.block_pool.get_num_free_blocks())

    def _held_blocks(self, request_id: str) -> int:
        return len(self._block_ids(request_id)[0])

    def _block_ids(self, request_id: str) -> tuple[list[int], ...]:
        if self._kv_cache_manager is None:
            raise Bug("vLLM scheduled a step before it bound its cache manager")
        ids: tuple[list[int], ...] = self._kv_cache_manager.get_block_ids(request_id)
        return ids


def _register() -> None:
    """Let vLLM's MultiConnector find the connector by its name: so it reads the statistics of its parts."""
    name = KVBatonConnector.__name__
    with contextlib.suppress(ValueError):  # it has that name already
        KVConnectorFactory.register_connector(name, KVBatonConnector.__module__, name)


def _log_with_vllm() -> None:
    """Let kvbaton's log lines go where vLLM's go."""
    ours, theirs = logging.getLogger("kvbaton"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers[:] = theirs.handlers
        ours.setLevel(theirs.level or logging.INFO)
        ours.propagate = False


def _check_shape(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name in _SIZES:
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} is {getattr(parallel, name)}; 1 can be handed over so far")
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise ConfigError(f"the model has {groups} groups of layers (kv_cache_groups); one can be handed over so far")


def _role(is_producer: bool, is_consumer: bool) -> Role:
    if is_producer and is_consumer:
        return "both"
    return "prefill" if is_producer else "decode"


def _computing(scheduler_output: Any) -> list[Computing]:
    """Every request of a step, with what it had before."""
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    before = [(each.req_id, each.num_computed_tokens) for each in scheduler_output.scheduled_new_reqs]
    before += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return [Computing(request_id, computed, scheduled.get(request_id, 0)) for request_id, computed in before]


def _spec(vllm_config: Any, kv_cache_config: Any) -> CacheSpec:
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise ConfigError(f"the cache of this model is a {kind}; full attention and MLA can be handed over so far")
    total_heads = vllm_config.model_config.get_total_num_kv_heads()
    return CacheSpec(spec.block_size, spec.num_kv_heads, total_heads, "mla" if kind.startswith("MLA") else "full")


def _model(vllm_config: Any, device: EngineDevice) -> ModelIdentity:
    """The fingerprint covers what decides the meaning of a cache: architecture, weights, dtypes, kind of device."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    names = model.served_model_name
    name = names if isinstance(names, str) else (names[0] if names else model.model)
    others = [str(model.dtype), str(cache.cache_dtype), str(model.quantization), str(getattr(model, "revision", "") or "")]
    others += device.kinds
    return ModelIdentity(str(name), fingerprint(model.hf_config.to_dict(), model.model, others))


_register()
