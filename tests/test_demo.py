"""The demonstration: run as its user runs it, and what it counts."""

from __future__ import annotations

import re
import signal
import smtplib
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from jobq.demo.mailserver import MailServer
from jobq.demo.shop import CREATE_ORDERS, INSERT_ORDER, Order, confirmation, read_orders
from jobq.demo.tally import Bookkeeper
from tests.support.polling import eventually

if TYPE_CHECKING:
    from tests.conftest import SpawnPython

ROOT = Path(__file__).parents[1]
ORDERS = ROOT / "examples" / "orders.csv"

slow = pytest.mark.slow


def count(output: str, name: str) -> int:
    found = re.search(rf"│ {name}\s*│\s*([\d,]+)", output)
    assert found is not None, output
    return int(found[1].replace(",", ""))


def schemas(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("select nspname from pg_namespace where nspname !~ '^pg_'").fetchall()
    return sorted(name for (name,) in rows)


# The whole


@slow
def test_it_delivers_all_survives_a_kill_and_says_so_in_a_narrow_pipe(spawn_python: SpawnPython) -> None:
    demo = spawn_python("-m", "jobq.cli", "demo", "--orders", "200", env={"COLUMNS": "40"})
    assert demo.wait(100) == 0, demo.output
    output = demo.output
    assert "kill -9" in output
    assert count(output, "enqueued") == 200
    assert count(output, "delivered") + count(output, "refused for good") == 200
    assert count(output, "retried") > 0
    assert count(output, "refused for good") > 0
    assert count(output, "recovered from the dead worker") > 0
    assert count(output, "lost") == 0
    assert output.count("lost: 0") == 1
    assert max(map(len, output.splitlines())) <= 40
    assert "\x1b" not in output


@slow
def test_on_a_database_of_ones_own_it_leaves_nothing_behind_and_shows_a_bar(
    spawn_python: SpawnPython, empty_dsn: str
) -> None:
    before = schemas(empty_dsn)
    demo = spawn_python(
        "-m",
        "jobq.cli",
        "demo",
        "--orders",
        "100",
        env={"DATABASE_URL": empty_dsn, "FORCE_COLOR": "1", "COLUMNS": "100"},
    )
    assert demo.wait(100) == 0, demo.output
    assert "in a schema of its own" in demo.output
    assert re.search(r'The schema "jobq_demo_\w+" is dropped', demo.output)
    assert "100/100" in demo.output
    assert "what that means" in demo.output
    assert schemas(empty_dsn) == before


@slow
def test_a_lost_job_is_noticed(spawn_python: SpawnPython, empty_dsn: str) -> None:
    demo = spawn_python(
        "-m", "jobq.cli", "demo", "--orders", "200", "--lose", "2", env={"DATABASE_URL": empty_dsn}
    )
    assert demo.wait(100) == 1, demo.output
    assert count(demo.output, "lost") == 2
    assert "lost: 2" in demo.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_interrupted_it_cleans_up(
    spawn_python: SpawnPython, empty_dsn: str, number: signal.Signals, code: int
) -> None:
    before = schemas(empty_dsn)
    demo = spawn_python("-m", "jobq.cli", "demo", env={"DATABASE_URL": empty_dsn})
    demo.wait_for_output("Two worker processes")
    demo.signal(number)
    assert demo.wait() == code, demo.output
    assert "Traceback" not in demo.output
    assert schemas(empty_dsn) == before
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        others = (
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        eventually(lambda: connection.execute(others).fetchone() == (0,))


def test_a_database_that_cannot_be_reached_is_named(spawn_python: SpawnPython) -> None:
    demo = spawn_python("-m", "jobq.cli", "demo", "--dsn", "postgresql://127.0.0.1:1/none")
    assert demo.wait() == 1
    assert "the database cannot be reached" in demo.output
    assert "Traceback" not in demo.output


def test_the_example_runs_by_itself_as_it_says(
    spawn_python: SpawnPython, empty_dsn: str, tmp_path: Path
) -> None:
    few = tmp_path / "few.csv"
    few.write_text("\n".join(ORDERS.read_text().splitlines()[:6]))
    with MailServer() as server:
        world = {"DATABASE_URL": empty_dsn, "SMTP_HOST": "127.0.0.1", "SMTP_PORT": str(server.port)}
        shop = spawn_python("shop.py", str(few), env=world, cwd=ORDERS.parent)
        assert shop.wait() == 0, shop.output
        worker = ["-m", "jobq.cli", "worker", "shop:jobs", "--queue", "mail=20"]
        spawn_python(*worker, env=world, cwd=ORDERS.parent)
        eventually(lambda: server.received == dict.fromkeys(range(1001, 1006), 1), 20.0)


# What it counts


def order(number: int, email: str = "a@example.com") -> Order:
    return Order(number, "Ada", email, "tea", 1, Decimal("9.80"))


def place(db: psycopg.Connection, number: int, state: str, email: str = "a@example.com") -> None:
    """Store an order, and its job in a state: a terminal one, ``ready``, or none."""
    db.execute(INSERT_ORDER, [number, "Ada", email, "tea", 1, Decimal(1)])
    if state:
        db.execute("select jobq.enqueue('confirm_order', jsonb_build_object('number', %s::int))", [number])
    if state not in {"", "ready"}:
        db.execute(
            "with x as (delete from jobq.ready returning *) insert into jobq.finished"
            " (job_id, state, queue, priority, attempt, failures, crashes)"
            " select job_id, %s, queue, priority, 1, 0, 0 from x",
            [state],
        )


def test_an_order_is_lost_unless_the_database_and_the_mail_server_agree_on_its_outcome(
    db: psycopg.Connection,
) -> None:
    db.execute(CREATE_ORDERS)
    server = MailServer()
    server.received.update([1, 1, 2])
    server.refused.add("gone@gone.example")
    place(db, 1, "completed")  # delivered, twice
    place(db, 3, "completed")  # completed, but no mail went out
    place(db, 4, "discarded", "gone@gone.example")
    place(db, 5, "discarded")  # given up, and the server never refused it
    place(db, 6, "")  # stored without its job
    place(db, 2, "ready")  # its mail went out, but that was never recorded
    orders = [order(number) for number in range(1, 8)]  # 7 was never stored
    tally = Bookkeeper(db, "jobq", server).tally(orders)
    assert (tally.enqueued, tally.delivered, tally.refused, tally.twice) == (5, 1, 1, 1)
    assert tally.lost == 5


# The world around it


def test_the_mail_server_turns_away_for_a_while_and_for_good_and_remembers_what_it_took() -> None:
    with MailServer() as server, smtplib.SMTP("127.0.0.1", server.port) as smtp:
        mail = confirmation(order(7))
        mail["Message-ID"] = "<1.order-7@shop.example>"
        assert smtp.send_message(mail) == {}
        assert server.received == {7: 1}
        with pytest.raises(smtplib.SMTPRecipientsRefused) as busy:
            smtp.send_message(mail, to_addrs=["x@busy.example"])
        assert busy.value.recipients["x@busy.example"][0] == 451
        with pytest.raises(smtplib.SMTPRecipientsRefused) as gone:
            smtp.send_message(mail, to_addrs=["x@gone.example"])
        assert gone.value.recipients["x@gone.example"][0] == 550
        server._first_tried["x@busy.example"] -= 60.0
        assert smtp.send_message(mail, to_addrs=["x@busy.example"]) == {}
        assert server.received == {7: 2}
        assert server.refused == {"x@gone.example"}


def test_the_orders_are_two_thousand_and_some_addresses_are_difficult() -> None:
    orders = read_orders(ORDERS)
    assert len({order.number for order in orders}) == 2000
    domains = [order.email.rpartition("@")[2] for order in orders]
    assert domains.count("busy.example") >= 50
    assert domains.count("gone.example") >= 20


def test_the_package_carries_the_very_files_of_the_examples() -> None:
    for name in ("orders.csv", "shop.py"):
        assert (ROOT / "src" / "jobq" / "demo" / name).samefile(ROOT / "examples" / name)
