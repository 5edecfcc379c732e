"""SGLang's four classes of a transfer backend, each call passed on to the half that it belongs to. Imports SGLang.

Nothing is decided here. SGLang's scheduler ends with every exception that leaves one of these methods, so none does: an error
of our own fails the one request, with its reason.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVPoll,
    KVTransferMetric,
)
from sglang.srt.runtime_context import get_parallel

from kvbaton.core.topology import RankAt, Shape, rank_port
from kvbaton.engines.sglang.halves import Poll, SourceHalf, TargetHalf
from kvbaton.engines.sglang.hooks import current_queue, current_request, report_refused
from kvbaton.engines.sglang.instance import RankInstance, SglangPlace, model_identity, replica_halves
from kvbaton.engines.sglang.metadata import MetadataRows
from kvbaton.engines.sglang.pool import PoolFacts, read_pool
from kvbaton.engines.sglang.settings import CONFIG_VARIABLE, SglangSettings, parse_settings
from kvbaton.errors import ConfigError, KVBatonError
from kvbaton.launch.ports import PortPicker

__all__ = ["KVBatonBootstrapServer", "KVBatonManager", "KVBatonReceiver", "KVBatonSender", "TransferFailed"]

log = logging.getLogger(__name__)

_WITHOUT = {"nnodes": "several nodes"}
_WITHOUT_IN_DECODE = {"attn_cp_size": "context parallelism of decode", "attn_dcp_size": "context parallelism of decode"}
_CP_DIVIDES_THE_CACHE = ("enable_cp_tp_group_sharing", "enable_dsa_cache_layer_split", "enable_kv_cache_sharding")
"""Flags with which no context-parallel rank of prefill has the whole cache; without them each has."""

F = TypeVar("F", bound=Callable[..., Any])


class TransferFailed(Exception):
    """Why a transfer failed, as SGLang reads it."""

    def __init__(self, room: int, reason: str, is_from_another_rank: bool) -> None:
        super().__init__(f"room {room}: {reason}")
        self.failure_reason = reason
        self.is_from_another_rank = is_from_another_rank


def _contained(method: F) -> F:
    """No exception leaves: it fails the request of this sender or receiver."""

    @functools.wraps(method)
    def contained(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # an exception here would end SGLang's scheduler, and every other request with it
            log.exception("hand-off %s: %s failed", self.half.key, method.__name__)
            self.half.fail(f"{method.__name__} failed: {type(error).__name__}: {error}")
            return None

    return contained  # type: ignore[return-value]


class KVBatonManager(BaseKVManager):
    """One rank's agents. Raises ConfigError, which ends the server, for what cannot be handed over."""

    enable_deferred_decode_kv_release = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False) -> None:
        del is_mla_backend
        _log_with_sglang()
        _check_polls()
        queue, parallel = current_queue(), get_parallel()
        role = str(disaggregation_mode.value)
        _check_shape(role, server_args, parallel)
        self.role = role
        self.dp_size, self.dp_rank = _data_parallel(role, args, parallel)
        settings = parse_settings(os.environ.get(CONFIG_VARIABLE, "")).of_dp_rank(self.dp_size, self.dp_rank)
        model_config = queue.scheduler.model_config
        facts = PoolFacts(
            page_tokens=args.page_size,
            first_layer=int(queue.pool.start_layer or 0),
            total_heads=_loaded_config(queue.scheduler).get_total_num_kv_heads(),
            tp_size=parallel.attn_tp_size,
            tp_rank=parallel.attn_tp_rank,
            window=int(getattr(queue.scheduler, "sliding_window_size", None) or 0),
            model_layers=int(model_config.num_hidden_layers),
        )
        pool = read_pool(queue.pool, facts, args, queue.draft if getattr(args, "num_draft_entries", 0) else None)
        _check_release_limit(settings)
        self.kv_args = args
        self.page_bytes = pool.page_bytes
        self.prefill_dp_size = settings.prefill_dp_size
        self.prefill_info_table: dict[str, Any] = {}
        self.is_dummy_cp_rank = getattr(parallel, "attn_cp_rank", 0) > 0
        """SGLang's name for a context-parallel rank behind the first: its cache is the same, and the first hands it over."""
        self.instance: RankInstance | None = None
        if self.is_dummy_cp_rank:
            self.halves = replica_halves(pool)
            return
        shape = Shape(tp=parallel.attn_tp_size, pp=parallel.pp_size)
        rank = shape.number(RankAt(0, parallel.pp_rank, parallel.attn_tp_rank, 0))
        place = SglangPlace(
            role=role,
            host=server_args.host,
            http_port=server_args.port,
            control_port=self._control_port(role, server_args, settings, rank),
            shape=shape,
            rank=rank,
            broadcast=functools.partial(_broadcast, parallel),
        )
        rows = MetadataRows.of(queue.metadata, args)
        self.instance = RankInstance(settings, place, pool, rows, model_identity(model_config, server_args, settings))
        self.halves = self.instance.halves
        report_refused(self.refuse)
        log.info("kvbaton: %s instance, control port %d, %s", role, place.control_port, settings.mode)

    def _control_port(self, role: str, server_args: Any, settings: SglangSettings, rank: int) -> int:
        """Where the agents listen: on prefill the port that balancers send along, on further data-parallel ranks those behind
        it; on decode any, no peer dials it.
        """
        if role == "prefill":
            base = int(server_args.disaggregation_bootstrap_port)
            return rank_port(base, Shape(dp=self.dp_size), RankAt(dp=self.dp_rank))
        return settings.control_port or (PortPicker().pick() if rank == 0 else 1)

    def refuse(self, request: Any) -> None:
        """SGLang has refused a request before it had a sender or receiver; the other side must not wait for it."""
        try:
            why = getattr(request.finished_reason, "message", request.finished_reason)
            if self.role == "prefill":
                self.halves.refuse_target(request.bootstrap_room, f"prefill refused it: {why}")
            else:
                address = f"{request.bootstrap_host}:{request.bootstrap_port}"
                self.halves.refuse_source(request.bootstrap_room, address, f"decode refused it: {why}")
        except Exception:  # see `_contained`
            log.exception("room %s: its peer was not notified that it is refused here", request.bootstrap_room)

    def register_to_bootstrap(self) -> None:
        """Nothing: the address that balancers send as bootstrap_host and bootstrap_port is the agents' own."""

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Always: the agents handshake with the source while the request waits for pages, and check more than SGLang does."""
        # What SGLang's scheduler reads of a prefill instance before it makes a request's pages; the agents check the rest.
        known = SimpleNamespace(dp_size=self.prefill_dp_size, follow_bootstrap_room=True)
        self.prefill_info_table[bootstrap_addr] = known
        return True

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:
        """Whether nothing can write to the pages of a failed request any more."""
        del required_acks
        try:
            self.halves.take_events()
        except KVBatonError:
            log.exception("room %s: whether its pages are quiet is not known", room)
            return False
        return not any(
            isinstance(half, TargetHalf) and half.room == room and half.may_be_written for half in self.halves.live.values()
        )

    def clear_deferred_abort_state(self, room: int) -> None:
        """Nothing is kept."""

    def submit_prefill_recompute(self, receiver: KVBatonReceiver, payload: Any) -> None:
        """A retraction with new weights would need a second prefill under the same room; that is not possible so far."""
        del payload
        receiver.half.fail("computing a retracted request anew with other weights is not possible over kvbaton so far")


class _SenderOrReceiver:
    kv_mgr: KVBatonManager
    half: Any

    @property
    def conclude_state(self) -> int:
        """The state without taking events."""
        return int(self.half.state)

    def poll(self) -> int:
        """The state of the transfer, in SGLang's numbers."""
        try:
            return int(self.half.poll())
        except Exception as error:  # see `_contained`
            log.exception("hand-off %s: poll failed", self.half.key)
            self.half.fail(f"poll failed: {error}")
            return int(Poll.FAILED)

    def poll_pp_consensus(self) -> int:
        """The same: the first stage of a pipeline has the coordinator, whose verdict is about every stage."""
        return self.poll()

    def failure_exception(self) -> None:
        """Raise why it failed. Another rank may have failed alone, so the agents are asked to end it here too."""
        half = self.half
        is_other = half.state is not Poll.FAILED
        if not half.is_over:
            half.fail(half.reason or "another rank of this instance failed")
        raise TransferFailed(half.room, half.reason or "another rank of this instance failed", is_other)

    @_contained
    def abort(self) -> None:
        """SGLang aborts the request."""
        self.half.abort()

    def clear(self) -> None:
        """Nothing: the half is forgotten when the agents have reported its end."""


