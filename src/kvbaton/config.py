"""Settings that several rooms share, parsed once into frozen values and checked together."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.errors import ConfigError

__all__ = ["Limits", "parse_limits"]


class Limits(msgspec.Struct, frozen=True):
    """How long an instance waits for what. Seconds.

    transfer_timeout: a target gives a hand-off up when nothing has moved for so long
    defer_timeout:    a source keeps finished blocks for so long after the last sign of life of their target
    retry:            a question without an answer is asked again after so long
    """

    transfer_timeout: float = 30.0
    defer_timeout: float = 60.0
    retry: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} is {value!r}; it must be a positive, finite number of seconds")
        if self.defer_timeout <= self.transfer_timeout:
            raise ConfigError(
                f"defer_timeout ({self.defer_timeout:g} s) must be longer than transfer_timeout ({self.transfer_timeout:g} s): "
                "a source has to keep its blocks longer than a target waits for them"
            )
        if self.retry >= self.transfer_timeout:
            raise ConfigError(f"retry ({self.retry:g} s) must be shorter than transfer_timeout ({self.transfer_timeout:g} s)")

    @property
    def renew_s(self) -> float:
        """How often a target renews the leases of what it still wants: several times within the source's patience."""
        return self.defer_timeout / 6


def parse_limits(values: Mapping[str, Any]) -> Limits:
    """Read limits from a mapping; an unknown key is refused with the nearest known name, a bad value by its key."""
    known = Limits.__struct_fields__
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
            raise ConfigError(f"unknown setting {key!r}{hint}")
    try:
        return msgspec.convert(dict(values), Limits)
    except msgspec.ValidationError as error:
        raise ConfigError(f"limits: {error}") from error
