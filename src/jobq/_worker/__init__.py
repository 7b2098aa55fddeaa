"""The worker: claims jobs, runs their handlers, records what became of them.

A job goes through four parts with a bounded hand-over between each: the *fetcher* claims, the
*executor* runs handlers, the *completer* records outcomes, and the *lease* keeps all of it ours.
Beside them stand the *listener*, which only makes the fetcher prompt, and the *duties* that every
worker does for the fleet: promotion of due jobs, and rescue.
"""

from __future__ import annotations

from jobq._worker.config import WorkerConfig
from jobq._worker.report import Latency, WorkerHealth, WorkerReport, WorkerStats
from jobq._worker.worker import Worker

__all__ = ["Latency", "Worker", "WorkerConfig", "WorkerHealth", "WorkerReport", "WorkerStats"]
