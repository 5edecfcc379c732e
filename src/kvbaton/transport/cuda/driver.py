"""What the CUDA driver offers for memory of another process: IPC handles, allocations, and single bytes for tests."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvbaton.errors import ConfigError, TransportError

__all__ = ["HANDLE_BYTES", "GpuAllocation", "CudaDriver", "MemoryDriver"]

HANDLE_BYTES = 64
"""Size of an IPC handle."""

_LAZY_PEER_ACCESS = 1
_INVALID_VALUE = 1
_ONE = ctypes.c_size_t(1)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@dataclass(frozen=True, slots=True)
class GpuAllocation:
    """One allocation of GPU memory as this process sees it."""

    address: int
    allocated_bytes: int


class MemoryDriver(Protocol):
    """What the transport needs of a driver; each raises TransportError when it cannot."""

    def gpu_id(self) -> str:
        """The GPU's own id, the same in every process."""

    def allocation(self, address: int) -> GpuAllocation:
        """The allocation that holds `address`."""

    def share(self, address: int) -> bytes:
        """A handle under which other processes can open the allocation that holds `address`."""

    def open(self, handle: bytes) -> GpuAllocation:
        """Map another process's allocation into this one."""

    def forget(self, address: int) -> None:
        """Undo one `open`."""

    def close(self) -> None:
        """Release the GPU. Idempotent."""


class CudaDriver:
    """The driver's calls on one GPU, in the context that torch uses too. Safe to use from any thread, until `close`."""

    def __init__(self, device: int) -> None:
        """Raises ConfigError when there is no driver, or no such GPU."""
        self._cuda = _load()
        self._lock = threading.Lock()
        self._context = ctypes.c_void_p()
        self._device = ctypes.c_int()
        self._check(self._cuda.cuInit(0), "start")
        code = self._cuda.cuDeviceGet(ctypes.byref(self._device), device)
        if code:
            raise ConfigError(f"GPU {device} is not there ({self._name(code)}); see CUDA_VISIBLE_DEVICES and nvidia-smi")
        self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), self._device), "open the GPU")

    def gpu_id(self) -> str:
        uuid = (ctypes.c_uint8 * 16)()
        self._check(self._cuda.cuDeviceGetUuid(ctypes.byref(uuid), self._device), "name the GPU")
        return bytes(uuid).hex()

    def allocation(self, address: int) -> GpuAllocation:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self.entered():
            code = self._cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._check(code, f"find the allocation of address {address:#x}")
        return GpuAllocation(base.value, size.value)

    def share(self, address: int) -> bytes:
        """A handle under which other processes can open the allocation that holds `address`. Raises ConfigError."""
        handle = _Handle()
        with self.entered():
            code = self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address))
        if code == _INVALID_VALUE:
            raise ConfigError(
                f"GPU memory at {address:#x} cannot be shared by CUDA IPC ({self._name(code)}): it was not allocated with "
                "cudaMalloc. Switch off PYTORCH_CUDA_ALLOC_CONF=expandable_segments and allocators of virtual memory "
                "(vLLM's sleep mode)"
            )
        self._check(code, f"share memory at {address:#x}")
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open(self, handle: bytes) -> GpuAllocation:
        """Map another process's allocation into this one; the same handle again gives the same memory, and counts twice."""
        if len(handle) != HANDLE_BYTES:
            raise TransportError(f"an IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}")
        address = ctypes.c_uint64()
        with self.entered():
            code = self._cuda.cuIpcOpenMemHandle_v2(
                ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
            )
        self._check(code, "open the peer's memory")
        return self.allocation(address.value)

    def forget(self, address: int) -> None:
        with self.entered():
            code = self._cuda.cuIpcCloseMemHandle(ctypes.c_uint64(address))
        self._check(code, f"close the peer's memory at {address:#x}")

    def flip_byte(self, address: int) -> None:
        """Invert one byte of GPU memory: for negative controls."""
        byte = ctypes.c_uint8()
        with self.entered():
            self._check(self._cuda.cuMemcpyDtoH_v2(ctypes.byref(byte), ctypes.c_uint64(address), _ONE), "read a byte")
            byte.value ^= 0xFF
            self._check(self._cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(address), ctypes.byref(byte), _ONE), "write a byte")

    @property
    def context(self) -> int:
        """The GPU's context."""
        return self._context.value or 0

    def address_of(self, name: str) -> int:
        """Where a function of the driver is. Raises TransportError."""
        try:
            return ctypes.cast(getattr(self._cuda, name), ctypes.c_void_p).value or 0
        except AttributeError as error:
            raise TransportError(f"the CUDA driver has no {name}") from error

    def bring(self, target: int, source: int, count: int, stream: int) -> None:
        """Queue a copy from pinned memory to the GPU; the context must be entered. Raises TransportError."""
        code = self._cuda.cuMemcpyHtoDAsync_v2(
            ctypes.c_uint64(target), ctypes.c_void_p(source), ctypes.c_size_t(count), ctypes.c_void_p(stream)
        )
        self._check(code, "copy a table")

    def write_number(self, address: int, number: int, stream: int) -> None:
        """Have a number written when a stream has come so far; the context must be entered. Raises TransportError."""
        code = self._cuda.cuStreamWriteValue32_v2(
            ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(number), ctypes.c_uint(0)
        )
        self._check(code, "write a number")

    def close(self) -> None:
        """Release the GPU; torch keeps its own hold. Idempotent."""
        with self._lock:
            held, self._context = self._context, ctypes.c_void_p()
        if held:
            self._check(self._cuda.cuDevicePrimaryCtxRelease_v2(self._device), "release the GPU")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make the GPU's context the thread's own for a while. Raises TransportError."""
        self._check(self._cuda.cuCtxPushCurrent_v2(self._context), "enter the GPU's context")
        try:
            yield
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _check(self, code: int, what: str) -> None:
        if code:
            raise TransportError(f"CUDA could not {what}: {self._name(code)}")

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or b"CUDA error").decode() + f" ({code})"


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(
            f"transport cuda needs an NVIDIA driver ({error}); install it, or choose transport local or tcp"
        ) from error
