"""A copier for vLLM's offloading connector on CPUs, loaded by `spec_module_path`.

vLLM's own copier needs the streams of a GPU, and refuses to start without one. Everything else of the connector is vLLM's:
which blocks are stored and loaded, when, and what its scheduler is notified of.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

__all__ = ["HostOffloadingSpec"]


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc] # vLLM is not installed where types are checked
    """vLLM's offloading to main memory, with a copier for caches that are there already."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The copier of one rank."""
        assert self.blocks_per_chunk == 1
        return _Copier(kv_caches, self.num_chunks)


class _Copier(OffloadingWorker):  # type: ignore[misc]
    """Copies at once; what is done is collected by the next step, as with a stream."""

    def __init__(self, caches: Any, chunks: int) -> None:
        self._caches = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors]
        self._stored = [torch.zeros((chunks, each.shape[1]), dtype=torch.int8) for each in self._caches]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the cache."""
        return self._copy(job_id, self._caches, src_spec, self._stored, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """To the cache."""
        return self._copy(job_id, self._stored, src_spec, self._caches, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """All since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def _copy(self, job_id: int, sources: Any, read: Any, targets: Any, written: Any) -> bool:
        for source, target in zip(sources, targets, strict=True):
            target[torch.from_numpy(written.block_ids).long()] = source[torch.from_numpy(read.block_ids).long()]
        self._done.append(TransferResult(job_id, success=True, transfer_size=0, transfer_time=0.0))
        return True
