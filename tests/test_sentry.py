"""The Sentry integration against the real SDK, with a transport that keeps what it gets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import sentry_sdk
from sentry_sdk.transport import Transport

import jobq
from jobq.integrations.sentry import SentryMiddleware
from tests.support.inprocess import working
from tests.support.observed import MODES, fresh_jobs
from tests.support.polling import eventually_async

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sentry_sdk.envelope import Envelope


class Kept(Transport):
    """Keeps events instead of sending them."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        event: Any = envelope.get_event()
        if event is not None:
            self.events.append(event)


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    # not its own logging integration: jobq's error lines would be events, too
    sentry_sdk.init(dsn="http://key@localhost/1", transport=kept, default_integrations=False)
    yield kept
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)


@pytest.mark.parametrize("mode", MODES)
async def test_a_failure_is_an_event_with_its_job(dsn: str, kept: Kept, mode: str) -> None:
    jobs = fresh_jobs()
    jobs.use(SentryMiddleware())
    async with working(dsn, jobs) as bench:
        made = await bench.client.enqueue(mode, {"do": "fail", "secret": "42"}, tags=["a"])
        await bench.waits(made.id, "retry")
    [event] = kept.events
    assert event["tags"] == {"jobq.kind": mode, "jobq.queue": "default", "jobq.attempt": "1"}
    assert event["transaction"] == f"jobq {mode}"
    about = event["contexts"]["job"]
    assert (about["id"], about["kind"], about["failures"], about["tags"]) == (made.id, mode, 0, ["a"])
    [exception] = event["exception"]["values"][-1:]
    assert "the handler fails" in exception["value"]
    assert exception["type"] == ("ProcessFailure" if mode == "process" else "ValueError")
    if mode == "process":
        assert "in behave" in event["contexts"]["process"]["traceback"]


async def test_signals_are_no_events_but_a_permanent_failure_is(dsn: str, kept: Kept) -> None:
    jobs = fresh_jobs()
    jobs.use(SentryMiddleware())
    async with working(dsn, jobs) as bench:
        for do in ("x", "snooze", "cancel", "permanent"):
            await bench.client.enqueue("async", {"do": do})
        await eventually_async(lambda: bench.worker.stats().discarded == 1)
        await eventually_async(
            lambda: sum((bench.worker.stats().cancelled, bench.worker.stats().snoozed)) == 2
        )
    assert [event["exception"]["values"][-1]["type"] for event in kept.events] == ["Permanent"]


async def test_only_the_last_failure_may_be_reported(dsn: str, kept: Kept) -> None:
    jobs = fresh_jobs()
    jobs.use(SentryMiddleware(report="last"))
    async with working(dsn, jobs) as bench:
        await bench.waits((await bench.client.enqueue("async", {"do": "fail"})).id, "retry")
        assert kept.events == []
        await bench.ended((await bench.client.enqueue("async", {"do": "fail"}, max_attempts=1)).id)
        await bench.ended((await bench.client.enqueue("async", {"do": "permanent"})).id)
    assert len(kept.events) == 2


async def test_what_a_handler_reports_itself_has_the_job_and_nothing_of_others(dsn: str, kept: Kept) -> None:
    jobs = jobq.Jobs()
    jobs.use(SentryMiddleware())

    @jobs.handler("reports")
    def reports(job: jobq.Job, args: dict[str, Any]) -> None:
        sentry_sdk.add_breadcrumb(message=f"crumb of {job.id}")
        sentry_sdk.capture_message(f"from {job.id}")

    async with working(dsn, jobs) as bench:
        ids = [(await bench.client.enqueue("reports", {})).id for _ in range(3)]
        for job_id in ids:
            await bench.ended(job_id)
    sentry_sdk.capture_message("outside")
    by_message = {event["message"]: event for event in kept.events}
    for job_id in ids:
        event = by_message[f"from {job_id}"]
        assert event["contexts"]["job"]["id"] == job_id
        assert [crumb["message"] for crumb in event["breadcrumbs"]["values"]] == [f"crumb of {job_id}"]
    assert "job" not in by_message["outside"].get("contexts", {})


def test_a_wrong_option_is_named() -> None:
    wrong: Any = "first"
    with pytest.raises(jobq.ConfigError, match="report='first'"):
        SentryMiddleware(report=wrong)


def test_the_example_is_short_enough_to_be_one() -> None:
    import inspect

    assert len(inspect.getsource(SentryMiddleware).splitlines()) <= 50
    assert logging.getLogger("jobq").propagate
