"""What vLLM's own description of its caches means for a hand-off: kinds of attention, windows, heads, states, drafts.

Read by attribute, so that it can be tested without vLLM. A kind of cache that is not known here is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbaton.core.layout import CHUNKED, FULL, INDEX, MLA, SLIDING_PAGES, HeadRange
from kvbaton.core.topology import head_range
from kvbaton.engines.vllm.tensors import LayerSpec, StatePart
from kvbaton.errors import ConfigError

__all__ = ["STATE", "CutFacts", "TokenCounts", "layer_specs", "token_counts"]

STATE = "state"
"""The kind of a group that keeps one state per request."""

# The first block of a window is moved whole: vLLM enters it into its prefix cache, and another prompt may need all of it.
_KINDS = {
    "FullAttentionSpec": FULL,
    "MLAAttentionSpec": MLA,
    "SlidingWindowSpec": SLIDING_PAGES,
    "ChunkedLocalAttentionSpec": CHUNKED,
    "MambaSpec": STATE,
}
_QUANTIZED = ("NONE", "FP8_PER_TENSOR")
"""Without scales, or with those of the model's weights, which the fingerprint covers."""
_INDEXER = "INDEXER"
"""The role of an MLA cache by which sparse attention chooses tokens."""
_MAMBA2 = "MAMBA2"
_GATED_DELTA = "GDN_ATTN"


