"""What hurts a queue, found by looking: each check is an operation that says what is, and what to do.

A check that fails (no right, a time limit) is reported as such, and the others go on.
"""

from __future__ import annotations

from typing import Final

from jobq._doctor import fleet, server, tables
from jobq._doctor.findings import Check, Context, Finding, Level

__all__ = ["CHECKS", "Check", "Context", "Finding", "Level"]

CHECKS: Final[dict[str, Check]] = {
    "rights": tables.rights,
    "settings": server.settings,
    "clock": server.clock,
    "pooler": server.pooler,
    "connections": server.connections,
    "vacuum horizon": server.horizon,
    "dead rows": tables.dead_rows,
    "indexes": tables.indexes,
    "workers": fleet.workers,
    "listeners": fleet.listeners,
    "leader": fleet.leader,
    "queues": fleet.queues,
    "kinds": fleet.unknown_kinds,
    "schedules": fleet.schedules,
    "restored rows": tables.future_xids,
    "one table a job": tables.in_one_table,
    "payloads": tables.with_payload,
    "states": tables.with_state,
}
