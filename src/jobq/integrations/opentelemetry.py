"""Spans and metrics by OpenTelemetry's conventions for messaging.

Needs ``opentelemetry-api``, and an SDK to send them somewhere (``pip install 'jobq[opentelemetry]'
opentelemetry-sdk``)::

    telemetry = OpenTelemetry()
    client = telemetry.instrument_client(jobq.AsyncClient(dsn))
    telemetry.instrument_jobs(jobs)

An enqueue is a *send* span, whose context travels in the job's meta, under the key ``otel``. A claim is
a *receive* span, linked to what sent its jobs; each run is a *process* span; the recording of outcomes
is a *settle* span, linked to the runs. The first attempt continues the trace of its enqueue. A retry,
which may come days later, begins a trace of its own that links to it.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakSet

from opentelemetry import context, metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode

import jobq

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["META_KEY", "OpenTelemetry"]

META_KEY: Final = "otel"
"""Where the context travels in a job's meta."""

_NAME: Final = "jobq"
_MOST_LINKS: Final = 128  # of one span; what SDKs keep by default
_MOST_REMEMBERED: Final = 20_000  # runs whose outcome is not recorded yet
# Advised by the conventions, in seconds.
_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 60, 300, 1800)

C = TypeVar("C", jobq.AsyncClient, jobq.Client)
_sending: ContextVar[_Sending | None] = ContextVar("jobq_otel_sending", default=None)


class OpenTelemetry:
    """Makes the spans and metrics of clients and workers.

    Args:
        tracer_provider, meter_provider: the global ones by default.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer(_NAME, jobq.__version__, tracer_provider)
        meter = metrics.get_meter(_NAME, jobq.__version__, meter_provider)
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Jobs enqueued.")
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Jobs claimed by a worker."
        )
        self._operation = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "How long enqueues, claims and the recording of outcomes took.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )
        self._process = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "How long handlers ran.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )
        self._runs = _Runs()
        self._instrumented: WeakSet[object] = WeakSet()

    # Clients

    def instrument_client(self, client: C) -> C:
        """Have a client's enqueues be send spans whose context travels with the jobs.

        Args:
            client: either client; done twice, it is done once.

        Returns:
            The same.
        """
        if client not in self._instrumented:
            self._instrumented.add(client)
            client.use(_inject)
            is_async = inspect.iscoroutinefunction(client.enqueue)
            wrap = self._wrap_async if is_async else self._wrap_sync
            for name in ("enqueue", "enqueue_many"):
                setattr(client, name, wrap(getattr(client, name)))
        return client

    def _wrap_async(self, call: Any) -> Any:
        async def sending(*args: Any, **kwargs: Any) -> Any:
            with self._send() as span:
                return span.note(await call(*args, **kwargs))

        return sending

    def _wrap_sync(self, call: Any) -> Any:
        def sending(*args: Any, **kwargs: Any) -> Any:
            with self._send() as span:
                return span.note(call(*args, **kwargs))

        return sending

    @contextmanager
    def _send(self) -> Generator[_Sending]:
        started = time.perf_counter()
        attributes = _attributes("send", "send")
        with self._tracer.start_as_current_span(
            "send", kind=SpanKind.PRODUCER, attributes=attributes
        ) as span:
            sending = _Sending(span)
            token = _sending.set(sending)
            try:
                yield sending
            except BaseException as error:
                attributes["error.type"] = _type_of(error)
                span.set_attribute("error.type", attributes["error.type"])
                raise
            finally:
                _sending.reset(token)
                attributes |= sending.finish()
                self._operation.record(time.perf_counter() - started, attributes)
        self._sent.add(sending.count, attributes)

    # Workers

    def instrument_jobs(self, jobs: jobq.Jobs) -> jobq.Jobs:
        """Have the workers of a `Jobs` make receive, process and settle spans.

        Args:
            jobs: the outermost one; what it includes is part of it. Done twice, it is done once.

        Returns:
            The same.
        """
        if jobs not in self._instrumented:
            self._instrumented.add(jobs)
            jobs.use(self._run)
            jobs.observe(self)
        return jobs

    async def _run(self, job: jobq.Job, args: Any, call_next: jobq.CallNext) -> Any:  # noqa: ARG002
        origin, links = _origin(job)
        token = context.attach(origin)  # not as the span's parent alone: the baggage comes along
        try:
            return await self._run_in_span(job, links, call_next)
        finally:
            context.detach(token)

    async def _run_in_span(self, job: jobq.Job, links: Sequence[Link], call_next: jobq.CallNext) -> Any:
        started = time.perf_counter()
        attributes = _attributes("process", "process", job.queue)
        with self._tracer.start_as_current_span(
            f"process {job.queue}",
            kind=SpanKind.CONSUMER,
            links=links,
            attributes=attributes
            | {"messaging.message.id": str(job.id), "jobq.kind": job.kind, "jobq.attempt": job.attempt},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            self._runs.add(job, span.get_span_context())
            try:
                return await call_next()
            except BaseException as error:
                _note_end(span, error, attributes)
                raise
            finally:
                self._process.record(time.perf_counter() - started, attributes)

    def claimed(self, queue: str, jobs: Sequence[jobq.Job], took_s: float) -> None:
        """Make the receive span of a claim."""
        attributes = _attributes("receive", "receive", queue)
        origins = (trace.get_current_span(_context_of(job)).get_span_context() for job in jobs)
        self._span_of_the_past(f"receive {queue}", origins, attributes, len(jobs), took_s)
        self._consumed.add(len(jobs), attributes)

    def settled(self, outcomes: Sequence[jobq.Settled], took_s: float) -> None:
        """Make the settle span of outcomes that were recorded together."""
        runs = (self._runs.pop(one.job_id, one.attempt) for one in outcomes)
        attributes = _attributes("settle", "settle")
        self._span_of_the_past("settle", runs, attributes, len(outcomes), took_s)

    def _span_of_the_past(
        self,
        name: str,
        origins: Iterable[SpanContext | None],
        attributes: Mapping[str, Any],
        count: int,
        took_s: float,
    ) -> None:
        links = [Link(origin) for origin in origins if origin is not None and origin.is_valid]
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            name,
            context=Context(),
            kind=SpanKind.CLIENT,
            links=links[:_MOST_LINKS],
            attributes={**attributes, "messaging.batch.message_count": count},
            start_time=ended_ns - int(took_s * 1e9),
        )
        span.end(ended_ns)
        self._operation.record(took_s, attributes)


class _Sending:
    """An enqueue under way: what its jobs turn out to be."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._is_bulk = False
        self.queues: set[str] = set()
        self.count = 0

    def note(self, made: Any) -> Any:
        """Take in what the enqueue returned, one or a list, and return it."""
        if isinstance(made, jobq.Enqueued):
            self.count = 1
            self._span.set_attribute("messaging.message.id", str(made.id))
        else:
            self.count = len(made)
            self._span.set_attribute("messaging.batch.message_count", self.count)
        return made

    def finish(self) -> dict[str, Any]:
        """Name the span for its queue, if it is one; return that for the metrics."""
        if len(self.queues) != 1:
            return {}
        (queue,) = self.queues
        self._span.update_name(f"send {queue}")
        self._span.set_attribute("messaging.destination.name", queue)
        return {"messaging.destination.name": queue}


