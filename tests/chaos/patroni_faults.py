"""What befalls hosts under Patroni: one dies, its Patroni hangs, etcd is away, somebody switches over."""

from __future__ import annotations

import http
import os
import signal
import time
from typing import TYPE_CHECKING, Final, TypeAlias

import psycopg

from jobq._clients.migrate import migrate
from jobq.embedded import Databases
from tests.support.patroni import POLL_S, TTL_S, Host, PatroniCluster
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.stage import Stage

DATABASE: Final = "app"
_TAKEOVER_S: Final = TTL_S + 40.0  # and what a busy machine may add
_WORK_S: Final = 60.0

Once: TypeAlias = "Callable[[PatroniCluster, Stage], None]"


def make_database(cluster: PatroniCluster) -> str:
    """Make a migrated database; return its address, which names all hosts."""
    with Databases(cluster.dsn("postgres")) as databases:
        databases.create(DATABASE)
    migrate(cluster.dsn(DATABASE))
    return cluster.dsn(DATABASE)


def again_and_again(cluster: PatroniCluster, once: Once) -> Callable[[Stage], None]:
    """Return the fault that does this at least once, on a cluster that is whole each time."""

    def fault(stage: Stage) -> None:
        is_first = True
        while is_first or not stage.is_over():
            is_first = False
            stage.pause(1.0, 3.0)
            once(cluster, stage)
            stage.count("times")
            cluster.await_whole()

    return fault


def kill_host(cluster: PatroniCluster, stage: Stage) -> None:
    """Kill the leader's Patroni and server at once; the host comes back when the other has taken over."""
    leader, follower = cluster.roles()
    began = time.monotonic()
    leader.kill()
    _await_takeover(follower)
    _await_work(stage, "there", began)
    leader.start()


def kill_host_ahead(cluster: PatroniCluster, stage: Stage) -> None:
    """Do so when the follower lacks the last second."""
    with psycopg.connect(stage.dsn, autocommit=True) as connection:
        [(sender,)] = connection.execute("select pid from pg_stat_replication").fetchall()
    os.kill(sender, signal.SIGSTOP)
    time.sleep(1.0)  # what happens now is lost
    kill_host(cluster, stage)


def freeze_patroni(cluster: PatroniCluster, stage: Stage) -> None:
    """SIGSTOP the leader's Patroni until the other host leads, and longer: two servers take writes.

    The old one's commits wait for a standby that it no longer has. Which of the two a client
    reaches depends on the order in its address, so work need not go on before the thaw.
    """
    leader, follower = cluster.roles()
    leader.freeze()
    _await_takeover(follower)
    time.sleep(stage.rng.uniform(0.0, 5.0))
    leader.thaw()
    began = time.monotonic()
    eventually(lambda: not leader.leads, _WORK_S, what="the old leader steps down", interval_s=POLL_S)
    _await_work(stage, "after the thaw", began)


def lose_etcd(cluster: PatroniCluster, stage: Stage) -> None:
    """Kill etcd: the leader makes itself a standby, and nobody takes writes until etcd is back."""
    leader, _ = cluster.roles()
    began = time.monotonic()
    cluster.etcd.kill()
    eventually(lambda: not leader.leads, _TAKEOVER_S, what="the leader steps down", interval_s=POLL_S)
    stage.note_longest("s until it stepped down", time.monotonic() - began)
    time.sleep(stage.rng.uniform(0.0, 5.0))
    began = time.monotonic()
    cluster.etcd.start()
    _await_work(stage, "with etcd", began)


def switch_over(cluster: PatroniCluster, stage: Stage) -> None:
    """Have the follower take over in order, as before the maintenance of a host."""
    leader, follower = cluster.roles()
    began = time.monotonic()
    status, said = leader.ask("POST", "/switchover", {"leader": leader.name, "candidate": follower.name})
    assert status == http.HTTPStatus.OK, said
    _await_work(stage, "there", began)


def _await_takeover(follower: Host) -> None:
    eventually(lambda: follower.leads, _TAKEOVER_S, what=f"{follower.name} leads", interval_s=POLL_S)


def _await_work(stage: Stage, where: str, began: float) -> None:
    stage.await_answers(_TAKEOVER_S)
    stage.await_work(_WORK_S)
    stage.note_longest(f"s until work went on {where}", time.monotonic() - began)
