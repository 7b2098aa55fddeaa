"""How exceptions and results are turned into outcomes, whatever their own methods do."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest

import jobq
from jobq._redaction import Redaction, Secrets
from jobq._worker.decide import on_exception
from jobq._worker.describe import MESSAGE_LIMIT, TRACEBACK_LIMIT, describe, frames_of
from jobq._worker.processes import _run
from jobq.testing import make_job
from tests.support.deeds import RAISED, SHARED, OddDelay, SaysOddly, Undescribed, chain, nested, snooze, throw
from tests.support.inprocess import working
from tests.support.odd_objects import OddError, Unshowable, Untyped

if TYPE_CHECKING:
    from collections.abc import Callable

NO_SECRETS: Final = Secrets(Redaction(), list)


def raised(make: Callable[[], BaseException]) -> BaseException:
    """Return an exception that was raised here, so that it has a frame."""
    try:
        throw(make())
    except BaseException as error:  # noqa: BLE001 - of every sort
        return error
    raise AssertionError


def shared() -> BaseException:
    """Return one object that was raised ten thousand times, and has a frame of each."""
    for _ in range(10_000):
        raised(lambda: SHARED)
    return SHARED


@pytest.mark.parametrize(
    "make",
    [
        lambda: ValueError("line\n" * 2_000_000),
        lambda: chain(20_000, "__cause__"),
        lambda: chain(20_000, "__context__"),
        lambda: ExceptionGroup("wide", [ValueError(n) for n in range(20_000)]),
        lambda: nested(20_000),
        shared,
    ],
    ids=["lines", "causes", "contexts", "members", "depth", "frames"],
)
def test_what_is_vast_is_told_by_its_own_last_frames_alone(make: Callable[[], BaseException]) -> None:
    """Written out it takes seconds, in which nothing else on the event loop gets on."""
    failure = describe(raised(make), "failed", NO_SECRETS)
    assert "left out" in failure.traceback
    assert "in raised" in failure.traceback
    assert len(failure.message) <= MESSAGE_LIMIT + 50
    assert len(failure.traceback) <= TRACEBACK_LIMIT + 100


def test_a_thousand_frames_and_ten_causes_are_not_vast() -> None:
    deep = raised(lambda: chain(10, "__cause__"))
    assert describe(deep, "failed", NO_SECRETS).traceback.count("was the direct cause") == 10
    with pytest.raises(RecursionError) as recursion:
        RAISED["no more stack"].do("")
    assert "repeated" in describe(recursion.value, "failed", NO_SECRETS).traceback


def test_a_message_is_kept_by_its_characters_whatever_its_class_says() -> None:
    assert describe(raised(SaysOddly), "failed", NO_SECRETS).message == "said oddly"


def test_an_exception_that_cannot_be_looked_at_keeps_its_own_frames() -> None:
    failure = describe(raised(Undescribed), "failed", NO_SECRETS)
    assert failure.type == "tests.support.deeds.Undescribed"
    assert "in raised" in failure.traceback
    assert "raised OddError" in failure.traceback
    assert "in raised" in frames_of(raised(Undescribed))


def test_a_cancel_whose_reason_cannot_be_shown_is_a_cancel_all_the_same() -> None:
    signal = jobq.Cancel()
    signal.reason = Unshowable()  # type: ignore[assignment]
    decided = on_exception(make_job(), signal, jobq.ConstantBackoff(timedelta(0)), NO_SECRETS)
    assert (decided.to, decided.reason) == ("cancelled", "<its __str__ raised OddError>")


@pytest.mark.parametrize(
    ("delay", "seconds"),
    [
        (OddDelay(hours=1), 3600.0),
        (timedelta.max, 36_525 * 86_400.0),
        (timedelta(hours=-1), 0.0),
    ],
)
def test_a_wait_is_one_that_can_be_stored_whatever_its_class_says(delay: timedelta, seconds: float) -> None:
    decided = on_exception(make_job(), snooze(delay), jobq.ConstantBackoff(timedelta(0)), NO_SECRETS)
    assert (decided.to, decided.reason, decided.delay_s) == ("scheduled", "snooze", seconds)


def test_in_a_process_what_cannot_be_decided_is_a_failure_of_its_job_and_not_the_processs_end() -> None:
    @jobq.Jobs().handler("k")
    def k(job: jobq.Job, args: None) -> None:
        raise snooze(None)

    decided = _run(k, make_job(max_attempts=1), None)
    assert isinstance(decided, tuple)
    assert getattr(decided, "failure").type == "jobq.Undecidable"  # noqa: B009 - of a union


async def test_a_result_that_is_not_kept_is_not_looked_at(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("k", max_attempts=1)
    async def k(job: jobq.Job, args: None) -> Any:
        return Untyped()

    async with working(dsn, jobs) as bench:
        made = await bench.client.enqueue(k)
        assert (await bench.ended(made.id))["state"] == "completed"


def test_a_policy_that_raises_anything_is_answered_for_by_the_default() -> None:
    def interrupts(failures: int) -> timedelta:
        raise KeyboardInterrupt

    kind = jobq.JobType("k", None, backoff=interrupts)
    assert timedelta(0) < kind.backoff(1) < timedelta(seconds=2)


def test_an_error_that_cannot_say_anything_is_told_by_its_class() -> None:
    def hook(document: dict[str, Any]) -> dict[str, Any]:
        raise OddError

    kind = jobq.JobType("k", dict, upgrade=hook)
    with pytest.raises(jobq.ArgumentsDecodeError, match=r"^arguments of kind 'k': OddError$"):
        kind.decode("{}")
