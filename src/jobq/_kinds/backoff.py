"""Backoff: how long a job waits after a failure. Pure, but for the jitter's source of chance.

A policy is any callable from the number of failures to a wait, so a function of one's own will do
as well as the classes here. Failures, not starts: a job that was snoozed a thousand times and then
fails once waits as after a first failure.

Jitter keeps a thousand jobs that failed together from coming back together. At the cap it only
shortens, so that no wait is longer than the cap says.
"""

from __future__ import annotations

import logging
import random
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, TypeGuard

from jobq._errors import ConfigError
from jobq._limits import MAX_WAIT
from jobq._messages import shown

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = logging.getLogger("jobq.backoff")

_DAY: Final = timedelta(days=1)


class Backoff(Protocol):
    """A policy: what a declaration's ``backoff=`` takes."""

    def __call__(self, failures: int, /) -> timedelta:
        """Return how long to wait.

        Args:
            failures: failures of the job so far, the one that just happened included: 1 or more.
        """
        ...


@dataclass(frozen=True, slots=True)
class PolynomialBackoff:
    """Wait ``base`` × failures to the ``power``; as it stands, jobq's default policy.

    The defaults wait 1 s, 16 s, 81 s, 4 min … and reach the cap of a day at the 18th failure.

    Args:
        base: the wait after the first failure, more than 0.
        power: how fast it grows, 0 or more.
        cap: the longest wait, at least ``base``.
        jitter: the share by which a wait is made longer or shorter at random, from 0 to below 1.
        rng: returns the chance, 0 ≤ x < 1.

    Raises:
        ConfigError: an argument is out of its range.
    """

    base: timedelta = timedelta(seconds=1)
    power: float = 4
    cap: timedelta = _DAY
    jitter: float = 0.1
    rng: Callable[[], float] = field(default=random.random, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_wait(self, "base", self.base, timedelta.resolution)
        _check_wait(self, "cap", self.cap, self.base)
        _check_jitter(self, self.jitter)
        if not _is_number(self.power, 0):
            raise ConfigError(f"power={shown(self.power)}: a finite number, 0 or more")

    def __call__(self, failures: int, /) -> timedelta:
        return _wait(lambda n: float(n) ** self.power, failures, self.base, self.cap, self.jitter, self.rng)


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """Wait ``base``, and ``factor`` times as long after each further failure.

    Args:
        base: the wait after the first failure, more than 0.
        factor: how fast it grows, 1 or more.
        cap: the longest wait, at least ``base``.
        jitter: the share by which a wait is made longer or shorter at random, from 0 to below 1.
        rng: returns the chance, 0 ≤ x < 1.

    Raises:
        ConfigError: an argument is out of its range.
    """

    base: timedelta = timedelta(seconds=1)
    factor: float = 2
    cap: timedelta = _DAY
    jitter: float = 0.1
    rng: Callable[[], float] = field(default=random.random, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_wait(self, "base", self.base, timedelta.resolution)
        _check_wait(self, "cap", self.cap, self.base)
        _check_jitter(self, self.jitter)
        if not _is_number(self.factor, 1):
            raise ConfigError(f"factor={shown(self.factor)}: a finite number, 1 or more")

    def __call__(self, failures: int, /) -> timedelta:
        growth = float(self.factor)
        return _wait(lambda n: growth ** (n - 1), failures, self.base, self.cap, self.jitter, self.rng)


@dataclass(frozen=True, slots=True)
class ConstantBackoff:
    """Wait the same time after every failure.

    Args:
        delay: how long, 0 or more.
        jitter: the share by which a wait is made shorter at random, from 0 to below 1.
        rng: returns the chance, 0 ≤ x < 1.

    Raises:
        ConfigError: an argument is out of its range.
    """

    delay: timedelta
    jitter: float = 0.1
    rng: Callable[[], float] = field(default=random.random, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_wait(self, "delay", self.delay, timedelta(0))
        _check_jitter(self, self.jitter)

    def __call__(self, failures: int, /) -> timedelta:
        return _wait(lambda _: 1.0, failures, self.delay, self.delay, self.jitter, self.rng)


def guarded(policy: Backoff) -> Backoff:
    """Return a policy that always gives a wait that can be stored.

    A worker asks for a wait when a job has just failed, and must not lose that job to a mistake in
    somebody's policy: what raises, or returns no wait, is logged as an error and the default policy
    answers in its place.
    """

    def wait(failures: int, /) -> timedelta:
        try:
            return _checked(policy(failures))
        except BaseException:  # a policy of the user's own may raise anything
            _logger.exception(
                "backoff policy %r failed for failure %s; the default policy answers in its place",
                policy,
                failures,
                extra={"failures": failures},
            )
            return DEFAULT_BACKOFF(failures)

    return wait


def _checked(delay: object) -> timedelta:
    if not isinstance(delay, timedelta):
        raise TypeError(f"a backoff policy returned {shown(delay)} and should return a timedelta")
    if delay < timedelta(0):
        raise ValueError(f"a backoff policy returned {shown(delay)}: a wait is 0 or more")
    return min(delay, MAX_WAIT)


def _is_number(value: object, at_least: float) -> TypeGuard[float]:
    return isinstance(value, int | float) and at_least <= value <= sys.float_info.max


def _check_wait(policy: object, name: str, value: object, at_least: timedelta) -> None:
    if not isinstance(value, timedelta) or not at_least <= value <= MAX_WAIT:
        raise ConfigError(
            f"{type(policy).__name__}: {name}={shown(value)}: a timedelta from {at_least} to 100 years"
        )


def _check_jitter(policy: object, jitter: object) -> None:
    if not _is_number(jitter, 0) or jitter >= 1:
        raise ConfigError(f"{type(policy).__name__}: jitter={shown(jitter)}: a share from 0 to below 1")


def _wait(
    growth: Callable[[int], float],
    failures: int,
    base: timedelta,
    cap: timedelta,
    jitter: float,
    rng: Callable[[], float],
) -> timedelta:
    cap_s = cap.total_seconds()
    try:
        seconds = min(base.total_seconds() * growth(max(failures, 1)), cap_s)
    except OverflowError:
        seconds = cap_s
    seconds *= 1 + jitter * (2 * rng() - 1)
    if seconds > cap_s:  # fold what stands over the cap back below it: still spread out
        seconds = 2 * cap_s - seconds
    return min(timedelta(seconds=seconds), cap)


DEFAULT_BACKOFF: Final = PolynomialBackoff()
