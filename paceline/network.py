"""Addresses and ports by which processes of a run reach each other."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""Below the ports that systems give to outgoing connections, so that none of these takes one; a
server that adds 10,000 for a second port of its own stays below the highest that there is."""


def free_port(host: str = LOOPBACK, attempts: int = 200) -> int:
    """A port that nobody listens on now. Chosen at random: two runs hardly choose the same."""
    for port in random.sample(PORTS, attempts):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((host, port))
            return port
    raise OSError(f"no free port among {attempts} between {PORTS.start} and {PORTS.stop}")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
