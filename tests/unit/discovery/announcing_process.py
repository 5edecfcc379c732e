"""A process that announces itself and then holds its interpreter: `announcing_process.py PORT STALL_S STALL_LIMIT_S CLASS`.

It prints a line before it stalls and one when it is awake again, and then waits to be killed.
"""

from __future__ import annotations

import ctypes
import sys
import threading

from kvbaton.discovery import announcer
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode

HEARTBEAT_S = 0.05


def main() -> None:
    """Announce, stall, wait."""
    port, stall_s, stall_limit_s, name = sys.argv[1:]
    registration = Registration(
        type=InstanceType.PREFILL,
        http_address="127.0.0.1:8101",
        zmq_address="host:127.0.0.1,handshake:6301,notify:6301",
        transfer_mode=TransferMode.READ,
        incarnation="one",
    )
    voice = getattr(announcer, name)(registration, [f"127.0.0.1:{port}"], HEARTBEAT_S, stall_limit_s=float(stall_limit_s))
    voice.start()
    sys.stdin.readline()
    print("stalled", flush=True)
    ctypes.PyDLL(None).sleep(int(stall_s))
    print("awake", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
