"""Metrics for Prometheus: what the queues hold, what a worker does, how long jobs take.

Needs ``prometheus-client`` (``pip install 'jobq[prometheus]'``). `jobqctl worker --http PORT` serves all
of it; in a program of your own::

    registry.register(QueueCollector(jobq.Client(dsn)))    # the queues, as the database knows them
    registry.register(WorkerCollector(worker))             # one worker in this process
    jobs.use(JobMetrics(registry))                         # durations, by kind

The one to alert on is ``jobq_queue_lag_seconds``. All names stand in ``METRICS``.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

import jobq

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from wsgiref.types import WSGIApplication

    from prometheus_client.core import Metric

__all__ = ["METRICS", "JobMetrics", "QueueCollector", "WorkerCollector", "metrics_app"]

logger = logging.getLogger("jobq.integrations.prometheus")


class About(NamedTuple):
    """What a metric is.

    Attributes:
        kind: ``gauge``, ``counter`` or ``histogram``.
        labels: the names of its labels.
        text: what it tells.
    """

    kind: str
    labels: tuple[str, ...]
    text: str


_QUEUE: Final = ("queue",)

METRICS: Final[dict[str, About]] = {
    "jobq_database_up": About("gauge", (), "Whether the last look at the queues came through."),
    "jobq_queue_lag_seconds": About(
        "gauge", _QUEUE, "For how long the oldest ready job has been ready, 0 when none is."
    ),
    "jobq_queue_jobs": About("gauge", ("queue", "state"), "Jobs in each state."),
    "jobq_queue_completed_last_hour": About("gauge", _QUEUE, "Jobs completed within the last hour."),
    "jobq_queue_discarded_last_hour": About("gauge", _QUEUE, "Jobs discarded within the last hour."),
    "jobq_queue_unknown_kinds": About("gauge", _QUEUE, "Jobs that wait since no worker knows their kind."),
    "jobq_queue_paused": About("gauge", _QUEUE, "Whether the queue is paused."),
    "jobq_queue_workers": About("gauge", _QUEUE, "Live workers that serve the queue."),
    "jobq_queue_estimated": About(
        "gauge", _QUEUE, "Whether some of the queue's numbers are estimates, since it is large."
    ),
    "jobq_worker_slots": About("gauge", (), "Jobs that may run at once in this process."),
    "jobq_worker_busy": About("gauge", (), "Jobs that run in this process."),
    "jobq_worker_prefetched": About("gauge", (), "Jobs that are claimed and wait for a slot."),
    "jobq_worker_stuck": About("gauge", (), "Handlers that went on after they were told to stop."),
    "jobq_worker_unrecorded": About("gauge", (), "Outcomes that wait to be recorded."),
    "jobq_worker_listening": About("gauge", (), "Whether notifications arrive; without them it polls."),
    "jobq_worker_leader": About("gauge", (), "Whether this worker does the fleet's duties."),
    "jobq_worker_alive": About("gauge", (), "Whether the event loop runs."),
    "jobq_worker_ready": About("gauge", (), "Whether the worker takes jobs."),
    "jobq_worker_fetch_seconds": About("gauge", ("quantile",), "How long the newest claims took."),
    "jobq_worker_completion_seconds": About(
        "gauge", ("quantile",), "How long the recording of the newest batches of outcomes took."
    ),
    "jobq_worker_loop_lag_seconds": About("gauge", ("quantile",), "How late the event loop was lately."),
    "jobq_worker_claimed_total": About("counter", (), "Jobs taken from the queues."),
    "jobq_worker_attempts_total": About("counter", ("outcome",), "Attempts, by what was recorded of them."),
    "jobq_worker_lost_leases_total": About(
        "counter", (), "Outcomes dropped since their jobs had been taken back."
    ),
    "jobq_worker_promoted_total": About("counter", (), "Due jobs made ready."),
    "jobq_worker_rescued_total": About("counter", (), "Jobs taken back from dead workers."),
    "jobq_worker_removed_total": About("counter", (), "Finished jobs removed at their age."),
    "jobq_worker_heartbeats_total": About("counter", (), "Renewals of the lease."),
    "jobq_job_duration_seconds": About(
        "histogram", ("kind", "queue", "outcome"), "How long handlers ran, by how the run ended."
    ),
}
"""Every metric: its kind, its labels, and what it tells."""

_FRESH_FOR: Final = timedelta(seconds=5)
_STATES: Final = ("scheduled", "ready", "running", "completed", "discarded", "cancelled")
_OUTCOMES: Final = ("completed", "retried", "snoozed", "discarded", "cancelled", "parked", "handed_back")


class QueueCollector(Collector):
    """What the queues hold and how far behind they are, read when somebody scrapes.

    One of them for a database is enough: every worker that serves metrics tells the same, so ask for
    ``max by (queue) (…)``. While the database is away, `jobq_database_up` is 0 and the rest is absent.

    Args:
        client: a sync client; it is opened at the first scrape if it is not, and closed by nobody.
        fresh_for: for how long an answer is given again instead of a new one, at least 5 seconds.

    Raises:
        ConfigError: ``fresh_for`` is shorter.
    """

    def __init__(self, client: jobq.Client, *, fresh_for: timedelta = _FRESH_FOR) -> None:
        if fresh_for < _FRESH_FOR:
            raise jobq.ConfigError(f"fresh_for={fresh_for!r}: at least {_FRESH_FOR.seconds} seconds")
        self._client = client
        self._fresh_for_s = fresh_for.total_seconds()
        self._lock = threading.Lock()
        self._stats: list[jobq.QueueStats] | None = None
        self._read_at = float("-inf")

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so that registering does not ask the database."""
        return [_gauge("jobq_database_up"), *_families("jobq_queue_").values()]

    def collect(self) -> Iterator[Metric]:
        """Return what is known, from the database or as it was a moment ago."""
        stats = self._read()
        yield _gauge("jobq_database_up", 0 if stats is None else 1)
        families = _families("jobq_queue_")
        for queue in stats or ():
            _add_queue(families, queue)
        yield from families.values()

    def _read(self) -> list[jobq.QueueStats] | None:
        with self._lock:  # one look at a time, however many scrape
            if time.monotonic() - self._read_at >= self._fresh_for_s:
                try:
                    self._client.open()
                    self._stats = self._client.queue_stats()
                except jobq.Error as error:
                    self._stats = None
                    logger.info("the queues cannot be looked at: %s", error)
                self._read_at = time.monotonic()
            return self._stats


