"""From SGLang's cache pool to a layout and a region: what each axis means, where each byte lies.

A pool has one tensor of slots per layer and plane, each an allocation of its own; page p is the slots from p times the page
size on. Plain attention keeps K and V as (slots, heads, channels), MLA one latent as (slots, 1, channels). Pools of several
kinds of layers have pools inside: full attention beside sliding windows, or beside the states of linear attention, whose
tensors are (slots, ...) with one slot per request. Sparse attention keeps a page of index keys per page of its latent. A draft
model has a pool with the same slots. What is not understood is refused by name when the server starts: other pools, other
orders of the axes, memory of a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import BlockLists
from kvbaton.core.layout import FULL, INDEX, MLA, SLIDING_PAGES, Axis, Group, HeadRange, Layout, Plane
from kvbaton.core.segments import HOLE
from kvbaton.core.tensors import LayerTensor, tensor_group
from kvbaton.core.topology import head_range
from kvbaton.engines.sglang.tables import BlockTable, BlockTables
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region

__all__ = ["CachePool", "PoolFacts", "read_pool"]

POISON_BYTE = 0x4B
STATE = "state"
"""Kind of the group of linear attention's states."""

_ATTENTION = {"MHATokenToKVPool": FULL, "MLATokenToKVPool": MLA, "DSATokenToKVPool": MLA}


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What SGLang states about its pool, beside the tensors."""

    page_tokens: int
    first_layer: int
    total_heads: int
    tp_size: int = 1
    tp_rank: int = 0
    window: int = 0
    """How many tokens a sliding window has, by SGLang's scheduler; 0 without one."""
    model_layers: int = 0
    """How many layers the model has on all ranks; those of a draft model are numbered behind them."""


@dataclass(frozen=True, slots=True)
class _PoolPart:
    """One group: its tensors, and how it is described once the address of the region is known."""

    tensors: Sequence[Any]
    describe: Callable[[int], Group]
    component: int = -1
    """Which of SGLang's state components it is; -1 for the cache itself."""
    name: str = "the cache"


class CachePool:
    """The memory of SGLang's cache on one rank: its layout and its region. Keeps nothing alive itself."""

    def __init__(self, parts: Sequence[_PoolPart], page_tokens: int) -> None:
        tensors = [tensor for part in parts for tensor in part.tensors]
        self.page_tokens = page_tokens
        self._address = min(tensor.data_ptr() for tensor in tensors)
        self._bytes = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors) - self._address
        groups = tuple(part.describe(self._address) for part in parts)
        self.layout = Layout(self._bytes, groups)
        self.first_layer, self.end_layer = self.layout.layers[0], self.layout.layers[-1] + 1
        tables = [BlockTable(group, part.component, part.name) for group, part in zip(groups, parts, strict=True)]
        self.tables = BlockTables(page_tokens, tables)

    @property
    def region(self) -> Region:
        """Everything from the first to the last byte; what lies between two tensors is never part of a plan."""
        return Region.of(_memory(self._address, self._bytes))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers and planes of this rank; without windows and states."""
        paged = [group for group in self.layout.groups if not (group.is_state or group.window)]
        return sum(group.token_bytes * group.block_tokens * len(group.layers) for group in paged)

    def poison(self, blocks: BlockLists) -> None:
        """Fill these blocks of every layer with a pattern that no real cache holds."""
        memory = _memory(self._address, self._bytes)
        for group, ids in zip(self.layout.groups, blocks, strict=True):
            for plane in group.planes:
                size = sum((axis.count - 1) * axis.stride for axis in group.axes(plane)[1:]) + plane.element_bytes
                for first in (
                    offset + number * plane.block_stride for offset in plane.layer_offsets for number in ids if number != HOLE
                ):
                    memory[first : first + size] = POISON_BYTE


def read_pool(pool: Any, facts: PoolFacts, arguments: Any = None, draft: Any = None) -> CachePool:
    """Describe SGLang's pool, the state components of its `KVArgs`, and the pool of a draft model. Raises ConfigError, by name,
    for what cannot be handed over so far.
    """
    types = [str(getattr(each, "value", each)) for each in getattr(arguments, "state_types", None) or ()]
    name = type(pool).__name__
    if name in _ATTENTION and types == ([] if name != "DSATokenToKVPool" else ["dsa"]):
        layers: Sequence[int] = range(facts.first_layer, facts.first_layer + len(_planes(pool)[0][1]))
        parts = [_attention(pool, layers, facts)]
        if types:
            parts.append(_index(pool, layers, facts))
    elif name == "SWAKVPool" and types == ["swa"]:
        parts = _with_windows(pool, facts)
    elif name == "HybridLinearKVPool" and types == ["mamba"]:
        layers = list(pool.full_attention_layer_id_mapping)
        parts = [_attention(pool.full_kv_pool, layers, facts), _states(pool.mamba_pool, arguments, facts)]
    else:
        beside = f" with {', '.join(types)}" if types else ""
        raise ConfigError(
            f"the cache of this model is a {name}{beside}; MHATokenToKVPool, MLATokenToKVPool, SWAKVPool with swa, "
            "HybridLinearKVPool with mamba and DSATokenToKVPool with dsa can be handed over so far"
        )
    if draft is not None:
        parts.append(_draft(draft, facts))
    return CachePool(parts, facts.page_tokens)


def _draft(pool: Any, facts: PoolFacts) -> _PoolPart:
    """The cache of a draft model: its tokens have the slots that they have in the model's own cache."""
    name = "the cache of the draft model"
    kind = f"{_ATTENTION.get(type(pool).__name__, FULL)} draft"
    layers = range(facts.model_layers, facts.model_layers + int(getattr(pool, "layer_num", 0)))
    return _attention(pool, layers, facts, kind, name=name, has_own_heads=True)


