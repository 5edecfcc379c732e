"""A network that delays, loses, doubles, reorders, corrupts and replays frames, and can be cut in one direction or clogged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvbaton.core.auth import Session
from kvbaton.core.messages import MAX_MORE, Envelope, decode, encode_several
from kvbaton.errors import ProtocolError
from kvbaton.sim.world import World

__all__ = ["LinkFaults", "Network"]

_RECORDED = 64
_KEY = b"the cluster key of every run"


@dataclass(slots=True)
class LinkFaults:
    """How badly one direction between two addresses behaves."""

    loss: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    cut_until: float = 0.0
    """Until when no frame passes; transports may use another network, which still works."""
    severed_until: float = 0.0
    """Until when neither frames nor the bytes of transports pass."""
    clogged_until: float = 0.0
    lose_next: int = 0
    double_next: int = 0
    corrupt_next: int = 0
    """Of how many frames a bit flips on the way."""
    ended_at: float = -1.0
    """When the connection was last ended, with what was on its way over it."""
    delay_next_s: float = 0.0
    slow_until: float = 0.0
    slow_s: float = 0.0
    last_arrival: float = 0.0


@dataclass(slots=True)
class Network:
    """Carries frames between addresses. `arrive(address, frame, sender_address)` is called when one gets through."""

    world: World
    arrive: Callable[[str, bytes, str], None]
    delay_s: float = 0.001
    is_ordered: bool = False
    """Whether frames of one direction arrive in the order in which they were sent, as on one connection that lasts."""
    joins_messages: bool = False
    """Whether messages that leave at the same moment travel in one frame, as they do out of one turn of the control sockets."""
    faults: dict[tuple[str, str], LinkFaults] = field(default_factory=dict)
    recorded: dict[tuple[str, str], deque[bytes]] = field(default_factory=dict)
    """The last frames of each direction, which may be replayed."""
    leaving: dict[tuple[str, str], list[bytes]] = field(default_factory=dict)
    """What waits for the others of this moment, by direction."""

    def link(self, source: str, target: str) -> LinkFaults:
        """The faults of the direction from `source` to `target`."""
        faults = self.faults.get((source, target))
        if faults is None:
            faults = self.faults[source, target] = LinkFaults()
        return faults

    def send(self, source: str, target: str, frame: bytes) -> None:
        """Send one frame; it may arrive late, twice, out of order, or not at all."""
        if not self.joins_messages:
            self._send(source, target, frame)
        elif (leaving := self.leaving.get((source, target))) is not None:
            leaving.append(frame)
        else:
            self.leaving[source, target] = [frame]
            self.world.at(self.world.now, self.world.outside, partial(self._send_together, source, target))

    def _send_together(self, source: str, target: str) -> None:
        """Send what has waited: frames of one sender to one recipient that follow each other as one."""
        together: list[Envelope] = []
        for frame in self.leaving.pop((source, target)):
            envelope = _read(frame)
            last = together[-1] if together else None
            if last is None or envelope is None or len(together) > MAX_MORE or not _same_way(last, envelope):
                self._send_joined(source, target, together)
                together = []
            if envelope is None:
                self._send(source, target, frame)
            else:
                together.append(envelope)
        self._send_joined(source, target, together)

    def _send_joined(self, source: str, target: str, envelopes: list[Envelope]) -> None:
        if envelopes:
            messages = [each.message for each in envelopes]
            self._send(source, target, encode_several(envelopes[0].sender, envelopes[0].recipient, messages))

    def _send(self, source: str, target: str, frame: bytes) -> None:
        faults = self.link(source, target)
        random = self.world.random
        recorded = self.recorded.get((source, target))
        if recorded is None:
            recorded = self.recorded[source, target] = deque(maxlen=_RECORDED)
        recorded.append(frame)
        self.world.use(f"frame {source} {target}")
        if faults.lose_next > 0 or faults.cut_until > self.world.now or random.random() < faults.loss:
            faults.lose_next = max(0, faults.lose_next - 1)
            return
        copies = 1
        if faults.double_next > 0 or random.random() < faults.double:
            faults.double_next = max(0, faults.double_next - 1)
            copies = 2
        if faults.corrupt_next > 0:
            faults.corrupt_next -= 1
            self._deliver_corrupt(faults, source, target, frame)
            return
        for _ in range(copies):
            self._deliver(faults, source, target, frame)

    def replay(self, source: str, target: str, number: int, for_s: float) -> None:
        """Let recorded frames of this direction arrive again: `number` times any of them, or with 0 each of them once."""
        frames: list[bytes | None] = [None] * number if number else list(self.recorded.get((source, target), ()))
        for index, frame in enumerate(frames):
            self.world.after(for_s * index / len(frames), None, partial(self._send_again, source, target, frame))

    def _send_again(self, source: str, target: str, frame: bytes | None) -> None:
        recorded = self.recorded.get((source, target), ())
        if recorded and (frame is None or frame in recorded):
            frame = frame or self.world.random.choice(recorded)
            self.world.note(f"REPLAY {source} -> {target}: {decode(frame).message}")
            self._deliver(self.link(source, target), source, target, frame)

    def forget(self, source: str) -> None:
        """The process at an address is gone, and its connections with it: what it has sent does not count on another one."""
        for link in [link for link in self.recorded if link[0] == source]:
            del self.recorded[link]

    def sever(self, one: str, other: str, until: float) -> None:
        """Cut two addresses off from each other, in both directions."""
        for link in (self.link(one, other), self.link(other, one)):
            link.cut_until = link.severed_until = until

    def is_severed(self, one: str, other: str) -> bool:
        """Whether nothing at all passes between two addresses."""
        link = self.faults.get((one, other))
        return link is not None and link.severed_until > self.world.now

    def _deliver(self, faults: LinkFaults, source: str, target: str, frame: bytes) -> None:
        random = self.world.random
        delay = self.delay_s * random.uniform(0.5, 1.5)
        if faults.delay_next_s:
            delay, faults.delay_next_s = delay + faults.delay_next_s, 0.0
        elif faults.slow_until > self.world.now:
            delay += random.uniform(0.0, faults.slow_s)
        elif random.random() < faults.reorder:
            delay *= random.choice((5, 50, 2000))
        arrival = max(self.world.now + delay, faults.clogged_until)
        if self.is_ordered:
            arrival = faults.last_arrival = max(arrival, faults.last_arrival)
        sent_at = self.world.now
        self.world.at(arrival, self.world.outside, lambda: self._arrive(faults, sent_at, source, target, frame))

    def _arrive(self, faults: LinkFaults, sent_at: float, source: str, target: str, frame: bytes) -> None:
        if sent_at > faults.ended_at:
            self.arrive(target, frame, source)

    def _deliver_corrupt(self, faults: LinkFaults, source: str, target: str, frame: bytes) -> None:
        """Flip a bit of a frame as it is sealed on the wire: where the seal shows it, the receiver ends the connection."""
        random = self.world.random
        sender, receiver = (Session(_KEY, dialled=b"dialled", accepted=b"accepted", is_listener=each) for each in (False, True))
        sealed = bytearray(sender.seal(frame))
        bit = random.randrange(8 * len(sealed))
        sealed[bit // 8] ^= 1 << bit % 8
        try:
            opened = receiver.open(bytes(sealed))
        except ProtocolError:
            self.world.after(self.delay_s * random.uniform(0.5, 1.5), None, partial(self._end_connection, source, target))
        else:
            self._deliver(faults, source, target, opened)

    def _end_connection(self, source: str, target: str) -> None:
        """What was on its way between two addresses is lost; what is sent from now on goes over a new connection."""
        self.world.note(f"END of the connection {source} - {target}: a frame that does not open")
        for link in (self.link(source, target), self.link(target, source)):
            link.ended_at = self.world.now


def _read(frame: bytes) -> Envelope | None:
    """What is in a frame; None for what is no message of ours, which travels as it is."""
    try:
        return decode(frame)
    except ProtocolError:
        return None


def _same_way(one: Envelope, other: Envelope) -> bool:
    return (one.sender, one.recipient) == (other.sender, other.recipient)
