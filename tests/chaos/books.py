"""The books that producers and handlers keep: notes about each job, or counts where there are too many."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Protocol

from tests.chaos import ledger, notes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jobq


class ProducerBook(Protocol):
    """What a producer tells of."""

    def intend(self, jobs: Sequence[jobq.NewJob]) -> None:
        """These are about to be made."""
        ...

    def made(self, jobs: Sequence[jobq.NewJob], told: Sequence[jobq.Enqueued]) -> None:
        """This is what it was told of them."""
        ...

    def rolled_back(self, jobs: Sequence[jobq.NewJob]) -> None:
        """Their transaction was rolled back, or broke before its commit was sent."""
        ...

    def failed(self, error: Exception) -> None:
        """A call failed."""
        ...


class HandlerBook(Protocol):
    """What handlers tell of; a `jobq.WorkerObserver` as well."""

    def start(self, job: jobq.Job, args: dict[str, Any]) -> None:
        """A handler begins."""
        ...

    def end(self, job: jobq.Job, how: str) -> None:
        """It has returned, raised or was told to stop."""
        ...

    def claimed(self, queue: str, jobs: Sequence[jobq.Job], took_s: float, /) -> None:
        """Jobs were claimed."""
        ...

    def settled(self, outcomes: Sequence[jobq.Settled], took_s: float, /) -> None:
        """Outcomes were recorded."""
        ...


class ProducerNotes:
    """A line for each call before it, and for what came of it."""

    def __init__(self, path: str) -> None:
        self._journal = notes.Journal(path)

    def intend(self, jobs: Sequence[jobq.NewJob]) -> None:
        self._journal.note(notes.INTENT, jobs=[[token_of(job), _key_of(job)] for job in jobs])

    def made(self, jobs: Sequence[jobq.NewJob], told: Sequence[jobq.Enqueued]) -> None:
        pairs = zip(jobs, told, strict=True)
        self._journal.note(
            notes.ACKNOWLEDGED, jobs=[[token_of(job), one.id, _answer_of(one)] for job, one in pairs]
        )

    def rolled_back(self, jobs: Sequence[jobq.NewJob]) -> None:
        self._journal.note(notes.ROLLED_BACK, jobs=[token_of(job) for job in jobs])

    def failed(self, error: Exception) -> None:
        self._journal.note(notes.FAILED, error=type(error).__name__, text=str(error)[:200])


class HandlerNotes:
    """A line for each start and end, and for what is recorded of the jobs that have told of their start."""

    def __init__(self, path: str) -> None:
        self._journal = notes.Journal(path)
        self._begun: set[int] = set()

    def start(self, job: jobq.Job, args: dict[str, Any]) -> None:
        self._begun.add(job.id)
        self._journal.note(notes.START, token=args["token"], **_fence(job))

    def end(self, job: jobq.Job, how: str) -> None:
        self._journal.note(notes.END, how=how, **_fence(job))

    def claimed(self, queue: str, jobs: Sequence[jobq.Job], took_s: float, /) -> None:
        """Note nothing: what was claimed need not start."""

    def settled(self, outcomes: Sequence[jobq.Settled], took_s: float, /) -> None:
        ended = [one for one in outcomes if one.outcome == "completed"]
        jobs = [[one.job_id, one.attempt] for one in ended if one.job_id in self._begun]
        if jobs:
            self._journal.note(notes.RECORDED, jobs=jobs)


class ProducerLedger:
    """Counts what was made."""

    def __init__(self, path: str) -> None:
        self._ledger = ledger.Ledger(path)

    def intend(self, jobs: Sequence[jobq.NewJob]) -> None:
        """Count nothing: without faults each call is answered."""

    def made(self, jobs: Sequence[jobq.NewJob], told: Sequence[jobq.Enqueued]) -> None:
        self._ledger.add(ledger.MADE, [one.id for one in told if one.inserted])
        self._ledger.add(ledger.REPLACED, [one.id for one in told if one.replaced])
        self._ledger.add(ledger.HELD, [one.id for one in told if not (one.inserted or one.replaced)])

    def rolled_back(self, jobs: Sequence[jobq.NewJob]) -> None:
        self._ledger.add(ledger.ROLLED_BACK, [0] * len(jobs))

    def failed(self, error: Exception) -> None:
        print(f"refused: {type(error).__name__}: {error}", flush=True)  # noqa: T201 - for the test's reader
        self._ledger.add(ledger.REFUSED, [0])


class HandlerLedger:
    """Counts starts and how they ended, and how long first starts took from the call that made the job.

    It reads the clock that the producers read, which is on the same machine.
    """

    def __init__(self, path: str) -> None:
        self._ledger = ledger.Ledger(path)

    def start(self, job: jobq.Job, args: dict[str, Any]) -> None:
        self._ledger.add(ledger.STARTED, [job.id])
        if job.attempt == 1 and args["at"] is not None:
            self._ledger.note_pickup(time.time() - args["at"])

    def end(self, job: jobq.Job, how: str) -> None:
        if how != notes.DONE:
            self._ledger.add(ledger.RAISED, [job.id])

    def claimed(self, queue: str, jobs: Sequence[jobq.Job], took_s: float, /) -> None:
        """Count nothing: what was claimed need not start."""

    def settled(self, outcomes: Sequence[jobq.Settled], took_s: float, /) -> None:
        self._ledger.add(ledger.COMPLETED, [one.job_id for one in outcomes if one.outcome == "completed"])


def token_of(job: jobq.NewJob) -> str:
    """Return the name that a job bears in its arguments, by which it is known whatever its id."""
    token: str = job.args["token"]  # type: ignore[index]  # a producer makes no others
    return token


def _key_of(job: jobq.NewJob) -> str | None:
    unique = job.options.get("unique")
    return unique if unique is None or isinstance(unique, str) else unique.key


def _answer_of(told: jobq.Enqueued) -> str:
    if told.inserted:
        return notes.MADE
    # code of the first version, which a test of upgrades runs, replaces nothing
    return notes.REPLACED if getattr(told, "replaced", False) else notes.HELD


def _fence(job: jobq.Job) -> dict[str, int]:
    return {"job": job.id, "attempt": job.attempt, "worker": job.worker_id, "pid": os.getpid()}
