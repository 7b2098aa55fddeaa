"""`jobqctl` for whoever is on call: look, steer, and output that survives any terminal and any pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

import jobq
from jobq.cli import escapes
from jobq.cli.app import app
from jobq.cli.parsing import parse_length

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg
    from click.testing import Result

ODD = "漢字 😀 \u202egnp.exe \x1b[31m\x07 é"


def run(dsn: str, *arguments: str, stdin: str | None = None, code: int | None = 0) -> Result:
    result = CliRunner().invoke(app, arguments, input=stdin, env={"DATABASE_URL": dsn, "COLUMNS": "200"})
    assert code is None or result.exit_code == code, result.output
    return result


def read(dsn: str, *arguments: str, code: int = 0) -> Any:
    return json.loads(run(dsn, *arguments, "--json", code=code).stdout)


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    with jobq.Client(dsn) as client:
        yield client


# enqueue


def test_enqueue_takes_every_option_and_keeps_every_digit(dsn: str, client: jobq.Client) -> None:
    made = read(
        dsn, "enqueue", "report", '{"id": 1970670598291982290}', "--queue", "reports", "--priority", "3",
        "--delay", "2h", "--max-attempts", "4", "--timeout", "90s", "--unique", "r-1", "--meta", '{"a": 1}',
        "--tag", "x", "--tag", "y",
    )  # fmt: skip
    info = client.get(made["id"])
    assert info.args == {"id": 1970670598291982290}
    assert (info.queue, info.priority, info.max_attempts, info.timeout_s) == ("reports", 3, 4, 90.0)
    assert (info.unique_key, info.meta, info.tags) == ("r-1", {"a": 1}, ("x", "y"))
    assert info.state is jobq.JobState.SCHEDULED
    again = run(dsn, "enqueue", "report", "--unique", "r-1")
    assert again.output == f"job {made['id']} holds that key already: none was made\n"


def test_enqueue_reads_standard_input_and_lifts_the_time_limit(dsn: str, client: jobq.Client) -> None:
    result = run(dsn, "enqueue", "k", "-", "--timeout", "0", stdin='{"from": "stdin"}')
    info = client.get(int(result.output.split()[1]))
    assert info.args == {"from": "stdin"}
    assert info.timeout_s is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("k", "{"), "not JSON"),
        (("k", "[" * 100_000), "not JSON"),
        (("k", "--meta", "[1]"), "meta"),
        (("k", "--run-at", "2030-01-01"), "which zone"),
        (("k", "--run-at", "soon"), "2030-01-31T09"),
        (("k", "--delay", "soon"), "90s, 15m, 2h or 7d"),
        (("k", "--delay", "90"), "90: of what? write 90s, 90m, 90h or 90d"),
        (("k", "--delay", "9" * 30 + "d"), "too long"),
        (("k", "--priority", "10"), "priority"),
        (("", "{}"), "kind"),
    ],
)
def test_enqueue_names_what_it_cannot_take(dsn: str, arguments: tuple[str, ...], said: str) -> None:
    assert said in run(dsn, "enqueue", *arguments, code=2).output


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("0.0", 0),
        ("90s", 90),
        ("1.5s", 1.5),
        ("15m", 900),
        ("3 min", 180),
        ("2h", 7200),
        ("1w", 604_800),
    ],
)
def test_lengths_of_time_as_people_write_them(text: str, seconds: float) -> None:
    parsed = parse_length(None, None, text)  # type: ignore[arg-type]
    assert parsed is not None
    assert parsed.total_seconds() == seconds


# list, show


def test_list_pages_through_what_the_filter_chooses(dsn: str, client: jobq.Client) -> None:
    jobs = [jobq.NewJob("report", {"n": n}, queue="reports", tags=["t"]) for n in range(5)]
    made = [enqueued.id for enqueued in client.enqueue_many([*jobs, jobq.NewJob("other", {})])]
    seen: list[int] = []
    page = read(dsn, "list", "--queue", "reports", "--kind", "report", "--tag", "t", "--limit", "2")
    while True:
        seen += [job["id"] for job in page["jobs"]]
        if page["next"] is None:
            break
        page = read(dsn, "list", "--queue", "reports", "--limit", "2", "--after", page["next"])
    assert seen == sorted(made[:5], reverse=True)
    assert "more: add --after" in run(dsn, "list", "--limit", "2").stderr
    nothing = run(dsn, "list", "--state", "discarded")
    assert (nothing.stdout, nothing.stderr) == ("", "no such jobs\n")


def test_list_puts_nothing_that_has_been_into_the_future(
    dsn: str, db: psycopg.Connection, client: jobq.Client
) -> None:
    """Whatever the clocks say: the database's was set back, or this machine's is behind."""
    client.enqueue("k", {})
    client.enqueue("k", {}, delay=timedelta(hours=2))
    db.execute("update jobq.ready set ready_at = ready_at + interval '1 hour'")
    shown = run(dsn, "list").output
    assert "0.0 s ago" in shown
    assert shown.count("in ") == 1
    assert "in 2 h" in shown


def test_show_tells_the_whole_story_of_a_job(dsn: str, db: psycopg.Connection, client: jobq.Client) -> None:
    job_id = client.enqueue("report", {"month": 3}, tags=["t"], meta={"by": "me"}, unique="r").id
    db.execute(
        "insert into jobq.attempt_error (job_id, attempt, outcome, type, message, traceback, worker,"
        " started_at, omitted)"
        " values (%s, 1, 'failed', 'ValueError', 'no ink', 'Traceback…', 'w1', now(), 3)",
        [job_id],
    )
    client.cancel(job_id, reason="enough")
    shown = run(dsn, "show", str(job_id)).output
    for text in (
        "report",
        "cancelled (enough)",
        '"month": 3',
        "unique key",
        "w1",
        "no ink",
        "Traceback…",
        "3 older",
    ):
        assert text in shown
    assert "Traceback…" not in run(dsn, "show", str(job_id), "--no-traceback").output
    as_json = read(dsn, "show", str(job_id))
    assert as_json["job"]["args"] == {"month": 3}
    assert as_json["errors"][0]["message"] == "no ink"
    assert run(dsn, "show", "4711", code=1).output == "jobqctl: there is no job 4711\n"


def fail(db: psycopg.Connection, job_id: int, attempt: int, traceback: str) -> None:
    db.execute(
        "insert into jobq.attempt_error"
        " (job_id, attempt, outcome, type, message, traceback, worker, started_at)"
        " values (%s, %s, 'failed', 'ValueError', 'no ink', %s, 'host:7 #9', now())",
        [job_id, attempt, traceback],
    )


def test_show_leaves_no_attempt_out_and_tells_an_equal_traceback_once(
    dsn: str, db: psycopg.Connection, client: jobq.Client
) -> None:
    job_id = client.enqueue("report", {}).id
    db.execute("delete from jobq.ready")
    db.execute(
        "insert into jobq.worker (id, name, host, pid, version, queues, kinds, lease_until)"
        " values (8, 'host:7', 'host', 7, '0.1', '{a}', '{k}', clock_timestamp() + interval '1 minute')"
    )
    for attempt, traceback in ((2, "Traceback A"), (3, "Traceback A"), (6, "Traceback B")):
        fail(db, job_id, attempt, traceback)
    db.execute(
        "insert into jobq.running (job_id, queue, priority, attempt, failures, crashes, worker_id)"
        " values (%s, 'default', 0, 7, 3, 1, 8)",
        [job_id],
    )
    shown = run(dsn, "show", str(job_id)).output
    lines = [line.split("Z  ")[-1].strip() for line in shown.partition("timeline\n")[2].splitlines()]
    assert [line for line in lines if line.startswith("attempt") and not line.endswith("ValueError")] == [
        "attempt 1 left no error: snoozed, put back or handed back",
        "attempt 2 started on host:7 #9",
        "attempt 2 failed: ValueError: no ink",
        "attempt 3 started on host:7 #9",
        "attempt 3 failed: ValueError: no ink",
        "attempts 4 to 5 left no error: snoozed, put back or handed back",
        "attempt 6 started on host:7 #9",
        "attempt 6 failed: ValueError: no ink",
        "attempt 7 started on host:7 (id 8)",
    ]
    assert shown.count("Traceback A") == 1
    assert shown.count("Traceback B") == 1
    assert "(the same traceback as attempt 2)" in shown
    assert "1 worker died with it" in shown


def test_show_tells_what_operators_did_to_the_job(dsn: str, client: jobq.Client) -> None:
    job_id = client.enqueue("report", {}).id
    client.cancel(job_id, by="anna", reason="too \x1b[31mred")
    client.retry(job_id, by="anna")
    client.move(job_id, priority=3, by="ben")
    client.cancel(client.enqueue("report", {}).id, by="other")
    shown = run(dsn, "show", str(job_id)).output
    lines = [line.split("Z  ")[-1].strip() for line in shown.partition("timeline\n")[2].splitlines()]
    assert lines == [
        "enqueued", r"cancel by anna: too \x1b[31mred", "retry by anna", "ready", "move by ben (priority=3)",
    ]  # fmt: skip
    document = json.loads(run(dsn, "show", str(job_id), "--json").output)
    assert [action["action"] for action in document["actions"]] == ["move", "retry", "cancel"]
    log = run(dsn, "log", "--job", str(job_id)).output
    assert log.count("anna") == 2
    assert "other" not in log


def test_show_tells_of_a_snoozed_first_attempt_and_no_reason_twice(
    dsn: str, db: psycopg.Connection, client: jobq.Client
) -> None:
    job_id = client.enqueue("report", {}, delay=timedelta(hours=1)).id
    assert "scheduled (scheduled)" not in run(dsn, "show", str(job_id)).output
    db.execute("update jobq.scheduled set reason = 'snooze', attempt = 1")
    shown = run(dsn, "show", str(job_id)).output
    assert "scheduled (snooze)" in shown
    first, last = shown.index("attempt 1 left no error"), shown.index("will be ready")
    assert first < last


def test_documents_beyond_pythons_types_are_shown_all_the_same(dsn: str, db: psycopg.Connection) -> None:
    deep = "[" * 5000 + "]" * 5000
    for args in ("1e400", "9" * 5000, deep):
        db.execute(
            "with j as (insert into jobq.job (id, kind, args, max_attempts) values"
            " (nextval('jobq.job_id_seq'), 'k', %s::text::jsonb, 1) returning id)"
            " insert into jobq.ready (job_id, queue, priority) select id, 'default', 0 from j",
            [args],
        )
    jobs = read(dsn, "list")["jobs"]
    assert [job["args"] for job in jobs] == [deep, "9" * 5000, 10**400]
    for job in jobs:
        assert run(dsn, "show", str(job["id"])).exit_code == 0
        assert read(dsn, "show", str(job["id"]))["job"]["args"] == job["args"]


# cancel, retry, delete, move, reschedule


def test_by_id_each_job_is_told_of_and_one_failure_is_an_exit_code(dsn: str, client: jobq.Client) -> None:
    one, two = client.enqueue("k", {}).id, client.enqueue("k", {}).id
    result = run(dsn, "cancel", str(one), "4711", str(two), "--reason", "enough", "--by", "me", code=1)
    assert result.stdout == f"job {one}: cancelled\njob {two}: cancelled\n"
    assert result.stderr == "jobqctl: there is no job 4711\n"
    assert client.get(one).reason == "enough"
    assert {entry.actor for entry in client.operator_log()} == {"me"}
    assert read(dsn, "retry", str(one)) == [{"job": one, "done": True, "outcome": "made ready again"}]
    assert client.get(one).state is jobq.JobState.READY
    run(dsn, "move", str(one), "--to-queue", "other", "--to-priority", "5")
    assert (client.get(one).queue, client.get(one).priority) == ("other", 5)
    run(dsn, "reschedule", str(one), "--delay", "1h")
    assert client.get(one).state is jobq.JobState.SCHEDULED
    run(dsn, "reschedule", str(one), "--run-at", "2999-01-01T00:00:00Z")
    assert str(client.get(one).run_at) == "2999-01-01 00:00:00+00:00"
    run(dsn, "delete", str(one), str(two))
    with pytest.raises(jobq.JobNotFound):
        client.get(one)


def test_an_id_that_no_job_can_have_keeps_none_of_the_others(dsn: str, client: jobq.Client) -> None:
    made = client.enqueue("k")
    result = run(dsn, "cancel", str(2**70), str(made.id), code=1)
    assert result.stdout == f"job {made.id}: cancelled\n"
    assert f"there is no job {2**70}" in result.stderr


def test_in_bulk_it_counts_asks_and_tells(dsn: str, client: jobq.Client) -> None:
    client.enqueue_many([jobq.NewJob("report", {}, queue="reports") for _ in range(30)])
    client.enqueue("other", {})
    dry = run(dsn, "cancel", "--queue", "reports", "--dry-run")
    assert dry.output == "30 jobs would be cancelled\n"
    asked = run(dsn, "cancel", "--queue", "reports", code=2)
    assert "30 jobs will be cancelled: add --yes" in asked.output
    assert read(dsn, "cancel", "--queue", "reports", "--dry-run")["jobs"] == 30
    done = run(dsn, "cancel", "--queue", "reports", "--yes", "--reason", "cleanup")
    assert done.stdout == "30 jobs cancelled\n"
    assert run(dsn, "cancel", "--kind", "other", "--dry-run").stdout == "1 job would be cancelled\n"
    assert (
        run(dsn, "cancel", "--kind", "other").stdout == "1 job cancelled\n"
    )  # nobody has to be asked for one
    assert (
        run(dsn, "retry", "--state", "cancelled", "--kind", "report", "--yes").stdout
        == "30 jobs made ready again\n"
    )


def test_a_bulk_retry_names_the_job_whose_key_is_held_and_does_the_others(
    dsn: str, client: jobq.Client
) -> None:
    held = client.enqueue("k", {}, unique="key").id
    others = [enqueued.id for enqueued in client.enqueue_many([jobq.NewJob("k", {}) for _ in range(10)])]
    run(dsn, "cancel", "--all", "--yes")
    holder = client.enqueue("k", {}, unique="key").id
    result = run(dsn, "retry", "--all", "--yes", code=1)
    assert result.stdout == "10 jobs made ready again, 1 left alone, since their unique keys are held\n"
    assert f"job {held}: job {holder} holds its unique key" in result.stderr
    assert {client.get(job_id).state for job_id in others} == {jobq.JobState.READY}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cancel",), "which jobs?"),
        (("move", "1"), "where to?"),
        (("reschedule", "1"), "when?"),
        (("reschedule", "1", "--delay", "1h", "--run-at", "2030-01-01T00:00:00Z"), "when?"),
        (("retry", "--state", "running", "--yes"), "applies to jobs that are discarded"),
        (("list", "--after", "bla"), "--after bla: what the page before printed after `more: add --after`"),
        (("pause", "--queue", "q", "--until", "2020-01-01T00:00:00Z"), "2020-01-01 00:00:00Z has passed"),
        (("pause", "q r"), "'q r': of a queue or of a kind? Say --queue 'q r' or --kind 'q r'."),
        (("resume", "q", "--kind", "k"), "Say --queue q or --kind q."),
        (("pause", "--nosuch", "q"), "No such option '--nosuch'"),
        (("pause",), "give --queue or --kind, one of them"),
        (("resume", "--queue", "a", "--kind", "b"), "give --queue or --kind, one of them"),
        (("log", "--limit", "0"), "limit"),
    ],
)
def test_what_makes_no_sense_is_refused_as_wrong_usage(
    dsn: str, arguments: tuple[str, ...], said: str
) -> None:
    assert said in run(dsn, *arguments, code=2).output


# queues, schedules, workers


def test_pause_and_resume_by_queue_and_by_kind(dsn: str) -> None:
    assert (
        "is paused until it is resumed"
        in run(dsn, "pause", "--queue", "mail", "--reason", "why", "--by", "me").output
    )
    run(dsn, "pause", "--kind", "report", "--until", "2999-01-01T00:00:00Z")
    (queue, kind) = read(dsn, "pauses")
    assert (queue["name"], queue["reason"], queue["paused_by"]) == ("mail", "why", "me")
    assert kind["until"].startswith("2999-01-01")
    assert "mail" in run(dsn, "pauses").stdout
    assert run(dsn, "resume", "--queue", "mail").output == "queue 'mail' goes on\n"
    assert run(dsn, "resume", "--queue", "mail").output == "queue 'mail' was not paused\n"


def test_a_pause_tells_its_end_in_utc_wherever_it_was_written(dsn: str) -> None:
    result = run(dsn, "pause", "--queue", "q", "--until", "2090-01-01T00:00:00+05:00")
    assert "is paused until 2089-12-31 19:00:00Z" in result.output
    said = run(dsn, "pause", "--queue", "q", "--until", "0001-01-01T00:00:00+14:00", code=2)
    assert "is no moment of the years 1 to 9999" in said.output


def test_pause_says_when_it_stops_nothing_that_there_is(dsn: str, client: jobq.Client) -> None:
    job_id = client.enqueue("report", {}, queue="mail").id
    client.cancel(job_id)
    for option, name in (("--queue", "mail"), ("--kind", "report")):
        assert run(dsn, "pause", option, name).stderr == ""
        what = option.removeprefix("--")
        assert run(dsn, "pause", option, "nosuch").stderr == f"note: no such {what} now has jobs or workers\n"


def test_workers_ids_are_texts_in_json_and_keep_every_digit(
    dsn: str, db: psycopg.Connection, client: jobq.Client
) -> None:
    worker_id = 2**62 - 1
    db.execute(
        "insert into jobq.worker (id, name, host, pid, version, queues, kinds, lease_until)"
        " values (%s, 'w', 'h', 1, '0.1', '{a}', '{k}', clock_timestamp() + interval '1 minute')",
        [worker_id],
    )
    job_id = client.enqueue("k", {}).id
    db.execute("delete from jobq.ready")
    db.execute(
        "insert into jobq.running (job_id, queue, priority, attempt, failures, crashes, worker_id)"
        " values (%s, 'default', 0, 1, 0, 0, %s)",
        [job_id, worker_id],
    )
    [worker] = read(dsn, "workers")
    assert worker["id"] == str(worker_id)
    assert read(dsn, "show", str(job_id))["job"]["worker_id"] == worker["id"]
    [job] = read(dsn, "list", "--worker", worker["id"])["jobs"]
    assert (job["id"], job["worker_id"]) == (job_id, worker["id"])
    run(dsn, "cancel", "--worker", worker["id"], "--by", "me")
    assert read(dsn, "log")[0]["target"]["filter"] == {"worker": worker["id"]}
    assert f"worker={worker_id}" in run(dsn, "log").stdout


def test_stats_show_what_waits_is_paused_and_has_no_worker(dsn: str, client: jobq.Client) -> None:
    assert run(dsn, "stats").stderr == "no queue has jobs, workers or a pause\n"
    client.enqueue("k", {}, queue="mail")
    client.queues.pause("mail", reason="maintenance")
    (mail,) = read(dsn, "stats")
    assert (mail["queue"], mail["ready"], mail["paused"]) == ("mail", 1, True)
    shown = run(dsn, "stats").stdout
    assert "paused: maintenance, no worker" in shown


def test_retention_is_shown_and_set(dsn: str) -> None:
    run(dsn, "retention", "--queue", "mail", "--completed", "2h", "--discarded", "keep")
    (mail,) = [row for row in read(dsn, "retention") if row["queue"] == "mail"]
    assert (mail["completed"], mail["discarded"]) == (7200.0, "keep")
    others, own = run(dsn, "retention").stdout.splitlines()[1:]
    assert others.split() == ["(all", "others)", "1", "d", "7", "d", "7", "d"]
    assert own.split() == ["mail", "2", "h", "keep", "7", "d,", "as", "for", "all"]


def test_retention_takes_no_number_without_its_unit(dsn: str, client: jobq.Client) -> None:
    before = client.queues.retention()
    refused = run(dsn, "retention", "--completed", "5", code=2)
    assert "5: of what? write 5s, 5m, 5h or 5d" in refused.output
    assert client.queues.retention() == before
    assert run(dsn, "retention").stdout.splitlines()[1].startswith("(all queues)")


def test_schedules_are_listed_paused_resumed_triggered_and_removed(dsn: str, client: jobq.Client) -> None:
    client.periodic.add("nightly", "report", {"month": 1}, cron="0 3 * * *", tz="Europe/Berlin")
    shown = run(dsn, "periodic", "list").stdout
    assert "0 3 * * * (Europe/Berlin)" in shown
    assert "added by a client" in shown
    run(dsn, "periodic", "pause", "nightly", "--reason", "holidays", "--by", "me")
    assert "paused by me: holidays" in run(dsn, "periodic", "list").stdout
    assert read(dsn, "periodic", "list")[0]["pause_reason"] == "holidays"
    run(dsn, "periodic", "resume", "nightly")
    made = read(dsn, "periodic", "trigger", "nightly")
    assert client.get(made["id"]).kind == "report"
    run(dsn, "periodic", "remove", "nightly")
    assert run(dsn, "periodic", "list").stderr == "no schedules\n"
    assert "nightly" in run(dsn, "periodic", "pause", "nightly", code=1).output


def test_workers_are_shown_by_their_state(dsn: str, db: psycopg.Connection) -> None:
    assert run(dsn, "workers").stderr == "none\n"
    db.execute(
        "insert into jobq.worker"
        " (id, name, host, pid, version, queues, kinds, lease_until, ended_at, end_reason) values"
        " (1, 'w1', 'h', 1, '0.1', '{a,b}', '{k}', clock_timestamp() + interval '1 minute', null, null),"
        " (2, 'w2', 'h', 2, '0.1', '{a}', '{k}', clock_timestamp(), clock_timestamp(), 'died')"
    )
    shown = run(dsn, "workers").stdout
    assert "a, b" in shown
    assert [line.split()[2] for line in shown.splitlines()[1:]] == ["live", "died"]
    assert [worker["is_live"] for worker in read(dsn, "workers")] == [True, False]


def test_the_log_says_who_did_what_and_why(dsn: str, client: jobq.Client) -> None:
    assert run(dsn, "log").stderr == "nobody has done anything\n"
    client.cancel(client.enqueue("k", {}).id, reason="because", by="me")
    assert all(word in run(dsn, "log").stdout for word in ("me", "cancel", "because"))
    assert read(dsn, "log")[0]["actor"] == "me"
    run(dsn, "retention", "--queue", "mail", "--completed", "2h")
    run(dsn, "cancel", "--kind", "a", "--kind", "b")
    told = run(dsn, "log").stdout
    assert "queue=mail, completed=7200.0 " in told
    assert "kinds=a|b " in told
    assert "null" not in told


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_names_the_program(dsn: str, shell: str) -> None:
    assert "_JOBQCTL_COMPLETE" in run(dsn, "completion", shell).stdout


# Terminals and pipes


def test_nothing_that_a_terminal_obeys_is_printed() -> None:
    assert escapes.safe("a\x1b[31m\u202e\x9b\u2028\ud800\x00") == "a\\x1b[31m\\u202e\\x9b\\u2028\\ud800\\x00"
    assert escapes.safe("漢字 é 👩\u200d🚀") == "漢字 é 👩\u200d🚀"
    assert escapes.safe("a\nb\tc", keep_lines=True) == "a\nb\tc"
    assert escapes.safe("a\nb") == "a\\nb"


def jobqctl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "jobq.cli", *arguments]


@pytest.mark.parametrize("env", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
@pytest.mark.parametrize("width", ["20", "80", "200"])
def test_s83_a_list_of_odd_texts_is_aligned_or_escaped_on_any_terminal(
    dsn: str, client: jobq.Client, env: dict[str, str], width: str
) -> None:
    client.enqueue("plain", {"text": ODD}, queue="漢字", tags=[ODD])
    client.enqueue("漢字😀", {"text": ODD}, unique="😀")
    ran = subprocess.run(
        jobqctl("list"),
        env={**os.environ, **env, "DATABASE_URL": dsn, "COLUMNS": width, "FORCE_COLOR": "1", "TERM": "xterm"},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert b"Traceback" not in ran.stderr
    shown = ran.stdout.decode()
    assert "\u202e" not in shown
    assert "\x07" not in shown
    assert "\x1b[31m" not in shown.replace("\\x1b[31m", "")


def test_s83_pipes_that_close_early_are_no_accident(dsn: str, client: jobq.Client) -> None:
    client.enqueue_many([jobq.NewJob("k", {"n": n}) for n in range(500)])
    command = " ".join(jobqctl("list", "--limit", "500"))
    for shell, codes in {
        f"set -o pipefail; {command} | head -1": {0, 1},  # 0 where all of it was in the pipe before it closed
        f"set -o pipefail; {command} --json | head -c 1": {0, 1},
        f"{command} >&-": {0},
        f"{command} > /dev/full": {1},
    }.items():
        ran = subprocess.run(
            ["bash", "-c", shell],
            env={**os.environ, "DATABASE_URL": dsn},
            capture_output=True,
            check=False,
            text=True,
            timeout=60,
        )
        assert "Traceback" not in ran.stderr, (shell, ran.stderr)
        assert ran.returncode in codes, (shell, ran.stderr)


def test_a_table_in_a_pipe_has_one_line_a_row_however_long(dsn: str, client: jobq.Client) -> None:
    client.enqueue("k" * 128, {"text": "x" * 300}, queue="q" * 128)
    lines = subprocess.run(
        jobqctl("list"),
        env={**os.environ, "DATABASE_URL": dsn, "COLUMNS": "20"},
        capture_output=True,
        check=True,
        text=True,
    ).stdout.splitlines()
    assert len(lines) == 2


def test_every_command_is_told_where_the_database_is(dsn: str) -> None:
    for name, command in app.commands.items():
        if name in {"bench", "completion", "periodic"}:
            continue
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--dsn"} <= options, name


def test_the_commands_of_the_documentation_exist() -> None:
    text = "".join(path.read_text() for path in (Path(__file__).parent.parent / "docs").glob("*.md"))
    for line in text.splitlines():
        words = line.strip().lstrip("`$ ").split()
        if words[:1] == ["jobqctl"] and len(words) > 1 and words[1].isalpha():
            assert words[1] in app.commands, line
