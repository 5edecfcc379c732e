"""Bytes over NIXL, with UCX underneath: RDMA, shared memory, TCP, whatever UCX finds. Needs the package `nixl`."""

from kvbaton.transport.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
