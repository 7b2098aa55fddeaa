"""A wait grows with failures, stays under its cap, is spread by jitter, and never overflows."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobq._errors import ConfigError
from jobq._kinds.backoff import (
    DEFAULT_BACKOFF,
    Backoff,
    ConstantBackoff,
    ExponentialBackoff,
    PolynomialBackoff,
    guarded,
)
from jobq._limits import MAX_WAIT

DAY = timedelta(days=1)
SECOND = timedelta(seconds=1)
MOST_FAILURES = 32_767


def chance(value: float) -> Any:
    return lambda: value


@pytest.mark.parametrize(
    ("failures", "seconds"),
    [
        (1, 1),
        (2, 16),
        (3, 81),
        (10, 10_000),
        (17, 83_521),
        (18, 86_400),
        (1000, 86_400),
        (MOST_FAILURES, 86_400),
    ],
)
def test_the_default_is_failures_to_the_fourth_up_to_a_day(failures: int, seconds: int) -> None:
    assert PolynomialBackoff(rng=chance(0.5))(failures) == timedelta(seconds=seconds)


@given(st.sampled_from([1, 25, 1000, MOST_FAILURES]) | st.integers(1, MOST_FAILURES))
def test_s67_the_default_with_jitter_stays_near_its_value_and_never_over_the_cap(failures: int) -> None:
    nominal = min(float(failures) ** 4, DAY.total_seconds())
    wait = DEFAULT_BACKOFF(failures)
    assert 0.9 * nominal <= wait.total_seconds() <= min(1.1 * nominal, DAY.total_seconds())


@pytest.mark.parametrize("failures", [1, 25])
def test_jitter_spreads_waits_below_the_cap_and_at_it(failures: int) -> None:
    waits = {DEFAULT_BACKOFF(failures) for _ in range(50)}
    assert len(waits) > 40


@pytest.mark.parametrize(("value", "seconds"), [(0.0, 14.4), (0.5, 16.0), (0.75, 16.8)])
def test_jitter_is_a_share_of_the_wait(value: float, seconds: float) -> None:
    assert PolynomialBackoff(rng=chance(value))(2) == timedelta(seconds=seconds)


def test_at_the_cap_jitter_only_shortens() -> None:
    for value in (0.0, 0.25, 0.75, 0.999):
        assert 0.9 * DAY <= PolynomialBackoff(rng=chance(value))(50) < DAY


def test_exponential_growth() -> None:
    policy = ExponentialBackoff(timedelta(seconds=3), factor=2, cap=timedelta(minutes=1), jitter=0)
    assert [policy(n).total_seconds() for n in (1, 2, 3, 5, 6, MOST_FAILURES)] == [3, 6, 12, 48, 60, 60]


def test_constant() -> None:
    policy = ConstantBackoff(timedelta(seconds=10), jitter=0)
    assert policy(1) == policy(MOST_FAILURES) == timedelta(seconds=10)
    assert ConstantBackoff(timedelta(0))(5) == timedelta(0)
    assert ConstantBackoff(timedelta(seconds=10), rng=chance(0.0))(1) == timedelta(seconds=9)


policies = st.one_of(
    st.builds(
        PolynomialBackoff,
        base=st.timedeltas(timedelta(microseconds=1), DAY),
        power=st.floats(0, 1e6),
        cap=st.timedeltas(DAY, MAX_WAIT),
        jitter=st.floats(0, 0.999),
    ),
    st.builds(
        ExponentialBackoff,
        base=st.timedeltas(timedelta(microseconds=1), DAY),
        factor=st.floats(1, 1e300),
        cap=st.timedeltas(DAY, MAX_WAIT),
        jitter=st.floats(0, 0.999),
    ),
    st.builds(ConstantBackoff, delay=st.timedeltas(timedelta(0), MAX_WAIT), jitter=st.floats(0, 0.999)),
)


@given(policies, st.integers(-5, MOST_FAILURES))
def test_no_policy_overflows_or_exceeds_its_cap(policy: Any, failures: int) -> None:
    cap = policy.delay if isinstance(policy, ConstantBackoff) else policy.cap
    assert timedelta(0) <= policy(failures) <= cap
    assert guarded(policy)(failures) <= cap


@given(
    policies.filter(lambda policy: not isinstance(policy, ConstantBackoff)), st.integers(1, MOST_FAILURES - 1)
)
def test_without_jitter_more_failures_never_wait_less(policy: Any, failures: int) -> None:
    steady = type(policy)(**{name: getattr(policy, name) for name in policy.__slots__} | {"jitter": 0.0})
    assert steady(failures) <= steady(failures + 1)


@pytest.mark.parametrize(
    ("policy", "arguments", "message"),
    [
        (PolynomialBackoff, {"base": timedelta(0)}, "base=.*from 0:00:00.000001 to 100 years"),
        (PolynomialBackoff, {"base": 5}, "base=5"),
        (PolynomialBackoff, {"base": DAY, "cap": SECOND}, "cap="),
        (PolynomialBackoff, {"cap": timedelta.max}, "cap="),
        (PolynomialBackoff, {"power": -1}, "power=-1"),
        (PolynomialBackoff, {"power": float("nan")}, "power=nan"),
        (PolynomialBackoff, {"jitter": 1}, "jitter=1"),
        (PolynomialBackoff, {"jitter": -0.1}, "jitter=-0.1"),
        (ExponentialBackoff, {"factor": 0.5}, "factor=0.5"),
        (ExponentialBackoff, {"factor": float("inf")}, "factor=inf"),
        (ConstantBackoff, {"delay": -SECOND}, "delay=.* to 100 years"),
        (ConstantBackoff, {"delay": timedelta.max}, "delay=.* to 100 years"),
        (ConstantBackoff, {"delay": 0}, "delay=0"),
        (ConstantBackoff, {"delay": timedelta(0), "jitter": 2}, "jitter=2"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(
    policy: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(**arguments)


def test_a_function_of_ones_own_is_a_policy() -> None:
    policy: Backoff = lambda failures: timedelta(seconds=5 * failures)  # noqa: E731 - as a user may
    assert guarded(policy)(3) == timedelta(seconds=15)


def test_a_wait_of_ones_own_is_cut_at_what_can_be_stored() -> None:
    assert guarded(lambda _: timedelta.max)(1) == MAX_WAIT


@pytest.mark.parametrize("answer", [None, 5, -SECOND, "raise"])
def test_a_policy_that_fails_is_logged_and_the_default_answers(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(failures: int, /) -> timedelta:
        if answer == "raise":
            raise LookupError("no table for this one")
        result: timedelta = answer
        return result

    with caplog.at_level(logging.ERROR, "jobq"):
        wait = guarded(broken)(2)
    assert timedelta(seconds=14.4) <= wait <= timedelta(seconds=17.6)
    (record,) = caplog.records
    assert "broken" in record.getMessage()
    assert record.exc_info is not None
