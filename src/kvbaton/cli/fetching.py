"""HTTP for commands that ask a running deployment: one request, bounded, every failure in words with the next step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Fetched", "checked_url", "fetch_json", "fetch_url"]

_TIMEOUT_S = 15.0
_MOST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer of a server, with its headers under lower-case names."""

    content: bytes
    headers: Mapping[str, str]


def checked_url(url: str, option: str) -> str:
    """The address of a server, with a scheme and without a slash at the end. Raises ConfigError that names the option."""
    from kvbaton.errors import ConfigError

    address = url if "://" in url else f"http://{url}"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"{option} is {url!r}; it must be an http address such as http://127.0.0.1:8000")
    return address.rstrip("/")


def fetch_url(
    url: str,
    absent: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> Fetched:
    """Ask for a page, or send `body` to it. Raises PeerRefused, or PeerLost with the text `absent` where nothing answers."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from kvbaton.errors import PeerLost, PeerRefused

    try:
        request = Request(url, data=body, headers=dict(headers or {}))  # noqa: S310
        with urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            return Fetched(answer.read(_MOST_BYTES), {name.lower(): value for name, value in answer.headers.items()})
    except HTTPError as error:
        raise PeerRefused(_error_text(error.read(_MOST_BYTES), url, error.code)) from error
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise PeerLost(absent.replace("{reason}", str(reason))) from error


def fetch_json(url: str, absent: str) -> object:
    """One JSON document. Raises PeerError with what to do next."""
    import msgspec

    from kvbaton.errors import ProtocolError

    try:
        document: object = msgspec.json.decode(fetch_url(url, absent).content)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{url} answered something that is no JSON; is it a kvbaton router?") from error
    return document


def _error_text(content: bytes, url: str, status: int) -> str:
    """The message of an error answer."""
    import msgspec

    try:
        return str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"{url} answered {status}; is it a kvbaton router?"