class _Runs:
    """The spans of runs whose outcomes are not recorded yet; no more than could be."""

    def __init__(self) -> None:
        self._spans: OrderedDict[tuple[int, int], SpanContext] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, job: jobq.Job, span: SpanContext) -> None:
        with self._lock:
            self._spans[job.id, job.attempt] = span
            if len(self._spans) > _MOST_REMEMBERED:
                self._spans.popitem(last=False)

    def pop(self, job_id: int, attempt: int) -> SpanContext | None:
        with self._lock:
            return self._spans.pop((job_id, attempt), None)


def _inject(job: jobq.NewJob) -> jobq.NewJob:
    """Be the enqueue middleware: have the current context travel with the job."""
    sending = _sending.get()
    if sending is not None:
        sending.queues.add(job.options.get("queue", "default"))
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    if not carrier:
        return job
    return job.replace(meta={**(job.options.get("meta") or {}), META_KEY: carrier})


def _context_of(job: jobq.Job) -> Context:
    """Return the context that a job's enqueue ran in; an empty one if none came along."""
    carrier: Any = job.meta.get(META_KEY)
    return propagate.extract(carrier if isinstance(carrier, dict) else {}, Context())  # pyright: ignore[reportUnknownArgumentType]


def _origin(job: jobq.Job) -> tuple[Context, list[Link]]:
    """Return what a run's span begins in, and what it links to."""
    origin = _context_of(job)
    sent = trace.get_current_span(origin).get_span_context()
    if job.attempt == 1 or not sent.is_valid:
        return origin, []
    # The baggage stays, the parent does not.
    return trace.set_span_in_context(trace.INVALID_SPAN, origin), [Link(sent)]


def _note_end(span: Span, error: BaseException, attributes: dict[str, Any]) -> None:
    """Tell how a run ended that did not return: a snooze or a cancel is no error."""
    if isinstance(error, jobq.Snooze | jobq.Cancel):
        span.set_attribute("jobq.outcome", "snoozed" if isinstance(error, jobq.Snooze) else "cancelled")
        return
    attributes["error.type"] = _type_of(error)
    span.set_attribute("error.type", attributes["error.type"])
    span.set_status(Status(StatusCode.ERROR, str(error)[:500]))
    span.record_exception(error)


def _type_of(error: BaseException) -> str:
    if isinstance(error, jobq.ProcessFailure):
        return error.type
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _attributes(name: str, type: str, queue: str | None = None) -> dict[str, Any]:
    found = {"messaging.system": _NAME, "messaging.operation.name": name, "messaging.operation.type": type}
    return found if queue is None else {**found, "messaging.destination.name": queue}
