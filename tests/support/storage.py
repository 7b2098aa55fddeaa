"""The storage layer in a test's hands: operations, states and dumps, without worker or client."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from jobq._kinds.jobtype import JobColumns, JobRow
from jobq._kinds.options import ResolvedOptions
from jobq._marks import LaneMarks
from jobq._sessions import SyncSession
from jobq._statements.claim import Claimed, claim, refresh
from jobq._statements.duties import Registration, register
from jobq._statements.enqueue import enqueue_many
from jobq._statements.keys import FIRST_KEY, forget_keys, look_at_keys
from jobq._statements.outcomes import Failure, Settlement
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jobq._operation import Call, Operation, Row, Rows
    from jobq._statements.leader import Term
    from jobq._statements.outcomes import Target
    from jobq._types import Enqueued

SCHEMA: Final = "jobq"
TABLES: Final = ("job", "ready", "scheduled", "running", "finished", "attempt_error", "unique_key", "worker")
PLACES: Final = ("ready", "scheduled", "running", "finished")
BOOM: Final = Failure("failed", "ValueError", "boom", "Traceback: boom")


class Place(NamedTuple):
    """Where a job stands, and what its row says there."""

    table: str
    attempt: int
    failures: int
    crashes: int
    worker_id: int | None
    reason: str | None


class Storage:
    """One connection of the kind that a worker has, and shorthands for what tests do with it."""

    def __init__(self, dsn: str, *, plan_settings: bool = True) -> None:
        self.dsn = dsn
        self.session = SyncSession.open(dsn, schema=SCHEMA, name="test", plan_settings=plan_settings)
        self.run = self.session.run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.close()

    @property
    def pid(self) -> int:
        return self.session.connection.info.backend_pid

    def sql(self, text: str, *params: Any) -> list[Row]:
        """Run a statement with psycopg's own placeholders; return its rows, if it has any."""
        cursor = self.session.connection.execute(text.encode(), params or None)
        return cursor.fetchall() if cursor.description else []

    def value(self, text: str, *params: Any) -> Any:
        return self.sql(text, *params)[0][0]

    def call(self, call: Call) -> Rows:
        """Run one statement of an operation, as it is or after a test has changed it."""
        return self.run(_one(call))

    # -- doing -------------------------------------------------------------------------------------

    def worker(self, worker_id: int, *, name: str = "w", lease_s: float = 600.0) -> int:
        self.run(register(SCHEMA, Registration(worker_id, name, "host", 1, "0", ["default"], []), lease_s))
        return worker_id

    def enqueue(self, count: int = 1, **options: Any) -> list[int]:
        """Enqueue jobs of one kind in one statement; ``options`` are those of `job_row`."""
        row = job_row(**options)
        return [made.id for made in self.run(enqueue_rows([row] * count, notify=False))]

    def claim(
        self, worker_id: int, limit: int = 100, *, queue: str = "default", marks: LaneMarks | None = None
    ) -> list[Claimed]:
        ranges = (marks or LaneMarks()).ranges()
        return self.run(claim(SCHEMA, queue, ranges, limit, worker_id))

    def refresh(self, marks: LaneMarks, taken_s: float, *, queue: str = "default") -> bool:
        ranges = marks.ranges()
        return marks.refresh(ranges, self.run(refresh(SCHEMA, queue, ranges, taken_s)))

    def claimed(self, worker_id: int, **options: Any) -> Claimed:
        """Enqueue one job and claim it."""
        [job_id] = self.enqueue(**options)
        [job] = self.claim(worker_id, queue=options.get("queue", "default"))
        assert job.job_id == job_id, "another job was waiting"
        return job

    def end_lease(self, worker_id: int) -> None:
        self.sql(
            "update jobq.worker set ended_at = now(), end_reason = 'lease ended'"
            " where id = %s and ended_at is null",
            worker_id,
        )

    def walk_keys(self, term: Term) -> int:
        """Look at all unique keys, and remove the rows that nothing needs; return how many went."""
        place, removed = FIRST_KEY, 0
        while True:
            stale, place = self.run(look_at_keys(SCHEMA, place))
            removed += self.run(forget_keys(SCHEMA, term, stale))
            if place == FIRST_KEY:
                return removed

    # -- looking -----------------------------------------------------------------------------------

    def places(self) -> dict[int, list[Place]]:
        """Return where every job stands: one place each, if nothing is wrong."""
        found: dict[int, list[Place]] = {job_id: [] for (job_id,) in self.sql("select id from jobq.job")}
        for job_id, *place in self.sql(
            """
            select job_id, 'ready', attempt, failures, crashes, null::bigint, null from jobq.ready
            union all
            select job_id, 'scheduled', attempt, failures, crashes, null, reason from jobq.scheduled
            union all
            select job_id, 'running', attempt, failures, crashes, worker_id, null from jobq.running
            union all
            select job_id, state, attempt, failures, crashes, worker_id, reason from jobq.finished
            """
        ):
            found.setdefault(job_id, []).append(Place(*place))
        return found

    def place(self, job_id: int) -> Place:
        places = self.places()[job_id]
        assert len(places) == 1, f"job {job_id} stands in {places}"
        return places[0]

    def count(self, table: str) -> int:
        count: int = self.value(f"select count(*) from jobq.{table}")
        return count

    def dump(self) -> dict[str, list[str]]:
        """Return every row of every table as text: what is equal before and after did not change."""
        return {
            table: [row for (row,) in self.sql(f"select t::text from jobq.{table} t order by 1")]
            for table in TABLES
        }