def _planes(pool: Any) -> list[tuple[str, list[Any]]]:
    """Every plane of a pool of attention, with one tensor per layer."""
    if _ATTENTION[type(pool).__name__] == MLA:
        return [("kv", list(pool.kv_buffer))]
    return [("k", list(pool.k_buffer)), ("v", list(pool.v_buffer))]


def _attention(
    pool: Any,
    layers: Sequence[int],
    facts: PoolFacts,
    kind: str = "",
    component: int = -1,
    name: str = "the cache",
    *,
    has_own_heads: bool = False,
) -> _PoolPart:
    if type(pool).__name__ not in _ATTENTION:
        raise ConfigError(f"{name} is a {type(pool).__name__}; {' and '.join(_ATTENTION)} can be handed over so far")
    order = getattr(pool, "kv_cache_layout", "nhd")
    if order != "nhd":
        raise ConfigError(f"the axes of {name} are in the order {order!r}; 'nhd' can be handed over so far")
    planes, is_mla = _planes(pool), _ATTENTION[type(pool).__name__] == MLA
    for plane, tensors in planes:
        for layer, tensor in enumerate(tensors):
            _check_tensor(f"{name}, layer {layer}, plane {plane}", tensor, tensors[0], 3)
    kind = kind or _ATTENTION[type(pool).__name__]
    # Windows and drafts may have other numbers of heads than the model states; several are never replicated.
    here = planes[0][1][0].shape[1]
    total = here * facts.tp_size if has_own_heads and (here > 1 or facts.tp_size == 1) else facts.total_heads
    held = HeadRange(0, 1) if is_mla else head_range(total, facts.tp_size, facts.tp_rank)
    window = facts.window if kind == SLIDING_PAGES else 0

    def describe(base: int) -> Group:
        groups = [
            tensor_group(
                kind,
                layers,
                _by_page(tensors, facts.page_tokens, base),
                ("block", "token", "head", "channel"),
                heads=(held,),
                total_heads=1 if is_mla else total,
                planes=(plane,),
                window=window,
            )
            for plane, tensors in planes
        ]
        joined = tuple(plane for group in groups for plane in group.planes)
        return msgspec.structs.replace(groups[0], planes=joined)

    return _PoolPart([tensor for _, tensors in planes for tensor in tensors], describe, component, name)


