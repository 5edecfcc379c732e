"""How fast encrypted `tcp` could be here at most, beside plain `tcp`: `python tools/tls_floor.py`.

Each end is one thread, so the slower end decides. Encrypting and decrypting cannot be left out, nor can the sockets: processor
time of OpenSSL's ciphers on records of 16 KiB, as `openssl speed` measures it, and of both ends of a plain socket. No record is
made and no call of Python counted. All are processor times, not times on a clock, so that other work changes little.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys

_CIPHERS = ("aes-128-gcm", "aes-256-gcm", "chacha20-poly1305")
_SECONDS = 2
_RECORD_BYTES = 16 << 10
_MOVED_BYTES = 2 << 30
_PIECE_BYTES = 1 << 20
_GB = 1e9
_WAIT_S = 60.0


def cipher_s_per_gb(name: str, *more: str) -> float:
    """Processor seconds for a GB. Raises CalledProcessError where OpenSSL does not have it."""
    command = ["openssl", "speed", "-seconds", str(_SECONDS), "-bytes", str(_RECORD_BYTES), *more, "-evp", name]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    thousands = float(re.findall(r"([\d.]+)k\s*$", output, re.MULTILINE)[-1])
    return _GB / (thousands * 1000)


def socket_s_per_gb() -> tuple[float, float]:
    """Processor seconds for a GB, of the sender and of the receiver, each a process of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if not child:
        with socket.create_connection(listener.getsockname()) as sock:
            room = bytearray(_PIECE_BYTES)
            while sock.recv_into(room):
                pass
        os._exit(0)
    listener.settimeout(_WAIT_S)
    sock, _ = listener.accept()
    sock.settimeout(_WAIT_S)
    data = memoryview(bytearray(os.urandom(_PIECE_BYTES)))
    before, sent = _spent_s(resource.getrusage(resource.RUSAGE_SELF)), 0
    while sent < _MOVED_BYTES:
        sent += sock.send(data)
    sender_s = _spent_s(resource.getrusage(resource.RUSAGE_SELF)) - before
    sock.close()
    _, _, used = os.wait4(child, 0)
    return sender_s / sent * _GB, _spent_s(used) / sent * _GB


def _spent_s(used: resource.struct_rusage) -> float:
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print a table."""
    sender_s, receiver_s = socket_s_per_gb()
    plain = 1 / max(sender_s, receiver_s)
    lines = [
        f"plain socket: {sender_s:.2f} s of processor to send a GB, {receiver_s:.2f} s to receive it: {plain:.2f} GB/s at most",
        "| cipher | to encrypt | to decrypt | GB/s at most | of a plain socket |",
        "|---|---|---|---|---|",
    ]
    for name in _CIPHERS:
        encrypt_s, decrypt_s = cipher_s_per_gb(name), cipher_s_per_gb(name, "-decrypt")
        most = 1 / max(sender_s + encrypt_s, receiver_s + decrypt_s)
        lines.append(f"| {name} | {encrypt_s:.2f} s | {decrypt_s:.2f} s | {most:.2f} | {most / plain:.2f} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
