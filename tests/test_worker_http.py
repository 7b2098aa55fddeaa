"""A worker's probes: alive while its loop runs, ready while it takes jobs, whatever blocks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import urllib.error
import urllib.request
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import jobq
from tests.support.inprocess import working
from tests.support.observed import fresh_jobs
from tests.support.polling import eventually, eventually_async
from tests.support.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import SpawnPython
    from tests.support.proxy import TcpProxy


def fetch(port: int, path: str) -> tuple[int, str]:
    """Return the status and the body of an answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def is_ready(port: int) -> bool:
    return fetch(port, "/readyz") == (200, "ready\n")


async def ask(port: int, path: str) -> tuple[int, str]:
    return await asyncio.to_thread(fetch, port, path)


async def test_a_worker_that_works_is_alive_and_ready(dsn: str) -> None:
    async with working(dsn, fresh_jobs()) as bench:
        with bench.worker.serve_http(0, host="127.0.0.1") as http:
            await eventually_async(lambda: bench.worker.health().ready)
            assert await ask(http.port, "/livez") == (200, "alive\n")
            assert await ask(http.port, "/readyz") == (200, "ready\n")
            status, text = await ask(http.port, "/metrics")
            assert (status, "jobq[prometheus]" in text) == (501, True)
            assert (await ask(http.port, "/other"))[0] == 404


async def test_one_that_has_not_begun_or_has_ended_is_alive_and_not_ready(dsn: str) -> None:
    async with jobq.AsyncClient(dsn) as client:
        worker = jobq.Worker(client, fresh_jobs())
        assert worker.health() == jobq.WorkerHealth(alive=True, ready=False, problems=("it is not running",))
        run = asyncio.create_task(worker.run(handle_signals=False))
        await eventually_async(lambda: worker.health().ready)
        await worker.stop()
        await run
        assert (worker.health().alive, worker.health().ready) == (True, False)


async def test_one_that_drains_is_alive_and_not_ready(dsn: str) -> None:
    jobs = jobq.Jobs()
    go_on = asyncio.Event()

    @jobs.handler("wait")
    async def wait(job: jobq.Job, args: dict[str, Any]) -> None:
        await go_on.wait()

    async with working(dsn, jobs) as bench:
        await bench.client.enqueue("wait", {})
        await eventually_async(lambda: bench.worker.stats().busy == 1)
        assert bench.worker.health().ready
        stop = asyncio.create_task(bench.worker.stop(grace=timedelta(seconds=20)))
        await eventually_async(lambda: not bench.worker.health().ready)
        assert bench.worker.health().alive
        assert bench.worker.health().problems == ("it stops",)
        go_on.set()
        await stop


async def test_a_database_that_is_away_makes_it_unready_and_not_dead(dsn: str, proxy: TcpProxy) -> None:
    async with working(
        proxy.dsn, fresh_jobs(), lease=timedelta(seconds=6), heartbeat=timedelta(seconds=0.3)
    ) as bench:
        with bench.worker.serve_http(0, host="127.0.0.1") as http:
            await eventually_async(lambda: bench.worker.health().ready)
            proxy.refuse()
            proxy.drop()
            await eventually_async(lambda: not bench.worker.health().ready, 15)
            assert (await ask(http.port, "/livez"))[0] == 200
            status, text = await ask(http.port, "/readyz")
            assert (status, "the database is away" in text) == (503, True)
            proxy.accept()
            await eventually_async(lambda: bench.worker.health().ready, 15)


async def test_a_loop_that_stands_still_is_told_from_outside_of_it(dsn: str) -> None:
    jobs = jobq.Jobs()
    seen: list[tuple[int, str]] = []
    ports: list[int] = []

    @jobs.handler("block")
    async def block(job: jobq.Job, args: dict[str, Any]) -> None:
        until = time.monotonic() + 20  # the fault under test: the loop is ours until the probe has failed
        while time.monotonic() < until and not (seen and seen[-1][0] == 503):
            seen.append(fetch(ports[0], "/livez"))
            time.sleep(0.05)  # noqa: ASYNC251

    async with working(
        dsn, jobs, lease=timedelta(seconds=30), heartbeat=timedelta(seconds=0.5), exit_when_blocked=False
    ) as bench:
        with bench.worker.serve_http(0, host="127.0.0.1") as http:
            ports.append(http.port)
            await bench.ended((await bench.client.enqueue("block", {})).id, 30)
            assert seen[0] == (200, "alive\n")
            assert "its event loop has been blocked for 1 s" in seen[-1][1]
            await eventually_async(lambda: bench.worker.health().alive)