def job_row(**options: Any) -> JobRow:
    """Return a job; ``options`` are its kind, its args, and fields of `ResolvedOptions`."""
    defaults: dict[str, Any] = {"kind": "noop", "args": "{}"}
    given = defaults | options
    return JobRow(given.pop("kind"), given.pop("args"), ResolvedOptions(**given))


def enqueue_rows(rows: Sequence[JobRow], *, notify: bool) -> Operation[list[Enqueued]]:
    """Make jobs in one statement."""
    return enqueue_many(SCHEMA, JobColumns.of(rows), notify=notify)


def settlement(
    job: Claimed,
    to: Target,
    reason: str | None = None,
    *,
    delay_s: float = 0.0,
    failure: Failure | None = None,
) -> Settlement:
    """Return what settles one claimed job; one with a failure counts as failed."""
    return Settlement(
        job.job_id, job.attempt, to, reason, delay_s, failed=failure is not None, failure=failure
    )


def hold(operation: Operation[Any]) -> Call:
    """Return the one statement of an operation unsent: a write that its worker is about to make."""
    call = next(operation)
    operation.close()
    return call


def _one(call: Call) -> Operation[Rows]:
    return (yield call)


def is_waiting(watcher: Storage, pid: int, *, event_type: str = "Lock") -> bool:
    """Whether a server process waits for a lock just now."""
    watcher.sql("select pg_stat_clear_snapshot()")  # else a transaction sees one and the same answer
    found = watcher.sql("select wait_event_type from pg_stat_activity where pid = %s", pid)
    return bool(found) and found[0][0] == event_type


@contextlib.contextmanager
def in_background(watcher: Storage, pid: int, work: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run a call that is going to wait for a lock in the server, and enter once it does.

    The list that it gives holds the call's result after the block.
    """
    results: list[Any] = []
    failures: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            failures.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        eventually(lambda: failures or is_waiting(watcher, pid), what="the statement waits for a lock")
        yield results
    finally:
        thread.join(30)
    assert not thread.is_alive(), "the statement still waits"
    if failures:
        raise failures[0]


def join_all(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    """Wait for threads, and fail when one does not end."""
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), f"{thread.name} did not end within {timeout_s:g} s"
