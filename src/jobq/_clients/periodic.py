"""``client.periodic``: schedules, seen and steered. Both colours run the same operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast, overload

from jobq._clients.base import documented_by
from jobq._kinds.schedule import make_schedule
from jobq._statements.periodic_declare import add_periodic, prepare_schedule
from jobq._statements.periodic_operate import (
    list_periodic,
    pause_periodic,
    remove_periodic,
    resume_periodic,
    trigger_periodic,
)

if TYPE_CHECKING:
    from jobq._clients.base import AsyncRun, SyncRun
    from jobq._kinds.jobtype import JobType
    from jobq._kinds.options import ResolvedOptions
    from jobq._kinds.schedule import PeriodicOptions
    from jobq._operation import Operation
    from jobq._statements.periodic_operate import PeriodicInfo
    from jobq._types import Enqueued

A = TypeVar("A")


class _Periodic:
    """What both colours are made with, beside their way to run an operation."""

    def __init__(self, schema: str, defaults: ResolvedOptions, args_limit: int, *, notify: bool) -> None:
        self._schema = schema
        self._defaults = defaults
        self._args_limit = args_limit
        self._notify = notify

    def _add(
        self,
        name: str,
        kind: JobType[Any] | str,
        args: object,
        given: PeriodicOptions,
        reason: str,
        by: str | None,
    ) -> Operation[None]:
        schedule = make_schedule(name, kind, args, cast("dict[str, object]", given))
        prepared = prepare_schedule(schedule, self._defaults, self._args_limit)
        return add_periodic(self._schema, prepared, reason, by)


class AsyncPeriodic(_Periodic):
    """Schedules: those that workers declare, and those that a client adds.

    Reached as ``client.periodic``.
    """

    def __init__(
        self, run: AsyncRun, schema: str, defaults: ResolvedOptions, args_limit: int, *, notify: bool
    ) -> None:
        super().__init__(schema, defaults, args_limit, notify=notify)
        self._run = run

    async def list(self) -> list[PeriodicInfo]:
        """Return all schedules, by name."""
        return await self._run(list_periodic(self._schema))

    @overload
    async def add(
        self,
        name: str,
        kind: JobType[None],
        args: None = None,
        *,
        reason: str = "",
        by: str | None = None,
        **options: Unpack[PeriodicOptions],
    ) -> None: ...
    @overload
    async def add(
        self,
        name: str,
        kind: JobType[A],
        args: A,
        *,
        reason: str = "",
        by: str | None = None,
        **options: Unpack[PeriodicOptions],
    ) -> None: ...
    @overload
    async def add(
        self,
        name: str,
        kind: str,
        args: object = None,
        *,
        reason: str = "",
        by: str | None = None,
        **options: Unpack[PeriodicOptions],
    ) -> None: ...
    async def add(
        self,
        name: str,
        kind: JobType[Any] | str,
        args: object = None,
        *,
        reason: str = "",
        by: str | None = None,
        **options: Unpack[PeriodicOptions],
    ) -> None:
        """Add a schedule that no code declares, or replace one that was added before.

        It ticks whatever workers run, until it is removed.

        Args:
            name: what it is known by, in the whole schema, 1 to 128 bytes.
            kind: of its jobs; a bare string is the untyped way.
            args: of its jobs.
            reason: for the operator log, at most 1,000 characters.
            by: who does it; the process's user and host when left out.
            options: when it ticks, and the options of its jobs, see :class:`jobq.PeriodicOptions`.

        Raises:
            PeriodicConflict: live workers declare a schedule of that name.
            ConfigError: something of it cannot work; the message names it.
        """
        await self._run(self._add(name, kind, args, options, reason, by))

    async def remove(self, name: str, *, reason: str = "", by: str | None = None) -> None:
        """Remove a schedule: one that was added, or one that no live worker declares. Its jobs stay.

        Args:
            name: its name.
            reason: for the operator log.
            by: likewise; the process's user and host when left out.

        Raises:
            PeriodicNotFound: there is none of that name.
            PeriodicConflict: live workers declare it.
        """
        await self._run(remove_periodic(self._schema, name, reason, by))

    async def pause(self, name: str, *, reason: str = "", by: str | None = None) -> None:
        """Let a schedule make no jobs until it is resumed, whatever workers start meanwhile.

        Args:
            name: its name.
            reason: shown with it, and kept in the operator log.
            by: likewise; the process's user and host when left out.

        Raises:
            PeriodicNotFound: there is none of that name.
        """
        await self._run(pause_periodic(self._schema, name, reason, by))

    async def resume(self, name: str, *, reason: str = "", by: str | None = None) -> None:
        """Let a schedule tick again from now on; what was missed while it was paused is not made up for.

        Args:
            name: its name.
            reason: for the operator log.
            by: likewise; the process's user and host when left out.

        Raises:
            PeriodicNotFound: there is none of that name.
        """
        await self._run(resume_periodic(self._schema, name, reason, by))

    async def trigger(self, name: str, *, reason: str = "", by: str | None = None) -> Enqueued:
        """Make a schedule's job now, beside its ticks, also while it is paused or not active.

        Args:
            name: its name.
            reason: for the operator log.
            by: likewise; the process's user and host when left out.

        Returns:
            The job; with a unique key that is held, the one that holds it and ``inserted=False``.

        Raises:
            PeriodicNotFound: there is none of that name.
            JobConflict: its unique key is held, and it was declared to raise then.
        """
        return await self._run(trigger_periodic(self._schema, name, reason, by, notify=self._notify))


class Periodic(_Periodic):
    """Schedules: those that workers declare, and those that a client adds; see the async client's."""

    def __init__(
        self, run: SyncRun, schema: str, defaults: ResolvedOptions, args_limit: int, *, notify: bool
    ) -> None:
        super().__init__(schema, defaults, args_limit, notify=notify)
        self._run = run

    @documented_by(AsyncPeriodic.list)
    def list(self) -> list[PeriodicInfo]:
        return self._run(list_periodic(self._schema))

    @overload
    def add(
        self,
        name: str,
        kind: JobType[None],
        args: None = None,
        *,
        reason: str = "",
        by: str | None = None,
        **options: Unpack[PeriodicOptions],
    ) -> None: ...
    @overload
    def add(
        self,
        name: str,
        kind: JobType[A],
        args: A,
        *,
        reason: str = "",
        by: str | None = None,
        **options: Unpack[PeriodicOptions],
    ) -> None: ...
    @overload
    def add(
        self,
        name: str,
        kind: str,
        args: object = None,
        *,
        reason: str = "",
        by: str | None = None,
        **options: Unpack[PeriodicOptions],
    ) -> None: ...
    @documented_by(AsyncPeriodic.add)
    def add(
        self,
        name: str,
        kind: JobType[Any] | str,
        args: object = None,
        *,
        reason: str = "",
        by: str | None = None,
        **options: Unpack[PeriodicOptions],
    ) -> None:
        self._run(self._add(name, kind, args, options, reason, by))

    @documented_by(AsyncPeriodic.remove)
    def remove(self, name: str, *, reason: str = "", by: str | None = None) -> None:
        self._run(remove_periodic(self._schema, name, reason, by))

    @documented_by(AsyncPeriodic.pause)
    def pause(self, name: str, *, reason: str = "", by: str | None = None) -> None:
        self._run(pause_periodic(self._schema, name, reason, by))

    @documented_by(AsyncPeriodic.resume)
    def resume(self, name: str, *, reason: str = "", by: str | None = None) -> None:
        self._run(resume_periodic(self._schema, name, reason, by))

    @documented_by(AsyncPeriodic.trigger)
    def trigger(self, name: str, *, reason: str = "", by: str | None = None) -> Enqueued:
        return self._run(trigger_periodic(self._schema, name, reason, by, notify=self._notify))