async def test_a_port_that_is_taken_is_named(dsn: str) -> None:
    async with jobq.AsyncClient(dsn) as client:
        worker = jobq.Worker(client, fresh_jobs())
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(jobq.ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                worker.serve_http(port, host="127.0.0.1")
        with pytest.raises(jobq.ConfigError, match="cannot listen"):
            worker.serve_http(70_000)


async def test_more_requests_than_there_is_room_for_are_refused_and_nothing_hangs(dsn: str) -> None:
    async with jobq.AsyncClient(dsn) as client:
        with jobq.Worker(client, fresh_jobs()).serve_http(0, host="127.0.0.1") as http:
            idle = [socket.create_connection(("127.0.0.1", http.port)) for _ in range(16)]
            try:
                await eventually_async(_is_refused(http.port), what="the room is full")
            finally:
                for one in idle:
                    one.close()
            is_refused = _is_refused(http.port)
            await eventually_async(lambda: not is_refused(), what="there is room again")
            assert await ask(http.port, "/livez") == (200, "alive\n")


async def test_clients_that_send_byte_after_byte_do_not_keep_others_out(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobq._worker.http._LONGEST_REQUEST_S", 0.5)
    async with jobq.AsyncClient(dsn) as client:
        with (
            jobq.Worker(client, fresh_jobs()).serve_http(0, host="127.0.0.1") as http,
            contextlib.ExitStack() as stack,
        ):
            slow = [
                stack.enter_context(socket.create_connection(("127.0.0.1", http.port))) for _ in range(16)
            ]
            open_ = set(slow)
            for one in slow:
                one.setblocking(False)
                one.sendall(b"GET /livez HTTP/1.1\r\n")

            def trickle() -> bool:
                for one in list(open_):
                    try:
                        one.sendall(b"X-More: to come\r\n")
                    except OSError:
                        open_.discard(one)
                return not open_

            await eventually_async(trickle, what="those who never end are cut off")
            is_refused = _is_refused(http.port)
            await eventually_async(lambda: not is_refused(), what="there is room again")


def _is_refused(port: int) -> Callable[[], bool]:
    def look() -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as one:
            one.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            try:
                return one.recv(100) == b""
            except ConnectionError:
                return True

    return look


# -- worker.stats() ----------------------------------------------------------------------------------


async def test_statistics_tell_of_slots_outcomes_and_latencies(dsn: str) -> None:
    async with working(dsn, fresh_jobs(), queues={"default": 5, "other": 2}) as bench:
        made = {do: (await bench.client.enqueue("async", {"do": do})).id for do in ("x", "fail", "snooze")}
        made |= {do: (await bench.client.enqueue("async", {"do": do})).id for do in ("permanent", "cancel")}
        await bench.client.enqueue("nobody knows", {})
        await eventually_async(lambda: bench.worker.stats().parked == 1)
        await eventually_async(lambda: bench.worker.stats().unrecorded == 0)
        await bench.waits(made["fail"], "retry")
        stats = bench.worker.stats()
    assert (stats.slots, stats.busy, stats.prefetched, stats.stuck) == (7, 0, 0, 0)
    assert stats.claimed == 6
    assert (stats.completed, stats.retried, stats.snoozed) == (1, 1, 1)
    assert (stats.discarded, stats.cancelled, stats.parked, stats.handed_back) == (1, 1, 1, 0)
    for latency in (stats.fetch, stats.completion, stats.loop_lag):
        assert latency.count > 0
        assert 0 <= latency.p50_s <= latency.p99_s <= latency.max_s < 10
    with pytest.raises(AttributeError):
        stats.busy = 1  # type: ignore[misc]


def test_a_latency_is_of_the_newest_only() -> None:
    from jobq._worker.stats import Window

    window = Window()
    assert window.latency() == jobq.Latency(0, 0.0, 0.0, 0.0)
    for _ in range(5_000):
        window.add(9.0)
    for n in range(1_000):
        window.add(n / 1_000)
    assert window.latency() == jobq.Latency(1_000, 0.5, 0.99, 0.999)


# -- jobqctl worker --http ---------------------------------------------------------------------------


def test_each_process_serves_on_a_port_of_its_own(spawn_python: SpawnPython, dsn: str) -> None:
    port = free_ports(2)
    with jobq.Client(dsn) as client:
        client.enqueue("async", {"do": "x"}, queue="mail")
    process = spawn_python(
        "-m", "jobq.cli", "worker", "tests.support.observed:jobs",
        "--processes", "2", "--http", f"127.0.0.1:{port}",
        env={"DATABASE_URL": dsn},
    )  # fmt: skip
    for number in (port, port + 1):
        process.wait_for_output(f"on 127.0.0.1:{number}\n")
        eventually(partial(is_ready, number), 20.0)
        assert fetch(number, "/livez")[0] == 200
        status, text = fetch(number, "/metrics")
        assert status == 200
        assert 'jobq_queue_jobs{queue="mail",state="ready"} 1.0' in text
        assert "jobq_worker_slots 20.0" in text
        assert "process_resident_memory_bytes" in text
    process.terminate()
    assert process.wait() == 0
    with pytest.raises(OSError, match="refused"):
        fetch(port, "/livez")


def test_a_port_that_is_taken_is_the_settings_fault_and_not_the_applications(
    spawn_python: SpawnPython, dsn: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = spawn_python(
            "-m", "jobq.cli", "worker", "tests.support.observed:jobs",
            "--http", f"127.0.0.1:{taken.getsockname()[1]}",
            env={"DATABASE_URL": dsn},
        )  # fmt: skip
        assert process.wait(30) == 2
    why, end = [line for line in process.output.splitlines() if "CRITICAL" in line]
    assert "Address already in use" in why
    assert "was told to run what cannot work, as it says above: giving up" in end
    assert "application" not in end


@pytest.mark.parametrize(
    ("value", "processes", "message"),
    [("x", 1, "write [HOST:]PORT"), ("65536", 1, "write [HOST:]PORT"), ("65535", 2, "need as many ports")],
)
def test_an_address_that_cannot_be_is_refused(value: str, processes: int, message: str) -> None:
    from click.testing import CliRunner

    from jobq.cli.app import app

    done = CliRunner().invoke(
        app, ["worker", "a:b", "--dsn", "", "--http", value, "--processes", str(processes)]
    )
    assert done.exit_code == 2
    assert message in done.output
