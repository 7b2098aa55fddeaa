"""Values of every sort, for property tests: what people, programs and attackers hand to a queue.

`fuzz` says how many examples a property is shown: some in `make check`, many more with JOBQ_LONG=1.
"""

from __future__ import annotations

import os
from datetime import timedelta, timezone
from typing import TYPE_CHECKING, Any, Final

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import jobq
from tests.support.odd_objects import OBJECTS, WITHIN

if TYPE_CHECKING:
    from collections.abc import Sequence

LONG: Final = os.environ.get("JOBQ_LONG") == "1"
_LONG_FACTOR: Final = 40

# What may be refused where it is given; a driver's or a server's error may not come out.
REFUSED: Final = (jobq.ConfigError, jobq.ArgumentsError, jobq.JobNotFound)
MESSAGE_LIMIT: Final = 2_000  # characters; no message may be as long as what it complains of


def fuzz(examples: int) -> settings:
    """Return how a property is tested: with so many examples, or many more in the long form."""
    return settings(
        max_examples=examples * (_LONG_FACTOR if LONG else 1),
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
            HealthCheck.function_scoped_fixture,
        ],
    )


# -- anything at all -------------------------------------------------------------------------------


def one_of(found: Sequence[object]) -> st.SearchStrategy[Any]:
    """Return one of some objects; by its place, for hypothesis would fall over them when it looks."""
    return st.integers(0, len(found) - 1).map(found.__getitem__)


offsets = st.timedeltas(timedelta(hours=-24, microseconds=1), timedelta(hours=24, microseconds=-1))
moments = st.datetimes(timezones=st.none() | st.builds(timezone, offsets))
texts = st.text(st.characters(), max_size=150)
plain = st.none() | st.booleans() | st.integers() | st.floats() | texts
odd = (
    plain
    | moments
    | st.timedeltas()
    | st.binary(max_size=10)
    | st.decimals()
    | st.uuids()
    | st.sets(st.integers(), max_size=2)
    | st.lists(plain, max_size=3)
    | st.dictionaries(st.integers() | texts, plain, max_size=3)
    | one_of(OBJECTS)
)
documents = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=9
)
# Documents with an odd object somewhere within.
holding = one_of(WITHIN).map(lambda one: [{"a": one}]) | one_of(WITHIN).map(lambda one: {"a": [1, one]})
waits = st.timedeltas(timedelta(days=-1), timedelta(days=40_000))
OPTIONS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "queue": texts,
    "priority": st.integers(-12, 12),
    "run_at": moments,
    "delay": waits,
    "max_attempts": st.integers(-1, 40_000),
    "timeout": waits,
    "unique": texts,
    "meta": st.dictionaries(texts, documents, max_size=3),
    "tags": st.lists(texts, max_size=22),
    "expires_at": moments,
}


def some_of(
    strategies: dict[str, st.SearchStrategy[Any]], most: int = 5
) -> st.SearchStrategy[dict[str, Any]]:
    """Return dictionaries of some of these, now and then with something odd in the place of one."""
    names = st.lists(st.sampled_from(sorted(strategies)), max_size=most, unique=True)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({name: strategies[name] | odd for name in chosen})
    )


options = some_of(OPTIONS)
kinds = texts | odd


def assert_told(refused: Exception) -> None:
    """Fail unless an error says something, and not too much."""
    assert 0 < len(str(refused)) < MESSAGE_LIMIT
