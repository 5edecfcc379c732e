"""MoRI-IO's Python interface (`mori.io`, `mori.cpp`) on kvbaton's transports: for its users on machines without its hardware.

`install` makes it importable as `mori`. See docs/mori.md for what is promised and what differs.
"""

from __future__ import annotations

from kvbaton.compat.mori.importing import activate, install

__all__ = ["activate", "install"]
