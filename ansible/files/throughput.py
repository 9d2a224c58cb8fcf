"""Bytes per second over one TCP connection, by the standard library alone.

usage: throughput.py receive HOST PORT     one sender, then out
       throughput.py send HOST PORT BYTES  prints Gb/s
"""

from __future__ import annotations

import socket
import sys
import time

CHUNK = 4 << 20


def receive(host: str, port: int) -> None:
    """Accept one sender, read to its end, answer with one byte."""
    with socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    ) as server:
        server.settimeout(60)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(60)
            buffer = bytearray(CHUNK)
            while connection.recv_into(buffer):
                pass
            connection.sendall(b".")


def send(host: str, port: int, total: int) -> float:
    """Gb/s of `total` bytes, from the first one until the receiver has the last."""
    for attempt in range(50):
        try:
            connection = socket.create_connection((host, port), timeout=60)
            break
        except ConnectionRefusedError:  # the receiver is still starting
            if attempt == 49:
                raise
            time.sleep(0.2)
    chunk = bytes(CHUNK)
    with connection:
        start = time.perf_counter()
        for _ in range(max(1, total // CHUNK)):
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        seconds = time.perf_counter() - start
    return max(1, total // CHUNK) * CHUNK * 8 / seconds / 1e9


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], int(sys.argv[3]))
    else:
        print(f"{send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])):.3f}")
