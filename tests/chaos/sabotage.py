"""Faults of jobq's own, made by hand: what the auditor must see, or it proves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobq._marks import LaneMarks
from jobq._statements import duties as _duties
from jobq._statements import enqueue_unique as _enqueue_unique
from jobq._statements import outcomes as _outcomes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import jobq
    from jobq._marks import Range, Snapshot

_FENCE: Final = "and attempt = o.attempt and worker_id = $3::int8"
_NO_FENCE: Final = "and o.attempt is not null and $3::int8 is not null"


def _remove_fence(worker: jobq.Worker) -> None:
    """An outcome is taken from whoever sends it."""
    del worker
    for name in ("COMPLETE", "SETTLE"):
        text: str = getattr(_outcomes, name)
        assert _FENCE in text, "the statement has changed, and this sabotage is none"
        setattr(_outcomes, name, text.replace(_FENCE, _NO_FENCE))


def _make_marks_naive(worker: jobq.Worker) -> None:
    """The mark goes to the first row that is seen, whatever is undecided before it; no rescan helps."""
    refresh = LaneMarks.refresh

    def naive(marks: LaneMarks, ranges: Sequence[Range], snapshot: Snapshot) -> bool:
        return refresh(marks, ranges, snapshot._replace(in_progress=frozenset()))

    LaneMarks.refresh = naive  # type: ignore[assignment,method-assign]

    def stop_rescans(_worker_id: int) -> None:
        assert worker._parts is not None
        worker._parts.fetcher.rescans = False

    worker.on_register = stop_rescans


def _stop_rescuer(worker: jobq.Worker) -> None:
    """Nobody's lease is ever declared over."""
    del worker
    _duties.EXPIRE = _duties.EXPIRE.replace(  # type: ignore[misc]
        "ended_at is null and lease_until <", "false and lease_until <"
    )


def _rescue_the_living(worker: jobq.Worker) -> None:
    """Jobs are taken from workers whose lease holds."""
    del worker
    _duties.RESCUE = _duties.RESCUE.replace("where ended_at is null", "where false")  # type: ignore[misc]


_REWRITE: Final = "where j.ctid = moved.job_tid and"


def _keep_replaced_arguments() -> None:
    """A replacement is acknowledged, and leaves the arguments as they were."""
    assert _REWRITE in _enqueue_unique.ENQUEUE_REPLACE, "the statement has changed, and this sabotage is none"
    _enqueue_unique.ENQUEUE_REPLACE = _enqueue_unique.ENQUEUE_REPLACE.replace(  # type: ignore[misc]
        _REWRITE, f"{_REWRITE} false and"
    )


OF_WORKERS: Final = {
    "no fence": _remove_fence,
    "naive marks": _make_marks_naive,
    "no rescuer": _stop_rescuer,
    "rescue of the living": _rescue_the_living,
}
OF_PRODUCERS: Final = {"replaced arguments": _keep_replaced_arguments}


def apply_to_worker(name: str, worker: jobq.Worker) -> None:
    """Make a fault, before the worker runs, if it is one of workers."""
    if name in OF_WORKERS:
        OF_WORKERS[name](worker)


def apply_to_producer(name: str) -> None:
    """Make a fault, before the producer runs, if it is one of producers."""
    if name in OF_PRODUCERS:
        OF_PRODUCERS[name]()
