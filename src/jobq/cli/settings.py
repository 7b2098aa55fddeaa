"""What a worker process is told by its supervisor."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from datetime import timedelta

import msgspec

from jobq._worker.config import WorkerConfig
from jobq.cli.logs import LogFormat, make_handler


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of one worker process, as one line of JSON.

    Attributes:
        application: where the `Jobs` are, as ``module:attribute``.
        dsn: the database; ``schema``: the queue's schema there.
        queues: slots for each queue.
        lease_s, heartbeat_s, grace_s: seconds; ``crash_limit``: jobs' crashes; see :class:`WorkerConfig`.
        log_level: the level's name; ``log_format``: the form of its lines.
        http_host, http_port: where probes and metrics are served, ``None`` for nowhere.
    """

    application: str
    dsn: str = dataclasses.field(repr=False)
    schema: str
    queues: dict[str, int]
    lease_s: float
    heartbeat_s: float
    grace_s: float
    crash_limit: int
    log_level: str
    log_format: LogFormat = "text"
    http_host: str = ""
    http_port: int | None = None

    def of_process(self, number: int) -> ProcessSettings:
        """Return those of one process, counted from 0: each has a port of its own, one after the other."""
        if not self.http_port:
            return self
        return dataclasses.replace(self, http_port=self.http_port + number)

    def worker_config(self) -> WorkerConfig:
        """Return the worker's configuration.

        Raises:
            ConfigError: something of it cannot work.
        """
        return WorkerConfig(
            queues=self.queues,
            lease=timedelta(seconds=self.lease_s),
            heartbeat=timedelta(seconds=self.heartbeat_s),
            grace=timedelta(seconds=self.grace_s),
            crash_limit=self.crash_limit,
        )

    def configure_logging(self) -> None:
        """Have this process log to standard error, as all processes of this worker do."""
        logging.basicConfig(level=self.log_level.upper(), handlers=[make_handler(self.log_format)])

    def to_line(self) -> bytes:
        """Return it as JSON on one line."""
        return msgspec.json.encode(dataclasses.asdict(self))

    @classmethod
    def from_line(cls, line: bytes) -> ProcessSettings:
        """Return what :meth:`to_line` wrote."""
        return msgspec.json.decode(line, type=cls)
