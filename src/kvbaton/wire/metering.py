"""How much of a thread unknown peers may have: a share of the time that passes, measured as processor time."""

from __future__ import annotations

import time

__all__ = ["ThreadShare"]

_BURST_S = 0.02


class ThreadShare:
    """Work for unknown peers gets `share` of the thread that calls, and what was saved for a short burst.

    Processor time is what counts, not time that passes: a machine with other work on it must not lock new peers out.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit_s, self._credited_at = _BURST_S, time.monotonic()
        self._began = 0.0

    def begin(self) -> None:
        """Some work follows."""
        now = time.monotonic()
        self._credit_s = min(_BURST_S, self._credit_s + (now - self._credited_at) * self._share)
        self._credited_at = now
        self._began = time.thread_time()

    def is_spent(self) -> bool:
        """Whether the work since `begin` should stop here; one handshake of TLS is a millisecond, so ask after each."""
        return self._share < 1.0 and time.thread_time() - self._began > self._credit_s

    def end(self, *, is_contended: bool = True) -> float | None:
        """The work is over; returns when there may be more, on the monotonic clock, None for at once.

        Where nothing else waits for the thread, it is not `is_contended`: the work costs no share, and leaves no debt.
        """
        self._credit_s -= time.thread_time() - self._began
        if not is_contended:
            self._credit_s = max(0.0, self._credit_s)
        if self._credit_s >= 0 or self._share >= 1.0:
            return None
        return time.monotonic() - self._credit_s / self._share
