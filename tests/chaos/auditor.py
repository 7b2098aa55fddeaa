"""The auditor: reconciles what producers and handlers noted with what the tables say.

Each check states one promise, and yields what breaks it. They are functions of a `Case`, without I/O, so
that `test_chaos_auditor.py` can show of each that it fires.

When two runs of one job overlap, the lease decides whether that was wrong. A worker that was frozen goes on
with a job that somebody else has by then, which is what the fence is for; but the worker's row must
say that its lease was over before the second run began.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg

from tests.chaos.notes import DONE, Evidence, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_SHOWN: Final = 5  # examples in a message
LIVE: Final = ("ready", "scheduled", "running")


class Place(NamedTuple):
    """One row of one of the four tables that say a job's state."""

    job_id: int
    table: str
    state: str
    attempt: int
    worker_id: int | None
    crashes: int
    finished_at: float | None


class Payload(NamedTuple):
    """A row of `job`."""

    job_id: int
    token: str
    key: str | None
    created_at: float


@dataclass(slots=True)
class State:
    """What the database says.

    Attributes:
        ended_at: when each worker's lease was declared over or given back, ``None`` while it has not been.
        keys_doubled: keys that were seen held by two live jobs at once, while it all ran.
    """

    payloads: list[Payload] = field(default_factory=list[Payload])
    places: list[Place] = field(default_factory=list[Place])
    ended_at: dict[int, float | None] = field(default_factory=dict[int, "float | None"])
    keys_doubled: set[str] = field(default_factory=set[str])


class Allowed(NamedTuple):
    """What a fault may cost, beyond what is always allowed.

    Attributes:
        waiting: jobs may be left in `ready` and `scheduled`.
        lost_commits: the server lost its last commits (an asynchronous standby took over).
        discarded: so many jobs may have been given up.
    """

    waiting: bool = False
    lost_commits: bool = False
    discarded: int = 0


NOTHING: Final = Allowed()


class Problem(NamedTuple):
    """A promise that was broken, and for whom."""

    promise: str
    what: Sequence[object]

    def __str__(self) -> str:
        more = "" if len(self.what) <= _SHOWN else " …"
        return f"{self.promise}: {len(self.what)} ({', '.join(map(str, self.what[:_SHOWN]))}{more})"


@dataclass(frozen=True, slots=True)
class Case:
    """All that there is to judge."""

    evidence: Evidence
    state: State
    allowed: Allowed = NOTHING

    def places_of(self) -> dict[int, list[Place]]:
        """Return where each job stands."""
        places: defaultdict[int, list[Place]] = defaultdict(list)
        for place in self.state.places:
            places[place.job_id].append(place)
        return places

    def runs_of(self) -> dict[int, list[Run]]:
        """Return each job's runs, the first one first."""
        runs: defaultdict[int, list[Run]] = defaultdict(list)
        for run in self.evidence.runs:
            runs[run.job_id].append(run)
        return runs


# -- the promises -----------------------------------------------------------------------------------


def acknowledged_jobs_exist(case: Case) -> Iterator[object]:
    """What a producer was told to exist is there: finished or waiting."""
    if case.allowed.lost_commits:
        return
    there = {payload.job_id for payload in case.state.payloads}
    told = {**case.evidence.made, **case.evidence.held, **case.evidence.replaced}
    yield from (f"job {job_id}" for job_id in told.values() if job_id not in there)


def rolled_back_jobs_never_were(case: Case) -> Iterator[object]:
    """What was rolled back stands nowhere and was never started; nor does what nobody asked for."""
    gone = case.evidence.rolled_back
    started = {run.token for run in case.evidence.runs}
    yield from (f"started {token}" for token in gone & started)
    yield from (f"stored {p.token}" for p in case.state.payloads if p.token in gone)
    yield from (f"unasked {p.token}" for p in case.state.payloads if p.token not in case.evidence.keys)


def no_enqueue_makes_two_jobs(case: Case) -> Iterator[object]:
    """One call of a producer makes one job."""
    counts = Counter(payload.token for payload in case.state.payloads)
    yield from (f"{token} × {count}" for token, count in counts.items() if count > 1)


def each_job_is_in_one_place(case: Case) -> Iterator[object]:
    """No job is in no table or in two, and none is without its payload."""
    places = case.places_of()
    payloads = {payload.job_id for payload in case.state.payloads}
    for job_id in payloads | places.keys():
        tables = [place.table for place in places.get(job_id, [])]
        if len(tables) != 1 or job_id not in payloads:
            yield f"job {job_id} in {tables or 'no table'}{'' if job_id in payloads else ' without payload'}"


def nothing_is_left_running(case: Case) -> Iterator[object]:
    """With all workers stopped, nobody holds a job."""
    yield from (f"job {p.job_id}" for p in case.state.places if p.table == "running")


