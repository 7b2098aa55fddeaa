"""Stored JSON back to Python's values, whatever PostgreSQL can hold that Python's usual types cannot.

The clients refuse what does not come back; SQL, triggers and other languages do not ask them. A
number of jsonb may have 131,072 digits, and a document may be nested deeper than a stack here.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal

import msgspec


def read_document(text: str) -> object:
    """Return a stored document as plain values.

    An integer of more digits than Python reads, and a fraction beyond the floats, become a Decimal,
    which is exact. A document that is nested too deep stays what it is, as `msgspec.Raw`.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # a number is out of its range; valid JSON it is
        pass
    except RecursionError:
        return msgspec.Raw(text.encode())
    try:
        document: object = json.loads(text, parse_int=_integer, parse_float=_fraction)
    except RecursionError:
        return msgspec.Raw(text.encode())
    return document


def _integer(digits: str) -> int | Decimal:
    try:
        return int(digits)
    except ValueError:  # longer than sys.get_int_max_str_digits()
        return Decimal(digits)


def _fraction(digits: str) -> float | Decimal:
    number = float(digits)
    return number if math.isfinite(number) else Decimal(digits)