def _add_queue(families: dict[str, GaugeMetricFamily], stats: jobq.QueueStats) -> None:
    labels = [stats.queue]
    for state in _STATES:
        families["jobq_queue_jobs"].add_metric([stats.queue, state], getattr(stats, state))
    families["jobq_queue_lag_seconds"].add_metric(labels, stats.lag_s)
    families["jobq_queue_completed_last_hour"].add_metric(labels, stats.completed_last_hour)
    families["jobq_queue_discarded_last_hour"].add_metric(labels, stats.discarded_last_hour)
    families["jobq_queue_unknown_kinds"].add_metric(labels, stats.unknown_kinds)
    families["jobq_queue_paused"].add_metric(labels, stats.paused)
    families["jobq_queue_workers"].add_metric(labels, stats.workers)
    families["jobq_queue_estimated"].add_metric(labels, bool(stats.estimated))


class WorkerCollector(Collector):
    """What one worker in this process is doing and has done. It asks the worker, not the database.

    Args:
        worker: the worker; it need not run yet.
    """

    def __init__(self, worker: jobq.Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """Return the worker's statistics."""
        stats, health = self._worker.stats(), self._worker.health()
        for name in ("slots", "busy", "prefetched", "stuck", "unrecorded", "listening"):
            yield _gauge(f"jobq_worker_{name}", getattr(stats, name))
        yield _gauge("jobq_worker_leader", stats.is_leader)
        yield _gauge("jobq_worker_alive", health.alive)
        yield _gauge("jobq_worker_ready", health.ready)
        for name, latency in (
            ("fetch_seconds", stats.fetch),
            ("completion_seconds", stats.completion),
            ("loop_lag_seconds", stats.loop_lag),
        ):
            family = _gauge(f"jobq_worker_{name}")
            for quantile, seconds in (("0.5", latency.p50_s), ("0.99", latency.p99_s), ("1", latency.max_s)):
                family.add_metric([quantile], seconds)
            yield family
        for name in ("claimed", "lost_leases", "promoted", "rescued", "removed"):
            yield _counter(f"jobq_worker_{name}_total", getattr(stats, name))
        yield _counter("jobq_worker_heartbeats_total", stats.renewals)
        attempts = _counter("jobq_worker_attempts_total")
        for outcome in _OUTCOMES:
            attempts.add_metric([outcome], getattr(stats, outcome))
        yield attempts


class JobMetrics:
    """A run middleware that measures how long handlers take, by kind, queue and how the run ended.

    ``outcome`` is ``completed``, ``failed``, ``snoozed``, ``cancelled`` or ``stopped`` (told to stop: by
    its time limit, a shutdown or an operator).

    Args:
        registry: where the histogram is registered; the library's own by default.
        buckets: upper bounds in seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        buckets: Sequence[float] = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0),
    ) -> None:
        about = METRICS["jobq_job_duration_seconds"]
        self._seconds = Histogram(
            "jobq_job_duration_seconds", about.text, about.labels, registry=registry, buckets=buckets
        )

    async def __call__(self, job: jobq.Job, args: Any, call_next: jobq.CallNext) -> Any:  # noqa: ARG002
        """Run the job and measure it."""
        started, outcome = time.perf_counter(), "completed"
        try:
            return await call_next()
        except jobq.Snooze:
            outcome = "snoozed"
            raise
        except jobq.Cancel:
            outcome = "cancelled"
            raise
        except Exception:
            outcome = "failed"
            raise
        except BaseException:
            outcome = "stopped"
            raise
        finally:
            self._seconds.labels(job.kind, job.queue, outcome).observe(time.perf_counter() - started)


def metrics_app(
    worker: jobq.Worker,
    database: str | None = None,
    *,
    schema: str = "jobq",
    also: CollectorRegistry | None = REGISTRY,
) -> WSGIApplication:
    """Return a WSGI application that answers with a worker's metrics, for `Worker.serve_http`.

    Args:
        worker: the worker.
        database: a connection string, for the queues' metrics; one connection, made at the first
            scrape. ``None`` for the worker's metrics alone.
        schema: the schema that holds the queue.
        also: what else is served: the library's own registry, with the application's metrics and those
            of the process, by default; ``None`` for nothing.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerCollector(worker))
    if database is not None:
        client = jobq.Client(database, schema=schema, pool_min_size=0, pool_max_size=1)
        registry.register(QueueCollector(client))
    if also is not None:
        registry.register(_Registry(also))
    library: Any = prometheus_client  # its function is only half annotated
    app: WSGIApplication = library.make_wsgi_app(registry)
    return app


class _Registry(Collector):
    """Another registry's metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()


def _gauge(name: str, value: float | None = None) -> GaugeMetricFamily:
    about = METRICS[name]
    return GaugeMetricFamily(name, about.text, value=value, labels=_labels(about, value))


def _counter(name: str, value: float | None = None) -> CounterMetricFamily:
    about = METRICS[name]
    return CounterMetricFamily(name, about.text, value=value, labels=_labels(about, value))


def _labels(about: About, value: float | None) -> tuple[str, ...] | None:
    """Return the labels of a family that gets its samples one by one; one without any has its value."""
    return about.labels if value is None and about.labels else None


def _families(prefix: str) -> dict[str, GaugeMetricFamily]:
    return {name: _gauge(name) for name in METRICS if name.startswith(prefix)}
