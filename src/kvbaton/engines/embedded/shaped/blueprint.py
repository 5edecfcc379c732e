"""The small models with random weights: which kinds of layers each has, and in which dimensions."""

from __future__ import annotations

import enum
import re

import msgspec

from kvbaton.errors import ModelError

__all__ = ["BLUEPRINTS", "SIZES", "Blueprint", "Kind", "find_blueprint", "is_blueprint"]


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
