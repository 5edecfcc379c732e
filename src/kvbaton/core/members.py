"""Members of enums, found quickly.

In Python 3.11 the type of every enum has a hook for attributes, so that `Enum.MEMBER` takes as long as a call. The agents look
up 50 to 80 of them per hand-off, which was a tenth of their time. Later releases have no such hook; there it makes no
difference.
"""

from __future__ import annotations

import enum
from typing import TypeVar, cast

__all__ = ["members_of"]

EnumT = TypeVar("EnumT", bound=enum.Enum)


def members_of(kind: type[EnumT]) -> type[EnumT]:
    """The members of an enum as attributes of a plain object. It can stand for the enum where only members are looked up."""
    found = type(kind.__name__, (), {"__slots__": tuple(kind.__members__)})()
    for name, member in kind.__members__.items():
        setattr(found, name, member)
    return cast("type[EnumT]", found)
