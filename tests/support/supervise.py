"""``supervise.py DSN CHILD_DSN FOLDER PROCESSES GRACE ACT...``: a supervisor of fake children."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from jobq._supervisor.supervisor import Supervisor

dsn, child_dsn, folder, processes, grace, *acts = sys.argv[1:]
logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
supervisor = Supervisor(
    [sys.executable, str(Path(__file__).with_name("fakechild.py")), folder],
    [json.dumps({"dsn": child_dsn, "acts": acts}).encode()] * int(processes),
    grace_s=float(grace),
    conninfo=dsn,
    schema="jobq",
    crash_limit=3,
)
sys.exit(supervisor.run())
