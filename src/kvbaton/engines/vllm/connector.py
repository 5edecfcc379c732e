"""`KVBatonConnector`: vLLM's hooks, each passed on to the half that it belongs to. Imports vLLM, as only `metrics` does too."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from kvbaton.core.topology import RankAt, Shape, collect_ranks
from kvbaton.engines.base import Role
from kvbaton.engines.instance import ModelIdentity
from kvbaton.engines.vllm import register
from kvbaton.engines.vllm.device import EngineDevice, device_of, shareable_memory
from kvbaton.engines.vllm.engine_calls import EngineCaller
from kvbaton.engines.vllm.engine_waits import EngineWaits
from kvbaton.engines.vllm.fingerprint import fingerprint
from kvbaton.engines.vllm.instance import WorkerInstance
from kvbaton.engines.vllm.metrics import KVBatonMetrics, KVBatonStats
from kvbaton.engines.vllm.orders import StepOrders, StepReport
from kvbaton.engines.vllm.rank_links import T
from kvbaton.engines.vllm.requests import HandoffInfo, SourceCheck
from kvbaton.engines.vllm.scheduler_half import Computing, Room, SchedulerHalf
from kvbaton.engines.vllm.settings import ConnectorSettings, DpPlace, parse_settings
from kvbaton.engines.vllm.specs import CutFacts, layer_specs, token_counts
from kvbaton.engines.vllm.tensors import RegisteredCache, read_tensors
from kvbaton.engines.vllm.worker_half import WorkerHalf
from kvbaton.errors import Bug, ConfigError

__all__ = ["KVBatonConnector"]

log = logging.getLogger(__name__)

_SIZES = tuple(f"{kind}_parallel_size" for kind in ("prefill_context", "decode_context"))
_GROUP_NAMES = ("mamba_n_groups", "n_groups", "ngroups")


def _hit_source() -> Any:
    """As what vLLM counts tokens that came from another instance; releases before 0.32 do not ask."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ModuleNotFoundError:
        return None
    return CacheHitSource.P2P


def _spin_conditions() -> Any:
    """What the readers of vLLM's queues in shared memory wait for; releases that wait in another way have none."""
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    except ImportError:
        return None
    return SpinCondition


