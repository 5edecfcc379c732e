"""`kvbaton doctor --request`: sends one request through a running deployment, and collects where its cache came from."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from kvbaton.cli.fetching import Fetched, fetch_json, fetch_url
from kvbaton.errors import PeerError, ProtocolError
from kvbaton.observe.evidence import Evidence, HandoffVerdict, Scrape, from_answer, from_metrics, from_report, from_usage
from kvbaton.observe.transfer_report import TransferReport

__all__ = ["collect_evidence"]

_WORDS = 96
_MAX_TOKENS = 8
_ANSWER_S = 300.0
_TRANSFER_HEADER = "x-kvbaton-transfer"
# Engines publish counters after a step, and timelines are complete when both sides have ended.
_SETTLE_S, _LOOK_S = 5.0, 0.25


def collect_evidence(url: str, metrics: Sequence[str], model: str | None) -> list[Evidence]:
    """Send one request to `url`, and look at its answer, its timeline, and the decode instances at `metrics`.

    Raises PeerError where the deployment does not answer: without an answer there is nothing to judge.
    """
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("KVBATON_API_KEY", "").partition(",")[0].strip()
    if key:
        headers["Authorization"] = f"Bearer {key}"
    before = {where: _scrape(where) for where in metrics}
    body = {
        "model": model or _first_model(url, headers),
        "prompt": _fresh_prompt(),
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }
    absent = f"no server at {url} ({{reason}}); is the deployment running?"
    answer = fetch_url(f"{url}/v1/completions", absent, msgspec.json.encode(body), headers, _ANSWER_S)
    document = _document(answer, f"{url}/v1/completions")
    found = [each for each in (from_answer(document), from_usage(document)) if each is not None]
    transfer_id = answer.headers.get(_TRANSFER_HEADER, "")
    if transfer_id:
        found.append(_timeline(url, transfer_id))
    return found + _metrics(before)


def _fresh_prompt() -> str:
    """Random from its first word on: no prefix cache can hold it."""
    return " ".join(secrets.token_hex(2) for _ in range(_WORDS))


def _first_model(url: str, headers: dict[str, str]) -> str:
    where = f"{url}/v1/models"
    document = _document(fetch_url(where, f"no server at {url} ({{reason}}); is the deployment running?", None, headers), where)
    try:
        return str(document["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ProtocolError(f"{where} names no model; give one with --model") from error


def _document(answer: Fetched, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(answer.content, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"{where} answered something that is no JSON object; is it an OpenAI API?") from error


def _timeline(url: str, transfer_id: str) -> Evidence:
    """The timeline of the transfer, once both sides have ended; a request that was prefilled where it is decoded has none."""
    place = f"the timeline of {transfer_id}"
    absent = f"no router at {url} ({{reason}})"
    deadline = time.monotonic() + _SETTLE_S
    while True:
        try:
            if _is_local(fetch_json(f"{url}/handoffs", absent), transfer_id):
                return Evidence(
                    place, HandoffVerdict.NOT_HANDED_OVER, "the router let the decode instance prefill it by itself"
                )
            found = fetch_json(f"{url}/handoffs/{quote(transfer_id, safe='')}", absent)
            evidence = from_report(msgspec.convert(found, TransferReport))
        except (PeerError, msgspec.ValidationError) as error:
            evidence = Evidence(place, HandoffVerdict.UNKNOWN, str(error))
        if evidence.verdict is not HandoffVerdict.UNKNOWN or time.monotonic() > deadline:
            return evidence
        time.sleep(_LOOK_S)


def _is_local(document: Any, transfer_id: str) -> bool:
    lines = document.get("handoffs") if isinstance(document, dict) else None
    return any(line.get("transfer_id") == transfer_id and line.get("prefill") is None for line in lines or ())


def _scrape(where: str) -> Scrape:
    path = where if where.endswith("/metrics") else f"{where}/metrics"
    return Scrape(fetch_url(path, f"no metrics at {path} ({{reason}}); give a decode instance with --metrics").content.decode())


def _metrics(before: dict[str, Scrape]) -> list[Evidence]:
    deadline = time.monotonic() + _SETTLE_S
    while True:
        found = from_metrics({where: (earlier, _scrape(where)) for where, earlier in before.items()})
        if not found or any(each.verdict is HandoffVerdict.HANDED_OVER for each in found) or time.monotonic() > deadline:
            return found
        time.sleep(_LOOK_S)
