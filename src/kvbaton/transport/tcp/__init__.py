"""Bytes over TCP: `wire` is the format, `server` hands out this rank's memory, `transport` reads from peers."""

from kvbaton.transport.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
