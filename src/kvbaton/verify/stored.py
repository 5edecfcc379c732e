"""How much the instances of a pair have stored, where their connector is not ours and reports nothing with its answers.

Every engine of the drop-in for MoRI counts bytes and calls in a file of a directory that it is given. They are not known per
request, so all requests count as handed off when at least as many calls as requests have stored something, and none does
otherwise. That the answers depend on what was stored is what the control shows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import numpy as np

from kvbaton.transport.exchange.owner import COUNTS
from kvbaton.verify.report import RequestRow

__all__ = ["StoredCounts"]


class StoredCounts:
    """A directory of counts, until `close`."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="kvbaton-counts-")
        self.directory = self._place.name

    def totals(self) -> tuple[int, int]:
        """Bytes stored by all engines, and calls that did."""
        counts = self.counts()
        return counts["stored_bytes_total"], counts["stored_calls_total"]

    def counts(self) -> dict[str, int]:
        """What all engines have counted, under the names of `COUNTS`."""
        files = [np.fromfile(path, np.int64) for path in Path(self.directory).glob("*.counts")]
        written = [numbers for numbers in files if len(numbers) == len(COUNTS)]
        return dict(zip(COUNTS, np.sum([np.zeros(len(COUNTS), np.int64), *written], axis=0).tolist(), strict=True))

    def attributed(self, rows: list[RequestRow]) -> list[RequestRow]:
        """The rows, with what was stored spread evenly over them."""
        stored_bytes, calls = self.totals()
        share = stored_bytes // len(rows) if rows else 0
        is_handed_off = calls >= len(rows) and stored_bytes > 0
        changes = {"handed_off": is_handed_off, "bytes_planned": share, "bytes_moved": share}
        return [row if row.verdict == "failed" else msgspec.structs.replace(row, **changes) for row in rows]

    def close(self) -> None:
        """Remove the files."""
        self._place.cleanup()
