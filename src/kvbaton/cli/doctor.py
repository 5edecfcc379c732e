"""`kvbaton doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbaton.cli.options import JsonOption, print_json

__all__ = ["doctor"]


def doctor(*, json: JsonOption = False) -> int:
    """Try every transport between two processes of this machine; exits with 0 when `local` or `tcp` works, else with 1.

    These two need nothing but kvbaton, and one of them is enough to serve. What needs a library or a GPU may be missing.
    Transports that other packages have added are tried too.
    """
    from kvbaton.transport.trial import try_all

    trials = list(try_all())
    ok = any(trial.works for trial in trials if trial.is_enough)
    if json:
        rows = [{"transport": trial.kind, "works": trial.works, "problem": trial.problem} for trial in trials]
        print_json("doctor", ok, {}, transports=rows)
        return 0 if ok else 1
    table = Table("transport", "works", "what is wrong, and what to do", title="kvbaton doctor")
    for trial in trials:
        table.add_row(trial.kind, "yes" if trial.works else "no", Text(trial.problem))
    Console().print(table)
    return 0 if ok else 1
