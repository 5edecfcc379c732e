"""The source of the cuda benchmark as a process of its own: a region with known content, until standard input ends."""

from __future__ import annotations

import os
import sys

import msgspec

from kvbaton.bench.wire.gpu_content import fill_source
from kvbaton.core.handoff import Incarnation
from kvbaton.transport.base import TransportSettings
from kvbaton.transport.cuda import CudaTransport, DeviceRegion

__all__ = ["main"]


def main() -> None:
    """Serve one region of so many bytes; its endpoint goes to the descriptor that is the last argument, as one line of JSON."""
    import torch

    region_bytes, incarnation = int(sys.argv[1]), Incarnation(sys.argv[2])
    memory = torch.empty(region_bytes, dtype=torch.uint8, device="cuda:0")
    fill_source(torch, memory)
    torch.cuda.synchronize()
    transport = CudaTransport(DeviceRegion.of_tensors(memory), TransportSettings(incarnation=incarnation))
    os.write(int(sys.argv[3]), msgspec.json.encode(transport.endpoint()) + b"\n")
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    main()
