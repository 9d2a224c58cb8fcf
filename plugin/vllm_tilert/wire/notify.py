"""Word to systemd, for services of Type=notify."""

from __future__ import annotations

import os
import socket


def sd_notify(message: str) -> None:
    """Send `message` (such as READY=1) to systemd; nothing where it did not ask to be told."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(message.encode(), "\0" + path[1:] if path.startswith("@") else path)