def _by_page(tensors: Sequence[Any], page_tokens: int, base: int) -> list[LayerTensor]:
    """Tensors of (slots, heads, channels) as ones of (pages, tokens, heads, channels)."""
    first = tensors[0]
    size = first.element_size()
    slot, head, channel = (stride * size for stride in first.stride())
    shape = (first.shape[0] // page_tokens, page_tokens, *first.shape[1:])
    strides = (page_tokens * slot, slot, head, channel)
    return [LayerTensor(tensor.data_ptr() - base, shape, strides, _dtype(first), size) for tensor in tensors]


def _with_windows(pool: Any, facts: PoolFacts) -> list[_PoolPart]:
    """Layers of full attention, and layers with a sliding window, whose pages are in a smaller pool of their own."""
    if not facts.window:
        raise ConfigError("the cache has layers with a sliding window, and SGLang's scheduler states no sliding_window_size")
    layers: dict[bool, list[int]] = {False: [], True: []}
    for layer, (_, is_window) in sorted(pool.layers_mapping.items()):
        layers[is_window].append(layer)
    return [
        _attention(pool.full_kv_pool, layers[False], facts),
        _attention(pool.swa_kv_pool, layers[True], facts, SLIDING_PAGES, 0, "the pool of sliding windows", has_own_heads=True),
    ]


def _index(pool: Any, layers: Sequence[int], facts: PoolFacts) -> _PoolPart:
    """The index keys of sparse attention: all keys of a page, then all scales, in an order that only the kernels know.

    Pages of the index are those of the cache, under the same numbers. Layers that share the choice of another have none.
    """
    held = [(layer, tensor) for layer, tensor in zip(layers, pool.index_k_with_scale_buffer, strict=True) if tensor.shape[0]]
    if not held:
        raise ConfigError("the cache of this model has a sparse index without a layer that holds index keys")
    page, first = facts.page_tokens, held[0][1]
    keys = getattr(pool, "index_page_size", page)
    for layer, tensor in held:
        _check_tensor(f"the sparse index, layer {layer}", tensor, first, 2)
    size = first.element_size()
    if keys != page or first.shape[1] % page:
        raise ConfigError(
            f"a page of the sparse index holds {keys} keys in {first.shape[1]} bytes, one of the cache {page} tokens;"
            " an index without pooled keys can be handed over so far"
        )
    token = first.shape[1] // page

    def describe(base: int) -> Group:
        shape, strides = (first.shape[0], page, 1, token), (page * token * size, token * size, token * size, size)
        return tensor_group(
            INDEX,
            [layer for layer, _ in held],
            [LayerTensor(tensor.data_ptr() - base, shape, strides, _dtype(first), size) for _, tensor in held],
            ("block", "token", "head", "channel"),
            heads=(HeadRange(0, 1),),
            total_heads=1,
            planes=("index",),
            whole_blocks=True,
        )

    return _PoolPart([tensor for _, tensor in held], describe, 0, "the sparse index")


def _states(pool: Any, arguments: Any, facts: PoolFacts) -> _PoolPart:
    """The states of linear attention, by SGLang's own description of its tensors: one slot each per request and layer."""
    entries = [_StateEntry(*each) for each in zip(*(getattr(arguments, name)[0] for name in _STATE_LISTS), strict=True)]
    tensors = dict(_state_tensors(pool))
    planes: dict[str, list[_StateEntry]] = {}
    for entry in entries:
        name, tensor = next(
            (
                (name, each)
                for name, each in tensors.items()
                if each.data_ptr() <= entry.address < each.data_ptr() + each.nbytes
            ),
            ("", None),
        )
        if tensor is None:
            raise ConfigError("SGLang has states beside those of its layers (slot states); such states cannot be handed over")
        _check_tensor(f"state {name}", tensor, tensor, tensor.dim())
        planes.setdefault(name, []).append(entry)
    layers = [entry.layer for entry in next(iter(planes.values()))]
    if any([entry.layer for entry in each] != layers for each in planes.values()):
        raise ConfigError("the layers of this model hold different kinds of states; such caches cannot be handed over so far")

    def describe(base: int) -> Group:
        made = tuple(_state_plane(name, tensors[name], each, base, facts) for name, each in planes.items())
        return Group(STATE, tuple(layers), next(iter(tensors.values())).shape[1], 0, 0, made)

    return _PoolPart([tensors[name] for name in planes], describe, 0, "the states of linear attention")


_STATE_LISTS = (
    "state_data_ptrs",
    "state_item_lens",
    "state_dim_per_tensor",
    "state_slice_outer_counts",
    "state_conv_shard_groups",
    "state_layer_ids",
)


@dataclass(frozen=True, slots=True)
class _StateEntry:
    """One tensor of one layer: `count` channels or heads of this rank behind `outer` rows, `parts` of which ranks have a share
    each; a count of 0 is a state that every rank has whole.
    """

    address: int
    item_bytes: int
    count: int
    outer: int
    parts: Sequence[int] | None
    layer: int


def _state_tensors(pool: Any) -> Iterator[tuple[str, Any]]:
    """The tensors (layers, slots, ...) of a pool by name."""
    states = pool.mamba_cache
    for number, tensor in enumerate(states.conv):
        if tensor.numel():
            yield f"conv{number}", tensor
    if states.temporal.numel():
        yield "ssm", states.temporal


def _state_plane(name: str, tensor: Any, entries: Sequence[_StateEntry], base: int, facts: PoolFacts) -> Plane:
    first, size = entries[0], tensor.element_size()
    outer, tp, rank = first.outer, facts.tp_size, facts.tp_rank
    count, parts = first.count, first.parts
    heads: tuple[HeadRange, ...]
    if not count:
        heads, total, count, outer = (HeadRange(0, 1),), 1, 1, 1
    elif name == "ssm":
        heads, total = (HeadRange(rank * count, count),), tp * count
    elif parts is not None and sum(parts) == count * tp and all(part % tp == 0 for part in parts):
        starts = [sum(parts[:place]) for place in range(len(parts))]
        heads = tuple(HeadRange(start + rank * part // tp, part // tp) for start, part in zip(starts, parts, strict=True))
        total = sum(parts)
    else:
        # How ranks divide the channels is not stated, so the state is moved whole, between instances of as many ranks.
        heads, total, count, outer = (HeadRange(rank, 1),), tp, 1, 1
    inner = first.item_bytes // (count * outer)
    channels = (Axis(inner // size, size),) if outer == 1 else (Axis(outer, count * inner), Axis(inner // size, size))
    return Plane(
        name=name,
        dtype=_dtype(tensor),
        element_bytes=size,
        heads=heads,
        total_heads=total,
        channels=channels,
        layer_offsets=tuple(entry.address - base for entry in entries),
        block_stride=tensor.stride()[1] * size,
        page_stride=0,
        token_stride=0,
        head_stride=inner,
    )


def _check_tensor(where: str, tensor: Any, first: Any, dimensions: int) -> None:
    if tensor.device.type != "cpu":
        raise ConfigError(f"{where}: its cache is on {tensor.device}; only main memory can be handed over so far")
    if (
        tensor.dim() != dimensions
        or not tensor.is_contiguous()
        or tuple(tensor.shape) != tuple(first.shape)
        or tensor.dtype != first.dtype
    ):
        raise ConfigError(
            f"{where}: shape {tuple(tensor.shape)}, {tensor.dtype}, contiguous {tensor.is_contiguous()}; {dimensions} axes "
            "without gaps, the same in every layer, can be handed over so far"
        )


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _memory(address: int, size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)
