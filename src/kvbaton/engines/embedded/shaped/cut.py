"""Which part of a model one rank holds: layers by its pipeline stage, heads and channels by its tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.shaped.blueprint import Blueprint, Kind
from kvbaton.errors import ConfigError

__all__ = ["WHOLE", "Cut", "check_cut"]


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
