"""`kvbaton doctor`: what works on this machine, and whether a running deployment hands caches over."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbaton.cli.fetching import checked_url
from kvbaton.cli.options import JsonOption, print_json
from kvbaton.errors import ConfigError

__all__ = ["doctor"]

_NO_EVIDENCE = 2


def doctor(
    *,
    request: str | None = None,
    metrics: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    model: str | None = None,
    json: JsonOption = False,
) -> int:
    """Try every transport between two processes of this machine; exits with 0 when `local` or `tcp` works, else with 1.

    These two need nothing but kvbaton, and one of them is enough to serve. What needs a library or a GPU may be missing.
    Transports that other packages have added are tried too.

    With `--request`, send one request through a running deployment instead, and report whether its cache was handed over:
    exits with 0 when it was, with 1 when the decode instance computed the prompt again, and with 2 when there is no evidence.

    Parameters
    ----------
    request
        address of the API that clients use: a kvbaton router, or any other router or proxy.
    metrics
        address of a decode instance whose metrics are compared before and after the request; may be repeated.
    model
        name of the model to ask for; the first one of the deployment when not given.
    """
    if request is not None:
        urls = [checked_url(each, "--metrics") for each in metrics]
        return _ask_deployment(checked_url(request, "--request"), urls, model, json)
    if metrics or model:
        raise ConfigError("--metrics and --model belong to --request; give the address of the deployment with it")
    return _try_transports(json)


def _try_transports(json: bool) -> int:
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


def _ask_deployment(url: str, metrics: list[str], model: str | None, json: bool) -> int:
    from kvbaton.cli.doctor_request import collect_evidence
    from kvbaton.observe.evidence import HandoffVerdict, judge

    found = collect_evidence(url, metrics, model)
    verdict = judge(found)
    code = {HandoffVerdict.HANDED_OVER: 0, HandoffVerdict.NOT_HANDED_OVER: 1, HandoffVerdict.UNKNOWN: _NO_EVIDENCE}[verdict]
    if json:
        rows = [{"place": each.place, "verdict": each.verdict, "text": each.text} for each in found]
        settings = {"request": url, "metrics": metrics, "model": model}
        print_json("doctor", code == 0, settings, verdict=verdict, evidence=rows)
        return code
    console = Console()
    table = Table("evidence", "cache was", "what it shows", title=f"one request through {url}")
    for each in found:
        table.add_row(Text(each.place), each.verdict, Text(each.text))
    console.print(table)
    if verdict is HandoffVerdict.UNKNOWN:
        shown = "Nothing shows whether the cache was handed over; name the decode instances with --metrics http://HOST:PORT."
    else:
        shown = f"The cache was {verdict}."
    console.print(shown, highlight=False, soft_wrap=True)
    return code
