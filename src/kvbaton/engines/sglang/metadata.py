"""SGLang's metadata row: what travels beside the cache of a request, as bytes for SGLang and as numbers for other engines.

A row is one slot of several buffers: the first token, its logprobs, cached-token counts, hidden states and draft tokens, the
room. Between two SGLang instances it travels as it is. From another engine only the first token and its logprobs are known;
then the row is made from those, and everything else of it is zero, as SGLang itself leaves it without speculative decoding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.core.handoff import Aux
from kvbaton.errors import ConfigError, ProtocolError

__all__ = ["MetadataRows"]

_TYPES = {
    "output_ids": np.int32,
    "cached_tokens": np.int32,
    "output_token_logprobs_val": np.float32,
    "output_token_logprobs_idx": np.int32,
    "output_top_logprobs_val": np.float32,
    "output_top_logprobs_idx": np.int32,
    "bootstrap_room": np.uint64,
}


class MetadataRows:
    """The metadata buffers of one rank: `buffers` by name, in the order in which they travel."""

    def __init__(self, buffers: Sequence[tuple[str, npt.NDArray[np.uint8]]]) -> None:
        self._buffers = tuple(buffers)
        self._by_name = dict(buffers)
        missing = [name for name in _TYPES if name not in self._by_name]
        if missing:
            raise ConfigError(f"SGLang's metadata buffers lack {', '.join(missing)}; this release has other ones")
        self.row_bytes = sum(buffer.shape[1] for _, buffer in self._buffers)
        self.format = ", ".join(f"{name} {buffer.shape[1]}" for name, buffer in self._buffers)
        """Every field with its bytes, in the order in which they travel: two instances have to have the same."""

    @classmethod
    def of(cls, metadata: Any, arguments: Any) -> MetadataRows:
        """Those of SGLang's `MetadataBuffers`. Raises ConfigError when they are not those of its `KVArgs`."""
        named = {each.data_ptr(): name for name, each in vars(metadata).items() if hasattr(each, "data_ptr")}
        buffers = []
        for address, size, item in zip(arguments.aux_data_ptrs, arguments.aux_data_lens, arguments.aux_item_lens, strict=True):
            if address not in named:
                raise ConfigError("SGLang's metadata buffers are not those that its backend was given; another release?")
            memory = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)
            buffers.append((named[address], memory.reshape(-1, item)))
        return cls(buffers)

    def read(self, row: int) -> Aux:
        """What a source sends of this row."""
        top = [
            (int(token), float(value))
            for token, value in zip(
                self._view("output_top_logprobs_idx", row), self._view("output_top_logprobs_val", row), strict=True
            )
        ]
        return Aux(
            token_id=int(self._view("output_ids", row)[0]),
            logprob=float(self._view("output_token_logprobs_val", row)[0]),
            # SGLang does not write how many there are; behind the last one the row is all zero.
            top_logprobs=tuple(_without_padding(top)),
            opaque=b"".join(buffer[row].tobytes() for _, buffer in self._buffers),
        )

    def write(self, row: int, aux: Aux, room: int) -> None:
        """Write what a source has sent. Raises ProtocolError, and writes nothing, when it does not fit this instance."""
        written = self._view("bootstrap_room", row)
        if aux.opaque:
            self._write_opaque(row, aux.opaque)
        else:
            self._write_numbers(row, aux)
        # Last: SGLang takes the row as complete as soon as there is a room in it.
        written[0] = room

    def _write_opaque(self, row: int, opaque: bytes) -> None:
        if len(opaque) != self.row_bytes:
            raise ProtocolError(
                f"the source's metadata row has {len(opaque)} bytes, ours has {self.row_bytes}; both instances need the same "
                "release of SGLang and the same flags of speculative decoding and sampling masks"
            )
        first = 0
        for _, buffer in self._buffers:
            end = first + buffer.shape[1]
            buffer[row] = np.frombuffer(opaque, np.uint8)[first:end]
            first = end

    def _write_numbers(self, row: int, aux: Aux) -> None:
        for _, buffer in self._buffers:
            buffer[row] = 0
        self._view("output_ids", row)[0] = aux.token_id
        self._view("output_token_logprobs_idx", row)[0] = aux.token_id
        self._view("output_token_logprobs_val", row)[0] = aux.logprob
        values, ids = self._view("output_top_logprobs_val", row), self._view("output_top_logprobs_idx", row)
        for index, (token, value) in enumerate(aux.top_logprobs[: len(values)]):
            ids[index], values[index] = token, value

    def _view(self, name: str, row: int) -> npt.NDArray[Any]:
        buffer = self._by_name[name]
        if not 0 <= row < len(buffer):
            raise ProtocolError(f"row {row} is outside the {len(buffer)} rows of {name}")
        view: npt.NDArray[Any] = buffer[row].view(_TYPES[name])
        return view


def _without_padding(pairs: list[tuple[int, float]]) -> list[tuple[int, float]]:
    while pairs and pairs[-1] == (0, 0.0):
        pairs = pairs[:-1]
    return pairs
