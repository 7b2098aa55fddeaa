"""The bookkeeper: what became of each order, by the database and by the mail server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, LiteralString

from psycopg import sql

if TYPE_CHECKING:
    import psycopg

    from jobq.demo.mailserver import MailServer
    from jobq.demo.shop import Order

_STATES: Final[LiteralString] = """
select o.number, o.email, j.state, j.failures, j.crashes
from orders o left join {schema}.jobs j on (j.args ->> 'number')::integer = o.number
"""

_LIVE: Final[LiteralString] = """
select count(*) filter (where state in ('ready', 'scheduled', 'running')), count(*) from {schema}.jobs
"""

_HELD: Final[LiteralString] = """
select count(*) from {schema}.running r join {schema}.worker w on w.id = r.worker_id where w.pid = %s
"""

_DELETE: Final[LiteralString] = """
with x as (
    delete from {schema}.scheduled
    where ctid = any (array(select ctid from {schema}.scheduled limit %s for update skip locked)) returning 1
)
select count(*) from x
"""


@dataclass(frozen=True, slots=True)
class Tally:
    """The result, in orders.

    Attributes:
        enqueued: stored, each with its e-mail, in one transaction.
        delivered: accepted by the mail server.
        retried: turned away for a while, and tried again.
        refused: turned away for good.
        recovered: held by the worker that was killed, and finished by another.
        twice: delivered more than once.
        lost: without an outcome.
    """

    enqueued: int
    delivered: int
    retried: int
    refused: int
    recovered: int
    twice: int
    lost: int


class Bookkeeper:
    """Asks the database and the mail server.

    Args:
        connection: in autocommit.
        schema: where the queue lives.
        server: the mail server.
    """

    def __init__(self, connection: psycopg.Connection, schema: str, server: MailServer) -> None:
        self._connection = connection
        self._schema = sql.Identifier(schema)
        self._server = server

    def live(self) -> tuple[int, int]:
        """Return how many jobs have no outcome yet, and how many there are."""
        row = self._connection.execute(self._query(_LIVE)).fetchone()
        assert row is not None
        return row[0], row[1]

    def held_by(self, pid: int) -> int:
        """Return how many jobs a worker process holds."""
        row = self._connection.execute(self._query(_HELD), [pid]).fetchone()
        assert row is not None
        return int(row[0])

    def delete(self, jobs: int) -> int:
        """Delete jobs that wait for a retry behind the queue's back; return how many there were."""
        row = self._connection.execute(self._query(_DELETE), [jobs]).fetchone()
        assert row is not None
        return int(row[0])

    def tally(self, orders: list[Order]) -> Tally:
        """Count what became of these orders, by the database and by the server: neither alone is believed."""
        rows = self._connection.execute(self._query(_STATES)).fetchall()
        received, refused = self._server.received, self._server.refused
        delivered = {number for number, _, state, *_ in rows if state == "completed" and received[number]}
        turned_away = {
            number for number, email, state, *_ in rows if state == "discarded" and email in refused
        }
        return Tally(
            enqueued=sum(state is not None for _, _, state, *_ in rows),
            delivered=len(delivered),
            retried=sum(bool(failures) and state != "discarded" for _, _, state, failures, _ in rows),
            refused=len(turned_away),
            recovered=sum(bool(crashes) for *_, crashes in rows),
            twice=sum(times > 1 for times in received.values()),
            lost=len({order.number for order in orders} - delivered - turned_away),
        )

    def _query(self, text: LiteralString) -> sql.Composed:
        return sql.SQL(text).format(schema=self._schema)
