"""How the backend gets into SGLang, without a patch of its files, and how it knows that this worked.

SGLang has a list of backends for its command line, an enum, and a function from an enum member to classes. All three are
extended here. Two things that a backend needs are not passed to its classes: the pool of a queue and the request of a sender
or receiver. Hooks keep them here for the constructor that runs next; the scheduler is one thread. SGLang only logs a hook that
could not be applied, so everything that depends on one raises an error by name when its hook has not run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbaton.errors import ConfigError

__all__ = ["BACKEND", "Queue", "current_queue", "current_request", "register_backend", "report_refused"]

BACKEND = "kvbaton"
"""How the backend is chosen: `--disaggregation-transfer-backend kvbaton`."""

_MODULE = "kvbaton.engines.sglang.backend"
_CLASSES = {
    "manager": "KVBatonManager",
    "sender": "KVBatonSender",
    "receiver": "KVBatonReceiver",
    "bootstrap_server": "KVBatonBootstrapServer",
}
_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
_NIXL = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"
_DECODE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"


@dataclass(frozen=True, slots=True)
class Queue:
    """What SGLang made the queue of a scheduler with: its cache, its metadata buffers, the scheduler, and the cache of a draft
    model.
    """

    pool: Any
    metadata: Any
    scheduler: Any
    draft: Any = None


_queue: Queue | None = None
_request: Any = None
_on_refused: Callable[[Any], None] | None = None


def current_queue() -> Queue:
    """The queue whose manager is being made. Raises ConfigError when the hook has not run."""
    if _queue is None:
        raise ConfigError(
            f"the hook on {_PREFILL} or {_DECODE} has not run, so the cache is not known; this release of SGLang has another"
            " structure, and its log states which hook could not be applied"
        )
    return _queue


def current_request(room: object) -> Any:
    """The request whose sender or receiver is being made. Raises ConfigError when its hook has not run."""
    if _request is None or _request.bootstrap_room != room:
        raise ConfigError(f"the request of room {room} is not known: the hook on its queue has not run; see SGLang's log")
    return _request


def report_refused(callback: Callable[[Any], None]) -> None:
    """Have `callback` called for every request that SGLang refuses before it makes a sender or receiver for it."""
    global _on_refused
    _on_refused = callback


def register_backend() -> None:
    """Extend SGLang's choices, its enum and its table of classes, and hook its queues. Raises ConfigError by name."""
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES, add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvbaton.engines.sglang.cpu_build import define_rank_operators, is_cpu

    if BACKEND not in DISAGG_TRANSFER_BACKEND_CHOICES:
        add_disagg_transfer_backend_choices([BACKEND])
    member = _add_member(utils.TransferBackend)

    def class_of(original: Any, transfer_backend: Any, class_type: Any) -> Any:
        if transfer_backend is not member or class_type == utils.KVClassType.KVARGS:
            return original(transfer_backend, class_type)
        return getattr(importlib.import_module(_MODULE), _CLASSES[class_type.value])

    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", class_of, HookType.AROUND)
    HookRegistry.register(f"{_PREFILL}.__init__", _keep_prefill_queue, HookType.BEFORE)
    HookRegistry.register(f"{_DECODE}.__init__", _keep_decode_queue, HookType.BEFORE)
    HookRegistry.register(f"{_PREFILL}.add", _add, HookType.AROUND)
    HookRegistry.register(f"{_DECODE}.add", _add, HookType.AROUND)
    HookRegistry.register(f"{_PREFILL}.create_sender", _keep_request, HookType.BEFORE)
    HookRegistry.register(f"{_DECODE}._create_receiver_and_enqueue", _keep_request, HookType.BEFORE)
    if is_cpu():
        define_rank_operators()
        if importlib.util.find_spec("nixl") is not None:
            HookRegistry.register(f"{_NIXL}.__init__", _keep_in_main_memory, HookType.BEFORE)


def _add_member(backends: Any) -> Any:
    """A new member of SGLang's closed enum of backends; the same one when SGLang loads its plugins again."""
    if BACKEND in backends._value2member_map_:
        return backends(BACKEND)
    member = object.__new__(backends)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    backends._value2member_map_[BACKEND] = member
    backends._member_map_[BACKEND.upper()] = member
    backends._member_names_.append(BACKEND.upper())
    if backends(BACKEND) is not member:
        raise ConfigError("SGLang's TransferBackend takes no further member; this release of SGLang has another structure")
    return member


def _keep_in_main_memory(_: Any, arguments: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's NIXL backend registers every cache as memory of a GPU, which UCX refuses for one of a CPU."""
    del args, kwargs
    arguments.kv_data_mem_kinds = ["DRAM"] * len(arguments.kv_data_ptrs)


def _keep_prefill_queue(_: Any, **arguments: Any) -> None:
    _keep_queue(arguments["token_to_kv_pool"], arguments)


def _keep_decode_queue(_: Any, **arguments: Any) -> None:
    _keep_queue(arguments["token_to_kv_pool_allocator"].get_kvcache(), arguments)


def _keep_queue(pool: Any, arguments: dict[str, Any]) -> None:
    global _queue
    draft = arguments["draft_token_to_kv_pool"]
    _queue = Queue(pool, arguments["metadata_buffers"], arguments["scheduler"], draft)


def _add(original: Any, queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A request that is over when it has just been added was refused: too long for the cache, a grammar that cannot be read.

    SGLang's decode makes an address of the request before our receiver exists, and its scheduler ends where that fails. Without
    a host our receiver refuses the request by name.
    """
    if not isinstance(req.bootstrap_host, str):
        req.bootstrap_host = ""
    result = original(queue, req, *args, **kwargs)
    if _on_refused is not None and req.finished():
        _on_refused(req)
    return result


def _keep_request(_: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    global _request
    _request = req
