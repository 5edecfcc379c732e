"""Which run belongs to a seed: mostly a random one, every fourth a drill."""

from __future__ import annotations

import random

from kvbaton.sim.drills import make_drill
from kvbaton.sim.script import Script, make_script

__all__ = ["script_of_seed"]

_DRILL_EVERY = 4


def script_of_seed(seed: int) -> Script:
    """The run of a seed; the same on every machine."""
    if seed % _DRILL_EVERY == _DRILL_EVERY - 1:
        return make_drill(seed, random.Random(f"drill {seed}"))
    return make_script(seed)
