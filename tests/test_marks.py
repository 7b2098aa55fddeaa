"""Low-water marks against a simulated server: no committed job may ever stand outside them.

`Server` is a small model of what PostgreSQL guarantees: transaction ids that are given out in order
and decided in any order, and snapshots that show which are undecided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jobq._marks import PRIORITIES, YOUNG_S, LaneMarks, Range, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LAST_XID = 2**64 - 1
STEP_S = 0.02  # how far apart a worker's refreshes are at the least


class Row(NamedTuple):
    priority: int
    xid: int
    job_id: int

    def is_in(self, place: Range) -> bool:
        return (
            self.priority == place.priority
            and (self.xid, self.job_id) >= (place.from_xid, place.from_id)
            and self.xid <= place.to_xid
        )

    @property
    def turn(self) -> tuple[int, int, int]:
        return (-self.priority, self.xid, self.job_id)


class Server:
    """Rows of one queue, and the transactions that write them."""

    def __init__(self) -> None:
        self.started = 1
        self.now_s = 1000.0
        self.next_xid = 100
        self.next_id = 1
        self.completed = 99  # the latest transaction that has ended
        self.open: dict[int, list[Row]] = {}
        self.rows: set[Row] = set()

    def begin(self) -> int:
        xid = self.next_xid
        self.next_xid += 1
        self.open[xid] = []
        return xid

    def write(self, xid: int, priority: int) -> Row:
        row = Row(priority, xid, self.next_id)
        self.next_id += 1
        self.open[xid].append(row)
        return row

    def end(self, xid: int, *, commits: bool = True) -> None:
        rows = self.open.pop(xid)
        self.completed = max(self.completed, xid)
        if commits:
            self.rows.update(rows)

    def enqueue(self, *priorities: int) -> list[Row]:
        xid = self.begin()
        rows = [self.write(xid, priority) for priority in priorities]
        self.end(xid)
        return rows

    def claim(self, ranges: Sequence[Range], limit: int) -> list[Row]:
        """Take rows as the statement does: range after range, each in order."""
        taken: list[Row] = []
        for place in ranges:
            taken += sorted(row for row in self.rows if row.is_in(place) and row not in taken)
        self.rows.difference_update(taken[:limit])
        return taken[:limit]

    def snapshot(self, ranges: Sequence[Range]) -> Snapshot:
        xmax = self.completed + 1
        first = [min((r for r in self.rows if r.is_in(place)), default=None) for place in ranges]
        return Snapshot(
            self.now_s,
            xmax,
            frozenset(xid for xid in self.open if xid < xmax),
            [row and (row.xid, row.job_id) for row in first],
            self.started,
        )

    def crash(self, lost: int, *, restarts: bool) -> None:
        """End every session, and lose the last commits, which nobody had waited for."""
        self.open.clear()
        self.completed = max(99, self.completed - lost)
        self.next_xid = self.completed + 1
        self.rows = {row for row in self.rows if row.xid <= self.completed}
        if restarts:
            self.started += 1


def refresh(marks: LaneMarks, server: Server) -> bool:
    ranges = marks.ranges()
    return marks.refresh(ranges, server.snapshot(ranges))


def pass_time(marks: LaneMarks, server: Server, seconds: float) -> None:
    """Refresh as a worker does while time goes by and others write."""
    for _ in range(round(seconds / STEP_S)):
        server.now_s += STEP_S
        server.enqueue()
        refresh(marks, server)


def outside(rows: Iterable[Row], ranges: Sequence[Range]) -> list[Row]:
    return [row for row in rows if not any(row.is_in(place) for place in ranges)]


def overlapping(ranges: Sequence[Range]) -> list[tuple[Range, Range]]:
    return [
        (a, b)
        for i, a in enumerate(ranges)
        for b in ranges[i + 1 :]
        if a.priority == b.priority
        and max((a.from_xid, a.from_id), (b.from_xid, b.from_id)) <= (min(a.to_xid, b.to_xid), 2**63)
    ]


# -- one thing at a time ---------------------------------------------------------------------------


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def marks() -> LaneMarks:
    return LaneMarks()


def test_a_new_one_looks_at_every_lane_from_its_beginning_the_larger_priority_first(
    marks: LaneMarks,
) -> None:
    assert marks.ranges() == [Range(priority, 0, 0, LAST_XID) for priority in range(9, -10, -1)]


def test_an_empty_lane_begins_where_nothing_has_begun(marks: LaneMarks, server: Server) -> None:
    server.enqueue(0)
    server.claim(marks.ranges(), 1)
    refresh(marks, server)
    assert set(marks.lanes.values()) == {(server.next_xid, 0)}


def test_a_lane_begins_at_its_first_row(marks: LaneMarks, server: Server) -> None:
    first, second = server.enqueue(3, 3)
    refresh(marks, server)
    assert marks.lanes[3] == (first.xid, first.job_id)
    assert server.claim(marks.ranges(), 1) == [first]
    refresh(marks, server)
    assert marks.lanes[3] == (second.xid, second.job_id)


def test_a_young_writer_bounds_every_mark(marks: LaneMarks, server: Server) -> None:
    writer = server.begin()
    server.enqueue()
    refresh(marks, server)
    server.now_s += YOUNG_S / 2
    refresh(marks, server)
    assert set(marks.lanes.values()) == {(writer, 0)}
    assert marks.stragglers == frozenset()


def test_an_old_writer_is_stepped_over_and_found_at_its_end(marks: LaneMarks, server: Server) -> None:
    writer = server.begin()
    row = server.write(writer, -2)
    pass_time(marks, server, 10.0)
    assert marks.lanes[-2] == (server.next_xid, 0)
    assert marks.stragglers == {writer}
    server.end(writer)
    assert refresh(marks, server), "it did not say that there may be something to claim"
    assert server.claim(marks.ranges(), 10) == [row]
    assert not refresh(marks, server)
    assert marks.stragglers == frozenset()
    assert len(marks.ranges()) == len(PRIORITIES), "an empty range is still looked at"


def test_an_ended_straggler_is_looked_at_until_it_reads_empty(marks: LaneMarks, server: Server) -> None:
    writer = server.begin()
    rows = [server.write(writer, 0) for _ in range(3)]
    pass_time(marks, server, 1.0)
    server.end(writer)
    for row in rows:
        refresh(marks, server)
        assert server.claim(marks.ranges(), 1) == [row]
    refresh(marks, server)
    assert marks.ended == ()


def test_an_ended_straggler_that_a_lane_has_not_reached_needs_no_range_of_its_own(
    marks: LaneMarks, server: Server
) -> None:
    """It would be served before older jobs, and twice."""
    [older] = server.enqueue(0)
    writer = server.begin()
    late = server.write(writer, 0)
    pass_time(marks, server, 1.0)
    [newer] = server.enqueue(0)
    server.end(writer)
    refresh(marks, server)
    assert overlapping(marks.ranges()) == []
    assert server.claim(marks.ranges(), 10) == [older, late, newer]


def test_ended_stragglers_are_served_by_age_not_by_when_they_ended(marks: LaneMarks, server: Server) -> None:
    writers = [server.begin() for _ in range(3)]
    rows = [server.write(writer, 0) for writer in writers]
    pass_time(marks, server, 1.0)
    for writer in reversed(writers):
        server.end(writer)
        refresh(marks, server)
    assert server.claim(marks.ranges(), 10) == rows


def test_a_lane_is_bounded_by_a_writer_that_the_snapshot_ends_before(
    marks: LaneMarks, server: Server
) -> None:
    """Its id is given out, but no later one has ended: it stands at or beyond xmax, however old."""
    writer = server.begin()
    server.write(writer, 0)
    for _ in range(100):
        server.now_s += STEP_S
        refresh(marks, server)
    assert marks.lanes[0] == (writer, 0)


@pytest.mark.parametrize("restarts", [True, False])
def test_marks_of_another_server_are_forgotten_with_what_was_read_by_them(
    marks: LaneMarks, server: Server, *, restarts: bool
) -> None:
    """After a crash that lost commits, what a range of the old marks shows proves nothing."""
    for _ in range(50):
        server.enqueue()
    pass_time(marks, server, 1.0)
    server.crash(60, restarts=restarts)
    [row] = server.enqueue(0)
    assert marks.lanes[0] > (row.xid, row.job_id)
    assert refresh(marks, server)
    assert server.claim(marks.ranges(), 1) == [row]


def test_ids_that_run_backwards_by_one_are_noticed(marks: LaneMarks, server: Server) -> None:
    refresh(marks, server)
    server.now_s += 0.001  # too soon for a sample of its own
    for _ in range(10):
        server.enqueue()
    refresh(marks, server)
    server.crash(2, restarts=False)
    [row] = server.enqueue(0)
    refresh(marks, server)
    assert server.claim(marks.ranges(), 1) == [row]


def test_a_rescan_looks_everywhere_once(marks: LaneMarks, server: Server) -> None:
    writer = server.begin()
    row = server.write(writer, 0)
    pass_time(marks, server, 1.0)
    server.end(writer)
    refresh(marks, server)
    marks.rescan()
    assert marks.ranges() == LaneMarks().ranges()
    refresh(marks, server)
    assert server.claim(marks.ranges(), 10) == [row]
    refresh(marks, server)
    assert marks.lanes[0] == (server.next_xid, 0)


def test_what_is_remembered_stays_small(marks: LaneMarks, server: Server) -> None:
    for _ in range(5):
        server.begin()
    for _ in range(2000):
        server.now_s += 0.005
        server.enqueue()
        refresh(marks, server)
    assert len(marks.samples) < 12
    assert len(marks.stragglers) == 5
    for xid in list(server.open):
        server.end(xid, commits=False)
    refresh(marks, server)
    assert len(marks.ranges()) == len(PRIORITIES) * 6
    refresh(marks, server)
    assert len(marks.ranges()) == len(PRIORITIES)


# -- any history -----------------------------------------------------------------------------------

priorities = st.sampled_from([9, 1, 0, -9])


class Histories(RuleBasedStateMachine):
    """Any order of writes, ends, claims by others, crashes and refreshes."""

    new_marks: type[LaneMarks] = LaneMarks

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.marks = self.new_marks()
        self.seen: set[Row] = set()  # rows that were there at the last refresh

    @rule(written=st.lists(priorities, max_size=3))
    def begin(self, written: list[int]) -> None:
        xid = self.server.begin()
        for priority in written:
            self.server.write(xid, priority)

    @rule(written=st.lists(priorities, min_size=1, max_size=3))
    def enqueue(self, written: list[int]) -> None:
        self.server.enqueue(*written)

    @precondition(lambda self: self.server.open)
    @rule(data=st.data(), priority=priorities)
    def write_more(self, data: st.DataObject, priority: int) -> None:
        self.server.write(data.draw(st.sampled_from(sorted(self.server.open))), priority)

    @precondition(lambda self: self.server.open)
    @rule(data=st.data(), commits=st.sampled_from([True, True, False]))
    def end(self, data: st.DataObject, *, commits: bool) -> None:
        self.server.end(data.draw(st.sampled_from(sorted(self.server.open))), commits=commits)

    @rule(seconds=st.sampled_from([0.001, STEP_S, YOUNG_S / 2, YOUNG_S, 10.0]))
    def wait(self, seconds: float) -> None:
        self.server.now_s += seconds

    @rule(limit=st.integers(1, 5))
    def claim(self, limit: int) -> None:
        taken = self.server.claim(self.marks.ranges(), limit)
        assert taken == sorted(taken, key=lambda row: row.turn), "out of turn"

    @precondition(lambda self: self.server.rows)
    @rule(data=st.data(), goes_back=st.booleans())
    def others_claim(self, data: st.DataObject, *, goes_back: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.server.rows)))
        self.server.rows.remove(row)
        if goes_back:
            self.server.enqueue(row.priority)

    @rule()
    def refresh(self) -> None:
        refresh(self.marks, self.server)
        self.seen = set(self.server.rows)

    @rule()
    def refresh_while_time_passes(self) -> None:
        pass_time(self.marks, self.server, 2 * YOUNG_S)
        self.seen = set(self.server.rows)

    @rule()
    def rescan(self) -> None:
        self.marks.rescan()

    @rule(lost=st.integers(0, 5), restarts=st.booleans())
    def crash(self, lost: int, *, restarts: bool) -> None:
        """With a restart, ids may have caught up by the next refresh; without, it sees them fall."""
        self.server.crash(lost, restarts=restarts)
        self.seen = set()
        if not restarts:
            self.refresh()

    @invariant()
    def nothing_that_a_refresh_could_see_stands_outside(self) -> None:
        assert outside(self.seen & self.server.rows, self.marks.ranges()) == []

    @invariant()
    def no_place_is_looked_at_twice(self) -> None:
        assert overlapping(self.marks.ranges()) == []

    def teardown(self) -> None:
        """When all have ended and everything is claimed, every lane begins at the very end."""
        for xid in list(self.server.open):
            self.server.end(xid)
        for _ in range(2):
            pass_time(self.marks, self.server, 2 * YOUNG_S)
            self.server.claim(self.marks.ranges(), 1000)
        assert self.server.rows == set()
        pass_time(self.marks, self.server, 2 * YOUNG_S)
        assert set(self.marks.lanes.values()) == {(self.server.next_xid, 0)}
        assert self.marks.ended == ()
        assert self.marks.stragglers == frozenset()


SETTINGS = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_no_history_leaves_a_committed_job_outside_the_marks() -> None:
    run_state_machine_as_test(Histories, settings=SETTINGS)


class LastSeen(LaneMarks):
    """The naive mark: whatever the snapshot does not show is taken for nothing."""

    def refresh(self, ranges: Sequence[Range], snapshot: Snapshot) -> bool:
        return super().refresh(ranges, snapshot._replace(in_progress=frozenset()))


class NoStragglers(LaneMarks):
    """Steps over old writers and does not come back for them."""

    def refresh(self, ranges: Sequence[Range], snapshot: Snapshot) -> bool:
        answer = super().refresh(ranges, snapshot)
        self.ended = ()
        return answer


class Faithful(LaneMarks):
    """Keeps its marks whatever server it talks to."""

    def _is_foreign(self, snapshot: Snapshot) -> bool:
        return False


@pytest.mark.parametrize("wrong", [LastSeen, NoStragglers, Faithful])
def test_a_wrong_mark_does_not_survive_the_same_histories(wrong: type[LaneMarks]) -> None:
    machine: Any = type("Wrong", (Histories,), {"new_marks": wrong})
    first_found = settings(
        SETTINGS, max_examples=1000, database=None, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=first_found)
