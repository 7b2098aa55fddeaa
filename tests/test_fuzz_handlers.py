"""Whatever handlers raise or return: it is kept, escaped and cut where it must be, and hurts no sibling.

Batches go through a real worker, in all three modes at once, odd jobs mixed with plain ones. The
plain ones have to complete at their first attempt.
"""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jobq
from jobq._json.encode import encode
from jobq._limits import MAX_RESULT_BYTES
from jobq._worker.describe import MESSAGE_LIMIT, TRACEBACK_LIMIT, storable
from tests.support.deeds import DEEDS, HANDLERS, KEPT, Deed, Work, jobs
from tests.support.odd import fuzz, texts
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


pytestmark = [pytest.mark.fuzz, pytest.mark.slow]

ESCAPES: Final = 6  # characters that one may become: \ud800
# What is kept where the error itself could not be.
MISHAPS: Final = {"jobq.ProcessDied", "jobq.DatabaseError", "jobq.Undecidable"}


class RunningWorker:
    """A worker in a thread of its own, with a loop of its own.

    Args:
        dsn: the database.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: jobq.Worker | None = None
        self.report: jobq.WorkerReport | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        config = jobq.WorkerConfig(queues={"default": 6}, poll=timedelta(milliseconds=50), prefetch=0)
        async with jobq.AsyncClient(self._dsn) as client:
            self._worker = jobq.Worker(client, jobs, config)
            self._loop = asyncio.get_running_loop()
            self._started.set()
            self.report = await self._worker.run(handle_signals=False)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._worker is not None
        asyncio.run_coroutine_threadsafe(self._worker.stop(), self._loop).result(60)
        self._thread.join(60)

    def stats(self) -> jobq.WorkerStats:
        assert self._worker is not None
        return self._worker.stats()


@pytest.fixture(scope="module")
def worker(address: str) -> Iterator[RunningWorker]:
    with RunningWorker(address) as running:
        yield running
    assert running.report is not None
    assert (running.report.unrecorded, running.report.left_running) == (0, ())


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[jobq.Client]:
    with jobq.Client(address) as client:
        yield client


odd_jobs = st.tuples(
    st.integers(0, len(HANDLERS) - 1).map(HANDLERS.__getitem__), st.sampled_from(sorted(DEEDS)), texts
)


def new(handler: jobq.Handler[Work, Any], do: str = "", text: str = "") -> jobq.NewJob:
    return jobq.NewJob(handler, Work(do, tuple(map(ord, text))))


def run(client: jobq.Client, batch: Sequence[jobq.NewJob]) -> list[jobq.JobInfo]:
    """Have jobs run; return them when each has been run once."""
    ids = [made.id for made in client.enqueue_many(batch)]

    def all_ran() -> bool:
        with client.pool.connection() as connection:
            row = connection.execute(
                "select count(*) from jobq.jobs where id = any (%s)"
                " and (finished_at is not null or reason in ('snooze', 'retry'))",
                [ids],
            ).fetchone()
        return row == (len(ids),)

    eventually(all_ran, 60.0, what=f"jobs {ids[0]} to {ids[-1]} ran once")
    return [client.get(job_id) for job_id in ids]


@fuzz(6)
@given(odd=st.lists(odd_jobs, min_size=1, max_size=12), place=st.integers(0, 12))
def test_whatever_handlers_do_is_kept_and_their_plain_siblings_complete_at_once(
    client: jobq.Client, worker: RunningWorker, odd: list[tuple[Any, str, str]], place: int
) -> None:
    odd_ones, plain = [new(*one) for one in odd], [new(handler) for handler in HANDLERS]
    found = run(client, [*odd_ones[:place], *plain, *odd_ones[place:]])
    siblings = found[min(place, len(odd)) : min(place, len(odd)) + len(plain)]
    for sibling in siblings:
        assert (sibling.state, sibling.attempt, sibling.crashes) == (jobq.JobState.COMPLETED, 1, 0)
        assert client.errors(sibling.id) == []
    others = [info for info in found if info not in siblings]
    for (handler, do, text), info in zip(odd, others, strict=True):
        assert_kept(client, handler, DEEDS[do], text, info)
    assert worker.stats().lost_leases == 0


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: str(handler.kind))
def test_every_deed_is_kept(
    client: jobq.Client, worker: RunningWorker, handler: jobq.Handler[Work, Any]
) -> None:
    text = "nul \0, half \ud800, esc \x1b[31m, quotes \"'\\{},"
    found = run(client, [new(handler, do, text) for do in DEEDS])
    for deed, info in zip(DEEDS.values(), found, strict=True):
        assert_kept(client, handler, deed, text, info)


def assert_kept(
    client: jobq.Client, handler: jobq.Handler[Work, Any], deed: Deed, text: str, info: jobq.JobInfo
) -> None:
    """Check what became of an odd job against what had to."""
    errors = client.errors(info.id)
    assert (info.attempt, info.crashes) == (1, 0)
    if deed.ending == "snoozed":
        assert (info.state, info.reason, errors) == (jobq.JobState.SCHEDULED, "snooze", [])
    elif deed.ending == "cancelled":
        assert (info.state, errors) == (jobq.JobState.CANCELLED, [])
        assert info.reason is not None
    elif deed.ending == "returned" and (
        handler not in KEPT or (expected := result_of(deed, text)) is not None
    ):
        assert (info.state, errors) == (jobq.JobState.COMPLETED, [])
        if handler in KEPT:
            assert_result(client, info.id, expected)
    else:
        assert info.state is jobq.JobState.DISCARDED
        [error] = errors
        assert_readable(error)
        assert error.type == deed.type if deed.type else error.type not in MISHAPS
        assert error.outcome == ("permanent" if deed.ending == "permanent" else "failed")
        if deed.ending == "returned":
            assert error.type == "jobq._errors.ArgumentsEncodeError"
            assert error.message.startswith("result")
        assert not deed.keeps_text or error.message == storable(text, MESSAGE_LIMIT)


def assert_readable(error: jobq.AttemptError) -> None:
    """Check that an error says something, within bounds."""
    assert error.type
    assert len(error.message) <= ESCAPES * (MESSAGE_LIMIT + 50)
    assert len(error.traceback) <= ESCAPES * (TRACEBACK_LIMIT + 100)


def result_of(deed: Deed, text: str) -> str | None:
    """Return the document that a result becomes, ``None`` where there is none."""
    try:
        return encode(deed.do(text), max_bytes=MAX_RESULT_BYTES)
    except jobq.ArgumentsEncodeError:
        return None


def assert_result(client: jobq.Client, job_id: int, expected: str | None) -> None:
    with client.pool.connection() as connection:
        query = "select result = %s::text::jsonb from jobq.finished where job_id = %s"
        assert connection.execute(query, [expected, job_id]).fetchone() == (True,)
