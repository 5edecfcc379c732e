"""The small models with random weights: which kinds of layers each has, in which dimensions, and which part one rank holds:
layers by its pipeline stage, heads and channels by its tensor-parallel rank.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

import msgspec

from kvbaton.core.topology import Shape
from kvbaton.errors import ConfigError, ModelError

__all__ = ["BLUEPRINTS", "Blueprint", "Cut", "Kind", "SIZES", "WHOLE", "check_cut", "find_blueprint", "is_blueprint"]


class Kind(enum.StrEnum):
    """What a layer remembers of the tokens before."""

    FULL = "full"
    SLIDING = "sliding"
    MLA = "mla"
    SPARSE = "sparse"
    MAMBA = "mamba"


class Blueprint(msgspec.Struct, frozen=True):
    """All dimensions of one model. Every layer mixes tokens as its kind does and then has a gated feed-forward part.

    `window` counts the tokens that a sliding layer sees, the newest included. `index_top` is how many tokens a sparse layer
    looks at. Mamba heads are `head_size` wide and share their B and C in `mamba_groups`.
    """

    name: str
    kinds: tuple[Kind, ...]
    heads: int = 8
    kv_heads: int = 8
    seed: int = 0
    head_size: int = 8
    hidden_size: int = 64
    ffn_size: int = 96
    window: int = 0
    latent_size: int = 24
    rope_size: int = 8
    index_heads: int = 2
    index_size: int = 8
    index_top: int = 0
    mamba_heads: int = 0
    mamba_groups: int = 0
    state_size: int = 8
    conv_taps: int = 4
    context_tokens: int = 4096
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    @property
    def layers(self) -> int:
        """How many layers."""
        return len(self.kinds)

    @property
    def shares_prefixes(self) -> bool:
        """Whether the cache of a prompt can serve another with the same beginning: not where only its end is kept."""
        return not {Kind.SLIDING, Kind.MAMBA} & set(self.kinds)

    def layers_of(self, *kinds: Kind) -> tuple[int, ...]:
        """The numbers of the layers of these kinds."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind in kinds)


_ATTENTION = (Kind.FULL,) * 4

BLUEPRINTS: dict[str, Blueprint] = {
    each.name: each
    for each in (
        Blueprint("tiny-gqa2", _ATTENTION, kv_heads=2),
        Blueprint("tiny-gqa4", _ATTENTION, kv_heads=4),
        Blueprint("tiny-gqa6", _ATTENTION, heads=12, kv_heads=6),
        Blueprint("tiny-gqa8", _ATTENTION, heads=16),
        Blueprint("tiny-mqa", _ATTENTION, kv_heads=1),
        Blueprint("tiny-mla", (Kind.MLA,) * 4, kv_heads=1),
        Blueprint("tiny-swa", (Kind.SLIDING, Kind.FULL) * 2, kv_heads=4, window=24),
        Blueprint("tiny-mamba", (Kind.MAMBA, Kind.FULL) * 2, kv_heads=4, mamba_heads=8, mamba_groups=2),
        Blueprint("tiny-nsa", (Kind.SPARSE,) * 4, kv_heads=4, index_top=12),
    )
}
"""Every model by its name."""

SIZES = {"conv_taps": 16, "head_size": 64, "index_size": 64, "latent_size": 256, "window": 1024}
"""The sizes of a model that can be chosen, and the largest of each."""


def is_blueprint(model: str) -> bool:
    """Whether this is the name of one of these models, with or without `:SEED` and `@SIZE=N`."""
    return re.split("[:@]", model)[0] in BLUEPRINTS


def find_blueprint(model: str) -> Blueprint:
    """The blueprint behind `NAME`, `NAME:SEED` or `NAME:SEED@SIZE=N,...`. Raises ModelError when there is none."""
    named, _, sizes = model.partition("@")
    name, _, seed = named.partition(":")
    found = BLUEPRINTS.get(name)
    if found is None:
        raise ModelError(f"model {model!r} is none of the small ones; give {', '.join(BLUEPRINTS)}")
    if seed and not (seed.isascii() and seed.isdigit() and len(seed) <= 9):
        raise ModelError(f"model {model!r}: {seed!r} is no seed; write {name}:SEED with a number of at most nine digits")
    return msgspec.structs.replace(found, seed=int(seed or 0), **_sizes(model, sizes))


def _sizes(model: str, text: str) -> dict[str, int]:
    """Other sizes than the model's own, as `conv_taps=6,head_size=16`. Heads of a Mamba are as wide as its state."""
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        size, _, number = part.partition("=")
        most = SIZES.get(size)
        if most is None:
            raise ModelError(f"model {model!r}: {size!r} is no size that can be chosen; give {', '.join(SIZES)}")
        if not (number.isascii() and number.isdigit() and 2 <= int(number[:9]) <= most and int(number) % 2 == 0):
            raise ModelError(f"model {model!r}: {size} is {number!r}; give an even number from 2 to {most}")
        sizes[size] = int(number)
    return sizes | ({"state_size": sizes["head_size"]} if "head_size" in sizes else {})


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank of a model that is cut into `pp_size` stages of `tp_size` ranks each."""

    pp_rank: int = 0
    pp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def rank(self) -> int:
        """The number of this rank in its instance: stage after stage."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def all(self) -> tuple[Cut, ...]:
        """Every rank of this instance, by its number."""
        ranks = ((pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size))
        return tuple(Cut(pp, self.pp_size, tp, self.tp_size) for pp, tp in ranks)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.pp_rank == self.pp_size - 1

    def layers(self, total: int) -> range:
        """The layers of this stage."""
        return range(total * self.pp_rank // self.pp_size, total * (self.pp_rank + 1) // self.pp_size)

    def share(self, total: int) -> range:
        """The heads or channels of this rank; where there are more ranks than heads, neighbours hold the same one."""
        if total >= self.tp_size:
            return range(total * self.tp_rank // self.tp_size, total * (self.tp_rank + 1) // self.tp_size)
        one = self.tp_rank * total // self.tp_size
        return range(one, one + 1)


WHOLE = Cut()
"""A model that is not cut at all."""


def check_cut(blueprint: Blueprint, shape: Shape) -> None:
    """Raise ConfigError, with the numbers, for a model that cannot be cut so."""
    name, pp_size, tp_size = blueprint.name, shape.pp, shape.tp
    if shape.dp > 1 or shape.cp > 1:
        raise ConfigError(f"shape {shape}: the embedded engine has dp1 and cp1 only; choose pp and tp")
    if not 1 <= pp_size <= blueprint.layers:
        raise ConfigError(f"{name} has {blueprint.layers} layers and pp is {pp_size}; choose pp from 1 to {blueprint.layers}")
    heads = {"heads": blueprint.heads, "feed-forward channels": blueprint.ffn_size}
    if blueprint.layers_of(Kind.MAMBA):
        heads["Mamba heads"] = blueprint.mamba_heads
    for what, count in heads.items():
        if tp_size < 1 or count % tp_size:
            raise ConfigError(f"{name} has {count} {what} and tp is {tp_size}; choose a tp that divides {count}")
    shared = {"KV heads": blueprint.kv_heads}
    if blueprint.layers_of(Kind.MAMBA):
        shared["Mamba groups"] = blueprint.mamba_groups
    for what, count in shared.items():
        if count % tp_size and tp_size % count:
            raise ConfigError(
                f"{name} has {count} {what} and tp is {tp_size}: they neither divide nor replicate; choose a tp that divides "
                f"{count}, or a multiple of it"
            )
