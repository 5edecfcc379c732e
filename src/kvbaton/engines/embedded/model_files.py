"""Reads model files: GGUF, dequantised to float32, and Hugging Face directories with safetensors shards.

Every length and offset is checked before it is used, because the files come from the network.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.engines.embedded.tokenizer import TokenizerFiles
from kvbaton.errors import ModelError

__all__ = ["GgufFile", "SafetensorsDir", "SafetensorsFile", "TensorInfo"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100 << 20
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class _MappedFile:
    """A file of tensors, mapped read-only; errors name it. Raises ModelError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}; check the path, or download the file again") from error

    def _check_end(self, name: str, end: int) -> None:
        if end > len(self._bytes):
            raise self._damaged(f"tensor {name} ends at byte {end}, the file at {len(self._bytes)}: it is truncated")

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}; download the file again")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file; `shape` is (outputs, inputs), as NumPy counts."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    stored_bytes: int


class GgufFile(_MappedFile):
    """An open GGUF file: `metadata` by key, `tensors` by name. Raises ModelError for anything broken."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
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
        self._check_end(info.name, offset + stored_bytes)
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


class _TensorEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsFile(_MappedFile):
    """One open shard. Raises ModelError for anything broken."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        header_bytes = int.from_bytes(self._bytes[:8], "little")
        if not 1 < header_bytes <= min(_LARGEST_HEADER, len(self._bytes) - 8):
            raise self._damaged(f"a header of {header_bytes} bytes does not fit a file of {len(self._bytes)} bytes")
        try:
            header = json.loads(self._bytes[8 : 8 + header_bytes])
            header.pop("__metadata__", None)
            self.entries = msgspec.convert(header, dict[str, _TensorEntry])
        except (ValueError, AttributeError) as error:
            raise self._damaged(f"the header cannot be parsed: {error}") from error
        self._data_start = 8 + header_bytes
        self._check()

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor by name, as float32."""
        entry = self.entries[name]
        start, _ = entry.data_offsets
        count, offset = math.prod(entry.shape), self._data_start + start
        if entry.dtype == "BF16":
            halves = np.frombuffer(self._bytes, np.uint16, count, offset)
            values = (halves.astype(np.uint32) << 16).view(np.float32)
        else:
            dtype = {"F64": np.float64, "F32": np.float32, "F16": np.float16}[entry.dtype]
            values = np.frombuffer(self._bytes, dtype, count, offset).astype(np.float32)
        return values.reshape(entry.shape)

    def _check(self) -> None:
        for name, entry in self.entries.items():
            if entry.dtype not in _ELEMENT_BYTES:
                allowed = ", ".join(_ELEMENT_BYTES)
                raise ModelError(
                    f"{self.path}: tensor {name} is {entry.dtype}, supported are {allowed}; use unquantised weights"
                )
            start, stop = entry.data_offsets
            needed = math.prod(entry.shape) * _ELEMENT_BYTES[entry.dtype]
            if min(start, *entry.shape, 0) < 0 or stop - start != needed:
                raise self._damaged(f"tensor {name} of shape {entry.shape} needs {needed} bytes and has {stop - start}")
            self._check_end(name, self._data_start + stop)


class SafetensorsDir:
    """An open model directory: `config` is its config.json, `tensor(name)` reads from whichever shard holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _json_object(path / "config.json")
        self.shards = _shard_paths(path)
        self._files: dict[str, SafetensorsFile] = {}
        for shard in self.shards:
            file = SafetensorsFile(shard)
            self._files.update(dict.fromkeys(file.entries, file))

    @property
    def tensor_names(self) -> frozenset[str]:
        """All tensors of all shards."""
        return frozenset(self._files)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor by name, as float32."""
        if name not in self._files:
            raise ModelError(f"{self.path}: tensor {name} is in none of {len(self.shards)} shards; download the missing files")
        return self._files[name].tensor(name)

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer files of the directory."""
        tokenizer_json = _text(self.path / "tokenizer.json")
        settings = _json_object(self.path / "tokenizer_config.json", missing_ok=True)
        generation = _json_object(self.path / "generation_config.json", missing_ok=True)
        bos_token, eos_token = _token_text(settings.get("bos_token")), _token_text(settings.get("eos_token"))
        eos_ids = {*_ids(self.config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
        eos_ids |= {one["id"] for one in _added_tokens(tokenizer_json, self.path) if one.get("content") == eos_token != ""}
        return TokenizerFiles(
            tokenizer_json=tokenizer_json,
            chat_template=self._chat_template(settings),
            bos_token=bos_token,
            eos_token=eos_token,
            eos_ids=tuple(sorted(eos_ids)),
        )

    def _chat_template(self, settings: Mapping[str, Any]) -> str:
        separate = self.path / "chat_template.jinja"
        if separate.is_file():
            return _text(separate)
        template = settings.get("chat_template") or ""
        if isinstance(template, list):
            named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
            template = named.get("default") or ""
        if not isinstance(template, str):
            raise ModelError(
                f"{self.path / 'tokenizer_config.json'}: chat_template is {type(template).__name__}, expected a text"
            )
        return template


def _shard_paths(path: Path) -> list[Path]:
    index = path / _INDEX
    if not index.is_file():
        shards = sorted(path.glob("*.safetensors"))
        if not shards:
            raise ModelError(f"{path}: there is no *.safetensors file; download the weights, or give the path of a .gguf file")
        return shards
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(one, str) for one in weight_map.values()):
        raise ModelError(f"{index}: weight_map is no object of file names; download the file again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not (path / name).is_file():
            raise ModelError(f"{index}: weight_map names {name!r}, which is not in {path}; download the missing file")
    return [path / name for name in names]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}; a model directory needs this file") from error


def _json_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    if missing_ok and not path.is_file():
        return {}
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise ModelError(f"{path}: is no JSON: {error}; download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, expected an object; download the file again")
    return value


def _added_tokens(tokenizer_json: str, path: Path) -> list[dict[str, Any]]:
    try:
        tokens = json.loads(tokenizer_json).get("added_tokens") or []
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path / 'tokenizer.json'}: is no tokenizer: {error}; download the file again") from error
    return [one for one in tokens if isinstance(one, dict) and isinstance(one.get("id"), int)]


def _token_text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]
