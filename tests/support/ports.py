"""Ports for the servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from typing import Final

# below those that Linux gives to outgoing connections (net.ipv4.ip_local_port_range): a port among these
# may be free when it is chosen and taken by anybody's connection before its server listens
_FIRST: Final = 10_000
_LAST: Final = 32_000


def free_ports(count: int = 1) -> int:
    """Return the first of ``count`` ports of 127.0.0.1, one after the other, that are free now."""
    while True:
        first = random.SystemRandom().randrange(_FIRST, _LAST - count)
        with ExitStack() as taken:
            try:
                for port in range(first, first + count):
                    taken.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
