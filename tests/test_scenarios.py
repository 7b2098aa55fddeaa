"""The table of scenarios in README.md and the tests say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parent
IDS: Final = frozenset(
    re.findall(
        r"S\d\d",
        """
        liveness, rescue, fencing: S01 S02 S03 S04 S06 S07 S08 S10 S12 S13 S15
        claiming, shutdown, threads: S17 S18 S20 S21 S22 S23 S24 S25 S26 S27 S29
        LISTEN/NOTIFY and connections: S30 S31 S34 S35 S36 S37 S39 S40 S41
        uniqueness and transactional enqueue: S43 S44 S46 S47 S48 S49 S50 S51
        periodic, cron, leader: S55 S56 S58 S59 S60 S61
        arguments, errors, numbers: S62 S64 S65 S66 S67 S68 S69
        migrations, clocks, load, surfaces: S52 S70 S71 S73 S74 S75 S77 S78 S79 S80 S82 S83
        """,
    )
)
ROW: Final = re.compile(r"\| (S\d\d) \| [CHML] \| .+? \| (.+) \|")
TEST_NAME: Final = re.compile(r"test_s(\d\d)_\w+")


def rows() -> dict[str, str]:
    lines = (TESTS / "README.md").read_text().splitlines()
    found = [(match[1], match[2]) for match in map(ROW.fullmatch, lines) if match]
    assert len({name for name, _ in found}) == len(found), "a scenario has two rows"
    return dict(found)


def scenario_tests() -> set[str]:
    """Return the names of all tests that are named after a scenario."""
    return {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and TEST_NAME.fullmatch(node.name)
    }


def test_every_scenario_has_a_row() -> None:
    assert rows().keys() == IDS


def test_a_row_names_tests_or_says_why_there_is_none() -> None:
    for name, what in rows().items():
        named = what.startswith("`test_") and TEST_NAME.search(what)
        reason = what == "pending" or re.fullmatch(r"feature not there yet: \S.*", what)
        assert named or reason, f"{name}: {what}"


def test_every_test_named_in_the_table_exists_and_the_other_way_round() -> None:
    named = {match[0]: name for name, what in rows().items() for match in TEST_NAME.finditer(what)}
    for test, row in named.items():
        assert f"test_{row.lower()}_" in test, f"{test} stands in the row of {row}"
    assert named.keys() == scenario_tests()
