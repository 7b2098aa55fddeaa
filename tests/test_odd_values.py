"""Values that bite whoever looks at them: refused by name, or taken for what they are.

What the fuzzer found, one test for each sort; `test_fuzz_calls.py` looks for more.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Final

import pytest

import jobq
from tests.support.odd_objects import (
    OddDataclass,
    OddError,
    OddList,
    OddMapping,
    OddText,
    Unshowable,
    Untyped,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq.embedded import Databases, EmbeddedPostgres


@pytest.fixture(scope="module")
def client(server: EmbeddedPostgres, databases: Databases, template: str) -> Iterator[jobq.Client]:
    name = databases.create(template=template)
    with jobq.Client(server.dsn(name)) as client:
        yield client
    databases.drop(name)


class Priority(int, enum.Enum):
    """An integer that does not write itself as one."""

    HIGH = 5


HUGE: Final[Any] = 10**5000  # of more digits than Python shows
SHY: Final[Any] = Unshowable()
CHOSEN: Final = jobq.JobFilter(states=["ready"])
UNSHOWN: Final[dict[str, Callable[[jobq.Client, Any], object]]] = {
    "limit": lambda c, value: c.list(limit=value),
    "states": lambda _, value: jobq.JobFilter(states=[value]),
    "older_than": lambda _, value: jobq.JobFilter(older_than=value),
    "batch": lambda c, value: c.bulk.cancel(CHOSEN, batch=value),
    "action": lambda c, value: c.bulk.count(CHOSEN, action=value),
    "on_progress": lambda c, value: c.bulk.cancel(CHOSEN, on_progress=value),
    "ended_within": lambda c, value: c.workers(ended_within=value),
    "limit=": lambda c, value: c.operator_log(limit=value),
    "until": lambda c, value: c.queues.pause("q", until=value),
    "completed": lambda c, value: c.queues.set_retention(completed=value),
    "every": lambda c, value: c.periodic.add("n", "k", every=value),
    "cron": lambda c, value: c.periodic.add("n", "k", cron=value),
    "jitter": lambda c, value: c.periodic.add("n", "k", every=timedelta(1), jitter=value),
    "catch_up": lambda c, value: c.periodic.add("n", "k", every=timedelta(1), catch_up=value),
    "run_at_start": lambda c, value: c.periodic.add("n", "k", every=timedelta(1), run_at_start=value),
    "backoff": lambda _, value: jobq.JobType("k", dict, backoff=value),
    "ConstantBackoff: delay": lambda _, value: jobq.ConstantBackoff(value),
    "power": lambda _, value: jobq.PolynomialBackoff(power=value),
    "ExponentialBackoff: jitter": lambda _, value: jobq.ExponentialBackoff(jitter=value),
    "max_ready": lambda _, value: jobq.Client("", max_ready=value),
    "on_discard": lambda _, value: jobq.Jobs().on_discard(value),
    "Snooze": lambda _, value: jobq.Snooze(value),
    "Retry": lambda _, value: jobq.Retry(value),
}


@pytest.mark.parametrize("name", UNSHOWN)
@pytest.mark.parametrize("value", [HUGE, SHY], ids=["too many digits", "no repr"])
def test_a_value_that_cannot_be_shown_is_refused_by_its_name(
    client: jobq.Client, name: str, value: Any
) -> None:
    with pytest.raises(jobq.ConfigError, match=name):
        UNSHOWN[name](client, value)


BITING: Final = (OddMapping(a=1), OddList([1]), OddDataclass(), Untyped(), OddError())


@pytest.mark.parametrize("number", range(len(BITING)))  # pytest would look at them itself
def test_an_object_whose_own_methods_fail_is_refused_with_its_path(client: jobq.Client, number: int) -> None:
    value = BITING[number]
    for args in ({"a": value}, [value], value):
        with pytest.raises(jobq.ArgumentsEncodeError, match=r"^\$.*: .*(OddError|no JSON form)"):
            client.enqueue("k", args)
        with pytest.raises(jobq.ArgumentsEncodeError, match=r"^item 1: \$"):
            client.enqueue_many([jobq.NewJob("k", 1), jobq.NewJob("k", args)])


def test_a_sequence_or_mapping_that_fails_is_refused_by_its_option(client: jobq.Client) -> None:
    broken: Any = OddList(["a"])
    for refused in (
        lambda: client.enqueue("k", tags=broken),
        lambda: jobq.JobFilter(tags=broken),
        lambda: jobq.Unique(by_args=broken),
    ):
        with pytest.raises(jobq.ConfigError, match=r"(tags|by_args).*OddError"):
            refused()
    with pytest.raises(jobq.ArgumentsEncodeError, match=r"^meta: this object raised OddError"):
        client.enqueue("k", meta=OddMapping(a=1))


def test_a_text_of_a_class_of_its_own_is_taken_by_its_characters(client: jobq.Client) -> None:
    text = OddText("x")
    made = client.enqueue(text, {text: [text]}, queue=text, tags=[text], unique=text, meta={text: text})
    info = client.get(made.id)
    assert (info.kind, info.queue, info.tags, info.unique_key) == ("x", "x", ("x",), "x")
    assert (info.args, info.meta) == ({"x": ["x"]}, {"x": "x"})
    chosen = jobq.JobFilter(queues=[text], kinds=[text], tags=[text])
    assert [job.id for job in client.list(chosen).jobs] == [made.id]
    client.move(made.id, queue=OddText("y"))
    assert (
        client.bulk.move(jobq.JobFilter(queues=["y"]), queue=OddText("z"), reason=text, by=text).changed == 1
    )
    assert client.get(made.id).queue == "z"
    client.delete(made.id)


def test_an_integer_that_does_not_write_itself_as_one_is_one(client: jobq.Client) -> None:
    made = client.enqueue("integers", priority=Priority.HIGH, max_attempts=Priority.HIGH)
    chosen = jobq.JobFilter(kinds=["integers"], ids=[made.id, Priority.HIGH])
    [info] = client.list(chosen, limit=Priority.HIGH).jobs
    assert (info.priority, info.max_attempts) == (5, 5)
    assert client.bulk.delete(chosen, batch=Priority.HIGH).changed == 1
    assert len(client.operator_log(limit=Priority.HIGH)) > 0


@pytest.mark.parametrize("chosen", [None, {"states": ["ready"]}, "ready", SHY])
def test_what_is_no_filter_is_named(client: jobq.Client, chosen: Any) -> None:
    actions: list[Callable[[Any], object]] = [client.bulk.cancel, client.bulk.count]
    for action in (*actions, *([client.list] if chosen is not None else [])):
        with pytest.raises(jobq.ConfigError, match="which jobs"):
            action(chosen)


def test_a_progress_that_cannot_be_called_is_refused_before_anything_is_done(client: jobq.Client) -> None:
    made = client.enqueue("k")
    with pytest.raises(jobq.ConfigError, match="on_progress=5"):
        client.bulk.delete(CHOSEN, on_progress=5)  # type: ignore[arg-type]
    assert client.get(made.id).kind == "k"


@pytest.mark.parametrize(
    "after",
    [
        "",
        "ready",
        "done.1.",
        "ready.x.",
        "ready.-1.",
        "ready.99999999999999999999.",
        "ready.1.2030-01-01T00:00:00+00:00",
        "completed.1.x",
        "completed.1.infinity",
        "completed.1.294277-01-01T00:00:00+00:00",
        "completed.1.2030-01-01T00:00:00+05:00",
        "completed.1.2030-01-01T00:00:00",
        5,
        b"ready.1.",
    ],
)
def test_a_place_that_no_page_wrote_is_refused(client: jobq.Client, after: Any) -> None:
    with pytest.raises(jobq.ConfigError, match=r"^after: the `next` of a page$"):
        client.list(after=after)


def test_an_id_that_no_job_can_have_chooses_none_and_hinders_no_other(client: jobq.Client) -> None:
    made = client.enqueue("k")
    chosen = jobq.JobFilter(ids=[2**70, made.id, -1])
    assert [job.id for job in client.list(chosen).jobs] == [made.id]
    assert client.bulk.delete(chosen).changed == 1
    with pytest.raises(jobq.ConfigError, match=r"^worker="):
        jobq.JobFilter(worker=2**70)


def test_sequences_without_end_are_not_read_to_it(client: jobq.Client) -> None:
    endless: Any = Endless()
    for refused in (
        lambda: jobq.JobFilter(ids=range(2**70)),
        lambda: jobq.JobFilter(queues=endless),
        lambda: client.enqueue("k", tags=endless),
        lambda: jobq.Unique(by_args=endless),
    ):
        with pytest.raises(jobq.ConfigError, match="at most"):
            refused()


class Endless(Sequence[str]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: Any) -> Any:
        return "x"


def test_a_time_zone_of_ones_own_that_fails_is_refused(client: jobq.Client) -> None:
    class Broken(tzinfo):
        def utcoffset(self, _: datetime | None) -> timedelta:
            raise OddError

        dst = utcoffset

        def tzname(self, _: datetime | None) -> str:
            raise OddError

    moment = datetime(2030, 1, 1, tzinfo=Broken())
    with pytest.raises(jobq.ConfigError, match=r"^until=.*: OddError$"):
        client.queues.pause("q", until=moment)
    with pytest.raises(jobq.ConfigError, match=r"^run_at=.*: OddError$"):
        client.enqueue("k", run_at=moment)
