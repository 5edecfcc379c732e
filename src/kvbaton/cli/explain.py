"""`kvbaton explain`: where the time of one hand-off went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbaton.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from kvbaton.observe.transfer_report import TransferReport

__all__ = ["explain"]

_TIMEOUT_S = 15.0
_MOST_BYTES = 64 * 1024 * 1024


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
    address = _checked(router)
    transfer_id = _newest(address) if transfer == "last" else transfer
    story = _story(address, transfer_id)
    if json:
        print_json("explain", ok=True, settings={"router": address}, story=story)
    else:
        from rich.console import Console

        from kvbaton.cli.explain_picture import print_details, print_story

        console = Console()
        print_story(console, story)
        if verbose:
            print_details(console, story)
    return 0


def _checked(router: str) -> str:
    from kvbaton.errors import ConfigError

    address = router if "://" in router else f"http://{router}"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--router is {router!r}; it must be an http address such as http://127.0.0.1:8000")
    return address.rstrip("/")


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


def _story(router: str, transfer_id: str) -> TransferReport:
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
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import urlopen

    import msgspec

    from kvbaton.errors import PeerLost, PeerRefused, ProtocolError

    try:
        with urlopen(f"{router}{path}", timeout=_TIMEOUT_S) as answer:  # noqa: S310
            content = answer.read(_MOST_BYTES)
    except HTTPError as error:
        raise PeerRefused(_message(error.read(_MOST_BYTES), f"{router} answered {error.code}")) from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise PeerLost(f"no router at {router} ({reason}); is it running? Name another with --router") from error
    try:
        document: object = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{router}{path} answered something that is no JSON; is it a kvbaton router?") from error
    return document


def _message(content: bytes, otherwise: str) -> str:
    """The message of an error answer."""
    import msgspec

    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"{otherwise}; is it a kvbaton router?"
