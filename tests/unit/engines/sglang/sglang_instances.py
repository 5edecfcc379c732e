"""Instances with real agents over a real transport, as SGLang's scheduler processes hold them, all in this process.

Each rank has a pool of NumPy arrays that look like SGLang's tensors, and its own metadata rows. `Request` polls the halves of
all ranks and takes the lowest state, as SGLang's schedulers do.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.core.addresses import in_url
from kvbaton.core.topology import Shape
from kvbaton.engines.instance import ModelIdentity
from kvbaton.engines.sglang.halves import Poll, SourceHalf, TargetHalf
from kvbaton.engines.sglang.instance import RankInstance, SglangPlace
from kvbaton.engines.sglang.metadata import MetadataRows
from kvbaton.engines.sglang.pool import PoolFacts, read_pool
from kvbaton.engines.sglang.settings import SglangSettings
from kvbaton.launch.ports import PortPicker

__all__ = ["ArrayPool", "Instance", "LatentPool", "Request", "instances", "wait_for", "wait_until_over"]

HEADS, CHANNELS, LAYERS, SLOTS = 4, 8, 2, 64
ROW = {
    "output_ids": 64,
    "cached_tokens": 64,
    "output_token_logprobs_val": 64,
    "output_token_logprobs_idx": 64,
    "output_top_logprobs_val": 512,
    "output_top_logprobs_idx": 512,
    "bootstrap_room": 64,
}
_WAIT_S = 20.0
_numbers = itertools.count()
"""SGLang names each request, too."""


class _Device:
    type = "cpu"


class ArrayTensor:
    """The part of a tensor's interface that the pool reads, over an array."""

    device = _Device()

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.shape, self.nbytes, self.dtype = array.shape, array.nbytes, f"torch.{array.dtype}"

    def __getitem__(self, index: int) -> ArrayTensor:
        return ArrayTensor(self.array[index])

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def dim(self) -> int:
        return self.array.ndim

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)


class ArrayPool:
    """K and V of plain attention: one tensor each per layer."""

    kv_cache_layout = "nhd"

    def __init__(self, heads: int, layers: int = LAYERS, dtype: str = "float32", slots: int = SLOTS) -> None:
        def tensors() -> list[ArrayTensor]:
            return [ArrayTensor(np.zeros((slots, heads, CHANNELS), dtype)) for _ in range(layers)]

        self.k_buffer, self.v_buffer = tensors(), tensors()

    @property
    def planes(self) -> list[list[ArrayTensor]]:
        """Every tensor by plane and layer."""
        return [self.k_buffer, self.v_buffer]


class LatentPool:
    """The latent of MLA: one tensor per layer, the same on every rank."""

    def __init__(self, layers: int = LAYERS) -> None:
        self.kv_buffer = [ArrayTensor(np.zeros((SLOTS, 1, CHANNELS), "float32")) for _ in range(layers)]

    @property
    def planes(self) -> list[list[ArrayTensor]]:
        """Every tensor by plane and layer."""
        return [self.kv_buffer]


# The classes are recognised by SGLang's names.
ArrayPool.__name__, LatentPool.__name__ = "MHATokenToKVPool", "MLATokenToKVPool"


