"""What `import jobq` offers, and nothing else: a change here is a change for every user."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from importlib import metadata, resources

import pytest

import jobq
import jobq._errors
from jobq._clients import verbs

CLIENTS = {"AsyncClient", "Client", "Enqueued", "JobInfo", "JobState", "AttemptError", "migrate"}
DECLARING = {
    "Jobs",
    "Handler",
    "Job",
    "JobType",
    "JobTypeOptions",
    "JobOptions",
    "NewJob",
    "Unique",
    "PeriodicOptions",
}
WORKING = {"Worker", "WorkerConfig", "WorkerReport", "WorkerStats", "WorkerHealth", "Latency"}
OPERATING = {
    "BulkConflict",
    "BulkCount",
    "BulkResult",
    "Cancellation",
    "JobFilter",
    "JobPage",
    "OperatorAction",
    "Pause",
    "PeriodicInfo",
    "RedactedField",
    "Redactions",
    "Retention",
}
BACKING_OFF = {"Backoff", "ConstantBackoff", "ExponentialBackoff", "PolynomialBackoff"}
OBSERVING = {"QueueStats", "WorkerInfo", "JobContextFilter", "current_job", "Settled", "WorkerObserver"}
STANDING_AROUND = {"CallNext", "EnqueueMiddleware", "RunMiddleware"}
SIGNALS = {"Signal", "Permanent", "Retry", "Snooze", "Cancel"}
ERRORS = {
    "Error",
    "ConfigError",
    "DuplicateKind",
    "ArgumentsError",
    "ArgumentsEncodeError",
    "ArgumentsDecodeError",
    "SchemaError",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "TransactionError",
    "ClientClosed",
    "JobNotFound",
    "JobConflict",
    "UniqueConflict",
    "PeriodicNotFound",
    "PeriodicConflict",
    "QueueFull",
    "MiddlewareError",
    "ProcessFailure",
    "DatabaseUnavailable",
    "DatabaseError",
}
NAMES = (
    CLIENTS
    | DECLARING
    | WORKING
    | OPERATING
    | BACKING_OFF
    | OBSERVING
    | STANDING_AROUND
    | SIGNALS
    | ERRORS
    | {"__version__"}
)


def test_the_public_names_are_these() -> None:
    assert set(jobq.__all__) == NAMES
    assert list(jobq.__all__) == sorted(jobq.__all__)
    assert set(jobq.__all__) <= set(dir(jobq))


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_each_is_there_lives_in_an_internal_module_and_says_what_it_is(name: str) -> None:
    thing = getattr(jobq, name)
    assert thing.__name__ == name
    assert re.match(r"jobq\._\w+", thing.__module__)
    assert (inspect.getdoc(thing) or "").strip(), "no docstring"


def public_methods() -> list[tuple[str, str]]:
    """Return the public methods and properties of the public classes, inherited ones of ours too."""
    classes = [getattr(jobq, name) for name in sorted(NAMES) if inspect.isclass(getattr(jobq, name))]
    return [
        (cls.__name__, name)
        for cls in classes
        for name, value in inspect.getmembers_static(cls)
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property))
        and any(name in vars(base) for base in cls.__mro__ if base.__module__.startswith("jobq"))
    ]


@pytest.mark.parametrize(("cls", "name"), public_methods())
def test_each_public_method_stands_alone(cls: str, name: str) -> None:
    value = inspect.getattr_static(getattr(jobq, cls), name)
    assert inspect.getdoc(value), f"jobq.{cls}.{name} has no docstring"


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jobq.nothing
    with pytest.raises(ImportError):
        exec("from jobq import nothing", {})


def test_the_errors_form_the_tree_that_is_drawn() -> None:
    drawn = set(re.findall(r"^    (?:[│ ]*[├└]── )?([A-Z]\w+)", jobq._errors.__doc__ or "", re.MULTILINE))
    assert drawn == ERRORS | SIGNALS
    for name in ERRORS:
        assert issubclass(getattr(jobq, name), jobq.Error)
        assert not issubclass(getattr(jobq, name), jobq.Signal)
    for name in SIGNALS:
        assert issubclass(getattr(jobq, name), jobq.Signal)
        assert not issubclass(getattr(jobq, name), jobq.Error)
    parents = {"Error": "Exception", "Signal": "Exception"}
    parent_at_depth: dict[int, str] = {}
    for line in (jobq._errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│ ]*[├└]── )?([A-Z]\w+)", line):
            depth = len(match[1] or "") // 4
            parent_at_depth[depth] = match[2]
            if depth:
                parents[match[2]] = parent_at_depth[depth - 1]
    assert {name: getattr(jobq, name).__bases__[0].__name__ for name in drawn} == parents


def test_the_version_is_the_distributions() -> None:
    assert jobq.__version__ == metadata.version("jobq")


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files("jobq").joinpath("py.typed").is_file()


def test_declaring_kinds_loads_no_driver_and_no_worker() -> None:
    code = (
        "import jobq, sys\n"
        "jobq.JobType('k', dict)\n"
        "jobq.Jobs().handler('j')(lambda job, args: 1)\n"
        "loaded = {m for m in sys.modules if m.partition('.')[0] in {'psycopg', 'psycopg_pool', 'asyncio'}"
        " or m.startswith('jobq._worker')}\n"
        "print(sorted(loaded))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_client_loads_what_operators_and_schedules_need_when_it_is_asked_for() -> None:
    code = (
        "import jobq, sys\n"
        "jobq.Client('host=/nowhere')\n"
        "loaded = {m.rpartition('.')[2] for m in sys.modules if m.startswith('jobq.')}\n"
        "needless = {'bulk', 'cron', 'filter', 'migrate', 'operate', 'periodic', 'redaction', 'stats'}\n"
        "print(sorted(loaded & needless))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_operation_of_an_operator_is_found_where_it_lives() -> None:
    for name in verbs.__all__:
        assert getattr(verbs, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = verbs.other


def test_a_star_import_gives_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from jobq import *", namespace)
    assert namespace.keys() >= NAMES
