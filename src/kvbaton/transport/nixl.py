"""The nixl transport, with UCX underneath (RDMA, shared memory, TCP, whatever UCX finds): this side's mover reads from the
peer's registered memory, and writes there where that was chosen. Needs the package `nixl`.

NIXL registers memory so that every process that has its metadata could write there too. Without `unfenced_writes` no kvbaton
peer does: only reads are posted, by the owner of the target memory. A batch is not finished before NIXL has released its last
transfer. The metadata travels in the card, which only admitted peers are sent.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import secrets
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from kvbaton.errors import ConfigError, PeerLost, TransportError
from kvbaton.transport.base import Direction, Endpoint, PeerRank, Region, Runs, TransportSettings
from kvbaton.transport.lanes import LibraryPeer, Marks
from kvbaton.transport.library_transport import LibraryTransport, MemoryPlace
from kvbaton.transport.neighbour import files_left
from kvbaton.transport.queued import bytes_detail, detail
from kvbaton.transport.runs import MAX_SLICE_RUNS
from kvbaton.transport.table import MemoryKind

__all__ = ["NixlTransport", "check_nixl", "why_not_offered"]

_HOST = "DRAM"
_MEMORY = {MemoryKind.MAIN: _HOST, MemoryKind.GPU: "VRAM"}
_OPERATIONS = {Direction.READ: "READ", Direction.WRITE: "WRITE"}
_HERE = "NIXL_INIT_AGENT"
_MOST_PIECES = 1 << 20
_MOST_SIZES = 4
_WORTH_PREPARING = 64
_FILES_PER_AGENT = 32
_RDMA_DEVICES = Path("/sys/class/infiniband")

_MARGIN_S = 5.0
_LANE_STEPS = 3
"""What a lane waits for at most before it ends a slice: the mark, the slice, and the mark again."""

_WORTH_SHARING = 2


def check_nixl() -> None:
    """Raise ConfigError where the package nixl is missing.

    It is not imported: UCX looks at the devices of the machine once per process, and tests make devices before that.
    """
    if not importlib.util.find_spec("nixl"):
        raise ConfigError(_missing("no module nixl"))


def why_not_offered() -> str:
    """Why `auto` does not offer NIXL here; empty where there is an RDMA device."""
    if _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir()):
        return ""
    return "no RDMA device is here, and without one tcp is the faster; choose transport nixl to use it anyway"


def _missing(why: object) -> str:
    return f"transport nixl needs the package nixl, which cannot be imported ({why}): pip install torch, then nixl"


class NixlAgent:
    """One NIXL agent, without NIXL's own progress thread, which spins. Raises ConfigError where there is no NIXL."""

    def __init__(self, settings: TransportSettings, regions: tuple[Region, ...]) -> None:
        try:
            api = importlib.import_module("nixl._api")
        except ImportError as error:
            raise ConfigError(_missing(error)) from error
        _keep_quiet()
        left, limit = files_left()  # UCX ends the process when there is none left
        if left < _FILES_PER_AGENT:
            raise TransportError(
                f"{left} of {limit} file descriptors are left, NIXL needs {_FILES_PER_AGENT} for an agent; raise `ulimit -n`"
            )
        backends = settings.of_library("nixl_backends", str)
        config = api.nixl_agent_config(enable_prog_thread=False, backends=backends.split(","))
        try:
            self.nixl: Any = api.nixl_agent(f"kvbaton-{settings.incarnation or ''}-{secrets.token_hex(8)}", config)
            self._registered = [
                self.nixl.register_memory([(region.address, region.region_bytes, region.device, "")], _MEMORY[region.kind])
                for region in regions
            ]
        except Exception as error:
            raise ConfigError(f"transport nixl cannot start with {backends}: {_words(error)}") from error
        self.metadata: bytes = self.nixl.get_agent_metadata()

    def progress(self) -> None:
        """Serve the peers that read or write this side's memory, where UCX cannot do it without this process."""
        try:
            self.nixl.update_notifs()
        except Exception as error:
            raise TransportError(f"NIXL does not serve peers any more: {_words(error)}") from error

    def close(self) -> None:
        """Withdraw the memory and end the agent; afterwards nothing moves. Raises TransportError."""
        agent, self.nixl = self.nixl, None
        if agent is None:
            return
        try:
            for registered in self._registered:
                agent.deregister_memory(registered)
        except Exception as error:
            raise TransportError(f"NIXL does not give the memory back: {_words(error)}") from error


