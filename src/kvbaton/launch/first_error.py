"""The first error in what a process prints: what ended it, where its last lines only repeat what followed from that.

An engine is several processes that print to one output. The one that fails prints a traceback, then each that waits for it
prints a longer one of its own, so the cause is neither at the end nor alone: lines of other processes come in between. A record
of a log is found by the head that each of its lines has (`(Worker pid=7) ERROR 11-19 15:21:08 [x.py:1] `). No I/O.
"""

from __future__ import annotations

import re
from collections import deque

__all__ = ["FirstError"]

_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b")
_NEXT_OF_CHAIN = ("During handling of the above", "The above exception was")
_ERRORS = 3
_FRAME_LINES = 12
_MESSAGE_LINES = 8
_CHARACTERS = 400
_MOST_LINES = 400


class FirstError:
    """Takes the lines of a process, and keeps few: its first lines of level ERROR, and its first traceback up to the message.

    Of a long traceback the last frames are kept, those next to what was raised.
    """

    def __init__(self) -> None:
        self._errors: list[str] = []
        self._began = ""
        self._head = ""
        self._frames: deque[str] = deque(maxlen=_FRAME_LINES)
        self._frames_total = 0
        self._message: list[str] = []
        self._lines_left = _MOST_LINES
        self._is_complete = False

    def take(self, line: str) -> None:
        """Look at the next line, without its end."""
        if self._is_complete:
            return
        if self._began:
            self._take_traced(line)
        elif _TRACEBACK in line:
            self._began = line
            self._head = line.partition(_TRACEBACK)[0]
        elif _ERROR.search(line) and len(self._errors) < _ERRORS:
            self._errors.append(line[:_CHARACTERS])

    def lines(self) -> tuple[str, ...]:
        """What was kept so far; empty while the process has printed no error."""
        if not self._began:
            return tuple(self._errors)
        left_out = self._frames_total - len(self._frames)
        gap = [f"  ... {left_out} lines ..."] if left_out else []
        return (*self._errors, self._began[:_CHARACTERS], *gap, *self._frames, *self._message)

    def _take_traced(self, line: str) -> None:
        # A bound for what never ends in a message: the process may have been killed in the middle, and a thread prints on.
        self._lines_left -= 1
        self._is_complete = not self._lines_left
        if self._head and not line.startswith(self._head):
            if self._frames or not line.startswith("  File "):
                return  # of another process
            self._head = ""  # only the first line of the record has the head
        text = line[len(self._head) :]
        if _TRACEBACK in text or text.startswith(_NEXT_OF_CHAIN):
            self._is_complete = True
        elif self._message or (text and not text[0].isspace()):
            self._take_message(text)
        elif text:
            self._frames.append(text[:_CHARACTERS])
            self._frames_total += 1

    def _take_message(self, text: str) -> None:
        # A message of several lines is indented from the second one on.
        if self._message and not text.startswith((" ", "\t")):
            self._is_complete = True
            return
        self._message.append(text[:_CHARACTERS])
        self._is_complete = len(self._message) == _MESSAGE_LINES
