"""The state of a transfer, as callers see it; every query looks for what has arrived."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from kvbaton.compat.mori.names import StatusCode
from kvbaton.transport.exchange.base import PendingTransfer

__all__ = ["TransferStatus", "failed_status", "pending_status", "wait_all"]

_FIRST_ERROR = 11
_CHANGED = threading.Condition()
"""Notified when a status is set by hand; statuses of transfers do not need it."""


class TransferStatus:
    """INIT until a transfer has it. Safe to use from any thread; the transfer goes on when it is dropped."""

    __slots__ = ("__weakref__", "_code", "_message", "_pending")

    def __init__(self) -> None:
        self._code = StatusCode.INIT
        self._message = ""
        self._pending: PendingTransfer | None = None

    def Code(self) -> StatusCode:  # noqa: N802 - MoRI's name
        """The state now."""
        pending = self._pending
        if pending is not None and pending.is_finished():
            self._settle(pending)
        return self._code

    def Message(self) -> str:  # noqa: N802 - MoRI's name
        """What explains the state."""
        self.Code()
        return self._message

    def Init(self) -> bool:  # noqa: N802 - MoRI's name
        """Whether no transfer has it yet."""
        return self.Code() is StatusCode.INIT

    def InProgress(self) -> bool:  # noqa: N802 - MoRI's name
        """Whether the transfer is under way."""
        return self.Code() is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:  # noqa: N802 - MoRI's name
        """Whether every byte has arrived."""
        return self.Code() is StatusCode.SUCCESS

    def Failed(self) -> bool:  # noqa: N802 - MoRI's name
        """Whether it ended with an error."""
        return self.Code().value >= _FIRST_ERROR

    def SetCode(self, code: StatusCode) -> None:  # noqa: N802 - MoRI's name
        """Set the state, whatever it was."""
        if not isinstance(code, StatusCode):
            raise TypeError(f"SetCode takes a StatusCode, not {type(code).__name__}")
        with _CHANGED:
            self._pending = None
            self._code = code
            _CHANGED.notify_all()

    def SetMessage(self, message: str) -> None:  # noqa: N802 - MoRI's name
        """Set the message."""
        self._message = str(message)

    def Update(self, code: StatusCode, message: str) -> None:  # noqa: N802 - MoRI's name
        """Set both, unless the transfer has failed: that stays."""
        if not self.Failed():
            self._message = str(message)
            self.SetCode(code)

    def Wait(self) -> None:  # noqa: N802 - MoRI's name
        """Wait until it is over."""
        self.WaitFor(-1)

    def WaitFor(self, timeout_ms: int = -1) -> StatusCode:  # noqa: N802 - MoRI's name
        """Wait until it is not under way: below 0 without a limit of its own, 0 looks once, above 0 so many milliseconds."""
        deadline = None if timeout_ms < 0 else time.monotonic() + timeout_ms / 1000
        while self.Code() is StatusCode.IN_PROGRESS:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            pending = self._pending
            if pending is not None:
                pending.wait(left)
            else:
                with _CHANGED:
                    if self._code is StatusCode.IN_PROGRESS and self._pending is None:
                        _CHANGED.wait(left)
        return self._code

    def _settle(self, pending: PendingTransfer) -> None:
        with _CHANGED:
            if self._pending is not pending:
                return
            self._pending = None
            self._code = StatusCode.ERR_RDMA_OP if pending.error else StatusCode.SUCCESS
            self._message = pending.error or "success"


def pending_status(pending: PendingTransfer) -> TransferStatus:
    """The status of a transfer."""
    if pending.is_finished():
        return failed_status(StatusCode.ERR_RDMA_OP if pending.error else StatusCode.SUCCESS, pending.error or "success")
    status = TransferStatus()
    status._code, status._pending = StatusCode.IN_PROGRESS, pending  # noqa: SLF001 - its constructor is MoRI's
    return status


def failed_status(code: StatusCode, message: str) -> TransferStatus:
    """The status of a transfer that never began, or (SUCCESS) had nothing to do."""
    status = TransferStatus()
    status._code, status._message = code, message  # noqa: SLF001 - its constructor is MoRI's
    return status


def wait_all(statuses: Iterable[TransferStatus | None], timeout_ms: int = -1) -> StatusCode:
    """Wait for all of them, with one deadline.

    With 0 a failure wins over what is under way; otherwise the first that is not a success, in order, decides.
    """
    waited = [status for status in statuses if status is not None]
    if timeout_ms == 0:
        codes = [status.Code() for status in waited]
        failed = [code for code in codes if code.value >= _FIRST_ERROR or code is StatusCode.INIT]
        return next(iter(failed), StatusCode.IN_PROGRESS if StatusCode.IN_PROGRESS in codes else StatusCode.SUCCESS)
    deadline, first = time.monotonic() + timeout_ms / 1000, StatusCode.SUCCESS
    for status in waited:
        left = -1 if timeout_ms < 0 else max(0, round((deadline - time.monotonic()) * 1000))
        code = status.WaitFor(left)
        if code is StatusCode.IN_PROGRESS:
            return code
        if code is not StatusCode.SUCCESS and first is StatusCode.SUCCESS:
            first = code
            if timeout_ms > 0:
                return first
    return first
