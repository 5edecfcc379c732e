"""Reads GGUF files: the metadata, and tensors dequantised to float32. Every length is checked before it is believed."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kvbaton.errors import ModelError

__all__ = ["GgufFile", "TensorInfo"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file; `shape` is (outputs, inputs), as NumPy counts."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    stored_bytes: int


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name. Raises ModelError for anything broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read as a GGUF file: {error}; check the path") from error
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
            raise self._damaged(f"the header is broken near byte {self._position}: {error}") from error

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor by name, dequantised."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.path}: tensor {name} is missing; use a complete file of a Llama-family model")
        raw = np.frombuffer(self._bytes, np.uint8, info.stored_bytes, info.offset)
        try:
            values = gguf.quants.dequantize(raw, info.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} is stored as {info.kind.name}, which cannot be read; use a Q8_0 or Q4_1 file"
            ) from error
        result: npt.NDArray[np.float32] = np.asarray(values, np.float32).reshape(info.shape)
        return result

    def _parse(self) -> None:
        self._position = 0
        if self._bytes[:4] != _MAGIC:
            raise ModelError(
                f"{self.path}: starts with {self._bytes[:4]!r}, a GGUF file starts with {_MAGIC!r}; check the path"
            )
        self._position = 4
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF version is {version}, supported are {_VERSIONS}; convert the file anew")
        tensor_count, entry_count = self._scalar("<Q"), self._scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(self._plausible(entry_count, 13)):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        infos = [self._tensor_info() for _ in range(self._plausible(tensor_count, 24))]
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        data_start = -(-self._position // alignment) * alignment
        self.tensors = {info.name: info for info in (self._placed(info, data_start) for info in infos)}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._scalar("<I"), self._scalar("<Q")
            return [self._value(item_kind) for _ in range(self._plausible(count, 1))]
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is unknown")
        return self._scalar(_SCALARS[kind])

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        dimensions = self._scalar("<I")
        if not 0 < dimensions <= 4:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(dimensions))
        kind = gguf.GGMLQuantizationType(self._scalar("<I"))
        return TensorInfo(name, shape[::-1], kind, self._scalar("<Q"), 0)

    def _placed(self, info: TensorInfo, data_start: int) -> TensorInfo:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[info.kind]
        stored_bytes = math.prod(info.shape) // block_elements * block_bytes
        offset = data_start + info.offset
        if offset + stored_bytes > len(self._bytes):
            raise self._damaged(
                f"tensor {info.name} ends at byte {offset + stored_bytes}, the file at {len(self._bytes)}: it is truncated"
            )
        if info.shape[-1] % block_elements:
            raise self._damaged(f"tensor {info.name} has rows of {info.shape[-1]}, no multiple of {block_elements}")
        return TensorInfo(info.name, info.shape, info.kind, offset, stored_bytes)

    def _string(self) -> str:
        length = self._plausible(self._scalar("<Q"), 1)
        self._position += length
        return self._bytes[self._position - length : self._position].decode("utf-8")

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._bytes, self._position)
        self._position += struct.calcsize(layout)
        return value

    def _plausible(self, count: int, item_bytes: int) -> int:
        left = len(self._bytes) - self._position
        if count * item_bytes > left:
            raise ValueError(f"{count} items are announced and {left} bytes are left")
        return count

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}; download the file again")
