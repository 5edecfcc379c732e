"""Lets several ranks of one vLLM instance share the only GPU of a machine: `--worker-cls shared_gpu_worker.SharedGpuWorker`.

vLLM gives every rank a GPU of its own, and NCCL refuses two ranks on one. Here every rank takes the first GPU, and has another
name for its host, so that NCCL connects the ranks by sockets as if they were on several. For tests: it is slow. Give also
`--distributed-executor-backend mp --disable-custom-all-reduce`.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

__all__ = ["SharedGpuWorker"]


class SharedGpuWorker(Worker):  # type: ignore[misc]
    """vLLM's worker on the first GPU, whatever its rank."""

    def __init__(self, vllm_config: Any, local_rank: int, rank: int, *arguments: Any, **more: Any) -> None:
        del local_rank
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        super().__init__(vllm_config, 0, rank, *arguments, **more)
