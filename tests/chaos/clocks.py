"""Wall clocks that are stepped under load: of the workers' hosts, and of the database's own."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import psycopg

import jobq
from tests.chaos import faults
from tests.chaos.auditor import longest_gap_s
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.chaos.auditor import State
    from tests.chaos.stage import Stage
    from tests.support.faketime import Clock

HOUR_S: Final = 3_600
DAY_S: Final = 86_400
# Each is visited from the true time and left for it, so that there is a step of each length each way.
AWAY_S: Final = (5, -5, 60, -60, HOUR_S, -HOUR_S, DAY_S, -DAY_S)


@contextmanager
def stepping(clock: Clock, offsets_s: Sequence[int], every_s: float) -> Iterator[None]:
    """Step a clock from one offset to the next meanwhile, again and again."""
    over = threading.Event()

    def step() -> None:
        for offset_s in itertools.cycle(offsets_s):
            clock.set(offset_s)
            if over.wait(every_s):
                return

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


# When something really happened no clock of the server can say: it has one, and that is wrong. The kernel's
# uptime knows no steps, and is read as a file.
_NOTE: Final = """
create schema chaos;
create table chaos.happened (what name, id int8, uptime_s float8);
create index on chaos.happened (id);
create index on chaos.happened (uptime_s);
create function chaos.note() returns trigger language plpgsql as $$
begin
    insert into chaos.happened
    values (tg_table_name, (to_jsonb(new) ->> tg_argv[0])::int8,
            split_part(pg_read_file('/proc/uptime'), ' ', 1)::float8);
    return null;
end $$;
create trigger note after insert on jobq.job for each row execute function chaos.note('id');
create trigger note after insert on jobq.finished for each row execute function chaos.note('job_id');
create trigger note after update of ended_at on jobq.worker for each row
    when (old.ended_at is null and new.ended_at is not null) execute function chaos.note('id');
"""
_MADE_AND_DONE: Final = """
select exists (select from chaos.happened made join chaos.happened done on done.id = made.id
               where made.what = 'job' and done.what = 'finished' and made.uptime_s > %s)
"""
# What an operator does who wants what waits no longer to wait for a clock that was ahead: docs/operation.md.
_PUT_OFF_TOO_FAR: Final = """
select id from jobq.jobs where state = 'scheduled' and reason <> 'scheduled'
   and run_at > clock_timestamp() + interval '2 seconds'
"""
_TICKS: Final = """
select uptime_s from chaos.happened h where what = 'finished'
   and exists (select from jobq.job j where j.id = h.id and j.kind = 'tick')
"""


class DatabaseClock:
    """The wall clock of a database's own host, and what really happened when.

    Args:
        clock: by which its server goes.
        dsn: the database, with its schema in it.
        kills: whether workers are killed meanwhile.
    """

    def __init__(self, clock: Clock, dsn: str, *, kills: bool = False) -> None:
        self._clock = clock
        self._dsn = dsn
        self._kills = kills
        self._offsets_s = {0, *AWAY_S}
        self._booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(_NOTE)
        with jobq.Client(dsn) as client:  # a day's step would remove what the auditor looks for
            client.queues.set_retention(completed="keep", discarded="keep", cancelled="keep")

    def fault(self, stage: Stage) -> None:
        """Step it away and back, by each length and each way at least once; look whether work goes on."""
        for round_ in itertools.count():
            for away_s in AWAY_S:
                if round_ and stage.is_over():
                    ticks = [at for (at,) in stage.sql(_TICKS)]
                    stage.note_longest("s longest gap between ticks", longest_gap_s(ticks))
                    return
                for offset_s in (away_s, 0):
                    time.sleep(stage.rng.uniform(0.5, 1.2))
                    self._step(stage, offset_s)
                if away_s > 0:
                    self._hurry(stage)

    def _step(self, stage: Stage, offset_s: int) -> None:
        # What it holds has the stamps of the clock before.
        victim = faults.kill_started(stage) if self._kills else None
        self._clock.set(offset_s)
        stage.count("steps")
        began = time.monotonic()
        stepped_at = time.time() - self._booted_at
        eventually(
            lambda: stage.sql(_MADE_AND_DONE, stepped_at) == [(True,)],
            30.0,
            what=f"what was made after the step to {offset_s:+d} s is done",
        )
        stage.note_longest("s longest until a job was made and done", time.monotonic() - began)
        if victim is not None:
            dead = "select count(*) from jobq.worker where pid = %s and ended_at is null"
            eventually(
                lambda: stage.sql(dead, victim.pid) == [(0,)], 30.0, what="the dead worker's lease is over"
            )
            stage.note_longest("s longest until a lease was over", time.monotonic() - began)
        _look(stage)

    def _hurry(self, stage: Stage) -> None:
        ids = [job_id for (job_id,) in stage.sql(_PUT_OFF_TOO_FAR)]
        with jobq.Client(stage.dsn) as client:
            hurried = client.bulk.reschedule(jobq.JobFilter(ids=ids), delay=timedelta(0))
        stage.count("waits that were ended by hand", hurried.changed)

    def true_times(self, state: State) -> State:
        """Put the true times in the place of those that the database says."""

        def true(what: str, id_: int, said: float) -> float:
            noted = happened[what, id_] + self._booted_at
            return min((said - offset_s for offset_s in self._offsets_s), key=lambda at: abs(at - noted))

        with psycopg.connect(self._dsn) as connection:
            rows = connection.execute("select what, id, uptime_s from chaos.happened").fetchall()
        happened = {(what, id_): uptime_s for what, id_, uptime_s in rows}
        return dataclasses.replace(
            state,
            payloads=[p._replace(created_at=true("job", p.job_id, p.created_at)) for p in state.payloads],
            places=[
                p
                if p.finished_at is None
                else p._replace(finished_at=true("finished", p.job_id, p.finished_at))
                for p in state.places
            ],
            ended_at={
                id_: None if at is None else true("worker", id_, at) for id_, at in state.ended_at.items()
            },
        )


def _look(stage: Stage) -> None:
    """Look at all that counts times; nothing may be negative, whatever order the clock gave things."""
    with jobq.Client(stage.dsn) as client:
        for queue in client.queue_stats():
            assert queue.lag_s >= 0, queue
        for worker in client.workers():
            assert worker.heartbeat_age_s >= 0, worker
