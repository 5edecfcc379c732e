"""One rank of an instance, in a process of its own: runs its part of every step, and moves its part of every hand-off.

It ends when its leader or a neighbour is gone, and when a step of its own fails: an instance with a missing rank cannot run
a step. Within a step the ranks of a stage exchange sums, and stages pass rows on. The first rank of a stage adds the parts in
the order of the ranks and sends the sum to the others. Floating-point addition depends on the order: in one fixed order all
ranks of a stage continue with the same bits, and a run can be repeated.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvbaton.agent.channel import Channel, ChannelClosed, ChannelStuck
from kvbaton.agent.rank_sets import RankLoop
from kvbaton.core.layout import Layout
from kvbaton.engines.embedded.shaped import rank_messages
from kvbaton.engines.embedded.shaped.blueprint import Cut, find_blueprint
from kvbaton.engines.embedded.shaped.memory import ShapedCache
from kvbaton.engines.embedded.shaped.model import ShapedModel
from kvbaton.engines.embedded.shaped.rank_messages import GroupSettings, Links, RankSetup, open_rank_transport, rank_name
from kvbaton.engines.embedded.shaped.weights import Array, make_weights, weights_fingerprint

__all__ = ["RankCollectives", "RankWorker", "main"]


@dataclass(eq=False, repr=False)
class RankCollectives:
    """The links of one rank. The first rank of a stage has one to each of the others, `stage`; the others have one, to it."""

    stage: Sequence[Channel]
    adds_up: bool
    timeout_s: float
    before: Channel | None = None
    after: Channel | None = None

    def reduce(self, part: Array) -> Array:
        """The sum of this part and those of all other ranks of the stage."""
        if not self.stage:
            return part
        if not self.adds_up:
            self._send(self.stage[0], part)
            return self._receive(self.stage[0], part.shape)
        total = part
        for peer in self.stage:
            total = total + self._receive(peer, part.shape)
        for peer in self.stage:
            self._send(peer, total)
        return total

    def receive_rows(self, shape: tuple[int, ...]) -> Array | None:
        """The rows that the stage before has computed; None for the first stage."""
        return None if self.before is None else self._receive(self.before, shape)

    def send_rows(self, rows: Array) -> None:
        """Send the rows to the stage after, if there is one."""
        if self.after is not None:
            self._send(self.after, rows)

    def _send(self, peer: Channel, rows: Array) -> None:
        peer.send(np.ascontiguousarray(rows).data.cast("B"), self.timeout_s)

    def _receive(self, peer: Channel, shape: tuple[int, ...]) -> Array:
        frame = peer.receive(self.timeout_s)
        if frame is None:
            raise ChannelStuck(f"{peer.peer} has sent nothing of a step for {self.timeout_s:g} s")
        return np.frombuffer(frame, np.float64).reshape(shape)


log = logging.getLogger(__name__)

_IDLE_S = 5.0
_LEADER = "the leader"


@dataclass(eq=False, repr=False)
class RankWorker:
    """Executes the orders of the leader until the leader is gone."""

    _model: ShapedModel
    _cache: ShapedCache
    _steps: Channel
    _collectives: RankCollectives
    _timeout_s: float

    def send(self, reply: rank_messages.RankReply) -> None:
        """Send a reply to the leader."""
        self._steps.send(msgspec.msgpack.encode(reply), self._timeout_s)

    def run(self) -> None:
        """Work until the leader closes its end; raises what a step raised, after the failure was sent to the leader."""
        try:
            while True:
                frame = self._steps.receive(_IDLE_S)
                if frame is not None:
                    self._execute(frame)
        except ChannelClosed as error:
            log.info("%s ends: %s", rank_name(self._model.cut), error)

    def _execute(self, frame: bytearray) -> None:
        order = rank_messages.decode_order(frame)
        if isinstance(order, rank_messages.Poison):
            self._cache.poison(order.blocks)
            self.send(rank_messages.Poisoned())
            return
        try:
            self.send(rank_messages.StepDone(self._step(order)))
        except ChannelClosed:
            raise
        except Exception as error:
            self.send(rank_messages.StepFailed(f"{type(error).__name__}: {error}"))
            raise

    def _step(self, order: rank_messages.RunStep) -> bytes:
        model, spans = self._model, [rank_messages.from_wire(span) for span in order.spans]
        rows = sum(len(span.token_ids) for span in spans)
        hidden = self._collectives.receive_rows((rows, model.blueprint.hidden_size))
        hidden = model.embed(spans) if hidden is None else hidden
        hidden = model.run(hidden, spans, self._cache, self._report_layer if order.reports_layers else None)
        self._collectives.send_rows(hidden)
        if not (model.cut.is_last_stage and model.cut.tp_rank == 0):
            return b""
        return np.ascontiguousarray(model.logits(hidden, spans)).tobytes()

    def _report_layer(self, layer: int) -> None:
        self.send(rank_messages.LayerWritten(layer))


def main(arguments: Sequence[str]) -> int:
    """Run the rank that the only argument, a `RankSetup` as JSON, describes. Returns the exit code.

    The cluster key arrives on standard input, because every user of the machine can read a command line.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = msgspec.json.decode(arguments[0], type=RankSetup)
    group, cut, links = setup.group, setup.cut, setup.links
    cluster_key = msgspec.json.decode(sys.stdin.buffer.read(), type=rank_messages.RankKey).key()
    blueprint = find_blueprint(group.model)
    weights = make_weights(blueprint)
    collectives = _collectives(links, cut, group.step_s)
    steps, agent = (Channel(socket.socket(fileno=number), _LEADER) for number in (links.steps, links.agent))
    cache = ShapedCache(blueprint, group.blocks, group.block_tokens, cut, group.dtype)
    model = ShapedModel(blueprint, weights, cut, collectives.reduce)
    worker = RankWorker(model, cache, steps, collectives, group.step_s)
    layout, transport = cache.layout(), open_rank_transport(group.transport, cache, cluster_key)
    loop = RankLoop(
        cut.rank,
        [layout if each == cut else _outline(group, each) for each in cut.all()],
        transport,
        agent,
        group.transport.timeout_s,
        cache.memory,
        unfenced_writes=group.transport.unfenced_writes,
    )
    loop.start()
    try:
        fingerprint, rank = weights_fingerprint(blueprint, weights), loop.agent
        worker.send(rank_messages.RankReady(layout, transport.endpoint(), rank.executor, rank.fences_writers, fingerprint))
        worker.run()
    finally:
        loop.close()
    return 0


def _outline(group: GroupSettings, cut: Cut) -> Layout:
    """The layout of another rank of this instance, of one block: peers need its heads and layers, not its size."""
    return ShapedCache(find_blueprint(group.model), 1, group.block_tokens, cut, group.dtype).layout()


def _collectives(links: Links, cut: Cut, timeout_s: float) -> RankCollectives:
    def channel(number: int, pp_rank: int, tp_rank: int) -> Channel:
        return Channel(socket.socket(fileno=number), rank_name(Cut(pp_rank, cut.pp_size, tp_rank, cut.tp_size)))

    ranks = range(1, cut.tp_size) if cut.tp_rank == 0 else (0,)
    return RankCollectives(
        [channel(number, cut.pp_rank, rank) for number, rank in zip(links.stage, ranks, strict=True)] if links.stage else [],
        adds_up=cut.tp_rank == 0,
        before=None if links.before is None else channel(links.before, cut.pp_rank - 1, cut.tp_rank),
        after=None if links.after is None else channel(links.after, cut.pp_rank + 1, cut.tp_rank),
        timeout_s=timeout_s,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
