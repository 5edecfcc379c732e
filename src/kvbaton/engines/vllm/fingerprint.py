"""The fingerprint of a model: a digest of what decides the meaning of its cache, and of nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["fingerprint"]

_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version"})
"""Where a configuration was read from, and by what: these differ between hosts that serve the same model."""

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(config: Mapping[str, Any], model: str, others: Iterable[str]) -> str:
    """Digest of a model's configuration, of its weights by samples, and of `others`.

    `model` is a directory, whose path does not count, or a name, which does where there are no weights to look at. Of a
    directory that has a `config.json`, only what is stated there counts, with the values that the engine has for it: libraries
    add defaults of their own, and two releases of an engine would be two models.
    """
    directory = Path(model)
    if (stated := directory / "config.json").is_file():
        config = _as_stated(config, json.loads(stated.read_text()))
    weights = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    parts = [json.dumps(_meaning(config), sort_keys=True, default=str), *others]
    parts += [f"{path.name} {_sampled(path)}" for path in weights] or [model]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _sampled(path: Path) -> str:
    """Digest of a file's size and of bytes from all over it: other weights of the same shapes show, and it takes no time."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for index in range(_SAMPLES + 1):
            file.seek(max(0, size - _SAMPLE_BYTES) * index // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _as_stated(config: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's own file has, as the engine reads it; and how positions are encoded, which an operator may override."""
    return {
        key: _as_stated(value, stated[key]) if isinstance(value, Mapping) and isinstance(stated.get(key), Mapping) else value
        for key, value in config.items()
        if key in stated or key.startswith("rope_")
    }


def _meaning(value: Any) -> Any:
    """A configuration, with those inside it, without what is not the model's."""
    if isinstance(value, Mapping):
        return {str(key): _meaning(inner) for key, inner in value.items() if key not in _NOT_THE_MODEL}
    return value
