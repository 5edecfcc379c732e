"""The dimensions of a Llama-family model, read from a model's own description and checked before any weight is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from kvbaton.errors import ModelError

__all__ = ["ModelConfig", "config_from_gguf", "config_from_hugging_face"]

_MOST_LAYERS = 10_000
_CHOOSE = "choose a Llama-family model such as smollm2"


class ModelConfig(msgspec.Struct, frozen=True):
    """What two instances must agree on to share a cache, and all that the model needs beside its weights."""

    architecture: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    context_tokens: int
    rope_theta: float
    norm_epsilon: float
    tied_head: bool

    @property
    def query_size(self) -> int:
        """Columns of the query projection."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.kv_heads * self.head_size

    @property
    def heads_per_kv_head(self) -> int:
        """How many query heads share one key and value head."""
        return self.heads // self.kv_heads


def config_from_hugging_face(fields: Mapping[str, Any], where: str) -> ModelConfig:
    """Read a Hugging Face `config.json`; raises ModelError that names the field for whatever is not supported."""
    reader = _Fields(fields, where)
    architecture = reader.text("model_type")
    reader.refuse_unless("model_type", architecture, ("llama",))
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise reader.wrong("rope_scaling", rope, "an object")
    reader.refuse_unless("rope_scaling.rope_type", rope.get("rope_type") or rope.get("type") or "default", ("default",))
    reader.refuse_unless("hidden_act", fields.get("hidden_act", "silu"), ("silu",))
    for switch in ("attention_bias", "mlp_bias"):
        reader.refuse_unless(switch, bool(fields.get(switch)), (False,))
    reader.refuse_unless("partial_rotary_factor", float(fields.get("partial_rotary_factor") or 1.0), (1.0,))
    heads, hidden_size = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    config = ModelConfig(
        architecture=architecture,
        layers=reader.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=reader.integer("num_key_value_heads", heads),
        head_size=reader.integer("head_dim", hidden_size // heads),
        ffn_size=reader.integer("intermediate_size"),
        vocab_size=reader.integer("vocab_size"),
        context_tokens=reader.integer("max_position_embeddings", 2048),
        rope_theta=_Fields({**rope, **fields}, where).number("rope_theta", 10_000.0),
        norm_epsilon=reader.number("rms_norm_eps", 1e-6),
        tied_head=bool(fields.get("tie_word_embeddings", False)),
    )
    return _checked(config, where)


def config_from_gguf(fields: Mapping[str, Any], *, vocab_size: int, tied_head: bool, where: str) -> ModelConfig:
    """Read the metadata of a GGUF file; raises ModelError that names the field for whatever is not supported."""
    reader = _Fields(fields, where)
    architecture = reader.text("general.architecture")
    reader.refuse_unless("general.architecture", architecture, ("llama",))
    reader.refuse_unless("llama.rope.scaling.type", fields.get("llama.rope.scaling.type", "none"), ("none",))
    reader.refuse_unless("llama.expert_count", fields.get("llama.expert_count", 0), (0,))
    heads, hidden_size = reader.integer("llama.attention.head_count"), reader.integer("llama.embedding_length")
    head_size = reader.integer("llama.attention.key_length", hidden_size // heads)
    reader.refuse_unless(
        "llama.attention.value_length", reader.integer("llama.attention.value_length", head_size), (head_size,)
    )
    reader.refuse_unless("llama.rope.dimension_count", reader.integer("llama.rope.dimension_count", head_size), (head_size,))
    config = ModelConfig(
        architecture=architecture,
        layers=reader.integer("llama.block_count"),
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=reader.integer("llama.attention.head_count_kv", heads),
        head_size=head_size,
        ffn_size=reader.integer("llama.feed_forward_length"),
        vocab_size=vocab_size,
        context_tokens=reader.integer("llama.context_length"),
        rope_theta=reader.number("llama.rope.freq_base", 10_000.0),
        norm_epsilon=reader.number("llama.attention.layer_norm_rms_epsilon"),
        tied_head=tied_head,
    )
    return _checked(config, where)


def _checked(config: ModelConfig, where: str) -> ModelConfig:
    if config.heads % config.kv_heads:
        raise ModelError(f"{where}: {config.heads} heads do not divide into {config.kv_heads} KV heads; the file is damaged")
    if config.layers > _MOST_LAYERS:
        raise ModelError(f"{where}: {config.layers} layers; more than {_MOST_LAYERS} are not supported, the file is damaged")
    if config.head_size % 2:
        raise ModelError(f"{where}: head size {config.head_size} is odd, rotary positions need an even one; {_CHOOSE}")
    return config


class _Fields:
    """Typed access to a model's description, with errors that name the file and the field."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise self.wrong(name, value, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number as its shortest float32 text: files store 1e-05 in one precision or the other and mean the same."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.wrong(name, value, "a positive number")
        return float(str(np.float32(value)))

    def text(self, name: str) -> str:
        value = self._value(name, None)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def refuse_unless(self, name: str, value: object, supported: tuple[object, ...]) -> None:
        if value not in supported:
            allowed = " or ".join(repr(one) for one in supported)
            raise ModelError(f"{self._where}: {name} is {value!r}, supported is {allowed}; {_CHOOSE}")

    def wrong(self, name: str, value: object, expected: str) -> ModelError:
        return ModelError(f"{self._where}: {name} is {value!r}, expected {expected}; the file is damaged or of another kind")

    def _value(self, name: str, default: float | None) -> object:
        value = self._fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._where}: {name} is missing; the file is damaged or of another kind")
        return value
