"""Bounds that more than one module keeps."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

MAX_ARGUMENTS_BYTES: Final = 1_048_576  # a job's arguments, as UTF-8 JSON
MAX_RESULT_BYTES: Final = 65_536  # a stored return value
MAX_META_BYTES: Final = 16_384  # what travels beside the arguments

# Containers within containers. A fixed bound, for what a stack takes differs between the process
# that encodes, the server that parses, and the worker that decodes.
MAX_DEPTH: Final = 100

# Beyond a century a wait is a mistake, and sums of dates overflow (Python's end at the year 9999).
MAX_WAIT: Final = timedelta(days=36_525)
