"""What is sent at a port: garbage, true frames with changed bytes, those of a key holder, and recorded ones.

A keyed port ends a connection at its first frame that is wrong, so few frames go over one connection.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Callable

import msgspec
import numpy as np
from guarded_port import LIVE
from guarding import BEAT, ME, GuardedPort

from kvbaton.core.auth import Seal
from kvbaton.core.aux_area import AuxPointer
from kvbaton.core.handoff import Executor, HandoffKey, Incarnation, Mode, Outcome, Span, TransferId
from kvbaton.core.messages import (
    MAX_MORE,
    Announced,
    AuxSent,
    ConfirmAsk,
    Confirmed,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Over,
    Prefilled,
    Refused,
    Release,
    Retracted,
    Stop,
    Stopped,
    encode,
    encode_several,
)
from kvbaton.discovery.messages import Freshness, encode_registration
from kvbaton.transport.tcp.wire import HANDSHAKE_BYTES, pack_request
from kvbaton.wire.zmtp import encode_frame
from wire_peer import GREETING, READY, WirePeer

__all__ = ["ATTACKS"]

_PER_CONNECTION = 25
_PER_KNOWN = 250
_NO_TIME_S = 2.0


def _mutated(dice: random.Random, frame: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(dice.randrange(1, 4)):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def _in_batches(served: GuardedPort, frames: int, head: bytes, make: Callable[[], bytes]) -> int:
    """How many frames were sent over connections that stood, until those were ended."""
    sent = 0
    for _ in range(0, frames, _PER_CONNECTION):
        with contextlib.suppress(OSError), served.open() as sock:
            sent += _PER_CONNECTION
            sock.settimeout(_NO_TIME_S)
            sock.sendall(head + b"".join(make() for _ in range(_PER_CONNECTION)))
    return sent


def _true_request(served: GuardedPort, dice: random.Random, *, is_mutated: bool = False) -> bytes:
    """A request to a router by a client with an API key; with `is_mutated`, bytes of its body are changed."""
    body = json.dumps({"model": "m", "prompt": "hello " * 5, "max_tokens": 4}).encode()
    body = _mutated(dice, body) if is_mutated else body
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {served.key}",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _true_frame(served: GuardedPort) -> bytes:
    """What a true peer sends first, with its handshake."""
    if served.kind == "http":
        return _true_request(served, random.Random(1))
    if served.kind == "tcp":
        sock, handshake = served.shake_hands()
        sock.close()
        return handshake
    return GREETING + READY + encode_frame(BEAT if served.kind == "control" else encode_registration(ME))


def garbage(served: GuardedPort, dice: random.Random, frames: int) -> int:
    """Random bytes, after a handshake where one needs no key."""
    if served.kind in ("tcp", "http"):
        end = b"\r\n\r\n" if served.kind == "http" else b""
        return _in_batches(served, frames, b"", lambda: dice.randbytes(dice.randrange(1, HANDSHAKE_BYTES)) + end)
    return _in_batches(served, frames, GREETING + READY, lambda: encode_frame(dice.randbytes(dice.randrange(60))))


def mutated(served: GuardedPort, dice: random.Random, frames: int) -> int:
    """True frames with one to three changed bytes."""
    true = _true_frame(served)
    return _in_batches(served, frames, b"", lambda: _mutated(dice, true))


def sealed(served: GuardedPort, dice: random.Random, frames: int) -> int:
    """Frames that open, by a holder of the key, and are no messages, or messages with changed bytes."""
    if served.kind == "discovery":
        frame = encode_registration(ME, Seal(served.secret), Freshness.stamp(bytes(16), 1))
        return _in_batches(served, frames, GREETING + READY, lambda: encode_frame(_mutated(dice, frame)))
    sent = 0
    for _ in range(0, frames, _PER_KNOWN):
        with contextlib.suppress(OSError, EOFError):
            _as_key_holder(served, dice)
            sent += _PER_KNOWN
    return sent


def _as_key_holder(served: GuardedPort, dice: random.Random) -> None:
    """One connection of a key holder: what it sends, and the answers, which it reads as they come."""
    if served.kind == "agent":
        with WirePeer.dial(served.port, served.secret) as peer:
            sender = Incarnation(f"peer-{dice.randrange(1 << 30)}")
            hello = Hello(served.card_of(sender), wants_answer=True, takes_several=dice.random() < 0.5)
            messages = [hello, *(_any_message(served, dice, sender) for _ in range(_PER_KNOWN - 1))]
            recipients = [dice.choice(("", "guarded", "guarded", "guarded", "of before")) for _ in messages]
            contents = [encode(sender, to, message) for to, message in zip(recipients, messages, strict=True)]
            contents += [
                encode_several(sender, dice.choice(recipients), dice.sample(messages, dice.randint(2, 1 + MAX_MORE)))
                for _ in range(_PER_KNOWN // 10)
            ]
            wire = b"".join(encode_frame(each if peer.session is None else peer.session.seal(each)) for each in contents)
            _send_and_read(peer.sock, wire)
    elif served.kind == "control":
        with WirePeer.dial(served.port, served.secret) as peer:
            contents = [
                _mutated(dice, BEAT) if number % 2 else dice.randbytes(dice.randrange(80)) for number in range(_PER_KNOWN)
            ]
            wire = b"".join(encode_frame(each if peer.session is None else peer.session.seal(each)) for each in contents)
            _send_and_read(peer.sock, wire)
    elif served.kind == "tcp":
        sock, _ = served.shake_hands()
        with sock:
            runs = [np.array([[dice.randrange(1 << 20), 0, dice.randrange(1 << 16)]], np.uint64) for _ in range(_PER_KNOWN)]
            wire = b"".join(pack_request(number, each) for number, each in enumerate(runs))
            _send_and_read(sock, wire[: -dice.randrange(1, 40)] + dice.randbytes(40))
    else:
        # As many as it may send ahead of the answers, and then as fast as those come.
        for _ in range(0, _PER_KNOWN, 10):
            with served.open() as sock:
                _send_and_read(sock, b"".join(_true_request(served, dice, is_mutated=True) for _ in range(10)))


def _any_message(served: GuardedPort, dice: random.Random, sender: Incarnation) -> Message:
    """A message that can be read, of any kind, about hand-offs that exist or do not, with numbers that fit or do not."""
    key = HandoffKey(TransferId(f"live-{dice.randrange(LIVE + 4)}"), dice.choice((0, 0, 0, 1)))
    number, generation = (dice.choice((0, 1, 2, dice.randrange(1, 5000), 1 << 40, 1 << 62)) for _ in range(2))
    blocks = tuple(dice.randrange(64) for _ in range(dice.randrange(4)))
    tokens = dice.choice((0, 16, 64, 1 << 40))
    text = dice.choice(("", "no\nERROR a line of another", "\x1b[31m", "x" * 2000))
    prompt = dice.choice(("prompt", "prompt", "another"))
    outcome = dice.choice(tuple(Outcome))
    match dice.randrange(14):
        case 0:
            card = served.card_of(sender)
            changes: list[dict[str, object]] = [{}, {"fingerprint": text[:9]}, {"shape": "tp8"}, {"protocol": 9}, {"ranks": ()}]
            return Hello(msgspec.structs.replace(card, **dice.choice(changes)), wants_answer=dice.random() < 0.5)
        case 1:
            return Refused(text, dice.choice((None, key)), number, dice.random() < 0.5, generation)
        case 2 | 3:
            executor, mode = dice.choice(tuple(Executor)), dice.choice(tuple(Mode))
            return Grant(key, number or 1, prompt, mode, executor, generation, (blocks,), tokens, number or 1, tokens=tokens)
        case 4:
            spans = tuple(Span(dice.randrange(9), 0, tokens, 0, dice.randrange(9)) for _ in range(dice.randrange(3)))
            return Announced(key, number, generation, (blocks,), spans)
        case 5:
            return Prefilled(key, number, generation, number, tokens, 0.5)
        case 6:
            return AuxSent(key, number, pointer=AuxPointer(tokens, tokens, 1))
        case 7:
            return Retracted(key, number, generation)
        case 8:
            return ConfirmAsk(key, number, generation)
        case 9:
            return Confirmed(key, number, generation, number)
        case 10:
            return Release(key, number)
        case 11:
            return Stop(key, number, outcome, text, prompt, generation)
        case 12:
            return dice.choice((Stopped(key, number), Over(key, number, outcome, text)))
        case _:
            return Heartbeat(dice.random() < 0.5, ((key, number),), dice.choice((0.0, 1e6)))


def _send_and_read(sock: socket.socket, wire: bytes) -> None:
    """Send, read what comes meanwhile, and end."""
    sock.settimeout(10)

    def read() -> None:
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        sock.sendall(wire)
        sock.shutdown(socket.SHUT_WR)
    finally:
        reader.join(20)


def replayed(served: GuardedPort, dice: random.Random, frames: int) -> int:
    """All that a true peer has sent, on new connections."""
    del dice
    if served.kind == "discovery":
        frame = encode_frame(encode_registration(ME, Seal(served.secret), Freshness.stamp(bytes(16), 1)))
        return _in_batches(served, frames, GREETING + READY, lambda: frame)
    if served.kind in ("tcp", "http"):
        frame = _true_frame(served)
        return _in_batches(served, frames, b"", lambda: frame)
    with WirePeer.dial(served.port, served.secret) as peer:
        for _ in range(_PER_CONNECTION):
            peer.send(BEAT)
        peer.receive()
        recorded = peer.sent
    sent = 0
    for _ in range(0, frames, _PER_CONNECTION):
        with contextlib.suppress(OSError), served.open() as sock:
            sent += _PER_CONNECTION
            sock.settimeout(_NO_TIME_S)
            sock.sendall(recorded)
    return sent


ATTACKS: dict[str, Callable[[GuardedPort, random.Random, int], int]] = {
    each.__name__: each for each in (garbage, mutated, sealed, replayed)
}
"""Each by its name: sends so many frames; how many went over connections that stood."""
