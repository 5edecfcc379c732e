"""Bytes over Mooncake's transfer engine: TCP here, RDMA where its devices are. Needs a package `mooncake-transfer-engine`."""

from kvbaton.transport.mooncake.transport import MooncakeTransport

__all__ = ["MooncakeTransport"]
