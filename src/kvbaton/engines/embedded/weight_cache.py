"""A file of prepared weights that every process of a machine maps read-only, so that they share its pages.

The file starts with a fixed prefix, then a header (msgpack), then the tensors, each aligned. It is written under a
temporary name and renamed, so a reader sees a whole file or none; sizes and digests reveal a damaged one.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.engines.embedded.tokenizer import TokenizerFiles
from kvbaton.errors import ModelError

__all__ = ["FORMAT", "CachedWeights", "Header", "open_weights", "write_weights"]

FORMAT = 3
"""Goes into the key of every cached file; raised when the preparation of weights changes."""

_MAGIC = b"KVBTNWTS"
_PREFIX = struct.Struct("<8sQQQ16s16s")
_ALIGN = 4096
_CHUNK_WORDS = 1 << 17


class Header(msgspec.Struct, frozen=True):
    """All that is known about a model beside its tensors; `tensors` is (name, shape) in file order."""

    config: ModelConfig
    tokenizer: TokenizerFiles
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


class CachedWeights:
    """An open file: its header, its tensors as read-only views, and a digest of all of their bytes."""

    def __init__(self, header: Header, tensors: dict[str, npt.NDArray[np.float32]], digest: bytes) -> None:
        self.header = header
        self.tensors = tensors
        self.digest = digest


def open_weights(path: Path) -> CachedWeights | None:
    """Map the file at `path`; None when there is none, or when it is truncated or damaged."""
    try:
        with path.open("rb") as file:
            region = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    if len(region) < _PREFIX.size:
        return None
    magic, header_bytes, data_offset, data_bytes, header_digest, data_digest = _PREFIX.unpack_from(region)
    if magic != _MAGIC or data_offset < _PREFIX.size + header_bytes or len(region) != data_offset + data_bytes:
        return None
    raw_header = region[_PREFIX.size : _PREFIX.size + header_bytes]
    data = np.frombuffer(region, np.uint8, data_bytes, data_offset)
    if _digest(raw_header) != header_digest or _data_digest(data) != data_digest:
        return None
    try:
        header = msgspec.msgpack.decode(raw_header, type=Header)
    except msgspec.MsgspecError:
        return None
    return CachedWeights(header, dict(_views(header, data)), data_digest)


def write_weights(path: Path, header: Header, tensors: Iterable[npt.NDArray[np.float32]]) -> None:
    """Write a file at `path` from `tensors` in the order of `header.tensors`; it appears whole or not at all."""
    raw_header = msgspec.msgpack.encode(header)
    data_offset = -(-(_PREFIX.size + len(raw_header)) // _ALIGN) * _ALIGN
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as file:
            file.write(bytes(_PREFIX.size) + raw_header + bytes(data_offset - _PREFIX.size - len(raw_header)))
            for tensor in tensors:
                file.write(np.ascontiguousarray(tensor, np.float32).data)
                file.write(bytes(-tensor.nbytes % _ALIGN))
            data_bytes = file.seek(0, os.SEEK_CUR) - data_offset
            file.flush()
            data_digest = _data_digest(np.memmap(file.name, np.uint8, "r", data_offset, (data_bytes,)))
            file.seek(0)
            file.write(_PREFIX.pack(_MAGIC, len(raw_header), data_offset, data_bytes, _digest(raw_header), data_digest))
    except OSError as error:
        raise ModelError(f"{path}: cannot write prepared weights: {error}; make room there, or set KVBATON_CACHE") from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` when the block ends well, and vanishes when it does not."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        temporary = Path(file.name)
        try:
            yield file
            file.flush()
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _views(header: Header, data: npt.NDArray[np.uint8]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    offset = 0
    for name, shape in header.tensors:
        tensor_bytes = int(np.prod(shape, dtype=np.int64)) * 4
        yield name, data[offset : offset + tensor_bytes].view(np.float32).reshape(shape)
        offset += -(-tensor_bytes // _ALIGN) * _ALIGN


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _data_digest(data: npt.NDArray[np.uint8]) -> bytes:
    """Digest of the sums of all chunks: reads every byte at the speed of memory."""
    words = data.view(np.uint64)
    whole = len(words) // _CHUNK_WORDS * _CHUNK_WORDS
    sums = words[:whole].reshape(-1, _CHUNK_WORDS).sum(axis=1, dtype=np.uint64)
    rest = words[whole:].sum(dtype=np.uint64)
    return _digest(sums.tobytes() + rest.tobytes() + len(words).to_bytes(8, "little"))
