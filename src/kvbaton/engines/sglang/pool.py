"""From SGLang's cache pool to a layout and a region: what each axis means, where each byte lies.

A pool has one tensor of slots per layer and plane, each an allocation of its own; page p is the slots from p times the page
size on. Plain attention keeps K and V as (slots, heads, channels), MLA one latent as (slots, 1, channels). What is not
understood is refused by name when the server starts: other pools, other orders of the axes, memory of a GPU, state beside the
cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.core.layout import FULL, MLA, Group, HeadRange, Layout
from kvbaton.core.tensors import LayerTensor, tensor_group
from kvbaton.core.topology import head_range
from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region

__all__ = ["CachePool", "PoolFacts", "read_pool"]

POISON_BYTE = 0x4B
_KNOWN = {"MHATokenToKVPool": FULL, "MLATokenToKVPool": MLA}


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What SGLang states about its pool, beside the tensors."""

    page_tokens: int
    first_layer: int
    total_heads: int
    tp_size: int = 1
    tp_rank: int = 0


class CachePool:
    """The memory of SGLang's cache on one rank: its layout and its region. Keeps nothing alive itself.

    `planes` has one list of tensors per plane, each with one (slots, heads, channels) tensor per layer.
    """

    def __init__(self, kind: str, planes: Mapping[str, Sequence[Any]], facts: PoolFacts) -> None:
        self.page_tokens = facts.page_tokens
        self.first_layer = facts.first_layer
        self.end_layer = facts.first_layer + len(next(iter(planes.values())))
        self.pages = next(iter(planes.values()))[0].shape[0] // facts.page_tokens
        self._tensors = [tensor for tensors in planes.values() for tensor in tensors]
        self._address = min(tensor.data_ptr() for tensor in self._tensors)
        self._bytes = max(tensor.data_ptr() + tensor.nbytes for tensor in self._tensors) - self._address
        groups = [self._group(kind, name, tensors, facts) for name, tensors in planes.items()]
        joined = tuple(plane for group in groups for plane in group.planes)
        self.layout = Layout(self._bytes, (msgspec.structs.replace(groups[0], planes=joined),))

    @property
    def region(self) -> Region:
        """Everything from the first to the last byte; what lies between two tensors is never part of a plan."""
        return Region.of(_memory(self._address, self._bytes))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers and planes of this rank."""
        return self.page_tokens * sum(int(tensor[0].nbytes) for tensor in self._tensors)

    def poison(self, pages: Sequence[int]) -> None:
        """Fill these pages of every layer with a pattern that no real cache holds."""
        ids = np.asarray(pages, np.intp)
        for tensor in self._tensors:
            item = self.page_tokens * tensor[0].nbytes
            whole = tensor.nbytes // item
            _memory(tensor.data_ptr(), whole * item).reshape(whole, item)[ids] = POISON_BYTE

    def _group(self, kind: str, name: str, tensors: Sequence[Any], facts: PoolFacts) -> Group:
        page, first = facts.page_tokens, tensors[0]
        size = first.element_size()
        slot, head, channel = (stride * size for stride in first.stride())
        held = HeadRange(0, 1) if kind == MLA else head_range(facts.total_heads, facts.tp_size, facts.tp_rank)
        dtype = str(first.dtype).removeprefix("torch.")
        described = [
            LayerTensor(
                tensor.data_ptr() - self._address,
                (self.pages, page, *tensor.shape[1:]),
                (page * slot, slot, head, channel),
                dtype,
                size,
            )
            for tensor in tensors
        ]
        return tensor_group(
            kind,
            range(facts.first_layer, facts.first_layer + len(tensors)),
            described,
            ("block", "token", "head", "channel"),
            heads=(held,),
            total_heads=1 if kind == MLA else facts.total_heads,
            planes=(name,),
        )


def read_pool(pool: Any, facts: PoolFacts, state_types: Sequence[Any] = (), draft_tensors: int = 0) -> CachePool:
    """Describe SGLang's pool. Raises ConfigError, by name, for what cannot be handed over so far."""
    name = type(pool).__name__
    if name not in _KNOWN:
        raise ConfigError(f"the cache of this model is a {name}; {' and '.join(_KNOWN)} can be handed over so far")
    if state_types:
        names = ", ".join(str(getattr(each, "value", each)) for each in state_types)
        raise ConfigError(f"this model keeps state beside its cache ({names}); models without can be handed over so far")
    if draft_tensors:
        raise ConfigError(f"speculative decoding adds {draft_tensors} tensors of a draft model; start without a draft model")
    kind = _KNOWN[name]
    planes = {"kv": list(pool.kv_buffer)} if kind == MLA else {"k": list(pool.k_buffer), "v": list(pool.v_buffer)}
    for plane, tensors in planes.items():
        for layer, tensor in enumerate(tensors):
            _check_tensor(f"layer {layer}, plane {plane}", tensor, tensors[0])
    order = getattr(pool, "kv_cache_layout", "nhd")
    if order != "nhd":
        raise ConfigError(f"the axes of the cache are in the order {order!r}; 'nhd' can be handed over so far")
    return CachePool(kind, planes, facts)


def _check_tensor(where: str, tensor: Any, first: Any) -> None:
    if tensor.device.type != "cpu":
        raise ConfigError(f"{where}: its cache is on {tensor.device}; only main memory can be handed over so far")
    if tensor.dim() != 3 or not tensor.is_contiguous() or tensor.shape != first.shape or tensor.dtype != first.dtype:
        raise ConfigError(
            f"{where}: shape {tuple(tensor.shape)}, {tensor.dtype}, contiguous {tensor.is_contiguous()}; "
            f"(slots, heads, channels) without gaps, the same in every layer, can be handed over so far"
        )


def _memory(address: int, size: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)
