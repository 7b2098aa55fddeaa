"""What the tests of unique keys share."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import jobq
from jobq import Unique
from jobq._kinds.jobtype import prepare
from jobq._kinds.options import DEFAULTS
from jobq._statements.duties import promote
from jobq._statements.outcomes import complete, settle
from tests.support.storage import BOOM, SCHEMA, settlement

if TYPE_CHECKING:
    from jobq._statements.claim import Claimed
    from tests.support.storage import Storage

W: Final = 1  # the worker of these tests
HOUR: Final = timedelta(hours=1)
AGE: Final = timedelta(days=36_525)  # its slot ends in 2070: nothing here outlives it
FLAVOURS: Final = {
    "finished": Unique("k"),
    "started": Unique("k", until="started"),
    "period": Unique("k", period=AGE),
    "replace": Unique("k", on_conflict="replace"),
}
WAITING: Final = {name: FLAVOURS[name] for name in ("finished", "started", "period")}


def key_of(kind: jobq.JobType[Any] | str, args: object, unique: Unique, **options: Any) -> bytes:
    key = prepare(kind, args, {"unique": unique, **options}, DEFAULTS).options.unique_key
    assert key is not None
    return key


def name_of(kind: jobq.JobType[Any] | str, args: object, unique: Unique, **options: Any) -> str | None:
    return prepare(kind, args, {"unique": unique, **options}, DEFAULTS).options.unique_name


def claim_one(store: Storage) -> Claimed:
    (job,) = store.claim(W, 1)
    return job


def run_one(store: Storage) -> Claimed:
    """Claim one job and complete it."""
    job = claim_one(store)
    store.run(complete(SCHEMA, W, [(job.job_id, job.attempt)], {}))
    return job


def fail(store: Storage, job: Claimed) -> None:
    """Let a claimed job fail, so that it waits for its retry, which is due at once."""
    batch = [settlement(job, "scheduled", "retry", failure=BOOM)]
    assert store.run(settle(SCHEMA, W, "w", batch, notify=False)) == {job.job_id}


def promote_all(store: Storage) -> int:
    """Promote whatever is scheduled; return how many jobs that were."""
    return store.run(promote(SCHEMA, None, 100, notify=False, now=datetime(2090, 1, 1, tzinfo=UTC))).jobs
