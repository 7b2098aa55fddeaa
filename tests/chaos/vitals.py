"""What is measured of a queue while it is under load: of its processes, its connections and its tables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import psycopg

from tests.chaos.auditor import DOUBLED_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from tests.chaos.ledger import Totals

_PROC: Final = Path("/proc")

MEMORY: Final = "memory (RSS)"
SHARED_OUT: Final = "memory (PSS)"
FILES: Final = "open files"
THREADS: Final = "threads"
BACKENDS: Final = "private memory"
CONNECTIONS: Final = "connections"
HEAP: Final = "heap"
INDEXES: Final = "indexes"
DEAD: Final = "dead rows"
ALL_TABLES: Final = "all tables"
WAITING: Final = "ready jobs"
WAL: Final = "WAL"
MADE: Final = "enqueued"
DONE: Final = "completed"

_TABLES: Final = """
select c.relname, pg_table_size(c.oid), pg_indexes_size(c.oid), coalesce(s.n_dead_tup, 0)
from pg_class c left join pg_stat_user_tables s on s.relid = c.oid
where c.relnamespace = 'jobq'::regnamespace and c.relkind = 'r' order by 1
"""
_SERVER: Final = """
select (select count(*) from jobq.ready), pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8,
       array(select pid from pg_stat_activity where backend_type = 'client backend' order by 1)
"""


class Key(NamedTuple):
    """One thing that is measured: what, and of whom."""

    what: str
    whose: str


class Sample(NamedTuple):
    """All that was measured at one moment.

    Attributes:
        at_s: by the monotonic clock.
        values: memory and sizes in MB; WAL and jobs counted from the beginning.
        pickups: how long first starts have taken so far, see `ledger`.
    """

    at_s: float
    values: Mapping[Key, float]
    pickups: list[int]


class Vitals:
    """Measures, through one connection of its own.

    Args:
        dsn: the database.
        processes: their ids, by the names that they have here.
        made, done: read what the producers, and what the workers have counted so far.
    """

    def __init__(
        self,
        dsn: str,
        processes: Mapping[str, int],
        made: Callable[[], Totals],
        done: Callable[[], Totals],
    ) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._processes = processes
        self._made = made
        self._done = done
        self.keys_doubled: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._connection.close()

    def watch(self, seconds: float, every_s: float) -> list[Sample]:
        """Measure again and again for so long; return what was measured."""
        samples: list[Sample] = []
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            samples.append(self.sample())
            time.sleep(max(0.0, now + every_s - time.monotonic()))
        return samples

    def sample(self) -> Sample:
        """Measure once.

        Raises:
            FileNotFoundError: one of the processes has ended.
        """
        made, done = self._made(), self._done()
        values = dict(self._of_processes()) | dict(self._of_server()) | dict(self._of_tables())
        values[Key(MADE, "producers")] = made["made"].count
        values[Key(DONE, "workers")] = done["completed"].count
        self.keys_doubled.update(row[0] for row in self._rows(DOUBLED_KEYS))
        return Sample(time.monotonic(), values, done.pickups)

    def _of_processes(self) -> Iterator[tuple[Key, float]]:
        for name, pid in self._processes.items():
            yield Key(MEMORY, name), _kb(pid, "status", "VmRSS:") / 1024
            yield Key(FILES, name), len(list((_PROC / f"{pid}/fd").iterdir()))
            yield Key(THREADS, name), len(list((_PROC / f"{pid}/task").iterdir()))
            try:
                yield Key(SHARED_OUT, name), _kb(pid, "smaps_rollup", "Pss:") / 1024
            except PermissionError:
                continue  # not everywhere may one's own processes be asked for this

    def _of_server(self) -> Iterator[tuple[Key, float]]:
        [(ready, wal_bytes, pids)] = self._rows(_SERVER)
        yield Key(WAITING, "queue"), ready
        yield Key(WAL, "server"), wal_bytes / 1e6
        yield Key(CONNECTIONS, "server"), len(pids)
        yield Key(BACKENDS, "connections"), sum(map(_private_kb, pids)) / 1024

    def _of_tables(self) -> Iterator[tuple[Key, float]]:
        tables = self._rows(_TABLES)
        sums = [sum(row[column] for row in tables) for column in (1, 2, 3)]
        for table, heap, indexes, dead in [*tables, (ALL_TABLES, *sums)]:
            yield Key(HEAP, table), heap / 1e6
            yield Key(INDEXES, table), indexes / 1e6
            yield Key(DEAD, table), dead

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql.encode()).fetchall()


def _kb(pid: int, file: str, name: str) -> int:
    for line in (_PROC / str(pid) / file).read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise FileNotFoundError(f"process {pid} has ended: it has no {name} any more")


def _private_kb(pid: int) -> int:
    """Return a backend's memory without the buffers that all share; 0 when it has just ended."""
    try:
        return _kb(pid, "status", "RssAnon:")
    except (FileNotFoundError, ProcessLookupError):
        return 0
