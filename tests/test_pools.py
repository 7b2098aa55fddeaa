"""The client's own pool: a connection is kept at hand, and nobody waits for the one that is kept."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.pq import TransactionStatus
from psycopg_pool.base import AttemptWithBackoff

import jobq
from jobq._clients import pools
from tests.support.polling import eventually, eventually_async

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from tests.support.proxy import TcpProxy

OTHERS = (
    "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
)


@pytest.fixture
def others(db: psycopg.Connection[Any]) -> Callable[[], int]:
    """Counts the other sessions in the test's database."""

    def count() -> int:
        row = db.execute(OTHERS).fetchone()
        assert row
        return int(row[0])

    return count


def test_the_kept_connection_is_anybodys(dsn: str, others: Callable[[], int]) -> None:
    with jobq.Client(dsn, pool_max_size=1) as client:
        for _ in range(3):
            client.enqueue("k", {})
            with client.pool.connection(timeout=1) as connection:
                assert not connection.autocommit
                client.enqueue("k", {}, tx=connection)
                assert connection.info.transaction_status == TransactionStatus.INTRANS
        assert others() == 1
    eventually(lambda: others() == 0)


async def test_the_kept_connection_is_anybodys_who_awaits_it(dsn: str, others: Callable[[], int]) -> None:
    async with jobq.AsyncClient(dsn, pool_max_size=1) as client:
        for _ in range(3):
            await client.enqueue("k", {})
            async with client.pool.connection(timeout=1) as connection:
                assert not connection.autocommit
                await client.enqueue("k", {}, tx=connection)
                assert connection.info.transaction_status == TransactionStatus.INTRANS
        assert others() == 1
    await eventually_async(lambda: others() == 0)


def test_who_waits_gets_the_connection_before_it_is_kept(dsn: str) -> None:
    with jobq.Client(dsn, pool_max_size=1) as client:
        client.enqueue("k", {})
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for n in range(100):
                    if rng.random() < 0.5:
                        client.enqueue("k", {"n": n})
                    else:
                        with client.pool.connection(timeout=10) as connection:
                            connection.execute("select 1")
            except BaseException as error:  # noqa: BLE001 - shown by the assertion
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        assert not any(thread.is_alive() for thread in threads)


async def test_who_awaits_gets_the_connection_before_it_is_kept(dsn: str, others: Callable[[], int]) -> None:
    async with jobq.AsyncClient(dsn, pool_max_size=2) as client:

        async def work(seed: int) -> None:
            rng = random.Random(seed)
            for n in range(50):
                if rng.random() < 0.5:
                    await client.enqueue("k", {"n": n})
                else:
                    async with client.pool.connection(timeout=10) as connection:
                        await connection.execute("select 1")

        await asyncio.wait_for(asyncio.gather(*(work(seed) for seed in range(20))), 60)
        assert others() <= 2


async def test_s39_the_pool_is_whole_after_waits_were_cancelled_at_random(dsn: str) -> None:
    rng = random.Random(39)
    async with jobq.AsyncClient(dsn, pool_max_size=3) as client:
        for _ in range(20):
            tasks = [asyncio.create_task(client.enqueue("k", {"n": n})) for n in range(50)]
            for task in rng.sample(tasks, 25):
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(10):
            held = [await client.pool.getconn(5) for _ in range(3)]
            for connection in held:
                assert (await (await connection.execute("select 1")).fetchone()) == (1,)
                await connection.rollback()
                await client.pool.putconn(connection)
            await client.enqueue("k", {})


def test_closing_while_another_thread_enqueues_closes_everything(dsn: str, others: Callable[[], int]) -> None:
    client = jobq.Client(dsn, pool_max_size=2)
    client.open()
    enqueued = threading.Event()

    ended_by: list[type[BaseException]] = []

    def work() -> None:
        try:
            while True:
                client.enqueue("k", {})
                enqueued.set()
        except jobq.Error as error:
            ended_by.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert enqueued.wait(10)
    client.close()
    thread.join(30)
    assert ended_by == [jobq.ClientClosed]
    eventually(lambda: others() == 0)


def test_a_kept_connection_goes_back_to_the_pool_now_and_then(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with jobq.Client(dsn, pool_max_size=1) as client:
        returned: list[object] = []
        put = client.pool.putconn

        def count(connection: psycopg.Connection[Any]) -> None:
            returned.append(connection)
            put(connection)

        monkeypatch.setattr(client.pool, "putconn", count)
        for _ in range(5):
            client.enqueue("k", {})
        assert len(returned) == 1  # the first time; from then on it is kept
        monkeypatch.setattr(client.pool, "_spare_until_s", 0.0)
        for _ in range(5):
            client.enqueue("k", {})
        assert len(returned) == 2


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let psycopg's pool pause longer than a test may take, and ours a moment."""
    monkeypatch.setattr(AttemptWithBackoff, "INITIAL_DELAY", 600.0)
    monkeypatch.setattr(pools, "RECONNECT_PAUSE_MAX_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_call_goes_on_soon_after_an_outage_however_long_it_was(proxy: TcpProxy) -> None:
    with jobq.Client(proxy.dsn, pool_max_size=1) as client, ThreadPoolExecutor() as threads:
        client.enqueue("k", {})
        proxy.refuse()
        proxy.drop()
        made = threads.submit(client.enqueue, "k", {})
        eventually(lambda: client.pool.get_stats().get("connections_errors", 0) >= 3)
        proxy.accept()
        assert made.result(10).inserted


@pytest.mark.usefixtures("impatient")
async def test_an_awaited_call_goes_on_soon_after_an_outage_however_long_it_was(proxy: TcpProxy) -> None:
    async with jobq.AsyncClient(proxy.dsn, pool_max_size=1) as client:
        await client.enqueue("k", {})
        proxy.refuse()
        proxy.drop()
        made = asyncio.create_task(client.enqueue("k", {}))
        await eventually_async(lambda: client.pool.get_stats().get("connections_errors", 0) >= 3)
        proxy.accept()
        async with asyncio.timeout(10):
            assert (await made).inserted