def nothing_is_stranded(case: Case) -> Iterator[object]:
    """With time to work it all off, nothing waits."""
    if not case.allowed.waiting:
        yield from (f"job {p.job_id} {p.table}" for p in case.state.places if p.table in LIVE[:2])


def nothing_is_given_up(case: Case) -> Iterator[object]:
    """No job is discarded that its own handler did not fail."""
    given_up = [f"job {p.job_id}" for p in case.state.places if p.state not in {*LIVE, "completed"}]
    if len(given_up) > case.allowed.discarded:
        yield from given_up


def each_attempt_starts_once(case: Case) -> Iterator[object]:
    """A job is started no more often than it has attempts, and no attempt twice."""
    lost = case.allowed.lost_commits
    # ids come again where the server lost the last ones, so the token is part of who it was
    counts = Counter(
        (r.job_id, r.attempt, r.token if lost else "", r.worker_id if lost else 0) for r in case.evidence.runs
    )
    yield from (f"job {job} attempt {a} × {n}" for (job, a, _, _), n in counts.items() if n > 1)
    if lost:
        return
    attempts = {place.job_id: place.attempt for place in case.state.places}
    for job_id, runs in case.runs_of().items():
        last = max(run.attempt for run in runs)
        if last > attempts.get(job_id, last):
            yield f"job {job_id} was started as attempt {last} and stands at {attempts[job_id]}"


def valid_leases_never_overlap(case: Case) -> Iterator[object]:
    """Two runs of one job overlap only when the first one's lease was over before the second began."""
    for job_id, runs in case.runs_of().items():
        for first, second in itertools.combinations(runs, 2):
            if first.ended_at is not None and first.ended_at <= second.started_at:
                continue
            if case.allowed.lost_commits:
                continue  # the claim was forgotten by the server itself, or the id was given out again
            over_at = case.state.ended_at.get(first.worker_id)
            if over_at is None or over_at > second.started_at:
                yield (
                    f"job {job_id} ({first.token}): attempt {first.attempt} ran from {first.started_at:.3f}"
                    f" to {first.ended_at}, its lease until {over_at},"
                    f" and attempt {second.attempt} from {second.started_at:.3f}"
                )


def completions_are_of_who_ran(case: Case) -> Iterator[object]:
    """A completed job's attempt and worker are those of a run that had returned by then."""
    done = {
        (run.job_id, run.attempt, run.worker_id, run.token): run.ended_at
        for run in case.evidence.runs
        if run.how == DONE and run.ended_at is not None
    }
    tokens = {payload.job_id: payload.token for payload in case.state.payloads}
    for place in case.state.places:
        if place.state != "completed":
            continue
        token = tokens.get(place.job_id, "")
        ended_at = done.get((place.job_id, place.attempt, place.worker_id or 0, token))
        if ended_at is None or place.finished_at is None or ended_at > place.finished_at:
            yield f"job {place.job_id} attempt {place.attempt}"


def recorded_completions_stay(case: Case) -> Iterator[object]:
    """What a worker was told to be recorded is recorded, and nobody with a lease starts it again.

    A worker that was frozen in the middle of a start finishes it when it wakes.
    """
    if case.allowed.lost_commits:
        return
    completed = {(p.job_id, p.attempt) for p in case.state.places if p.state == "completed"}
    yield from (f"job {j} attempt {a} is gone" for j, a in case.evidence.recorded if (j, a) not in completed)
    recorded_at = {job_id: at for (job_id, _), at in case.evidence.recorded.items()}
    for run in case.evidence.runs:
        at = recorded_at.get(run.job_id, run.started_at)
        over_at = case.state.ended_at.get(run.worker_id)
        if run.started_at > at and (over_at is None or over_at > at):
            yield f"job {run.job_id} attempt {run.attempt} began after its end"


def keys_are_held_once(case: Case) -> Iterator[object]:
    """No two jobs of one unique key live at once: the next one starts when the one before has ended."""
    yield from (f"{key} held twice" for key in case.state.keys_doubled)
    runs = case.runs_of()
    jobs: defaultdict[str, list[Payload]] = defaultdict(list)
    for payload in case.state.payloads:
        if payload.key is not None:
            jobs[payload.key].append(payload)
    finished = {p.job_id: p for p in case.state.places if p.finished_at is not None}
    for key, payloads in jobs.items():
        for before, after in itertools.pairwise(sorted(payloads, key=lambda p: p.created_at)):
            ended = finished.get(before.job_id)
            # an id may be given out again, so the token is part of who it was
            mine = [run for run in runs.get(after.job_id, []) if run.token == after.token]
            first = min((run.started_at for run in mine), default=None)
            if ended is None or (first is not None and first < (ended.finished_at or 0.0)):
                yield f"{key}: job {after.job_id} beside {before.job_id}"


