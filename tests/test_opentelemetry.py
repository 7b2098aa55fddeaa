"""The OpenTelemetry integration against the real SDK, with its in-memory exporters."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import jobq
from jobq.integrations.opentelemetry import META_KEY, OpenTelemetry
from jobq.testing import make_job
from tests.support.inprocess import working
from tests.support.observed import MODES, fresh_jobs
from tests.support.polling import eventually_async

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan


class Lab:
    """Telemetry whose spans and metrics stay here."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])
        self.telemetry = OpenTelemetry(tracer_provider=self.tracers, meter_provider=self.meters)

    def close(self) -> None:
        self.tracers.shutdown()
        self.meters.shutdown()

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        [span] = self.spans(name)
        return span

    def metric(self, name: str) -> list[tuple[dict[str, Any], float]]:
        """Return each attribute set of a metric with its value, or its count."""
        data = self._reader.get_metrics_data()
        assert data is not None
        return [
            (dict(point.attributes or {}), float(getattr(point, "value", getattr(point, "count", 0))))
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.close()


def ids(span: ReadableSpan) -> tuple[int, int]:
    found = span.get_span_context()
    assert found is not None
    return found.trace_id, found.span_id


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


SEND = {"messaging.system": "jobq", "messaging.operation.name": "send", "messaging.operation.type": "send"}


# -- clients -----------------------------------------------------------------------------------------


def test_an_enqueue_is_a_send_span_whose_context_travels(dsn: str, lab: Lab) -> None:
    with jobq.Client(dsn, meta={"from": "client"}) as client:
        assert lab.telemetry.instrument_client(client) is client
        lab.telemetry.instrument_client(client)
        made = client.enqueue("k", {}, queue="mail")
        span = lab.span("send mail")
        assert span.kind is SpanKind.PRODUCER
        assert attributes(span) == SEND | {
            "messaging.destination.name": "mail",
            "messaging.message.id": str(made.id),
        }
        meta: Any = client.get(made.id).meta
    trace_id, span_id = ids(span)
    assert meta.keys() == {"from", META_KEY}
    assert meta[META_KEY]["traceparent"].startswith(f"00-{trace_id:032x}-{span_id:016x}-")


async def test_an_async_bulk_enqueue_is_one(dsn: str, lab: Lab) -> None:
    async with jobq.AsyncClient(dsn, queue="bulk") as client:
        lab.telemetry.instrument_client(client)
        with lab.tracers.get_tracer("app").start_as_current_span("request") as request:
            await client.enqueue_many([jobq.NewJob("k", {"n": n}) for n in range(3)])
        await client.enqueue_many([jobq.NewJob("k", {}), jobq.NewJob("k", {}, queue="other")])
    span = lab.span("send bulk")
    assert attributes(span)["messaging.batch.message_count"] == 3
    assert span.parent is not None
    assert span.parent.span_id == request.get_span_context().span_id
    assert "messaging.destination.name" not in attributes(lab.span("send"))
    sent = {
        labels.get("messaging.destination.name"): n
        for labels, n in lab.metric("messaging.client.sent.messages")
    }
    assert sent == {"bulk": 3, None: 2}
    assert len(lab.metric("messaging.client.operation.duration")) == 2


async def test_in_a_callers_transaction_it_is_one_too(dsn: str, lab: Lab) -> None:
    async with jobq.AsyncClient(dsn) as client:
        lab.telemetry.instrument_client(client)
        async with client.pool.connection() as connection:
            await client.enqueue("k", {}, tx=connection)
    assert lab.span("send default").kind is SpanKind.PRODUCER


def test_an_enqueue_that_fails_is_an_error_of_its_span(dsn: str, lab: Lab) -> None:
    with jobq.Client(dsn) as client:
        lab.telemetry.instrument_client(client)
        with pytest.raises(jobq.ConfigError):
            client.enqueue("k", {}, priority=99)
    span = lab.span("send default")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "jobq._errors.ConfigError"
    assert lab.metric("messaging.client.sent.messages") == []
    [(labels, count)] = lab.metric("messaging.client.operation.duration")
    assert (labels["error.type"], count) == ("jobq._errors.ConfigError", 1)


# -- workers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_job_is_one_trace_from_its_enqueue_to_its_run(dsn: str, lab: Lab, mode: str) -> None:
    jobs = fresh_jobs()
    assert lab.telemetry.instrument_jobs(jobs) is jobs
    lab.telemetry.instrument_jobs(jobs)
    async with working(dsn, jobs) as bench:
        lab.telemetry.instrument_client(bench.client)
        made = await bench.client.enqueue(mode, {"do": "x"})
        await bench.ended(made.id)
        await eventually_async(lambda: lab.spans("settle"))
    send, receive = lab.span("send default"), lab.span("receive default")
    process, settle = lab.span("process default"), lab.span("settle")
    assert process.parent is not None
    assert (process.parent.trace_id, process.parent.span_id) == ids(send)
    assert linked(process) == []
    assert (process.kind, receive.kind, settle.kind) == (SpanKind.CONSUMER, SpanKind.CLIENT, SpanKind.CLIENT)
    assert attributes(process) == {
        "messaging.system": "jobq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "default",
        "messaging.message.id": str(made.id),
        "jobq.kind": mode,
        "jobq.attempt": 1,
    }
    assert linked(receive) == [ids(send)]
    assert linked(settle) == [ids(process)]
    for span, operation in ((receive, "receive"), (settle, "settle")):
        assert attributes(span)["messaging.operation.type"] == operation
        assert attributes(span)["messaging.batch.message_count"] == 1
        assert span.parent is None
        assert 0 < (span.end_time or 0) - (span.start_time or 0) < 10e9
    assert [count for _, count in lab.metric("messaging.client.consumed.messages")] == [1]
    assert [count for _, count in lab.metric("messaging.process.duration")] == [1]


@pytest.mark.parametrize("mode", MODES)
async def test_failures_are_errors_and_signals_are_not(dsn: str, lab: Lab, mode: str) -> None:
    jobs = lab.telemetry.instrument_jobs(fresh_jobs())
    async with working(dsn, jobs) as bench:
        for do in ("fail", "permanent", "snooze", "cancel"):
            await bench.client.enqueue(mode, {"do": do})
        await eventually_async(lambda: len(lab.spans("process default")) == 4, 20.0)
    found = sorted(
        (
            span.status.status_code.name,
            attributes(span).get("error.type", attributes(span).get("jobq.outcome")),
        )
        for span in lab.spans("process default")
    )
    assert found == [
        ("ERROR", "ValueError"),
        ("ERROR", "jobq._errors.Permanent"),
        ("UNSET", "cancelled"),
        ("UNSET", "snoozed"),
    ]


async def test_a_retry_begins_a_trace_of_its_own_with_a_link_to_the_enqueue(dsn: str, lab: Lab) -> None:
    jobs = jobq.Jobs()
    seen: list[object] = []

    @jobs.handler("twice", backoff=jobq.ConstantBackoff(timedelta(milliseconds=10)))
    async def twice(job: jobq.Job, args: dict[str, Any]) -> None:
        seen.append(baggage.get_baggage("tenant"))
        if job.attempt == 1:
            raise ValueError("once")

    lab.telemetry.instrument_jobs(jobs)
    async with working(dsn, jobs) as bench:
        lab.telemetry.instrument_client(bench.client)
        token = context.attach(baggage.set_baggage("tenant", "acme"))
        try:
            made = await bench.client.enqueue("twice", {})
        finally:
            context.detach(token)
        await bench.ended(made.id)
    send = lab.span("send default")
    first, second = lab.spans("process default")
    assert first.parent is not None
    assert second.parent is None
    assert ids(second)[0] != ids(send)[0]
    assert (linked(first), linked(second)) == ([], [ids(send)])
    assert attributes(second)["jobq.attempt"] == 2
    assert seen == ["acme", "acme"]


async def test_jobs_without_a_context_run_as_traces_of_their_own(dsn: str, lab: Lab) -> None:
    jobs = lab.telemetry.instrument_jobs(fresh_jobs())
    async with working(dsn, jobs) as bench:
        await bench.ended((await bench.client.enqueue("async", {}, meta={META_KEY: "nonsense"})).id)
        await bench.ended((await bench.client.enqueue("async", {})).id)
    assert [span.parent for span in lab.spans("process default")] == [None, None]
    assert [linked(span) for span in lab.spans("receive default")] == [[], []]


async def test_a_handlers_own_spans_are_children_of_its_run(dsn: str, lab: Lab) -> None:
    jobs = jobq.Jobs()
    tracer = lab.tracers.get_tracer("app")

    @jobs.handler("thread")
    def in_thread(job: jobq.Job, args: dict[str, Any]) -> None:
        with tracer.start_as_current_span("query"):
            pass

    lab.telemetry.instrument_jobs(jobs)
    async with working(dsn, jobs) as bench:
        await bench.ended((await bench.client.enqueue("thread", {})).id)
    query, process = lab.span("query"), lab.span("process default")
    assert query.parent is not None
    assert (query.parent.trace_id, query.parent.span_id) == ids(process)


def test_runs_that_are_never_recorded_are_forgotten(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobq.integrations import opentelemetry

    monkeypatch.setattr(opentelemetry, "_MOST_REMEMBERED", 10)
    runs = lab.telemetry._runs
    for number in range(20):
        with lab.tracers.get_tracer("t").start_as_current_span("s") as span:
            runs.add(make_job(id=number), span.get_span_context())
    assert len(runs._spans) == 10
    assert runs.pop(0, 1) is None
    assert runs.pop(19, 1) is not None
