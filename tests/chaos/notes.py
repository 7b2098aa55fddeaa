"""What producers and handlers note, and reading it back.

Notes are lines of files and not rows of the database under test: that one is restarted, filled, cut off
and replaced by a standby that lacks its last commits, and what it lost would have taken the
evidence along. One write a line, so a process that is killed leaves whole lines behind.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EPOCH_VARIABLE: Final = "JOBQ_CHAOS_EPOCH"
"""Environment variable of a process whose wall clock is wrong: the true time when its monotonic one was 0."""

INTENT: Final = "intent"
ACKNOWLEDGED: Final = "acknowledged"
ROLLED_BACK: Final = "rolled back"
FAILED: Final = "failed"
START: Final = "start"
END: Final = "end"
RECORDED: Final = "recorded"

MADE: Final = "made"  # what a call was told to have done
HELD: Final = "held"
REPLACED: Final = "replaced"

DONE: Final = "done"  # how a run ended: returned, raised, or was told to stop
RAISED: Final = "raised"
STOPPED: Final = "stopped"


class Journal:
    """One process's notes.

    Args:
        path: its file, which nobody else writes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._epoch = os.environ.get(EPOCH_VARIABLE)

    def note(self, what: str, **facts: Any) -> None:
        """Add a line, with the true time."""
        at = time.time() if self._epoch is None else time.monotonic() + float(self._epoch)
        line = json.dumps({"what": what, "at": at, **facts})
        os.write(self._fd, line.encode() + b"\n")


@dataclass(slots=True)
class Run:
    """One start of a handler, and its end if it had one."""

    job_id: int
    attempt: int
    worker_id: int
    pid: int
    token: str
    started_at: float
    ended_at: float | None = None
    how: str | None = None


@dataclass(slots=True)
class Evidence:
    """All notes of a run of chaos.

    Attributes:
        keys: every job that a producer wanted to make, by its token, with its unique key if any.
        made: those of which it was told that they exist: their id.
        held: those of which it was told that another job holds their key: that one's id.
        replaced: those of which it was told that they took the place of what that job had been given.
        asked_at, told_at: when each one's call was made, and when its answer was there.
        rolled_back: those whose transaction was rolled back, or broke before its commit was sent.
        runs: every start of a handler, in the order of time.
        recorded: completions (job, attempt) of which a worker was told that they are recorded, and when.
        refusals: errors that the producers met.
    """

    keys: dict[str, str | None] = field(default_factory=dict[str, "str | None"])
    made: dict[str, int] = field(default_factory=dict[str, int])
    held: dict[str, int] = field(default_factory=dict[str, int])
    replaced: dict[str, int] = field(default_factory=dict[str, int])
    asked_at: dict[str, float] = field(default_factory=dict[str, float])
    told_at: dict[str, float] = field(default_factory=dict[str, float])
    rolled_back: set[str] = field(default_factory=set[str])
    runs: list[Run] = field(default_factory=list[Run])
    recorded: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    made_at: list[float] = field(default_factory=list[float])

    @property
    def doubtful(self) -> set[str]:
        """Those about which nothing is known: the answer to their commit was lost."""
        return self.keys.keys() - self.told_at.keys() - self.rolled_back


def read(folder: Path) -> Evidence:
    """Read the notes of every process, the oldest note first."""
    evidence = Evidence()
    open_runs: dict[tuple[int, int, int, int], Run] = {}
    for note in sorted(_lines(folder), key=lambda note: note["at"]):
        what = note["what"]
        if what in {START, END}:
            _read_run(evidence, open_runs, note)
        elif what == RECORDED:
            evidence.recorded.update(dict.fromkeys(map(tuple, note["jobs"]), note["at"]))
        else:
            _read_producer(evidence, note)
    return evidence


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.notes")):
        yield from map(json.loads, path.read_text().splitlines())


def _read_run(evidence: Evidence, open_runs: dict[Any, Run], note: dict[str, Any]) -> None:
    fence = (note["job"], note["attempt"], note["worker"], note["pid"])
    if note["what"] == START:
        run = open_runs[fence] = Run(*fence, note["token"], note["at"])
        evidence.runs.append(run)
    else:
        run = open_runs[fence]
        run.ended_at, run.how = note["at"], note["how"]


def _read_producer(evidence: Evidence, note: dict[str, Any]) -> None:
    what = note["what"]
    if what == INTENT:
        evidence.keys.update(note["jobs"])
        evidence.asked_at.update((token, note["at"]) for token, _ in note["jobs"])
    elif what == ROLLED_BACK:
        evidence.rolled_back.update(note["jobs"])
    elif what == ACKNOWLEDGED:
        evidence.made_at.append(note["at"])
        answers = {MADE: evidence.made, HELD: evidence.held, REPLACED: evidence.replaced}
        for token, job_id, answer in note["jobs"]:
            answers[answer][token] = job_id
            evidence.told_at[token] = note["at"]
    elif what == FAILED:
        evidence.refusals[note["error"]] = evidence.refusals.get(note["error"], 0) + 1
