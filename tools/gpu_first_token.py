"""What a push adds to a prefill and to the first token on one GPU, for several checkouts of kvbaton side by side.

    gpu_first_token.py MODEL [--also NAME=DIRECTORY]… [--rounds 8] [--lengths 512,4096,8192] [--engine-arguments=…]

One decode server, and one prefill server per checkout: this one ("now"), and those whose sources are in the DIRECTORY of
`--also`. All are up all the time. In each round every prefill server is asked for each length twice: alone, without a hand-off,
and for a push to the decode server; the order changes from round to round, and every prompt is new. With `--also` the same
decode server takes from all. Prints one JSON object, with the timeline of every hand-off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import time
import urllib.request
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np

from kvbaton.bench.asking import Alone, AskedPrompt, AtOnce, post
from kvbaton.config import HTTP_KEY_HEADER, HandoffSettings, http_token
from kvbaton.core.addresses import ControlAddress
from kvbaton.core.auth import AddressProof
from kvbaton.core.handoff import Mode
from kvbaton.engines.base import EngineOptions
from kvbaton.engines.table import find_engine
from kvbaton.launch.fleet import Fleet, FleetPart
from kvbaton.launch.ports import PortPicker

NAME = "first-token"
SETTLE_S = 0.4


def say(line: str) -> None:
    """Print a line of progress at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def timeline(address: str, transfer_id: str, key: str) -> list[list[Any]]:
    """What a server has noted of a hand-off: stages, milliseconds after the first, and the layers where there are some."""
    request = urllib.request.Request(
        f"http://{address}/handoffs/{transfer_id}", headers={HTTP_KEY_HEADER: http_token(key.encode())}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - loopback
        notes = json.loads(answer.read())["sides"][0]["notes"]
    found: list[list[Any]] = []
    for note in notes:
        layers = [note.get("first_layer", 0), note["end_layer"]] if "end_layer" in note else []
        found.append([note["stage"], round(note["at_s"] * 1e3, 3), *layers])
    return found


class Measured:
    """The servers, and what was measured: one row per request."""

    def __init__(self, prefills: dict[str, FleetPart], decode: FleetPart, key: str, session: aiohttp.ClientSession) -> None:
        self._prefills = prefills
        self._decode = decode
        self._key = key
        self._session = session
        self._generator = random.Random(20)
        self.rows: list[dict[str, Any]] = []

    async def ask(self, name: str, kind: str, length: int, index: int) -> None:
        """One request, and a pause."""
        part = self._prefills[name]
        row: dict[str, Any] = {"prefill": name, "kind": kind, "tokens": length, "round": index}
        prompt = AskedPrompt(NAME, tuple(self._generator.randrange(100, 30_000) for _ in range(length)), 4)
        if kind == "alone":
            began = time.perf_counter()
            await post(self._session, part.base_url, prompt.body(max_tokens=1))
            row["prefill_s"] = time.perf_counter() - began
        elif kind == "decode alone":
            answered = await Alone(self._decode.base_url).ask(self._session, prompt)
            row |= {"first_token_s": answered.first_token_s, "total_s": answered.total_s}
        else:
            source, target = (ControlAddress.parse(each.control_address) for each in (part, self._decode))
            proof = AddressProof(self._key.encode(), source, target)
            address = {"remote_host": source.host, "remote_port": source.handshake}
            answered = await AtOnce(part.base_url, self._decode.base_url, address, proof).ask(self._session, prompt)
            row |= {
                "prefill_s": answered.prefill_s,
                "first_token_s": answered.first_token_s,
                "total_s": answered.total_s,
            }
            await asyncio.sleep(SETTLE_S / 2)
            row["timelines"] = [
                timeline(each.handoffs_address, answered.transfer_id, self._key) for each in (part, self._decode)
            ]
        if index >= 0:
            self.rows.append(row)
        await asyncio.sleep(SETTLE_S)

    async def round(self, lengths: list[int], index: int) -> None:
        """Every kind of request once."""
        for length in lengths:
            kinds = [(name, kind) for name in self._prefills for kind in ("alone", "push")]
            kinds.append((next(iter(self._prefills)), "decode alone"))
            turn = index % len(kinds)
            for name, kind in (*kinds[turn:], *kinds[:turn]):
                await self.ask(name, kind, length, index)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of each kind of request, in milliseconds."""
    kinds = list(dict.fromkeys((row["prefill"], row["kind"], row["tokens"]) for row in rows))
    found = []
    for kind in kinds:
        these = [row for row in rows if (row["prefill"], row["kind"], row["tokens"]) == kind]
        medians = {
            what: round(float(np.median([row[f"{what}_s"] for row in these])) * 1e3, 2)
            for what in ("prefill", "first_token", "total")
            if f"{what}_s" in these[0]
        }
        found.append({"prefill": kind[0], "kind": kind[1], "tokens": kind[2], "requests": len(these), "median_ms": medians})
    return found


async def measure(prefills: dict[str, FleetPart], decode: FleetPart, key: str, lengths: list[int], rounds: int) -> Any:
    """Warm up, then measure round by round."""
    timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        measured = Measured(prefills, decode, key, session)
        await measured.round(lengths, -1)
        for index in range(rounds):
            await measured.round(lengths, index)
            say(f"round {index + 1} of {rounds}")
    return measured.rows


def main() -> int:
    """Start, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=DIRECTORY")
    parser.add_argument("--decode-paths", default="", help="more of PYTHONPATH for the decode server")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--lengths", default="512,4096,8192")
    parser.add_argument("--engine-arguments", default="")
    parser.add_argument("--device", default="cuda", help="or cpu")
    options = parser.parse_args()
    others = dict(each.split("=", 1) for each in options.also)
    lengths = [int(each) for each in options.lengths.split(",")]
    engine = find_engine("vllm")
    on_gpu = options.device == "cuda"
    chosen = EngineOptions(
        options.model,
        "cuda" if on_gpu else "local",
        2 + len(others) if on_gpu else 2,
        HandoffSettings(mode=Mode.PUSH),
        device=options.device,
        cache_dtype="bfloat16" if on_gpu else "float32",
        served_name=NAME,
        arguments=tuple(shlex.split(options.engine_arguments)),
    )
    engine.check_support(chosen)
    servers = engine.prepare(chosen, say)
    ports = PortPicker()
    decode = with_paths(servers.part("decode", "decode", ports), options.decode_paths)
    prefills = {name: with_paths(servers.part(name, "prefill", ports), path) for name, path in {"now": "", **others}.items()}
    with Fleet() as fleet:
        for part in (decode, *prefills.values()):
            fleet.start(part)
        fleet.wait_healthy(engine.healthy_within_s)
        say("all servers are up")
        rows = asyncio.run(measure(prefills, decode, chosen.cluster_key, lengths, options.rounds))
    json.dump({"command": sys.argv[1:], "medians": summary(rows), "rows": rows}, sys.stdout)
    return 0


def with_paths(part: FleetPart, paths: str) -> FleetPart:
    """A server that looks for its packages there first."""
    return (
        replace(part, environment=part.environment | {"PYTHONPATH": f"{paths}:{part.environment['PYTHONPATH']}"})
        if paths
        else part
    )


if __name__ == "__main__":
    sys.exit(main())
