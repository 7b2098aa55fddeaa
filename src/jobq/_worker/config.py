"""The worker's settings: one frozen value, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Final, cast

from jobq._errors import ConfigError
from jobq._kinds.options import check_name
from jobq._limits import MAX_WAIT
from jobq._messages import shown
from jobq._units import duration

DEFAULT_SLOTS: Final = 20
_RENEWALS_A_LEASE: Final = 3  # so that one renewal may fail or be late and two still come in time
_MOST: Final = 2**31 - 1  # the database's integers end there
_LONGEST_ANSWER_S: Final = 30.0  # the server ends its statements sooner by itself
_SHORTEST_ANSWER_S: Final = 2.0  # a busy server may take this long, however short the lease is


def _default_queues() -> dict[str, int]:
    return {"default": DEFAULT_SLOTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a worker process works. Every default is a setting; a bad one fails here, by name.

    Attributes:
        queues: slots for each queue: how many of its jobs run at once in this process.
        lease: for how long after its last heartbeat a worker counts as alive. When it ends, its
            jobs are taken back. The price of a longer one is a later rescue. A connection whose
            server says nothing for a third of it is given up and made anew.
        heartbeat: how often the lease is renewed; at most a third of the lease.
        poll: how often an idle worker looks for jobs without having been notified.
        grace: how long running handlers may go on once a stop was asked for.
        cancel_grace: how long a handler that was cancelled may take to end before it is left
            behind (counted as stuck: its slot is given to the next job, its job stays leased).
        prefetch: how many claimed jobs may wait in the process beside those that run. What is
            used of it follows the measured run time, so that only short jobs are held.
        prefetch_horizon: held jobs are about as many as the slots finish in this time.
        crash_limit: a job whose worker died with it this many times is discarded.
        promote_interval: how often due jobs are looked for when none is known to come sooner.
        rescue_interval: how often dead workers are looked for.
        completion_batch: outcomes recorded by one statement at the most.
        completion_delay: how long an outcome may wait for others to be recorded with it.
        pending_outcomes: unrecorded outcomes beyond which nothing more is claimed.
        exit_when_blocked: whether the process ends itself (code 70) when a handler blocks the
            event loop for longer than its time limit and grace; its jobs are then rescued.
        leads: whether this worker may be the fleet's leader, which starts schedules and removes old
            jobs, on one more connection. At least one worker of each schema must.

    Raises:
        ConfigError: names the setting and what would do.
    """

    queues: Mapping[str, int] = field(default_factory=_default_queues)
    lease: timedelta = timedelta(seconds=30)
    heartbeat: timedelta = timedelta(seconds=5)
    poll: timedelta = timedelta(seconds=1)
    grace: timedelta = timedelta(seconds=30)
    cancel_grace: timedelta = timedelta(seconds=2)
    prefetch: int = 500
    prefetch_horizon: timedelta = timedelta(milliseconds=40)
    crash_limit: int = 3
    promote_interval: timedelta = timedelta(milliseconds=150)
    rescue_interval: timedelta = timedelta(seconds=5)
    completion_batch: int = 250
    completion_delay: timedelta = timedelta(milliseconds=4)
    pending_outcomes: int = 2_000
    exit_when_blocked: bool = True
    leads: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        self._check_queues()
        for name in ("lease", "heartbeat", "poll", "promote_interval", "rescue_interval", "prefetch_horizon"):
            _require(getattr(self, name) > timedelta(0), name, "longer than 0")
        for name in ("grace", "cancel_grace", "completion_delay"):
            _require(getattr(self, name) >= timedelta(0), name, "0 or longer")
        for name in ("crash_limit", "completion_batch", "pending_outcomes"):
            _require(getattr(self, name) >= 1, name, "1 or more")
        _require(self.prefetch >= 0, "prefetch", "0 or more")
        lease = duration(self.lease.total_seconds())
        _require(
            self.heartbeat * _RENEWALS_A_LEASE <= self.lease,
            "heartbeat",
            f"at most a third of the lease ({lease}), so that a late one does not end it",
        )

    @property
    def answer_limit_s(self) -> float:
        """Seconds after which a silent server is given up: there is time for a second try in a lease."""
        return min(_LONGEST_ANSWER_S, max(_SHORTEST_ANSWER_S, self.lease.total_seconds() / 3))

    def _check_types(self) -> None:
        for setting in fields(self):
            value: object = getattr(self, setting.name)
            if setting.name == "queues":
                _require(isinstance(value, Mapping), "queues", "slots by queue, such as {'default': 20}")
            elif isinstance(setting.default, timedelta):
                fits = isinstance(value, timedelta) and value <= MAX_WAIT
                _require(fits, setting.name, f"a timedelta of at most 100 years, not {shown(value)}")
            elif isinstance(setting.default, bool):
                _require(isinstance(value, bool), setting.name, f"True or False, not {shown(value)}")
            else:
                fits = _is_whole(value) and cast("int", value) <= _MOST
                _require(fits, setting.name, f"a whole number of at most {_MOST:,}, not {shown(value)}")

    def _check_queues(self) -> None:
        _require(len(self.queues) >= 1, "queues", "at least one queue, such as {'default': 20}")
        for queue, slots in dict(self.queues).items():
            check_name("WorkerConfig.queues", queue)
            has_slots = _is_whole(slots) and 1 <= slots <= 10_000
            _require(has_slots, f"queues[{queue!r}]", "1 to 10,000 slots")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: object, name: str, what: str) -> None:
    if not holds:
        raise ConfigError(f"WorkerConfig.{name}: must be {what}")
