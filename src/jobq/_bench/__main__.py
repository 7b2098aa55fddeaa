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
from jobq._bench.records import Recorder
from jobq._bench.registry import BENCHES
from jobq._bench.report import print_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._bench.result import Result


def main(
    arguments: Sequence[str] | None = None, *, record: Path | None = None, program: str = "python -m bench"
) -> int:
    """Run the benches that were asked for.

    Args:
        arguments: the command's; ``None`` for the process's own.
        program: what it is called by.
        record: where results are appended when ``--record`` does not say; those of ``--tiny`` never are.

    Returns:
        0, or 1 when one could not be run. A floor that was missed is printed and is no error.
    """
    options = _parser(program).parse_args(arguments)
    options.record = None if options.size == Size.TINY.value else options.record or record
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
        recorder = None if options.record is None else Recorder(options.record)
        for result in BENCHES[name].run(lab):
            results.append(result)
            if recorder is not None:
                recorder.add(result)
            if options.json:
                print(result.as_json(), flush=True)
    if not options.json:
        print_report(results)


def _parser(program: str) -> argparse.ArgumentParser:
    listing = "\n".join(f"  {bench.name:12} {bench.summary}" for bench in BENCHES.values())
    parser = argparse.ArgumentParser(
        prog=program,
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
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="append the results to a file, one JSON object a line"
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