@dataclass(frozen=True, slots=True)
class CutFacts:
    """What the specs do not state: how the model is cut, and how many heads and groups it has in all."""

    tp_rank: int
    tp_size: int
    total_heads: int
    state_groups: int = 1
    """Groups of B and C of a Mamba layer."""
    layers: int = 0
    """Without those of a draft model."""
    draft_heads: int = 0
    is_channel_first: bool = False
    """Whether a convolution's state has its channels before its taps."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How tokens become blocks, over all block lists, and how many tokens of a prompt are handed over."""

    sizes: tuple[int, ...]
    """Tokens per block of each list that grows with the tokens."""
    windows: tuple[int, ...] = ()
    """How many tokens each of these lists holds at most; 0 for all."""
    states: int = 0
    """Lists that have one block per request."""
    backoff: int = 0
    """Tokens at the end of a prompt that the target computes itself, from a cache that ends before them."""

    @property
    def chunk(self) -> int:
        """Prompts are announced in multiples of so many tokens: whole blocks of every list."""
        return math.lcm(*self.sizes)

    def blocks(self, tokens: int) -> int:
        """How many blocks so many tokens take at most."""
        windows = self.windows or (0,) * len(self.sizes)
        held = [min(tokens, window) if window else tokens for window in windows]
        return sum(-(-count // size) + bool(window) for count, size, window in zip(held, self.sizes, windows, strict=True)) + (
            self.states
        )

    def handed(self, tokens: int) -> int:
        """How many tokens of such a prompt are handed over."""
        return max(0, tokens - self.backoff)


def token_counts(kv_cache_config: Any, step_tokens: int) -> TokenCounts:
    """Read them off vLLM's groups, for steps of at most so many tokens.

    After a load vLLM computes the last token of a prompt again. A state would take that token twice, and of a sliding window
    vLLM has by then given the block away that this token looks back to: models with either hand over one token less.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    states = [spec for spec in specs if _kind_name(spec) == "MambaSpec"]
    others = [spec for spec in specs if _kind_name(spec) != "MambaSpec"]
    windows = [_reach(_first(spec)) for spec in others]
    return TokenCounts(
        sizes=tuple(spec.block_size for spec in others),
        windows=tuple(window and window + step_tokens for window in windows),
        states=len(states),
        backoff=1 if states or any(windows) else 0,
    )


def layer_specs(kv_cache_config: Any, facts: CutFacts) -> dict[str, LayerSpec]:
    """The spec of each layer of this rank, by name. Raises ConfigError for a cache that cannot be handed over."""
    return {
        name: _layer_spec(number, name, _of_layer(group.kv_cache_spec, name), facts)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }


def _of_layer(spec: Any, name: str) -> Any:
    """Layers of one list may have specs of their own (`UniformTypeKVCacheSpecs`)."""
    several: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    return spec if several is None else several[name]


def _reach(spec: Any) -> int:
    """How many tokens an attention with a window, or in chunks, looks back to; 0 for all."""
    names = {"SlidingWindowSpec": "sliding_window", "ChunkedLocalAttentionSpec": "attention_chunk_size"}
    name = names.get(type(spec).__name__)
    return int(getattr(spec, name)) if name else 0


def _first(spec: Any) -> Any:
    several: Mapping[str, Any] = getattr(spec, "kv_cache_specs", None) or {"": spec}
    return next(iter(several.values()))


def _kind_name(spec: Any) -> str:
    return type(_first(spec)).__name__


def _layer_spec(number: int, name: str, spec: Any, facts: CutFacts) -> LayerSpec:
    kind = _KINDS.get(type(spec).__name__)
    if kind is None:
        raise ConfigError(
            f"the cache of {name} is a {type(spec).__name__}; full and chunked local attention, sliding windows, MLA and Mamba"
            " states can be handed over so far"
        )
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", _QUANTIZED[0])
    if mode not in _QUANTIZED:
        raise ConfigError(
            f"the cache of {name} is quantized as {mode}, with scales that are computed with the cache; such caches cannot"
            f" be handed over so far: choose a --kv-cache-dtype without such scales"
        )
    is_draft = _is_draft(name, facts)
    if getattr(getattr(spec, "cache_role", None), "name", "") == _INDEXER:
        kind = INDEX
    if kind == STATE:
        return LayerSpec(0, kind=kind, block_list=number, is_draft=is_draft, states=_states(name, spec, facts))
    window = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0) if kind == SLIDING_PAGES else _reach(spec)
    heads, total = _heads(spec.num_kv_heads, facts.draft_heads if is_draft else facts.total_heads, kind, facts)
    # A draft's groups have names of their own, so that a peer without them is refused by those names.
    named = f"{kind} draft" if is_draft else kind
    # Kernels keep the scales of an index behind the values of all tokens of a block, whatever the shape of the tensor.
    return LayerSpec(spec.block_size, heads, total, named, number, window, is_draft, whole_blocks=kind == INDEX)


def _is_draft(name: str, facts: CutFacts) -> bool:
    """Draft models have a prefix of their own; EAGLE heads and MTP layers are numbered behind the layers of the model."""
    if not facts.draft_heads:
        return False
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return name.startswith("draft_model.") or "mtp" in name or bool(numbers and facts.layers and numbers[0] >= facts.layers)


def _heads(held: int, total: int, kind: str, facts: CutFacts) -> tuple[tuple[HeadRange, ...], int]:
    """The heads of this rank. Layers may have other numbers of heads than the model states; several are never replicated."""
    if kind in (MLA, INDEX):
        return (HeadRange(0, 1),), 1
    if held > 1 or facts.tp_size == 1:
        total = held * facts.tp_size
    return (head_range(min(total, held * facts.tp_size), facts.tp_size, facts.tp_rank),), min(total, held * facts.tp_size)


def _states(name: str, spec: Any, facts: CutFacts) -> tuple[StatePart, ...]:
    if spec.mamba_cache_mode != "none":
        raise ConfigError(
            f"the states of {name} are cached by prefix (mamba_cache_mode {spec.mamba_cache_mode!r}); such states cannot be"
            " handed over so far: start vLLM with --no-enable-prefix-caching"
        )
    if getattr(spec, "num_speculative_blocks", 0):
        raise ConfigError(
            f"the states of {name} have blocks for drafted tokens (num_speculative_blocks is {spec.num_speculative_blocks});"
            " such states cannot be handed over so far: start vLLM without speculative decoding"
        )
    parts = [
        (tuple(shape), str(dtype).removeprefix("torch."), dtype.itemsize)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    mamba_type = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    is_replicated = getattr(spec, "tp_replicated", False)
    if mamba_type in (_MAMBA2, _GATED_DELTA) and len(parts) == 2 and not is_replicated:
        return _divided(parts, mamba_type, facts)
    return tuple(_whole(f"state{place}", *part, spec=spec, facts=facts) for place, part in enumerate(parts))


def _divided(parts: Sequence[tuple[tuple[int, ...], str, int]], mamba_type: str, facts: CutFacts) -> tuple[StatePart, ...]:
    """A convolution whose channels are parts that are divided each by itself, and a state per head.

    Mamba 2 has the channels [x | B | C], a gated delta net [q | k | v]. x and v have the heads of the state; B and C of a model
    with one group are on every rank.
    """
    (conv, conv_dtype, conv_bytes), (ssm, ssm_dtype, ssm_bytes) = parts
    axis = 0 if facts.is_channel_first else 1
    inner = ssm[0] * ssm[1]
    other = (conv[axis] - inner) // 2
    is_shared = mamba_type == _MAMBA2 and facts.state_groups == 1
    held = [inner, other, other] if mamba_type == _MAMBA2 else [other, other, inner]
    copies = [1 if is_shared and place else facts.tp_size for place in range(3)]
    units, start = [], 0
    for count, ranks in zip(held, copies, strict=True):
        units.append(HeadRange(start + (facts.tp_rank if ranks > 1 else 0) * count, count))
        start += count * ranks
    heads = HeadRange(facts.tp_rank * ssm[0], ssm[0])
    return (
        StatePart("conv", conv, conv_dtype, conv_bytes, axis, tuple(units), start),
        StatePart("ssm", ssm, ssm_dtype, ssm_bytes, 0, (heads,), ssm[0] * facts.tp_size),
    )


def _whole(name: str, shape: tuple[int, ...], dtype: str, size: int, *, spec: Any, facts: CutFacts) -> StatePart:
    """A state whose parts are not known: moved whole, between instances that are cut into as many ranks."""
    is_replicated = getattr(spec, "tp_replicated", False)
    unit, total = (0, 1) if is_replicated else (facts.tp_rank, facts.tp_size)
    return StatePart(name, (1, math.prod(shape)), dtype, size, 0, (HeadRange(unit, 1),), total)