class KVBatonSender(_SenderOrReceiver, BaseKVSender):
    """One prefill for a hand-off."""

    _early_send_wait_event: Any = None
    """Set by SGLang before `send`, where the pages of that chunk may still be written: an event of the device, or None."""

    def __init__(
        self, mgr: KVBatonManager, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        del bootstrap_addr
        self.kv_mgr = mgr
        prompt, request, problem = _request(bootstrap_room)
        if not (problem or req_has_disagg_prefill_dp_rank):
            problem = _other_dp_rank(mgr, bootstrap_room)
        self.half = SourceHalf(mgr.halves, bootstrap_room, prompt, problem, request)
        self._unsent: list[tuple[Any, list[int], list[list[int]]]] = []

    @_contained
    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """The target has pages; the prefill starts."""
        self.half.begin(num_kv_indices, aux_index)

    @_contained
    def send(self, kv_indices: Any, state_indices: list[Any] | None = None, num_kv_tokens: int | None = None) -> None:
        """A chunk is computed, or will be when its event has come: it is announced then, in the order of the calls."""
        del num_kv_tokens
        event, self._early_send_wait_event = self._early_send_wait_event, None
        self._unsent.append((event, [int(page) for page in kv_indices], _plain_numbers(state_indices)))
        self._send_computed()

    def poll(self) -> int:
        """The state of the transfer, after what is computed by now was announced."""
        self._send_computed()
        return super().poll()

    @_contained
    def _send_computed(self) -> None:
        if self.half.state is Poll.FAILED:
            self._unsent.clear()
        # The scheduler must not wait for a device; it polls in every turn.
        while self._unsent and (self._unsent[0][0] is None or self._unsent[0][0].query()):
            _, pages, state = self._unsent.pop(0)
            self.half.send(pages, state)

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """The last chunk also without pages: the metadata goes with it."""
        return num_pages > 0 or last_chunk

    def get_transfer_metric(self) -> KVTransferMetric:
        """For SGLang's own metrics: from the last chunk to the release by the target, and how long pages were waited for."""
        half = self.half
        return KVTransferMetric(
            transfer_latency_s=max(0.0, (half.ended_at or time.monotonic()) - half.offered_at) if half.offered_at else None,
            alloc_latency_s=max(0.0, half.granted_at - half.begun_at) if half.granted_at else None,
            transfer_total_bytes=half.pages_sent * self.kv_mgr.page_bytes,
        )


class KVBatonReceiver(_SenderOrReceiver, BaseKVReceiver):
    """One request whose cache is handed over."""

    require_staging = False
    bootstrap_infos = ()

    def __init__(self, mgr: KVBatonManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        prompt, request, problem = _request(bootstrap_room)
        self.half = TargetHalf(mgr.halves, bootstrap_room, bootstrap_addr, prompt, problem, request)

    @property
    def abort_notified(self) -> bool:
        """Whether the pages of a failed request have to wait for `is_abort_release_safe`."""
        return bool(self.half.may_be_written)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """The agents notify the source by themselves."""
        del force_arm

    @_contained
    def init(self, prefill_dp_rank: int) -> None:
        """The source is known."""
        self.half.ready(prefill_dp_rank or 0)

    @_contained
    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        **others: Any,
    ) -> None:
        """There are pages: grant them."""
        del others
        pages, state = [int(page) for page in kv_indices], _plain_numbers(state_indices)
        self.half.allocated(pages, aux_index, decode_prefix_len or 0, state)


class KVBatonBootstrapServer(BaseKVBootstrapServer):
    """Nothing: the agents of the prefill instance listen on the bootstrap port themselves."""

    def __init__(self, host: str, port: int) -> None:
        del host, port


def _request(room: object) -> tuple[Sequence[int], str, str]:
    """The prompt and the name of the request that a sender or receiver is made for, or why it is not known."""
    try:
        request = current_request(room)
    except ConfigError as error:
        return (), "", str(error)
    return request.origin_input_ids, str(request.rid), ""


def _loaded_config(scheduler: Any) -> Any:
    """The configuration that the model was loaded with. Raises ConfigError where it cannot be found.

    On CPUs SGLang adds heads until the ranks can divide them. The scheduler's own configuration does not have them.
    """
    try:
        return scheduler.tp_worker.model_runner.model_config
    except AttributeError as error:
        raise ConfigError(
            f"how many heads the model was loaded with is not known ({error}); this release of SGLang has another structure"
        ) from error


def _data_parallel(role: str, arguments: Any, parallel: Any) -> tuple[int, int]:
    """How many data-parallel ranks there are, of DP attention or of whole copies, and which one this is. Raises ConfigError."""
    copies, attention = (getattr(parallel, name, None) or 1 for name in ("dp_size", "attn_dp_size"))
    size, rank = (attention, parallel.attn_dp_rank if attention > 1 else 0)
    if copies > 1 and attention > 1:
        raise ConfigError(
            f"dp_size is {copies} and attn_dp_size is {attention}; copies of an instance with DP attention cannot be handed"
            " over so far; start one server for each"
        )
    if copies > 1:
        size, rank = copies, int(getattr(arguments, "system_dp_rank", 0) or 0)
    method = getattr(parallel, "load_balance_method", "follow_bootstrap_room")
    if role == "prefill" and size > 1 and method != "follow_bootstrap_room":
        raise ConfigError(
            f"load_balance_method is {method!r} with {size} data-parallel ranks: decode would not know which of them has a"
            " request; give --load-balance-method follow_bootstrap_room"
        )
    return size, rank


def _other_dp_rank(manager: KVBatonManager, room: object) -> str:
    """Why decode would ask another data-parallel rank for a room than this one; empty where it asks this one."""
    size, rank = manager.dp_size, manager.dp_rank
    if size == 1 or not isinstance(room, int) or room % size == rank:
        return ""
    return (
        f"room {room} is at data-parallel rank {rank}, and decode expects it at {room % size} of {size}; "
        "send disagg_prefill_dp_rank with the request to both instances"
    )


def _plain_numbers(state_indices: Sequence[Any] | None) -> list[list[int]]:
    """SGLang's indices of each state component, which are arrays, or lists of them; None where a component has none."""
    return [[] if each is None else [int(index) for index in np.ravel(each)] for each in state_indices or ()]


def _broadcast(parallel: Any, value: Any) -> Any:
    """A value of rank 0 for every rank: within each stage of the pipeline, then from the first stage to the others."""
    if parallel.attn_tp_size > 1:
        value = parallel.attn_tp_group.broadcast_object(value)
    return parallel.pp_group.broadcast_object(value) if parallel.pp_size > 1 else value


def _check_polls() -> None:
    """The numbers of the states are SGLang's; raise ConfigError for a release with other ones."""
    ours = {"Failed": Poll.FAILED, "Bootstrapping": Poll.BOOTSTRAPPING, "WaitingForInput": Poll.WAITING}
    ours |= {"Transferring": Poll.TRANSFERRING, "Success": Poll.SUCCESS}
    for name, value in ours.items():
        if getattr(KVPoll, name, None) != value:
            raise ConfigError(
                f"SGLang's KVPoll.{name} is {getattr(KVPoll, name, None)}, {int(value)} is known; another release?"
            )


def _check_shape(role: str, server_args: Any, parallel: Any) -> None:
    for name, what in (_WITHOUT | (_WITHOUT_IN_DECODE if role == "decode" else {})).items():
        size = getattr(parallel, name, None) or getattr(server_args, name, None) or 1
        if size > 1:
            raise ConfigError(f"{name} is {size}: {what} cannot be handed over so far; tensor parallelism and pipelines can")
    if (getattr(parallel, "attn_cp_size", None) or 1) > 1:
        for name in _CP_DIVIDES_THE_CACHE:
            if getattr(parallel, name, False):
                raise ConfigError(
                    f"{name} is set with attn_cp_size {parallel.attn_cp_size}: then no rank has the whole cache, and that"
                    " cannot be handed over so far; leave it out"
                )


def _check_release_limit(settings: SglangSettings) -> None:
    """SGLang releases the pages of a failed request after a limit of its own, even where a writer may be left."""
    from sglang.srt.environ import envs

    limit = float(envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get())
    needed = 4 * settings.agents("127.0.0.1", 1).limits.stop_timeout
    if limit < needed:
        raise ConfigError(
            f"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT is {limit:g} s, and fencing a silent writer takes up to "
            f"{needed:g} s (four times stop_timeout); raise it, or lower stop_timeout in {CONFIG_VARIABLE}"
        )


def _log_with_sglang() -> None:
    """Let kvbaton's log lines go where SGLang's go."""
    ours = logging.getLogger("kvbaton")
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)
