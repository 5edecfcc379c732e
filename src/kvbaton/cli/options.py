"""Kinds of values that several commands take."""

from __future__ import annotations

from typing import Literal

__all__ = ["TransportName"]

TransportName = Literal["local", "tcp"]
"""How cache bytes travel; the same names as in `kvbaton.transport.choose`."""