def _watchable_engines() -> Any:
    """What prepares requests in vLLM's engine process when they come in; None for releases that do it in another way."""
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return None
    return EngineCore if callable(getattr(EngineCore, "preprocess_add_request", None)) else None


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
        self._settings = self.read_settings(self._kv_transfer_config.kv_connector_extra_config or {})
        _check_shape(vllm_config)
        self._dp = _dp_place(vllm_config, self._settings)
        if not self._dp.is_external:
            self._settings = msgspec.structs.replace(self._settings, dp_size=self._dp.size).of_dp_rank(self._dp.rank)
        is_producer, is_consumer = self._kv_transfer_config.is_kv_producer, self._kv_transfer_config.is_kv_consumer
        self._serving_role = _serving_role(is_producer, is_consumer)  # `_role` is that of the base class: worker or scheduler.
        if self._serving_role == "both" and self._settings.routers:
            log.warning("kv_role is kv_both: it serves clients by itself and registers with no router; `routers` has no effect")
        self._scheduler: SchedulerHalf | None = None
        self._instance: WorkerInstance | None = None
        self._caches: dict[str, Any] = {}
        self._layer_index: dict[str, int] = {}
        self._bound: StepOrders | None = None
        self._report = StepReport()
        self._waits = EngineWaits()
        self._caller = EngineCaller()
        if role is KVConnectorRole.SCHEDULER:
            counts = token_counts(kv_cache_config, vllm_config.scheduler_config.max_num_batched_tokens)
            largest = counts.blocks(vllm_config.model_config.max_model_len)
            room = Room(largest, self._settings.defer_timeout, self._free_blocks, self._held_blocks)
            sources = SourceCheck(self._settings.trust(), self._settings.control_address)
            self._scheduler = SchedulerHalf(self._settings.mode, counts, is_producer, is_consumer, room, sources)
            if self._settings.engine_sleeps and (conditions := _spin_conditions()) is not None:
                self._waits.guide(conditions)

    @staticmethod
    def read_settings(extra_config: Mapping[str, Any]) -> ConnectorSettings:
        """What `kv_connector_extra_config` asks for. Raises ConfigError that names the key."""
        return parse_settings(extra_config)

    # In the worker.

    def get_mem_pool_context(self) -> Any:
        """Where vLLM allocates the caches: its own choice, unless that is virtual memory, which CUDA IPC cannot share."""
        is_virtual = getattr(self._vllm_config.model_config, "enable_cumem_allocator", False)
        return shareable_memory(torch) if is_virtual else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describe the cache, and start the agents over it."""
        self._caches = kv_caches
        exchange = _Workers(self._vllm_config)
        specs = layer_specs(self._kv_cache_config, _facts(self._vllm_config, exchange))
        device = device_of(kv_caches.values(), (platform.machine(), torch.backends.cpu.get_cpu_capability()))
        cache = RegisteredCache(read_tensors(kv_caches), specs, device)
        model = _model(self._vllm_config, device, self._settings.fingerprint)
        instance = self.instance_class(self._settings, cache, model, self._serving_role, exchange, self._dp)
        self._layer_index = instance.caches.numbers
        self._instance = instance
        instance.start()
        if instance.is_first:
            log.info("kvbaton listens at %s, incarnation %s", instance.info.control_address, instance.info.incarnation)

    def get_handshake_metadata(self) -> _Handshake | None:
        """Where this instance listens; vLLM carries it from every worker to the scheduler half."""
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
        """The forward is over, or queued: let the layers stream that had no hook, as in a full CUDA graph.

        Those of a draft model are computed after that: vLLM drafts when it has sampled, and calls `wait_for_save` then.
        """
        if self._instance is not None and not self._instance.has_drafts:
            self._instance.half.forward_done()

    def wait_for_save(self) -> None:
        """The same when drafts are computed too, and for releases that do not call `finish_forward`.

        Blocks stay until the sending is reported.
        """
        if self._instance is not None:
            self._instance.half.forward_done()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What has finished, each id once."""
        if self._instance is None:
            return KVConnectorTransferResults()
        finished = self._instance.end_step()
        self._report = finished.report
        return KVConnectorTransferResults(finished.sending, finished.receiving, finished.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same for callers that do not know of failures."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_kv_connector_stats(self) -> KVBatonStats | None:
        """What happened since the last call, for vLLM's log and its metrics."""
        if self._instance is None or self._instance.driver is None or not isinstance(self._instance.half, WorkerHalf):
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
        """Learn where the instance listens. Keys are (pp rank, tp rank); every worker has to be there."""
        # In a MultiConnector every part gets the metadata of the first part that has any.
        ours = {at: each.info for at, each in metadata.items() if isinstance(each, _Handshake)}
        infos = collect_ranks(_shape(self._vllm_config), [ours])
        if len(set(infos)) > 1:
            names = ", ".join(sorted({each.incarnation for each in infos}))
            raise ConfigError(f"the workers are of several instances ({names}); each has to report the one it belongs to")
        self._half.meet_worker(infos[0])
        # Engines in lockstep wait for each other's steps: those of one that only waits for caches have to stay short.
        is_alone = self._vllm_config.parallel_config.data_parallel_size == 1
        engines = _watchable_engines() if self._settings.engine_sleeps and is_alone else None
        if engines is not None and self._caller.connect(infos[0].incarnation):
            self._waits.watch(engines, self._caller.call)

    def on_new_request(self, request: Any) -> None:
        """A request was admitted."""
        self._half.begin(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much of the prompt comes from a source, asynchronously; None for a prefill that has to wait."""
        tokens = self._half.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Every group: the blocks of a load come from the source, so vLLM must not clear any of them afterwards."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there."""
        self._half.allocated(request, tuple(tuple(ids) for ids in blocks.get_block_ids()), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> _Metadata:
        """The orders for this step."""
        self._waits.step(has_forward=scheduler_output.total_num_scheduled_tokens > 0)
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
        self._caller.close()
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
        return sum(map(len, self._block_ids(request_id)))

    def _block_ids(self, request_id: str) -> tuple[list[int], ...]:
        if self._kv_cache_manager is None:
            raise Bug("vLLM scheduled a step before it bound its cache manager")
        ids: tuple[list[int], ...] = self._kv_cache_manager.get_block_ids(request_id)
        return ids


def _log_with_vllm() -> None:
    """Let kvbaton's log lines go where vLLM's go."""
    ours, theirs = logging.getLogger("kvbaton"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers[:] = theirs.handlers
        ours.setLevel(theirs.level or logging.INFO)
        ours.propagate = False


def _check_shape(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name in _SIZES:
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} is {getattr(parallel, name)}; 1 can be handed over so far")

    if getattr(parallel, "data_parallel_hybrid_lb", False):
        raise ConfigError("data_parallel_hybrid_lb is true; balance internally, or externally with one server per rank")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError("calculate_kv_scales is true; scales that each instance computes for itself cannot be handed over")
    # vLLM refuses this for the connectors that it knows by name: the decode instance has routed none of the prompt.
    if getattr(getattr(vllm_config, "aux_output_config", None), "enable_return_routed_experts", False):
        raise ConfigError("enable_return_routed_experts is true; the experts of a prompt that was handed over are not known")


def _dp_place(vllm_config: Any, settings: ConnectorSettings) -> DpPlace:
    """Which data-parallel engine this is. vLLM forgets how many there are where they are independent (models without experts).

    With external balancing the number is needed for the registration only; without it the engine registers as one by itself.
    """
    parallel = vllm_config.parallel_config
    is_external = bool(getattr(parallel, "data_parallel_external_lb", False))
    size = parallel.data_parallel_size if parallel.data_parallel_size > 1 else settings.dp_size
    rank = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    return DpPlace(is_external=True) if is_external and rank >= size else DpPlace(size, rank, is_external)


def _shape(vllm_config: Any) -> Shape:
    parallel = vllm_config.parallel_config
    return Shape(pp=parallel.pipeline_parallel_size, tp=parallel.tensor_parallel_size)


class _Workers:
    """The workers of this instance, over vLLM's own process groups."""

    def __init__(self, vllm_config: Any) -> None:
        self.shape = _shape(vllm_config)
        self._groups = [] if self.shape.ranks == 1 else [get_tp_group(), get_pp_group()]
        tp, pp = [group.rank_in_group for group in self._groups] or (0, 0)
        self.at = RankAt(pp=pp, tp=tp)
        self.rank = self.shape.number(self.at)

    def gather(self, value: T) -> list[T]:
        """First the ranks of each stage, then the stages."""
        values: Any = [value]
        for group in self._groups:
            found: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(found, values, group=group.cpu_group)
            values = [each for part in found for each in part]
        return list(values)


def _serving_role(is_producer: bool, is_consumer: bool) -> Role:
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


def _facts(vllm_config: Any, workers: _Workers) -> CutFacts:
    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    draft = getattr(drafts, "draft_model_config", None)
    config = model.hf_text_config
    return CutFacts(
        tp_rank=workers.at.tp,
        tp_size=workers.shape.tp,
        total_heads=model.get_total_num_kv_heads(),
        state_groups=next((getattr(config, name) for name in _GROUP_NAMES if hasattr(config, name)), 1),
        layers=getattr(config, "num_hidden_layers", 0),
        draft_heads=0 if draft is None else draft.get_total_num_kv_heads(),
        is_channel_first=_is_channel_first(),
    )


def _is_channel_first() -> bool:
    """How vLLM lays the state of a convolution out."""
    try:
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    except ImportError:
        return False
    return bool(is_conv_state_dim_first())


def _model(vllm_config: Any, device: EngineDevice, given: str) -> ModelIdentity:
    """Its fingerprint is `given`, or covers what decides the meaning of a cache: architecture, weights, dtypes, device."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    names = model.served_model_name
    name = names if isinstance(names, str) else (names[0] if names else model.model)
    if given:
        return ModelIdentity(str(name), given)
    others = [str(model.dtype), str(cache.cache_dtype), str(model.quantization), str(getattr(model, "revision", "") or "")]
    others += device.kinds
    others.append(json.dumps(getattr(model, "hf_overrides", None) or {}, sort_keys=True, default=repr))
    return ModelIdentity(str(name), fingerprint(model.hf_config.to_dict(), model.model, others))


# For vLLM's MultiConnector, which finds the statistics of its parts by their names, and where no entry point was called.
register()
