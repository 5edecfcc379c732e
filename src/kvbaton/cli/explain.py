"""`kvbaton explain`: where the time of one hand-off went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbaton.cli.fetching import checked_url, fetch_json
from kvbaton.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from kvbaton.observe.transfer_report import TransferReport

__all__ = ["explain"]


def explain(
    transfer: str,
    *,
    router: str = "http://127.0.0.1:8000",
    verbose: bool = False,
    json: JsonOption = False,
) -> int:
    """Show where the time of one hand-off went: both sides on one timeline, and what was waited for after the first token.

    Exits with 0, or with 2 when the hand-off cannot be explained.

    Parameters
    ----------
    transfer
        the transfer id, from the answer's X-KVBaton-Transfer header; or `last`, for the newest one.
    router
        address of the router that the request went through.
    verbose
        also list every chunk, how long it was computed, and every span, how long it travelled.
    """
    address = checked_url(router, "--router")
    transfer_id = _newest(address) if transfer == "last" else transfer
    report = _fetch_report(address, transfer_id)
    if json:
        print_json("explain", ok=True, settings={"router": address}, summary=report)
    else:
        from rich.console import Console

        from kvbaton.cli.explain_picture import print_details, print_report

        console = Console()
        print_report(console, report)
        if verbose:
            print_details(console, report)
    return 0


def _newest(router: str) -> str:
    from kvbaton.errors import PeerRefused, ProtocolError

    document = _get(router, "/handoffs")
    try:
        handoffs = document["handoffs"]  # type: ignore[index]
        newest = str(handoffs[0]["transfer_id"]) if handoffs else None
    except (KeyError, TypeError, IndexError) as error:
        raise ProtocolError(
            f"{router}/handoffs answered something else than a list of hand-offs; is it a kvbaton router?"
        ) from error
    if newest is None:
        raise PeerRefused(f"the router at {router} has routed nothing yet; send it a request first")
    return newest


def _fetch_report(router: str, transfer_id: str) -> TransferReport:
    from urllib.parse import quote

    import msgspec

    from kvbaton.errors import ProtocolError
    from kvbaton.observe.transfer_report import TransferReport

    document = _get(router, f"/handoffs/{quote(transfer_id, safe='')}")
    try:
        return msgspec.convert(document, TransferReport)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{router} sent a report that cannot be read ({error}); is it of the same version?") from error


def _get(router: str, path: str) -> object:
    """One JSON document of the router. Raises PeerError with what to do next."""
    return fetch_json(f"{router}{path}", f"no router at {router} ({{reason}}); is it running? Name another with --router")
