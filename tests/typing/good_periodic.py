"""What both type checkers must accept of schedules."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import assert_type

from jobq import AsyncClient, Client, Enqueued, Jobs, PeriodicInfo, Unique
from tests.typing.good_enqueue import REPORT, TICK, EmailArgs, ReportArgs, send, send_sync

jobs = Jobs()
HOUR = timedelta(hours=1)
report: ReportArgs = {"month": 1}

jobs.add_periodic("a", send, EmailArgs("a"), every=HOUR)
jobs.add_periodic("b", send_sync, EmailArgs("a"), cron="0 9 * * mon-fri", tz="Europe/Berlin")
jobs.add_periodic("c", REPORT, report, every=HOUR, catch_up="all", catch_up_max=10)
jobs.add_periodic("d", TICK, every=HOUR, overlap="skip", jitter=timedelta(minutes=5), run_at_start=True)
jobs.add_periodic("e", "some.kind", {"x": 1}, every=HOUR, queue="q", unique=Unique(by_args=True), tags=["t"])


async def steered(client: AsyncClient) -> None:
    await client.periodic.add("f", send, EmailArgs("a"), every=HOUR, reason="why", by="ada")
    await client.periodic.pause("f", reason="why")
    await client.periodic.resume("f")
    assert_type(await client.periodic.trigger("f"), Enqueued)
    assert_type(await client.periodic.list(), list[PeriodicInfo])
    await client.periodic.remove("f")


def steered_sync(client: Client) -> None:
    client.periodic.add("f", TICK, every=HOUR)
    [info] = client.periodic.list()
    assert_type(info.next_at, datetime | None)
    assert_type(info.paused, bool)
