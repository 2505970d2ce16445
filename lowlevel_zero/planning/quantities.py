"""Quantities on a command line, as in ``8``, ``7B``, ``100Gbit`` or ``20us``; other text raises."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER_AND_UNIT = re.compile(r"([0-9._]+(?:e[+-]?[0-9]+)?)([a-z%]*)")
_MOST = 1e18  # more bytes, elements or operations a second than any machine has


def _quantity(
    expected: str, units: Mapping[str, float], least: float = 0, most: float = _MOST, whole: bool = False
) -> Callable[[str], Any]:
    """Return a parser of a number with a unit to a float, or an int if ``whole``; it raises on other text."""

    kind: Any = Decimal if whole else float  # 8.03 * 10**9 is whole, but not as a float

    def read(text: str) -> float:
        match = _NUMBER_AND_UNIT.fullmatch(text.lower())
        try:
            number = kind(match[1]) * units[match[2]] if match else math.nan
        except (KeyError, ValueError, InvalidOperation):
            number = math.nan
        if not least <= number <= most or (whole and number % 1):
            raise ArgumentTypeError(f"expected {expected}, got {text!r}")
        return int(number) if whole else number

    return read


whole_number = _quantity("a whole number, at least 1", {"": 1}, 1, whole=True)
stage = _quantity("0 (DDP), 1 or 2", {"": 1}, most=2, whole=True)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
elements = _quantity("a whole number of elements, at least 1, as in 7B", _UNITS, 1, whole=True)
seconds = _quantity("seconds, as in 20us or 120ms", {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})
_RATES = {"bit": 1 / 8, "kbit": 125, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9}
rate = _quantity("a rate of at least 1bit, as in 1Gbit", _RATES, 1 / 8)
per_second = _quantity("operations a second, as in 100T", {"": 1, "g": 1e9, "t": 1e12, "p": 1e15})
share = _quantity("a share, as in 5%", {"": 1, "%": 0.01})
