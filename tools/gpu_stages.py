"""Where the time goes from `post` to the completion of a batch on a GPU: `python tools/gpu_stages.py OUT.json [ROUNDS]`.

The batches of `kvbaton bench wire --transport cuda` that are posted as plans, from a source in a process of its own; every byte
is checked in every round. The driver's calls go through functions that note the time (gpu_stages.c). All times are
microseconds after the call of `post`, on the host's clock:

- `entered`: the plan is checked and laid out, and the first call of the driver begins;
- `table_queued`, `kernel_queued`, `number_queued`: the calls have returned; `posted`: `post` has;
- `kernel_began`: all before the kernel is done. A number of its own shows it, which takes time: these rounds are apart;
- `number_written`: the copy is done, and a thread that does nothing but look has seen it;
- `woken`: the caller's `select` has returned; `reported`: the completion is there.
"""

from __future__ import annotations

import ctypes
import json
import select
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.bench.wire.cuda import Pattern, expected_target, patterns
from kvbaton.bench.wire.pages import POISON
from kvbaton.core.handoff import Incarnation
from kvbaton.core.strips import Plan
from kvbaton.transport.base import Batch, Completion, Direction, Endpoint, PeerRank, TransportSettings
from kvbaton.transport.cuda import CudaTransport, DeviceRegion
from kvbaton.transport.cuda.driver import CudaDriver
from kvbaton.transport.cuda.quick_start import CALLS
from kvbaton.transport.runs import compile_c
from kvbaton.transport.source_process import SourceProcess

TOKENS, ROUNDS, WARM_UP, START_S, BATCH_S = 4096, 40, 3, 120.0, 30.0
PEER = PeerRank(Incarnation("source"))
NOTED = ("entered", "table_queued", "kernel_queued", "number_queued", "kernel_began", "number_written")
FUNCTIONS = ("noted_enter", "noted_leave", "noted_bring", "noted_launch", "noted_write")
CODE = Path(__file__).with_suffix(".c")


def load() -> ctypes.CDLL:
    """The functions that note the time."""
    with tempfile.TemporaryDirectory() as place:
        library = Path(place) / "stages.so"
        compile_c([CODE], library, "-O2", "-shared", "-fPIC", "-pthread")
        return ctypes.CDLL(str(library))


class NotedDriver(CudaDriver):
    """The driver, with those functions in front of what C calls."""

    code: ctypes.CDLL

    def address_of(self, name: str) -> int:
        number = CALLS.index(name)
        (ctypes.c_void_p * len(CALLS)).in_dll(self.code, "driver")[number] = super().address_of(name)
        return ctypes.cast(getattr(self.code, FUNCTIONS[number]), ctypes.c_void_p).value or 0


def one_batch(code: ctypes.CDLL, transport: CudaTransport, pattern: Pattern) -> dict[str, float]:
    """The stages of one batch."""
    noted = (ctypes.c_int64 * len(NOTED)).in_dll(code, "noted_ns")
    for number in range(len(NOTED)):
        noted[number] = 0
    start = time.monotonic_ns()
    transport.post(Batch(PEER, Direction.READ, pattern.posted))
    posted = time.monotonic_ns()
    taken: dict[str, int] = {}
    completions: list[Completion] = []
    while not completions and select.select([transport.wakeup_fd], [], [], BATCH_S)[0]:
        taken["woken"] = time.monotonic_ns()
        completions = transport.poll()
    taken["reported"] = time.monotonic_ns()
    if not completions or completions[0].error or completions[0].moved_bytes != pattern.wire_bytes:
        sys.exit(f"{pattern.name}: {completions}")
    taken |= {name: at for name, at in zip(NOTED, noted, strict=True) if at} | {"posted": posted}
    return {name: (at - start) / 1e3 for name, at in sorted(taken.items(), key=lambda item: item[1])}


def measure(code: ctypes.CDLL, torch: Any, rounds: int) -> list[dict[str, Any]]:
    """Every batch, without and with the number that shows when the kernel begins."""
    batches = [pattern for pattern in patterns(TOKENS) if isinstance(pattern.posted, Plan)]
    found = []
    with ExitStack() as undo:
        arguments = str(max(pattern.source_bytes for pattern in batches)), PEER.incarnation
        source = undo.enter_context(closing(SourceProcess((sys.executable, "-m", "kvbaton.bench.wire.cuda", *arguments))))
        endpoint = msgspec.json.decode(source.line(START_S), type=Endpoint)
        target = torch.empty(max(pattern.target_bytes for pattern in batches), dtype=torch.uint8, device="cuda:0")
        transport = CudaTransport(DeviceRegion.of_tensors(target), TransportSettings(incarnation=Incarnation("target")))
        undo.callback(transport.close)
        transport.connect(PEER, endpoint)
        flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        code.start_watch()
        undo.callback(code.stop_watch)
        for pattern in batches:
            expected = expected_target(torch, pattern, target.device)
            for address in (0, flag.data_ptr()):
                ctypes.c_uint64.in_dll(code, "began_flag").value = address
                taken = []
                for _ in range(WARM_UP + rounds):
                    target[: pattern.target_bytes].fill_(POISON)
                    torch.cuda.synchronize()
                    taken.append(one_batch(code, transport, pattern))
                    torch.cuda.synchronize()
                    if not torch.equal(target[: pattern.target_bytes], expected):
                        sys.exit(f"{pattern.name}: bytes in target memory are not the source's")
                found.append({"runs": pattern.name, "shows_the_beginning": bool(address), "rounds_us": taken[WARM_UP:]})
    return found


def main() -> int:
    """Measure, print the medians, and keep every round."""
    import torch

    from kvbaton.transport.cuda import copier

    code = NotedDriver.code = load()
    copier.CudaDriver = NotedDriver  # type: ignore[attr-defined]
    found = measure(code, torch, int(sys.argv[2]) if len(sys.argv) > 2 else ROUNDS)
    for each in found:
        rounds = each["rounds_us"]
        names = [name for name in rounds[-1] if all(name in one for one in rounds)]
        medians = {name: statistics.median(one[name] for one in rounds) for name in names}
        sys.stdout.write(f"{each['runs']}: " + ", ".join(f"{name} {at:.0f}" for name, at in medians.items()) + "\n")
    Path(sys.argv[1]).write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
