"""Numbers that the processes of one router share: what each counts, and how many requests each has at which instance.

Every process writes its own row only, so counting needs no lock; a reader adds the rows up. Only with limits per instance is
the board locked for a moment, because two processes could both take the last seat. The first process clears the row of a
worker that died before it starts the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Iterator

__all__ = ["Board", "Loads"]

_CELL_BYTES = 8
# A process that was stopped (SIGSTOP, a debugger) may hold the lock for ever; one seat too many is the smaller harm.
_LOCK_S = 0.005


class Board:
    """`rows` times `columns` numbers in memory that children of this process share."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows = rows
        self.columns = columns
        self._memory = mmap.mmap(-1, rows * columns * _CELL_BYTES)
        self._cells = memoryview(self._memory).cast("d")
        self._lock = os.memfd_create("kvbaton-board")

    def row(self, index: int) -> memoryview[float]:
        """The cells of one process, to be written by it alone."""
        return self._cells[index * self.columns : (index + 1) * self.columns]

    def total(self, column: int) -> float:
        """A number, added up over all processes."""
        cells, columns = self._cells, self.columns
        if self.rows == 1:
            return float(cells[column])
        return float(sum(cells[row * columns + column] for row in range(self.rows)))

    def clear(self, index: int, first: int = 0, last: int | None = None) -> None:
        """Set cells of a row to zero."""
        row = self.row(index)
        for column in range(first, self.columns if last is None else last):
            row[column] = 0.0

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While inside, no other process is; except when one does not leave within milliseconds, because it stands still."""
        give_up_at = time.monotonic() + _LOCK_S
        is_ours = False
        while not is_ours and time.monotonic() < give_up_at:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = True
            except OSError:
                time.sleep(0)
        try:
            yield
        finally:
            if is_ours:
                fcntl.lockf(self._lock, fcntl.LOCK_UN)


class Loads:
    """How many sequences are at each instance, by its slot; slots are the columns from `first` on."""

    def __init__(self, board: Board, row: int, first: int) -> None:
        self._board = board
        self._mine = board.row(row)
        self._first = first
        self.slots = board.columns - first
        self.is_shared = board.rows > 1

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Look and take without another process in between."""
        return self._board.locked()

    def take(self, slot: int, sequences: int) -> None:
        """A request of so many sequences goes to the instance."""
        self._mine[self._first + slot] += sequences

    def give(self, slot: int, sequences: int) -> None:
        """A request there is over."""
        self._mine[self._first + slot] -= sequences

    def of(self, slot: int) -> int:
        """The sequences of all processes at the instance."""
        column = self._first + slot
        return int(self._board.total(column) if self.is_shared else self._mine[column])
