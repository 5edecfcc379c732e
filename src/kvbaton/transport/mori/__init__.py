"""Bytes over MoRI-IO, AMD's library for RDMA and xGMI between ROCm GPUs. Needs the package `mori`; not run on hardware yet."""

from kvbaton.transport.mori.transport import MoriTransport

__all__ = ["MoriTransport"]
