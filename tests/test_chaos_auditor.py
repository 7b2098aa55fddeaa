"""The auditor sees what it is there to see: of each promise a case that breaks it, and jobq itself broken."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.chaos import faults
from tests.chaos.auditor import PROMISES, Allowed, Case, Payload, Place, State, audit, longest_gap_s
from tests.chaos.notes import DONE, STOPPED, Evidence, Run
from tests.chaos.stage import Load, Stage, assert_kept

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobq.embedded import Databases, EmbeddedPostgres
    from tests.conftest import SpawnPython

W, V = 7, 8  # two workers


def good() -> Case:
    """Two jobs of one key, the first begun by two workers since the lease of one was over, and two others.

    The last one was made as f, and g took its place before its start; h came too late for that.
    """
    evidence = Evidence(
        keys={"a": "key", "b": "key", "c": None, "d": None, "e": None, "f": "k", "g": "k", "h": "k"},
        made={"a": 1, "b": 2, "f": 4},
        held={"h": 4},
        replaced={"g": 4},
        asked_at={"a": 8.9, "b": 14.9, "c": 9.0, "d": 9.0, "e": 9.0, "f": 9.0, "g": 9.5, "h": 10.4},
        told_at={"a": 9.1, "b": 15.1, "f": 9.2, "g": 9.7, "h": 10.6},
        rolled_back={"c"},
        runs=[
            Run(1, 1, W, 100, "a", 10.0, 16.0, STOPPED),
            Run(1, 2, V, 101, "a", 13.0, 14.0, DONE),
            Run(2, 1, V, 101, "b", 15.5, 16.0, DONE),
        ],
        recorded={(1, 2): 14.2, (2, 1): 16.2},
    )
    state = State(
        payloads=[
            Payload(1, "a", "key", 9.0),
            Payload(2, "b", "key", 15.0),
            Payload(3, "d", None, 9.0),
            Payload(4, "g", "k", 9.1),
        ],
        places=[
            Place(1, "finished", "completed", 2, V, 1, 14.1),
            Place(2, "finished", "completed", 1, V, 0, 16.1),
            Place(3, "finished", "completed", 1, V, 0, 12.0),
            Place(4, "finished", "completed", 1, V, 0, 11.0),
        ],
        ended_at={W: 12.0, V: None},
    )
    evidence.runs.append(Run(3, 1, V, 101, "d", 11.0, 11.9, DONE))
    evidence.runs.append(Run(4, 1, V, 101, "g", 10.2, 10.9, DONE))
    return Case(evidence, state)


def change(case: Case, index: int, **fields: Any) -> None:
    case.state.places[index] = case.state.places[index]._replace(**fields)


def run_and_keep(case: Case, token: str) -> None:
    """Have the last job run and stored as one version, after another was told to have taken its place."""
    case.evidence.runs[-1].token = token
    store(case, -1, token=token)


def store(case: Case, index: int, **fields: Any) -> None:
    case.state.payloads[index] = case.state.payloads[index]._replace(**fields)


BREAKS: Final[list[tuple[str, Callable[[Case], object]]]] = [
    ("acknowledged_jobs_exist", lambda c: c.evidence.made.update(x=99)),
    ("acknowledged_jobs_exist", lambda c: c.evidence.held.update(x=99)),
    ("rolled_back_jobs_never_were", lambda c: c.evidence.rolled_back.add("d")),
    ("rolled_back_jobs_never_were", lambda c: c.evidence.runs.append(Run(9, 1, V, 1, "c", 1.0, 2.0))),
    ("rolled_back_jobs_never_were", lambda c: c.state.payloads.append(Payload(4, "unheard of", None, 1.0))),
    ("no_enqueue_makes_two_jobs", lambda c: c.state.payloads.append(Payload(4, "a", None, 1.0))),
    ("each_job_is_in_one_place", lambda c: c.state.places.pop()),
    ("each_job_is_in_one_place", lambda c: c.state.places.append(c.state.places[0])),
    ("each_job_is_in_one_place", lambda c: c.state.payloads.pop()),
    ("nothing_is_left_running", lambda c: change(c, 2, table="running", state="running")),
    ("nothing_is_stranded", lambda c: change(c, 2, table="ready", state="ready")),
    ("nothing_is_stranded", lambda c: change(c, 2, table="scheduled", state="scheduled")),
    ("nothing_is_given_up", lambda c: change(c, 2, state="discarded")),
    ("each_attempt_starts_once", lambda c: c.evidence.runs.append(Run(3, 1, W, 1, "d", 12.5, 12.6))),
    ("each_attempt_starts_once", lambda c: change(c, 0, attempt=1)),
    ("valid_leases_never_overlap", lambda c: c.state.ended_at.update({W: None})),
    ("valid_leases_never_overlap", lambda c: c.state.ended_at.update({W: 13.5})),
    ("valid_leases_never_overlap", lambda c: c.state.ended_at.pop(W)),
    ("completions_are_of_who_ran", lambda c: change(c, 0, worker_id=W)),
    ("completions_are_of_who_ran", lambda c: change(c, 0, finished_at=13.9)),
    ("completions_are_of_who_ran", lambda c: setattr(c.evidence.runs[1], "how", STOPPED)),
    ("recorded_completions_stay", lambda c: change(c, 0, attempt=3)),
    ("recorded_completions_stay", lambda c: c.evidence.recorded.update({(3, 1): 10.5})),
    ("keys_are_held_once", lambda c: c.state.keys_doubled.add("key")),
    ("keys_are_held_once", lambda c: setattr(c.evidence.runs[2], "started_at", 14.05)),
    ("keys_are_held_once", lambda c: change(c, 0, finished_at=None)),
    ("acknowledged_jobs_exist", lambda c: c.evidence.replaced.update(g=99)),
    ("replacements_are_as_told", lambda c: setattr(c.evidence.runs[-1], "token", "f")),
    ("replacements_are_as_told", lambda c: store(c, 3, token="f")),
    ("replacements_are_as_told", lambda c: store(c, 3, token="h")),
    ("replacements_are_as_told", lambda c: run_and_keep(c, "f")),
]


def test_a_good_case_breaks_nothing_and_its_figures_are_right() -> None:
    verdict = audit(good())
    assert verdict.problems == []
    assert verdict.figures["acknowledged"] == 3
    assert (verdict.figures["keys held"], verdict.figures["replaced"]) == (1, 1)
    assert verdict.figures["rolled back"] == 1
    assert (verdict.figures["in doubt"], verdict.figures["of those made"]) == (2, 1)
    assert (verdict.figures["completed"], verdict.figures["starts"], verdict.figures["crashes"]) == (4, 5, 1)
    assert verdict.figures["s longest gap between starts"] == 2.5
    assert longest_gap_s([]) == 0.0


@pytest.mark.parametrize(("promise", "damage"), BREAKS)
def test_what_breaks_a_promise_is_found(promise: str, damage: Callable[[Case], object]) -> None:
    case = good()
    damage(case)
    verdict = audit(case)
    assert promise in verdict.broken, str(verdict)
    assert promise in str(verdict)


def test_a_run_of_a_lost_job_is_not_taken_for_one_of_the_job_that_got_its_id() -> None:
    case = good()
    case.evidence.keys["lost"] = None
    case.evidence.runs.append(Run(2, 1, W, 100, "lost", 9.5, 9.6, DONE))
    assert audit(Case(case.evidence, case.state, Allowed(lost_commits=True))).problems == []


def test_a_worker_without_a_lease_may_finish_a_start_when_it_wakes_and_one_with_a_lease_may_not() -> None:
    case = good()
    case.evidence.runs[0].started_at = 14.5
    assert audit(case).problems == []
    case.state.ended_at[W] = 14.4
    assert "recorded_completions_stay" in audit(case).broken


def test_every_promise_has_a_case_that_breaks_it() -> None:
    assert {name for name, _ in BREAKS} == {promise.__name__ for promise in PROMISES}


def test_what_a_fault_may_cost_is_not_held_against_it() -> None:
    case = good()
    change(case, 2, table="ready", state="ready")
    assert audit(Case(case.evidence, case.state, Allowed(waiting=True))).problems == []
    case = good()
    case.evidence.made["lost"] = 99
    assert audit(Case(case.evidence, case.state, Allowed(lost_commits=True))).problems == []
    case = good()
    change(case, 2, state="discarded")
    assert audit(Case(case.evidence, case.state, Allowed(discarded=1))).problems == []


# -- jobq itself, broken on purpose -------------------------------------------------------------------


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown here takes no minutes to see, also where the faults of others are made for so long."""
    monkeypatch.setattr("tests.chaos.stage.LONG", False)


