"""The Prometheus integration against the real library."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import jobq
from jobq.integrations.prometheus import (
    METRICS,
    JobMetrics,
    QueueCollector,
    WorkerCollector,
    metrics_app,
)
from tests.support.inprocess import working
from tests.support.observed import MODES, fresh_jobs
from tests.support.polling import eventually_async

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from tests.support.proxy import TcpProxy

DOCS: Final = Path(__file__).parents[1] / "docs"
QUANTILES: Final = {"0.5", "0.99", "1"}


def scrape(registry: CollectorRegistry) -> dict[str, Metric]:
    """Return what is exposed, as Prometheus reads it."""
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_queues_are_told_of(dsn: str) -> None:
    registry = CollectorRegistry()
    with jobq.Client(dsn) as client:
        client.enqueue_many([jobq.NewJob("k", {}, queue="mail") for _ in range(3)])
        client.enqueue("k", {}, delay=timedelta(hours=1))
        with client.pool.connection() as connection:
            connection.execute("update jobq.ready set ready_at = now() - interval '2 minutes'")
            connection.execute("insert into jobq.pause (scope, name) values ('queue', 'mail')")
        registry.register(QueueCollector(client))
        assert value(registry, "jobq_database_up") == 1
        assert value(registry, "jobq_queue_jobs", queue="mail", state="ready") == 3
        assert value(registry, "jobq_queue_jobs", queue="default", state="scheduled") == 1
        assert value(registry, "jobq_queue_jobs", queue="default", state="discarded") == 0
        assert value(registry, "jobq_queue_lag_seconds", queue="mail") == pytest.approx(120, abs=10)
        assert value(registry, "jobq_queue_lag_seconds", queue="default") == 0
        assert value(registry, "jobq_queue_paused", queue="mail") == 1
        assert value(registry, "jobq_queue_estimated", queue="mail") == 0


def test_an_answer_serves_for_five_seconds(dsn: str) -> None:
    registry = CollectorRegistry()
    with jobq.Client(dsn) as client:
        collector = QueueCollector(client)
        registry.register(collector)
        client.enqueue("k", {})
        assert value(registry, "jobq_queue_jobs", queue="default", state="ready") == 1
        client.enqueue("k", {})
        assert value(registry, "jobq_queue_jobs", queue="default", state="ready") == 1
        collector._read_at -= 5
        assert value(registry, "jobq_queue_jobs", queue="default", state="ready") == 2
        with pytest.raises(jobq.ConfigError, match="fresh_for"):
            QueueCollector(client, fresh_for=timedelta(seconds=1))


def test_a_database_that_is_away_is_told_of_and_the_rest_goes_on(dsn: str, proxy: TcpProxy) -> None:
    registry = CollectorRegistry()
    with jobq.Client(proxy.dsn, pool_min_size=0) as client:
        client.enqueue("k", {})
        collector = QueueCollector(client)
        registry.register(collector)
        assert value(registry, "jobq_database_up") == 1
        proxy.refuse()
        proxy.drop()
        collector._read_at -= 5
        assert value(registry, "jobq_database_up") == 0
        assert value(registry, "jobq_queue_jobs", queue="default", state="ready") is None
        proxy.accept()
        collector._read_at -= 5
        assert value(registry, "jobq_database_up") == 1


def test_registering_asks_no_database() -> None:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(QueueCollector(jobq.Client("host=/nowhere")))


async def test_a_worker_is_told_of(dsn: str) -> None:
    registry = CollectorRegistry()
    async with working(dsn, fresh_jobs()) as bench:
        registry.register(WorkerCollector(bench.worker))
        for do in ("x", "y", "fail"):
            await bench.client.enqueue("async", {"do": do})
        await eventually_async(
            lambda: value(registry, "jobq_worker_attempts_total", outcome="completed") == 2
        )
        await eventually_async(lambda: value(registry, "jobq_worker_attempts_total", outcome="retried") == 1)
        await eventually_async(lambda: value(registry, "jobq_worker_listening") == 1)
        assert value(registry, "jobq_worker_claimed_total") == 3
        assert value(registry, "jobq_worker_slots") == 20
        assert value(registry, "jobq_worker_alive") == value(registry, "jobq_worker_ready") == 1
        quantiles = {
            sample.labels["quantile"] for sample in scrape(registry)["jobq_worker_fetch_seconds"].samples
        }
        assert quantiles == QUANTILES


@pytest.mark.parametrize("mode", MODES)
async def test_runs_are_measured_by_kind_and_end(dsn: str, mode: str) -> None:
    registry = CollectorRegistry()
    jobs = fresh_jobs()
    jobs.use(JobMetrics(registry))
    name = "jobq_job_duration_seconds_count"

    def is_one(outcome: str) -> bool:
        return value(registry, name, kind=mode, queue="default", outcome=outcome) == 1

    async with working(dsn, jobs) as bench:
        for do in ("x", "fail", "snooze", "cancel"):
            await bench.client.enqueue(mode, {"do": do})
        for outcome in ("completed", "failed", "snoozed", "cancelled"):
            await eventually_async(partial(is_one, outcome), 20.0)


async def test_a_run_that_was_stopped_is_measured_as_such(dsn: str) -> None:
    registry = CollectorRegistry()
    jobs = jobq.Jobs()
    jobs.use(JobMetrics(registry))

    @jobs.handler("slow")
    async def slow(job: jobq.Job, args: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    async with working(dsn, jobs) as bench:
        await bench.waits(
            (await bench.client.enqueue("slow", {}, timeout=timedelta(milliseconds=50))).id, "retry"
        )
    labels = {"kind": "slow", "queue": "default", "outcome": "stopped"}
    assert value(registry, "jobq_job_duration_seconds_count", **labels) == 1


async def test_all_of_it_is_served(dsn: str) -> None:
    own = CollectorRegistry()
    jobs = fresh_jobs()
    jobs.use(JobMetrics(own))
    async with working(dsn, jobs) as bench:
        await bench.ended((await bench.client.enqueue("async", {})).id)
        with bench.worker.serve_http(
            0, host="127.0.0.1", metrics=metrics_app(bench.worker, dsn, also=own)
        ) as http:
            url = f"http://127.0.0.1:{http.port}/metrics"
            text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    exposed = {f"{name}_total" if family.type == "counter" else name for name, family in families.items()}
    exposed = {name for name in exposed if not name.endswith("_created")}  # the library's own, of a histogram
    assert exposed == set(METRICS)
    for name, about in METRICS.items():
        family = families[name.removesuffix("_total") if about.kind == "counter" else name]
        assert (family.type, family.documentation) == (about.kind, about.text)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(about.labels), name


# -- documents -----------------------------------------------------------------------------------------


def test_every_metric_stands_in_the_documents_table_and_no_other() -> None:
    rows = re.findall(
        r"^\| `(jobq_\w+)`(?:\{([\w, ]+)\})? \| (\w+) \| (.+) \|$",
        (DOCS / "metrics.md").read_text(),
        re.MULTILINE,
    )
    assert {name: (kind, tuple(filter(None, labels.split(", ")))) for name, labels, kind, _ in rows} == {
        name: (about.kind, about.labels) for name, about in METRICS.items()
    }


def test_alert_rules_are_yaml_that_asks_for_metrics_there_are() -> None:
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) >= 8
    runbook = (DOCS / "runbook.md").read_text()
    known = set(METRICS) | {f"{name}_{part}" for name in METRICS for part in ("bucket", "count", "sum")}
    for rule in alerts:
        asked = set(re.findall(r"\bjobq_\w+", rule["expr"]))
        assert asked, rule
        assert asked <= known, asked - known
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]
        assert f"\n## {rule['alert']}\n" in runbook, rule["alert"]
        anchor = rule["annotations"]["runbook"].partition("#")[2]
        assert anchor == rule["alert"].lower()


def test_labels_in_the_rules_are_labels_of_the_metrics() -> None:
    text = (DOCS / "alerts.yml").read_text()
    for name, selector in re.findall(r"\b(jobq_\w+)\{([^}]*)\}", text):
        labels = set(re.findall(r"(\w+)\s*[=!]", selector))
        assert labels <= set(METRICS[name].labels) | {"le"}, (name, selector)
