"""What must be red about schedules in both type checkers: every line that ends with `# red`, and no other."""

from __future__ import annotations

from datetime import timedelta

from jobq import AsyncClient, Client, Jobs
from tests.typing.good_enqueue import REPORT, TICK, EmailArgs, send

jobs = Jobs()
HOUR = timedelta(hours=1)

jobs.add_periodic("a", send, {"to": "a"}, every=HOUR)  # red
jobs.add_periodic("a", send, every=HOUR)  # red
jobs.add_periodic("a", TICK, {}, every=HOUR)  # red
jobs.add_periodic("a", REPORT, {"month": "January"}, every=HOUR)  # red
jobs.add_periodic("a", send, EmailArgs("a"), every=60)  # red
jobs.add_periodic("a", send, EmailArgs("a"), every=HOUR, catch_up="some")  # red
jobs.add_periodic("a", send, EmailArgs("a"), every=HOUR, run_at=None)  # red
jobs.add_periodic("a", send, EmailArgs("a"), every=HOUR, evry=HOUR)  # red


async def added(client: AsyncClient) -> None:
    await client.periodic.add("a", send, {"to": "a"}, every=HOUR)  # red
    await client.periodic.add("a", TICK, EmailArgs("a"), every=HOUR)  # red
    await client.periodic.add("a", send, EmailArgs("a"), every=HOUR, overlap="queue")  # red


def added_sync(client: Client) -> None:
    client.periodic.add("a", send, {"to": "a"}, every=HOUR)  # red
    client.periodic.trigger(5)  # red
