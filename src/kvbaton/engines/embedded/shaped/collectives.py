"""What the ranks of one instance exchange within a step: sums over a stage, and rows from one stage to the next.

The first rank of a stage adds the parts in the order of the ranks and sends the sum to the others. Floating-point addition
depends on the order: in one fixed order all ranks of a stage continue with the same bits, and a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbaton.agent.channel import Channel, ChannelStuck
from kvbaton.engines.embedded.shaped.weights import Array

__all__ = ["RankCollectives"]


class RankCollectives:
    """The links of one rank. The first rank of a stage has one to each of the others, `stage`; the others have one, to it."""

    def __init__(
        self,
        stage: Sequence[Channel],
        *,
        adds_up: bool,
        before: Channel | None = None,
        after: Channel | None = None,
        timeout_s: float,
    ) -> None:
        self._stage = stage
        self._adds_up = adds_up
        self._before = before
        self._after = after
        self._timeout_s = timeout_s

    def reduce(self, part: Array) -> Array:
        """The sum of this part and those of all other ranks of the stage."""
        if not self._stage:
            return part
        if not self._adds_up:
            self._send(self._stage[0], part)
            return self._receive(self._stage[0], part.shape)
        total = part
        for peer in self._stage:
            total = total + self._receive(peer, part.shape)
        for peer in self._stage:
            self._send(peer, total)
        return total

    def receive_rows(self, shape: tuple[int, ...]) -> Array | None:
        """The rows that the stage before has computed; None for the first stage."""
        return None if self._before is None else self._receive(self._before, shape)

    def send_rows(self, rows: Array) -> None:
        """Send the rows to the stage after, if there is one."""
        if self._after is not None:
            self._send(self._after, rows)

    def _send(self, peer: Channel, rows: Array) -> None:
        peer.send(np.ascontiguousarray(rows).data.cast("B"), self._timeout_s)

    def _receive(self, peer: Channel, shape: tuple[int, ...]) -> Array:
        frame = peer.receive(self._timeout_s)
        if frame is None:
            raise ChannelStuck(f"{peer.peer} has sent nothing of a step for {self._timeout_s:g} s")
        return np.frombuffer(frame, np.float64).reshape(shape)