def replacements_are_as_told(case: Case) -> Iterator[object]:
    """A job runs with what it was given last, which is what it is stored with: no claimed one is replaced.

    Nothing is stored that was told to have no effect, and nothing whose place was taken later.
    """
    if case.allowed.lost_commits:
        return
    evidence = case.evidence
    stored = {payload.job_id: payload.token for payload in case.state.payloads}
    for run in evidence.runs:
        if stored.get(run.job_id, run.token) != run.token:
            yield f"job {run.job_id} ran as {run.token} and is stored as {stored[run.job_id]}"
    yield from (f"{t} was told to be held, and is there" for t in evidence.held.keys() & set(stored.values()))
    for token, job_id in evidence.replaced.items():
        kept = stored.get(job_id, token)
        # of those that were under way together nobody was told the order
        if evidence.told_at.get(kept, math.inf) < evidence.asked_at[token]:
            yield f"job {job_id} is stored as {kept}, and was replaced by {token}"


PROMISES: Final = (
    acknowledged_jobs_exist,
    rolled_back_jobs_never_were,
    no_enqueue_makes_two_jobs,
    each_job_is_in_one_place,
    nothing_is_left_running,
    nothing_is_stranded,
    nothing_is_given_up,
    each_attempt_starts_once,
    valid_leases_never_overlap,
    completions_are_of_who_ran,
    recorded_completions_stay,
    keys_are_held_once,
    replacements_are_as_told,
)


# -- the verdict ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Audit:
    """The figures, and what was broken."""

    figures: dict[str, float]
    problems: list[Problem]

    def __str__(self) -> str:
        figures = ", ".join(f"{value:g} {name}" for name, value in self.figures.items())
        return "\n  ".join([figures, *map(str, self.problems)])

    @property
    def broken(self) -> set[str]:
        """The names of the promises that were broken."""
        return {problem.promise for problem in self.problems}


def audit(case: Case) -> Audit:
    """Hold a case against every promise."""
    problems: list[Problem] = []
    for promise in PROMISES:
        found = list(promise(case))
        if found:
            problems.append(Problem(promise.__name__, found))
    return Audit(_figures(case), problems)


def _figures(case: Case) -> dict[str, float]:
    evidence, state = case.evidence, case.state
    stored = {payload.token for payload in state.payloads}
    states = Counter(place.state for place in state.places)
    return {
        "acknowledged": len(evidence.made),
        "rolled back": len(evidence.rolled_back),
        "keys held": len(evidence.held),
        "replaced": len(evidence.replaced),
        "in doubt": len(evidence.doubtful),
        "of those made": len(evidence.doubtful & stored),
        "refused calls": sum(evidence.refusals.values()),
        **{name: states[name] for name in ("completed", "discarded", "ready", "scheduled", "running")},
        "starts": len(evidence.runs),
        "crashes": sum(place.crashes for place in state.places),
        "s longest gap between starts": longest_gap_s([run.started_at for run in evidence.runs]),
        "s longest gap between enqueues": longest_gap_s(evidence.made_at),
    }


def longest_gap_s(times: Iterable[float]) -> float:
    """Return the longest time between two neighbours, in seconds."""
    return round(max((b - a for a, b in itertools.pairwise(sorted(times))), default=0.0), 2)


# -- what the database says ---------------------------------------------------------------------------

_PAYLOADS: Final = """
select id, args ->> 'token', unique_name, extract(epoch from created_at)::float8 from jobq.job
where args ? 'token'
"""
# Jobs of schedules have no token: nobody noted that they were asked for.
_PLACES: Final = """
select p.* from (
    select job_id, 'ready', 'ready', attempt, null::int8, crashes, null::float8 from jobq.ready
    union all select job_id, 'scheduled', 'scheduled', attempt, null, crashes, null from jobq.scheduled
    union all select job_id, 'running', 'running', attempt, worker_id, crashes, null from jobq.running
    union all select job_id, 'finished', state, attempt, worker_id, crashes,
                     extract(epoch from finished_at)::float8 from jobq.finished
) p left join jobq.job j on j.id = p.job_id
where j.id is null or j.args ? 'token'
"""
_WORKERS: Final = "select id, extract(epoch from ended_at)::float8 from jobq.worker"

DOUBLED_KEYS: Final = """
select j.unique_name from (
    select job_id from jobq.ready union all select job_id from jobq.scheduled
    union all select job_id from jobq.running
) live join jobq.job j on j.id = live.job_id
where j.unique_name is not null group by 1 having count(*) > 1
"""


def read_state(dsn: str, keys_doubled: set[str]) -> State:
    """Read all that the tables say, in one snapshot."""
    with psycopg.connect(dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        payloads = [Payload(*row) for row in connection.execute(_PAYLOADS)]
        places = [Place(*row) for row in connection.execute(_PLACES)]
        return State(payloads, places, dict(connection.execute(_WORKERS).fetchall()), keys_doubled)
