"""What the server makes of a statement: its plan, and how much it read to carry it out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jobq._postgres import text_param

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobq._operation import Call
    from tests.support.storage import Storage

_WORKS_ON_ALL: Final = ("Seq Scan", "Bitmap Heap Scan", "Sample Scan")


class Scan(NamedTuple):
    """One node that reads a table; ``rows`` counts those that its filter removed, over all loops."""

    table: str
    node: str
    index: str | None
    condition: str | None
    rows: float

    @property
    def is_selective(self) -> bool:
        """Whether it goes straight to its rows."""
        if self.node == "Tid Scan":
            return True
        return self.node in {"Index Scan", "Index Only Scan"} and self.condition is not None


class Plan(NamedTuple):
    """How a statement was carried out.

    Attributes:
        scans: every node that reads a table.
        buffers: shared buffers that it touched.
    """

    scans: list[Scan]
    buffers: int

    def of(self, table: str) -> list[Scan]:
        return [scan for scan in self.scans if scan.table == table]


def prepare(store: Storage, name: str, call: Call) -> None:
    """Prepare a statement under a name of the test's own."""
    store.sql(f'prepare "{name}" as {call.sql}')


def explain(store: Storage, name: str, params: Sequence[Any], *, keep: bool = False) -> Plan:
    """Carry a prepared statement out and return how; undo what it did, unless told to keep it."""
    arguments = ", ".join(map(_literal, params))
    execute = f'execute "{name}"' + (f"({arguments})" if params else "")
    store.sql("begin")
    # without costs and times it is much faster, and they are not what is looked at
    document = store.value(f"explain (analyze, buffers, timing off, format json) {execute}")
    store.sql("commit" if keep else "rollback")
    top = (document if isinstance(document, list) else json.loads(document))[0]["Plan"]
    return Plan(list(_scans(top)), top["Shared Hit Blocks"] + top["Shared Read Blocks"])


def _scans(node: dict[str, Any]) -> Iterator[Scan]:
    if "Relation Name" in node and node["Node Type"] != "ModifyTable":
        rows = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
        condition = node.get("Index Cond") or node.get("TID Cond")
        yield Scan(
            node["Relation Name"],
            node["Node Type"],
            node.get("Index Name"),
            condition,
            rows * node["Actual Loops"],
        )
    for child in node.get("Plans", ()):
        yield from _scans(child)


def _literal(value: Any) -> str:
    text = text_param(value)
    if text is None:
        return "null"
    assert isinstance(text, str)
    return "'" + text.replace("'", "''") + "'"