class NixlMemory(NamedTuple):
    """A kind of memory as NIXL calls it, and the number of the GPU."""

    name: str
    device: int


_MARKS = NixlMemory(_HOST, 0)


class NixlPeer:
    """An agent that moves bytes between this side and one peer, `there`, one transfer at a time.

    Pages of one size are described once, and then moved by number: describing them is most of the work of posting.
    """

    is_bound = True

    def __init__(
        self, agent: NixlAgent, metadata: bytes, there: MemoryPlace, here: MemoryPlace, kinds: tuple[NixlMemory, NixlMemory]
    ) -> None:
        """`kinds` has which memory it is, there and here."""
        self._kinds = kinds
        self._agent = agent
        self._metadata = metadata
        self._there = there
        self._here = here
        self._region = np.array([there.address, here.address, 0], np.uint64)
        self._marks = np.array([there.mark_address, here.mark_address, 0], np.uint64)
        self._peer = ""
        self._transfer: Any = None
        self._mark_transfer: Any = None
        self._prepared: dict[int, tuple[Any, Any]] = {}

    def open(self) -> None:
        try:
            name = self._agent.nixl.add_remote_agent(self._metadata)
        except Exception as error:
            raise PeerLost(f"NIXL cannot reach the peer, or its metadata is not usable: {_words(error)}") from error
        self._peer = name.decode() if isinstance(name, bytes) else str(name)

    def start(self, direction: Direction, runs: Runs) -> None:
        size, nixl = int(runs[0, 2]), self._agent.nixl
        offsets = runs if direction is Direction.READ else runs[:, (1, 0, 2)]
        are_pages = self._are_pages(runs, size)
        with _nixl_errors():
            if are_pages:
                here, there = self._grid(size)
                numbers = (offsets[:, :2] // np.uint64(size)).astype(np.int32)
                pages_here, pages_there = numbers[:, 1].copy(), numbers[:, 0].copy()
                transfer = nixl.make_prepped_xfer(_OPERATIONS[direction], here, pages_here, there, pages_there)
            else:
                transfer = self._describe(direction, offsets + self._region, self._kinds)
            nixl.transfer(transfer)
        self._transfer = transfer

    def start_mark(self, runs: Runs) -> None:
        """Begin to read the peer's mark. `runs` are the same each time, so the transfer is kept and started again."""
        with _nixl_errors():
            transfer = self._mark_transfer
            if transfer is None:
                transfer = self._describe(Direction.READ, runs + self._marks, (_MARKS, _MARKS))
            self._agent.nixl.transfer(transfer)
        self._transfer = self._mark_transfer = transfer

    def is_done(self) -> bool:
        with _nixl_errors():
            state = self._agent.nixl.check_xfer_state(self._transfer)
        if state == "ERR":
            raise PeerLost("NIXL reports that the transfer failed")
        if state != "DONE":
            return False
        transfer, self._transfer = self._transfer, None
        if transfer is not self._mark_transfer:
            try:
                self._agent.nixl.release_xfer_handle(transfer)
            except Exception as error:
                raise TransportError(f"NIXL does not release a transfer: {_words(error)}") from error
        return True

    def close(self) -> None:
        """End the agent, and drop all that would keep it alive: NIXL ends an agent when its last handle is gone."""
        self._transfer = self._mark_transfer = None
        self._prepared.clear()
        self._agent.close()

    def _are_pages(self, runs: Runs, size: int) -> bool:
        """Whether all are pages of one size, and so many that describing every page of both regions is worth it."""
        largest = max(self._there.region_bytes, self._here.region_bytes)
        if len(runs) < _WORTH_PREPARING or largest // size > _MOST_PIECES:
            return False
        if size not in self._prepared and len(self._prepared) >= _MOST_SIZES:
            return False
        return bool((runs[:, 2] == np.uint64(size)).all()) and not (runs[:, :2] % np.uint64(size)).any()

    def _describe(self, direction: Direction, places: Runs, kinds: tuple[NixlMemory, NixlMemory]) -> Any:
        """A transfer of pieces of memory, given by address at the peer, address here, and bytes."""
        here, there = (
            self._agent.nixl.get_xfer_descs(_described(places, column, kinds[column].device), kinds[column].name)
            for column in (1, 0)
        )
        return self._agent.nixl.initialize_xfer(_OPERATIONS[direction], here, there, self._peer)

    def _grid(self, size: int) -> tuple[Any, Any]:
        """All pages of that size, here and there, as NIXL knows them."""
        if size not in self._prepared:
            nixl, kinds = self._agent.nixl, self._kinds
            here, there = (
                nixl.prep_xfer_dlist(name, nixl.get_xfer_descs(_described(_pages(side, size), 0, kind.device), kind.name))
                for name, side, kind in ((_HERE, self._here, kinds[1]), (self._peer, self._there, kinds[0]))
            )
            self._prepared[size] = (here, there)
        return self._prepared[size]


def _pages(side: MemoryPlace, size: int) -> Runs:
    count = side.region_bytes // size
    pages = np.zeros((count, 3), np.uint64)
    pages[:, 0] = np.uint64(side.address) + np.arange(count, dtype=np.uint64) * np.uint64(size)
    pages[:, 2] = size
    return pages


def _described(places: Runs, column: int, device: int) -> Runs:
    described = np.full((len(places), 3), device, np.uint64)
    described[:, 0] = places[:, column]
    described[:, 1] = places[:, 2]
    return described


class _nixl_errors:  # noqa: N801 - used like a function; a class, because it is entered for every question to NIXL
    """What NIXL raises in the block, as our errors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception):
            return
        name = type(error).__name__
        if "Disconnect" in name or "Backend" in name or "NotFound" in name:
            raise PeerLost(f"NIXL cannot reach the peer: {_words(error)}") from error
        raise TransportError(f"NIXL failed: {_words(error)}") from error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def has_many_files_left() -> bool:
    """Whether this process has opened less than a quarter of the files that it may: then a peer may have several agents."""
    left, limit = files_left()
    return 4 * left >= 3 * limit


def _keep_quiet() -> None:
    """NIXL logs to standard output, where a program's own output goes; let the program's logging decide instead."""
    logger = logging.getLogger("nixl")
    logger.setLevel(logging.WARNING)
    logger.handlers.clear()
    logger.propagate = True


class NixlTransport(LibraryTransport):
    """Moves bytes between this rank's region and those of other NIXL agents."""

    name = "nixl"

    def __init__(self, region: Region, settings: TransportSettings) -> None:
        lanes = settings.of_library("nixl_lanes", int)
        marks = Marks(settings.max_peers, lanes)
        serving = NixlAgent(settings, (region, marks.region))
        self._metadata = serving.metadata
        super().__init__(
            region,
            settings,
            marks,
            serving,
            slice_runs=64 * MAX_SLICE_RUNS,
            stop_s=_LANE_STEPS * settings.timeout_s + _MARGIN_S,
            idle_s=0.008,  # over TCP, UCX serves a peer's reads only when this process makes progress
            most_lanes=lanes,
            shared_bytes=_WORTH_SHARING * settings.slice_bytes,
            may_add_lane=has_many_files_left,
        )

    def _details(self) -> dict[str, str | int]:
        details: dict[str, str | int] = {"memory": _MEMORY[self._region.kind], "device": self._region.device}
        return {"metadata": self._metadata.hex(), **details, **self._place_details()}

    def _link(self, peer: PeerRank, endpoint: Endpoint) -> LibraryPeer:
        there, here = self._places(endpoint)
        metadata, mark = bytes_detail(endpoint, "metadata"), detail(endpoint, "mark", int)
        kinds = (
            NixlMemory(detail(endpoint, "memory", str), detail(endpoint, "device", int)),
            NixlMemory(_MEMORY[self._region.kind], self._region.device),
        )
        if kinds[0].name not in _MEMORY.values() or kinds[0].device < 0:
            raise TransportError(
                f"nixl endpoint: memory is {kinds[0].name!r}, device {kinds[0].device}; it must be one of "
                f"{', '.join(_MEMORY.values())}, and at least 0; fetch its card again"
            )

        def make_engine() -> NixlPeer:
            agent = NixlAgent(self._settings, (self._region, self._marks.region))
            return NixlPeer(agent, metadata, there, here, kinds)

        return LibraryPeer(peer, mark, make_engine)
