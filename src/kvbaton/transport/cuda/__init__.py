"""GPU memory of another process of this host, read through CUDA IPC by a kernel of this side: the transport `cuda`.

Needs the extra `kvbaton[cuda]` (torch and Triton), which is imported when a transport is opened, not before.
"""

from kvbaton.transport.cuda.region import DeviceRegion, queued_so_far
from kvbaton.transport.cuda.transport import CudaTransport

__all__ = ["CudaTransport", "DeviceRegion", "queued_so_far"]