class Instance:
    """All ranks of one instance."""

    def __init__(self, role: str, ports: PortPicker, tp: int = 1, page: int = 4, is_mla: bool = False, **settings: Any) -> None:
        self.tp, self.page, self.is_mla = tp, page, is_mla
        self.control_port = ports.pick()
        fingerprint = settings.pop("model", "one")
        self.total_heads: int = settings.pop("total_heads", HEADS)
        dtype: str = settings.pop("dtype", "float32")
        layers: int = settings.pop("layers", LAYERS)
        self.host: str = settings.pop("host", "127.0.0.1")
        self.pp: int = settings.pop("pp", 1)
        self._layers = layers // self.pp
        self.settings = SglangSettings(**{"control_port": self.control_port, **settings})
        self.model = ModelIdentity("model", fingerprint)
        self.role = role
        heads = max(1, self.total_heads // tp)
        self.pools: list[Any] = [LatentPool() if is_mla else ArrayPool(heads, self._layers, dtype) for _ in range(tp * self.pp)]
        self.rows = [{name: np.zeros((8, size), np.uint8) for name, size in ROW.items()} for _ in self.pools]
        self.ranks: list[RankInstance] = []

    @property
    def address(self) -> str:
        """What balancers send as bootstrap_host and bootstrap_port."""
        return f"{in_url(self.settings.advertise_host or self.host)}:{self.control_port}"

    def start(self) -> None:
        """Start all ranks, each in a thread, as SGLang starts them in processes."""
        exchange = _Exchange()
        found: dict[int, RankInstance] = {}
        errors: list[Exception] = []

        def run(rank: int) -> None:
            try:
                stage, tp_rank = divmod(rank, self.tp)
                facts = PoolFacts(self.page, stage * self._layers, self.total_heads, self.tp, tp_rank)
                pool = read_pool(self.pools[rank], facts)
                place = SglangPlace(
                    self.role, self.host, 1, self.control_port, Shape(tp=self.tp, pp=self.pp), rank, exchange.of(rank)
                )
                rows = MetadataRows(list(self.rows[rank].items()))
                found[rank] = RankInstance(self.settings, place, pool, rows, self.model)
            except Exception as error:  # noqa: BLE001 - raised again below, in the test's own thread
                errors.append(error)
                exchange.abandon()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.pools))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        self.ranks = [found[rank] for rank in range(len(self.pools))]

    def close(self) -> None:
        """End everything."""
        for rank in self.ranks:
            rank.close()

    def fill(self, pages: Sequence[int], tokens: int, seed: int) -> None:
        """Write the cache of a prompt into these pages: what each head of each token holds is a function of its place."""
        for rank, pool in enumerate(self.pools):
            for plane, tensors in enumerate(pool.planes):
                for layer, tensor in enumerate(tensors):
                    for token in range(tokens):
                        slot = pages[token // self.page] * self.page + token % self.page
                        tensor.array[slot] = self._expected(rank, plane, layer, token, seed)

    def problems(self, pages: Sequence[int], tokens: int, seed: int, first: int = 0) -> list[str]:
        """Where the cache in these pages is not that of the prompt."""
        found = []
        for rank, pool in enumerate(self.pools):
            for plane, tensors in enumerate(pool.planes):
                for layer, tensor in enumerate(tensors):
                    for token in range(first, tokens):
                        slot = pages[token // self.page] * self.page + token % self.page
                        if not (tensor.array[slot] == self._expected(rank, plane, layer, token, seed)).all():
                            found.append(f"rank {rank} plane {plane} layer {layer} token {token}")
        return found

    def _expected(self, rank: int, plane: int, layer: int, token: int, seed: int) -> npt.NDArray[np.float32]:
        stage, rank = divmod(rank, self.tp)
        layer += stage * self._layers
        held = 1 if self.is_mla else max(1, self.total_heads // self.tp)
        first = 0 if self.is_mla else rank * self.total_heads // self.tp
        heads = np.arange(first, first + held, dtype=np.float32)[:, None]
        channels = np.arange(CHANNELS, dtype=np.float32)[None, :]
        place = np.float32(seed * 1e4 + token * 100 + layer * 40 + plane * 20)
        return place + heads * np.float32(3) + channels / np.float32(16)


class _Exchange:
    """SGLang's collectives, as far as they are used: a value of rank 0 for every rank, in the order of the calls."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._ready = threading.Condition()
        self._is_abandoned = False

    def abandon(self) -> None:
        """A rank has failed: nothing more comes."""
        with self._ready:
            self._is_abandoned = True
            self._ready.notify_all()

    def of(self, rank: int) -> Callable[[Any], Any]:
        """The collective as one rank calls it."""
        calls = iter(range(1000))

        def broadcast(value: Any) -> Any:
            number = next(calls)
            with self._ready:
                if rank == 0:
                    self._values.append(value)
                    self._ready.notify_all()
                elif not self._ready.wait_for(lambda: len(self._values) > number or self._is_abandoned, _WAIT_S):
                    raise TimeoutError("rank 0 sends nothing")
                return self._values[number]

        return broadcast


class Request:
    """One request on all ranks of one instance."""

    def __init__(self, instance: Instance, room: int, prompt: Sequence[int], address: str = "") -> None:
        self.instance = instance
        name = f"request {next(_numbers)}"
        self.halves: list[Any] = [
            TargetHalf(rank.halves, room, address, prompt, request=name)
            if address
            else SourceHalf(rank.halves, room, prompt, request=name)
            for rank in instance.ranks
        ]

    def poll(self) -> Poll:
        """The lowest state of all ranks."""
        return Poll(min(half.poll() for half in self.halves))

    def each(self, name: str, *arguments: Any) -> None:
        """Call a method on every rank."""
        for half in self.halves:
            getattr(half, name)(*arguments)

    @property
    def reason(self) -> str:
        """Why it failed, as the first rank states it."""
        return str(self.halves[0].reason)


def wait_for(request: Request, *states: Poll, meanwhile: Request | None = None) -> Poll:
    """Poll until one of these states, for a bounded time; `meanwhile` is polled too, as its own scheduler would."""
    until = time.monotonic() + _WAIT_S
    while (state := request.poll()) not in states:
        if meanwhile is not None:
            meanwhile.poll()
        assert time.monotonic() < until, f"still {state!r}, waiting for {states}: {request.reason}"
        time.sleep(0.002)
    return state


def wait_until_over(*requests: Request) -> None:
    """Poll until the agents have reported the end of these on every rank, for a bounded time."""
    until = time.monotonic() + _WAIT_S
    while not all(half.is_over for request in requests for half in request.halves):
        assert time.monotonic() < until, "the agents report no end"
        for request in requests:
            request.poll()
        time.sleep(0.002)


@contextmanager
def instances(*made: Instance) -> Iterator[None]:
    """Start and end these."""
    try:
        for each in made:
            each.start()
        yield
    finally:
        for each in made:
            each.close()
