"""What vLLM for CPUs lacks to serve experts by data-parallel ranks: the exchange of rows between them.

`CpuCommunicator` inherits two collective operations that raise NotImplementedError. With these two, engines with
`--data-parallel-rank` compute, and external balancing can be tested; nothing of it concerns caches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

__all__ = ["install"]


def install() -> None:
    """Add the operations to vLLM's class."""
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    if isinstance(input_, list):
        return [_all_gatherv(self, each, dim, sizes) for each in input_]
    assert dim == 0
    counts = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(counts), *input_.shape[1:]))
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    assert dim == 0
    counts = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    start = sum(counts[: self.rank_in_group])
    return total[start : start + counts[self.rank_in_group]].clone()
