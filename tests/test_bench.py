"""The bench tells the truth about what it measured, and every bench runs."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import jobq._bench.__main__
from bench import document
from jobq._bench import beside, records
from jobq._bench.cores import CannotPin, Pin, cores_of, others_than, pinned, preferred
from jobq._bench.environments import NEIGHBOURS, Absent, Neighbour, interpreter_of
from jobq._bench.hands import HandFailed, call_all, hired
from jobq._bench.lab import Size, Window, open_lab
from jobq._bench.latency import latency_result, percentile
from jobq._bench.meter import Meter, Reading, filesystem_of, process_cpu_s, server_cpu_s
from jobq._bench.rates import rate_result
from jobq._bench.registry import BENCHES, Bench
from jobq._bench.report import print_report
from jobq._bench.result import Cost, Floor, Result, Spread
from jobq.embedded import EmbeddedPostgres
from tests.support.polling import eventually

ROOT = Path(__file__).parents[1]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="CPU is read from /proc")

SINGLES = ["1 client", "1 client, application", "16 clients", "16 clients, application"]
DRAINS = ["200 slots", "20 slots", "1 slots", "thread, 200 slots", "thread, 20 slots", "process, 2 slots"]
EXPECTED_CASES = {
    "bulk": ["calls of 1,000", "large calls"],
    "single": SINGLES,
    "notify": [
        f"{how}, {who}"
        for who in ("1 client", "16 clients")
        for how in ("off", "nobody waits", "each notifies")
    ],
    "transaction": ["1 client"],
    "drain": [*DRAINS, "20 slots beside 200"],
    "lanes": ["10 queues", "100 queues", "5 priorities", "19 priorities"],
    "retries": ["each fails once"],
    "duration": ["1 ms", "10 ms", "100 ms"],
    "processes": ["2 processes", "4 processes", "8 processes", "two cores, 2 processes"],
    "pickup": ["p50", "p99"],
    "cycle": ["enqueue and drain"],
    "halfload": ["p50", "p99"],
    "payload": ["100 B", "2 kB", "50 kB", "2 kB beside 100 B"],
    "history": [
        f"{who}, {which}"
        for which in ("statistics of an empty moment", "fresh statistics")
        for who in ("bare loop", "worker")
    ],
    "length": ["500 waiting", "1,000 waiting"],
    "finished": ["500 finished", "1,000 finished"],
    "connections": ["1 loops", "2 loops"],
    "snooze": ["100 jobs"],
    "statements": ["drain", "bulk enqueue", "one enqueue"],
    "memory": ["idle", "growth"],
    "import": ["import jobq", "jobq.Client"],
    "punctual": ["p50", "p99"],
    "retention": ["removal", "pinned horizon", "full cycle"],
    "horizon": [
        f"{who}, {what}"
        for who in ("bare loop", "worker", "worker, writer open")
        for what in ("buffer hits", "server CPU")
    ],
    "unique": ["until finished", "until started", "replaced"],
}
NEEDS_THE_NETWORK = {"neighbours"}
PROMISED_KEYS = {
    "bench",
    "value",
    "unit",
    "yardstick",
    "ratio",
    "server_cpu_us",
    "client_cpu_us",
    "wal_bytes",
    "settings",
}
PROMISED_SETTINGS = {
    "server_version",
    "synchronous_commit",
    "fsync",
    "pin",
    "slots",
    "python",
    "event_loop",
    "jobq",
}


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/src{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BENCHES if name not in NEEDS_THE_NETWORK])
def test_each_bench_prints_one_complete_object_a_line(name: str) -> None:
    done = run_bench(name, "--tiny", "--json")

    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    cases = [result["case"] for result in results]
    # a machine of one core has nothing to say about two
    assert cases in (EXPECTED_CASES[name], [case for case in EXPECTED_CASES[name] if "two cores" not in case])
    for result in results:
        assert result.keys() >= PROMISED_KEYS
        assert result["settings"].keys() >= PROMISED_SETTINGS
        assert result["bench"] == name
        assert result["value"] > 0
        assert result["yardstick"] > 0
        assert result["ratio"] > 0
        assert result["server_cpu_us"] is None or result["server_cpu_us"] > 0
        assert result["client_cpu_us"] is None or result["client_cpu_us"] >= 0
        assert result["wal_bytes"] is None or result["wal_bytes"] > 100
        assert (result["settings"]["synchronous_commit"], result["settings"]["fsync"]) == ("on", "on")
        assert result["settings"]["pin"] == "one"


@linux_only
@pytest.mark.slow
def test_neighbours_are_measured_in_turns_with_jobq_and_one_that_is_absent_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interpreter_of(neighbour: Neighbour) -> Path:
        if neighbour.name == "oban":
            raise Absent("it needs Python 4")
        return Path(sys.executable)

    monkeypatch.setattr(beside, "interpreter_of", interpreter_of)
    monkeypatch.setattr(beside, "OURS", Neighbour("jobq", ()))
    twin, absent = Neighbour("jobq", (), durability="the same"), Neighbour("oban", ("oban==1",))
    with open_lab(Pin.ONE, Size.TINY) as lab:
        results = list(beside.run(lab, [twin, absent]))

    assert [result.case for result in results] == [
        "drain, jobq", "bulk, jobq", "pickup p50, jobq", "pickup p99, jobq",
    ]  # fmt: skip
    for result in results:
        assert result.value.median > 0
        assert result.details["not_measured"] == {"oban": "it needs Python 4"}
        assert result.details["neighbour_settings"] == {"slots": 200}
    assert "oban 1 is not measured: it needs Python 4" in capsys.readouterr().err


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=lambda neighbour: neighbour.name)
def test_each_neighbour_s_script_states_its_settings_and_its_version_is_pinned(neighbour: Neighbour) -> None:
    assert beside.settings_of(neighbour.name)
    assert "==" in neighbour.requirements[0]


def test_a_neighbour_that_pip_cannot_find_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Absent, match="not installed"):
        interpreter_of(Neighbour("nobody", (str(tmp_path / "there-is-no-such-file.whl"),)))
    assert not list(tmp_path.glob("**/installed"))


def test_a_missed_floor_is_printed_and_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = a_result(Floor("ratio", 0.6))
    monkeypatch.setattr(jobq._bench.__main__, "open_lab", lambda *_: contextlib.nullcontext())
    monkeypatch.setitem(BENCHES, "drain", Bench("drain", "", lambda _: iter([missed])))

    assert jobq._bench.__main__.main(["drain"]) == 0
    assert "ratio ≥ 0.6 MISSED" in capsys.readouterr().out


def test_a_bench_that_cannot_run_fails_and_says_why(tmp_path: Path) -> None:
    done = run_bench("bulk", "--tiny", "--pin", "none", "--postgres", str(tmp_path))

    assert done.returncode == 1
    assert "no postgres and initdb there" in done.stderr


# -- the record, its table and its plot ---------------------------------------------------------------


def test_results_are_recorded_with_their_commit_and_tiny_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "history.jsonl"
    monkeypatch.setattr(jobq._bench.__main__, "open_lab", lambda *_: contextlib.nullcontext())
    monkeypatch.setitem(BENCHES, "drain", Bench("drain", "", lambda _: iter([a_result()])))
    for arguments in (["drain"], ["drain", "--quick", "--json"], ["drain", "--tiny"]):
        assert jobq._bench.__main__.main(arguments, record=record) == 0

    lines = list(records.read(record))
    assert [line["case"] for line in lines] == ["200 slots"] * 2
    assert lines[0].keys() >= {"at", "commit", "value", "settings"}
    assert records.commit_of(ROOT) == records.commit_of(ROOT / "src")
    assert "drain" in capsys.readouterr().out


def a_record(case: str, value: float, size: str, bench: str = "drain") -> records.Record:
    line = json.loads(a_result(Floor("ratio", 0.6)).as_json())
    settings = {**line["settings"], "size": size}
    return {**line, "bench": bench, "case": case, "value": value, "settings": settings, "commit": "abc"}


def test_full_results_count_before_later_quick_ones_and_later_before_earlier() -> None:
    chosen = document.newest(
        [
            a_record("a", 1.0, "full"),
            a_record("a", 2.0, "full"),
            a_record("a", 3.0, "quick"),
            a_record("b", 4.0, "quick"),
            a_record("c", 5.0, "quick", bench="bulk"),
        ]
    )
    # in the order of the registry
    assert [(case, record["value"]) for (_, case), record in chosen.items()] == [("c", 5), ("a", 2), ("b", 4)]


def test_the_page_gets_its_table_and_keeps_the_rest() -> None:
    table = document.table([a_record("200 slots", 30_000, "quick")])
    page = f"before\n{document.BEGIN}\nold\n{document.END}\nafter\n"
    written = document.with_table(page, table)

    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "old" not in written
    assert "| drain, 200 slots | 30,000 jobs/s |" in written
    assert "ratio ≥ 0.6 **missed**" in written
    assert "| abc, quick |" in written
    with pytest.raises(ValueError, match="no line"):
        document.with_table("no marks", table)


def test_the_plot_is_svg_with_a_bar_for_each_contestant() -> None:
    other = {
        **a_record("drain, other", 20_000, "full", bench="neighbours"),
        "yardstick_name": "a & co 1",
    }
    root = ET.fromstring(document.plot([a_record("200 slots", 30_000, "full"), other]))

    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"jobq", "a & co 1", "20,000"} <= set(texts)


def test_a_curve_has_the_ratio_of_the_servers_cpu_at_each_size_and_begins_at_one() -> None:
    def grown(bench: str, case: str, **more: object) -> records.Record:
        return {**a_record(case, 1.0, "full", bench=bench), **more}

    chosen = document.newest(
        [
            grown("length", "1,000 waiting", unit="server µs/job", ratio=1.0),
            grown("length", "1,000,000 waiting", unit="server µs/job", ratio=1.2),
            grown("lanes", "100 queues", yardstick_server_cpu_us=5.0),
            grown("lanes", "19 priorities", server_cpu_us=None),
        ]
    )
    assert document.curve(chosen, "length", "waiting") == [(1_000, 1.0), (1_000_000, 1.2)]
    assert document.curve(chosen, "lanes", "queues") == [(1, 1.0), (100, 2.0)]
    assert document.curve(chosen, "lanes", "priorities") == []
    texts = [element.text for element in ET.fromstring(document.plot(list(chosen.values()))).iter()]
    assert {name for _, _, name, _ in document.CURVES} <= set(texts)


# -- what figures mean -------------------------------------------------------------------------------


def a_result(floor: Floor | None = None) -> Result:
    return Result(
        bench="drain",
        case="200 slots",
        value=Spread.of([30_000.0, 20_000.0, 40_000.0]),
        unit="jobs/s",
        yardstick=Spread.of([60_000.0]),
        yardstick_name="bare loop",
        ratio=Spread.of([0.5]),
        runs=3,
        cost=Cost(10.0, None, 565.0),
        settings={"pin": "one", "slots": 200},
        floor=floor,
    )


def test_a_floor_is_about_the_value_or_the_ratio_and_may_be_a_ceiling() -> None:
    assert a_result().reached is None
    assert a_result(Floor("ratio", 0.5)).reached is True
    assert a_result(Floor("ratio", 0.6)).reached is False
    assert a_result(Floor("value", 25_000)).reached is True
    assert a_result(Floor("value", 25_000, at_least=False)).reached is False
    assert str(Floor("value", 80_000)) == "value ≥ 80,000"


def test_a_line_of_json_has_the_medians_and_what_is_unknown_as_null() -> None:
    line = json.loads(a_result(Floor("ratio", 0.5)).as_json())

    assert line["value"] == 30_000
    assert line["value_spread"] == [20_000, 40_000]
    assert line["reached"] is True
    assert line["client_cpu_us"] is None
    assert line["settings"] == {"pin": "one", "slots": 200}


def test_the_report_shows_value_floor_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    print_report([a_result(Floor("ratio", 0.6))])

    text = capsys.readouterr().out
    assert "30,000 [20,000 40,000] jobs/s" in text
    assert "ratio ≥ 0.6 MISSED" in text
    assert "pin=one, slots=200" in text


def test_ratios_are_taken_within_a_round() -> None:
    def window(seconds: float) -> Window:
        return Window(seconds, server_cpu_s=0.4, client_cpu_s=0.1, wal_bytes=500_000)

    result = rate_result(
        "drain",
        "x",
        # a machine that slows down by half and by half again: the ratio stays what it is
        ours=[(1000, window(s)) for s in (1.0, 2.0, 4.0)],
        yardstick=[(1000, window(s)) for s in (0.5, 1.0, 2.0)],
        yardstick_name="bare loop",
        floor=None,
        settings={},
    )

    assert (result.ratio.least, result.ratio.median, result.ratio.most) == (0.5, 0.5, 0.5)
    assert result.value == Spread(500.0, 250.0, 1000.0)
    assert result.cost == Cost(400.0, 100.0, 500.0)
    assert result.details["busy_share"] == 0.25


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (90, 90), (99, 99), (100, 100)])
def test_a_percentile_is_a_sample_that_so_many_do_not_exceed(percent: int, expected: int) -> None:
    assert percentile(range(100, 0, -1), percent) == expected


def test_latencies_have_the_percentile_of_all_samples_and_the_spread_of_their_parts() -> None:
    ours = [1.0] * 90 + [9.0] * 10  # the last fifth of them is slow

    result = latency_result(
        "pickup",
        50,
        ours,
        [1.0] * 100,
        yardstick_name="x",
        floor=Floor("value", 3, at_least=False),
        cost=Cost(),
        settings={},
    )

    assert result.value == Spread(1.0, 1.0, 1.0)
    assert result.details["max_ms"] == 9.0
    assert result.reached is True


# -- how they are taken ------------------------------------------------------------------------------


def burn(seconds: float) -> int:
    """Use CPU for so long. For a hand."""
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass
    return os.getpid()


def allowed_cores() -> set[int]:
    return os.sched_getaffinity(0)


def fail() -> None:
    raise ValueError("told to")


def die() -> None:
    os._exit(3)


@linux_only
def test_hands_work_pinned_and_side_by_side_and_tell_what_they_used() -> None:
    core = min(os.sched_getaffinity(0))
    with hired(2, [core]) as hands:
        assert [reply.value for reply in call_all(hands, allowed_cores)] == [{core}, {core}]
        replies = call_all(hands, burn, 0.1)

        assert [reply.value for reply in replies] == [hand.pid for hand in hands]
        for hand, reply in zip(hands, replies, strict=True):
            assert 0.1 <= reply.cpu_s < 0.2
            used_s = process_cpu_s(hand.pid)
            assert used_s is not None
            assert used_s >= 0.1


@linux_only
def test_the_server_and_the_hands_share_the_cores_that_were_asked_for_and_the_bench_keeps_off() -> None:
    allowed = os.sched_getaffinity(0)
    with open_lab(Pin.ONE, Size.TINY) as lab, lab.database() as database, lab.hands(1) as [hand]:
        with database.connect() as connection:
            server = os.sched_getaffinity(connection.info.backend_pid)
        assert server == {min(allowed)}
        assert hand.call(allowed_cores).value == server
        assert len(allowed) == 1 or not os.sched_getaffinity(0) & server
    assert os.sched_getaffinity(0) == allowed


def test_what_a_hand_raises_comes_back_with_its_traceback_and_it_works_on() -> None:
    with hired(1, None) as [hand]:
        with pytest.raises(HandFailed, match=r"(?s)in fail.*ValueError: told to"):
            hand.call(fail)
        assert hand.call(burn, 0.0).value == hand.pid


def test_a_hand_that_dies_is_noticed() -> None:
    with hired(1, None) as [hand], pytest.raises(HandFailed, match="ended"):
        hand.call(die)


def test_a_hand_at_work_is_ended_with_the_bench() -> None:
    with hired(1, None) as [hand]:
        hand.start(burn, 60.0)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 5


@linux_only
def test_a_server_s_cpu_includes_sessions_that_have_ended(server: EmbeddedPostgres, dsn: str) -> None:
    assert server.pid is not None
    before_s = server_cpu_s(server.pid)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select count(*) from generate_series(1, 1000000)")
        during_s = server_cpu_s(server.pid)
    after_s = server_cpu_s(server.pid)

    assert before_s is not None
    assert during_s is not None
    assert after_s is not None
    assert during_s - before_s > 0.02
    assert after_s >= during_s - 0.02  # ticks of ended processes are 10 ms long


def test_the_meter_sees_wal_and_buffer_hits(server: EmbeddedPostgres, dsn: str) -> None:
    assert server.pid is not None
    with Meter(server.dsn(), server.pid) as meter:
        database = conninfo_to_dict(dsn)["dbname"]
        before, hits = meter.read(), meter.buffer_hits(str(database))
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("create table t as select generate_series(1, 1000) as n")
            connection.execute("select count(*) from t")
        after = meter.read()
        # a session that ends reports what it has not reported yet
        eventually(lambda: meter.buffer_hits(str(database)) > hits)

    window = Window.between(before, after)
    assert window.wal_bytes is not None
    assert window.wal_bytes > 10_000
    assert window.seconds > 0


def test_what_is_unknown_stays_unknown() -> None:
    window = Window.between(Reading(1.0, None, 100), Reading(3.0, None, 300), client_cpu_s=1.0)

    assert window.cost(10) == Cost(None, 100_000.0, 20.0)
    assert window.busy_share() is None
    assert Cost.median([Cost(None, 1.0, 2.0), Cost(None, 3.0, 4.0)]) == Cost(None, 2.0, 3.0)


@linux_only
def test_file_systems_are_told_apart() -> None:
    assert filesystem_of(Path("/proc/self")) == "proc"
    assert filesystem_of(ROOT) not in {"proc", "unknown"}


@linux_only
def test_pinning_asks_for_no_more_cores_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7})

    assert cores_of(Pin.ONE) == [7]
    assert cores_of(Pin.NONE) is None
    with pytest.raises(CannotPin, match="may use 1 core"):
        cores_of(Pin.TWO)


@linux_only
def test_pins_and_priorities_end_with_their_block() -> None:
    allowed, niceness = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    with pinned([min(allowed)]), hired(1, None) as [hand]:
        with preferred([hand.pid], 5):
            assert os.getpriority(os.PRIO_PROCESS, hand.pid) == 5
        assert hand.call(allowed_cores).value == {min(allowed)}
        assert others_than([min(allowed)]) is None
    assert os.sched_getaffinity(0) == allowed
    assert os.getpriority(os.PRIO_PROCESS, 0) == niceness
