"""`kvbaton` whose embedded engine hangs on SIGUSR1 and goes on at SIGUSR2. Its agents, its HTTP server and its beats go on."""

from __future__ import annotations

import signal
import threading

from kvbaton.cli.main import main
from kvbaton.engines.embedded.engine import Engine

_works = threading.Event()
_works.set()
_step = Engine.step


def _step_unless_hung(self: Engine) -> bool:
    """Hang before a step, as an engine does whose device does not answer."""
    _works.wait()
    return _step(self)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: _works.clear())
    signal.signal(signal.SIGUSR2, lambda *_: _works.set())
    Engine.step = _step_unless_hung  # type: ignore[method-assign]
    main()
