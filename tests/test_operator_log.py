"""The operator log: an entry for each action, in its transaction, and none without one."""

from __future__ import annotations

import getpass
import socket
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import jobq
from jobq._operation import atomic
from jobq._statements.operator_log import Entry, default_actor, log_action
from tests.support.storage import SCHEMA, Storage

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    with jobq.Client(dsn) as client:
        yield client


def test_each_action_by_id_leaves_one_entry(client: jobq.Client) -> None:
    ids = [client.enqueue("k", {}).id for _ in range(4)]
    said: dict[str, Any] = {"by": "anna", "reason": "as agreed"}
    client.move(ids[0], queue="q", priority=2, **said)
    client.reschedule(ids[1], delay=timedelta(seconds=5), **said)
    client.cancel(ids[2], **said)
    client.retry(ids[2], **said)
    client.delete(ids[3], **said)
    entries = client.operator_log()
    assert [(entry.action, dict(entry.target)) for entry in reversed(entries)] == [
        ("move", {"job": ids[0], "queue": "q", "priority": 2}),
        ("reschedule", {"job": ids[1], "delay_s": 5.0}),
        ("cancel", {"job": ids[2]}),
        ("retry", {"job": ids[2]}),
        ("delete", {"job": ids[3]}),
    ]
    assert {(entry.actor, entry.reason, entry.jobs) for entry in entries} == {("anna", "as agreed", 1)}
    assert all(datetime.now(UTC) - entry.at < timedelta(minutes=1) for entry in entries)


def test_one_jobs_entries_can_be_asked_for_when_it_is_gone_too(client: jobq.Client) -> None:
    one, other = (client.enqueue("k", {}).id for _ in range(2))
    for job_id in (one, other):
        client.move(job_id, priority=1)
        client.delete(job_id)
    client.queues.pause("q")
    entries = client.operator_log(job_id=one)
    assert [(entry.action, entry.target["job"]) for entry in entries] == [("delete", one), ("move", one)]
    assert client.operator_log(job_id=one, before=entries[0].id) == entries[1:]
    for none in (-(10**5000), 10**5000, 0):
        assert client.operator_log(job_id=none) == []
    with pytest.raises(jobq.ConfigError, match="job_id='1': an integer"):
        client.operator_log(job_id="1")  # type: ignore[arg-type]


def test_what_was_refused_leaves_none(client: jobq.Client) -> None:
    job_id = client.enqueue("k", {}).id
    with pytest.raises(jobq.JobConflict):
        client.retry(job_id)
    for action in (client.cancel, client.retry, client.delete):
        with pytest.raises(jobq.JobNotFound):
            action(4711)
        with pytest.raises(jobq.ConfigError, match="by"):
            action(job_id, by="x" * 201)
        with pytest.raises(jobq.ConfigError, match="reason"):
            action(job_id, reason="\ud800")
    assert client.operator_log() == []


def test_a_bulk_action_leaves_one_entry_that_counts(client: jobq.Client) -> None:
    for _ in range(7):
        client.enqueue("k", {})
    client.bulk.cancel(jobq.JobFilter(kinds=["k"]), by="anna", reason="flood", batch=2)
    client.bulk.retry(jobq.JobFilter(kinds=["nothing"]))
    nothing, cancel = client.operator_log()
    assert (cancel.action, cancel.jobs, cancel.actor, cancel.reason) == ("cancel in bulk", 7, "anna", "flood")
    assert cancel.target == {"filter": {"kinds": ["k"]}}
    assert (nothing.action, nothing.jobs) == ("retry in bulk", 0)


def test_an_entry_is_gone_with_its_action(dsn: str) -> None:
    with Storage(dsn) as store:
        [job_id] = store.enqueue()
        store.sql("alter table jobq.finished add constraint no check (state <> 'cancelled')")
        with jobq.Client(dsn) as client:
            with pytest.raises(jobq.DatabaseError):
                client.cancel(job_id)
            assert client.operator_log() == []
        assert store.place(job_id).table == "ready"
        store.sql("alter table jobq.operator_log add constraint silent check (actor <> 'mute')")
        with jobq.Client(dsn) as client, pytest.raises(jobq.DatabaseError):
            client.delete(job_id, by="mute")
        assert store.place(job_id).table == "ready"


def test_pages_go_back_in_time(client: jobq.Client) -> None:
    for n in range(5):
        client.queues.pause(f"q{n}")
    newest = client.operator_log(limit=2)
    older = client.operator_log(limit=2, before=newest[-1].id)
    oldest = client.operator_log(before=older[-1].id)
    names = [entry.target["queue"] for entry in (*newest, *older, *oldest)]
    assert names == ["q4", "q3", "q2", "q1", "q0"]
    assert client.operator_log(before=-(10**30)) == []
    assert len(client.operator_log(before=10**30)) == 5
    impossible: list[dict[str, Any]] = [
        {"limit": 0},
        {"limit": 1001},
        {"limit": "5"},
        {"before": "x"},
        {"limit": True},
    ]
    for wrong in impossible:
        with pytest.raises(jobq.ConfigError):
            client.operator_log(**wrong)


def test_who_does_not_say_who_he_is_is_known_by_user_and_host(
    client: jobq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queues.pause("q")
    assert client.operator_log()[0].actor == f"{getpass.getuser()}@{socket.gethostname()}"

    def nameless() -> str:
        raise KeyError("no such user")

    monkeypatch.setattr("getpass.getuser", nameless)
    default_actor.cache_clear()
    try:
        client.queues.pause("q")
    finally:
        default_actor.cache_clear()
    actor = client.operator_log()[0].actor
    assert actor.partition("@")[0].isdigit()


def test_an_operation_of_several_statements_logs_in_its_transaction(dsn: str) -> None:
    def nothing_but_the_entry() -> Any:
        return (yield from log_action(SCHEMA, Entry("tidy", {"x": 1}, "anna", "why"), 3))

    with Storage(dsn) as store:
        entry_id = store.run(atomic(nothing_but_the_entry()))
    with jobq.Client(dsn) as client:
        [entry] = client.operator_log()
    assert (entry.id, entry.action, entry.jobs, entry.target) == (entry_id, "tidy", 3, {"x": 1})


async def test_the_async_client_reads_the_same(dsn: str, client: jobq.Client) -> None:
    client.queues.pause("q")
    async with jobq.AsyncClient(dsn) as other:
        assert await other.operator_log() == client.operator_log()


def test_nobody_but_the_owner_has_rights_on_it(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "select has_table_privilege('public', 'jobq.operator_log', 'select')"
        ).fetchone()
    assert row == (False,)
