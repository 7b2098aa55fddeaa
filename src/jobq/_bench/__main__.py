"""``python -m bench NAME …``: run benches and print what they found."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jobq
from jobq._bench.cores import CannotPin, Pin
from jobq._bench.hands import HandFailed
from jobq._bench.lab import BenchError, Size, open_lab
from jobq._bench.registry import BENCHES
from jobq._bench.report import print_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._bench.result import Result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benches that were asked for.

    Returns:
        0, or 1 when one could not be run. A floor that was missed is printed and is no error.
    """
    options = _parser().parse_args(arguments)
    names = list(BENCHES) if "all" in options.name else options.name
    try:
        for name in names:
            _run(name, Pin(options.pin), options)
    except (BenchError, CannotPin, HandFailed, jobq.Error) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def _run(name: str, pin: Pin, options: argparse.Namespace) -> None:
    with open_lab(pin, Size(options.size), options.postgres, options.nice) as lab:
        results: list[Result] = []
        for result in BENCHES[name].run(lab):
            results.append(result)
            if options.json:
                print(result.as_json(), flush=True)
    if not options.json:
        print_report(results)


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {bench.name:10} {bench.summary}" for bench in BENCHES.values())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"Measure jobq beside what PostgreSQL itself can do, on a scratch server.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="+", choices=[*BENCHES, "all"], metavar="NAME", help="benches, or all")
    parser.add_argument("--json", action="store_true", help="print one object a line instead of a table")
    parser.add_argument(
        "--pin",
        choices=[pin.value for pin in Pin],
        default=Pin.ONE.value,
        help="cores that server and worker share (default: one)",
    )
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        metavar="N",
        help="priority of what is measured, such as -15 on a busy machine (below 0: as root)",
    )
    parser.add_argument(
        "--postgres", type=Path, metavar="DIR", help="PostgreSQL's programs (default: those that are found)"
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--quick",
        dest="size",
        action="store_const",
        const=Size.QUICK.value,
        default=Size.FULL.value,
        help="under 30 s a bench",
    )
    sizes.add_argument(
        "--tiny",
        dest="size",
        action="store_const",
        const=Size.TINY.value,
        help="only see that it works; the figures mean nothing",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