def only_wait(stage: Stage) -> None:
    stage.pause(1000.0, 1000.0)


def freeze_once(stage: Stage) -> None:
    """Freeze one worker until others have its jobs, and wake it while they still run."""
    faults.freeze_workers(stage)
    time.sleep(1.0)


@pytest.mark.slow
def test_without_faults_nothing_is_broken(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> None:
    assert_kept(Stage(spawn_python, dsn, tmp_path).run(only_wait, 3.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "fault", "load", "promises"),
    [
        ("no fence", freeze_once, Load(pause_s=1.0, run_s=(3.0,)), {"completions_are_of_who_ran"}),
        ("naive marks", only_wait, Load(), {"nothing_is_stranded"}),
        ("no rescuer", faults.kill_workers, Load(), {"nothing_is_left_running"}),
        ("rescue of the living", only_wait, Load(run_s=(0.3, 1.0)), {"valid_leases_never_overlap"}),
        ("replaced arguments", only_wait, Load(), {"replacements_are_as_told"}),
    ],
)
def test_a_jobq_that_is_broken_is_found_out(
    spawn_python: SpawnPython,
    server: EmbeddedPostgres,
    databases: Databases,
    template: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sabotage: str,
    fault: Callable[[Stage], None],
    load: Load,
    promises: set[str],
) -> None:
    monkeypatch.setattr("tests.chaos.stage.DRAIN_S", 6.0)  # it will not be worked off
    verdicts: list[str] = []
    for number in range(3):  # what is broken need not meet a job that shows it in five seconds
        folder = tmp_path / str(number)
        folder.mkdir()
        name = databases.create(template=template)
        verdict = Stage(spawn_python, server.dsn(name), folder, sabotage=sabotage, load=load).run(fault, 5.0)
        databases.drop(name)
        if promises <= verdict.broken:
            return
        verdicts.append(str(verdict))
    pytest.fail("\n".join(verdicts))
