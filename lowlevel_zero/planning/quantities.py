"""What people write on a command line, as in ``8``, ``7B``, ``100Gbit`` or ``20us``: each raises for anything else."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping

_NUMBER_AND_UNIT = re.compile(r"([0-9._]+(?:e[+-]?[0-9]+)?)([a-z%]*)")
_MOST = 10**18  # elements: what more bytes has than any machine


def whole_number(text: str) -> int:
    """As in ``8``: at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return int(text)


def stage(text: str) -> int:
    """0, for DDP, 1 or 2."""
    if text not in ("0", "1", "2"):
        raise ArgumentTypeError(f"expected 0 (DDP), 1 or 2, got {text!r}")
    return int(text)


def elements(text: str) -> int:
    """As in ``7e9``, ``7_000_000``, ``7B`` or ``1.5M``."""
    number = _read(text, {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12})
    if not (1 <= number <= _MOST and number == int(number)):
        raise ArgumentTypeError(f"expected a whole number of elements, at least 1, as in 7B, got {text!r}")
    return int(number)


def _measured(expected: str, units: Mapping[str, float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        number = _read(text, units)
        if not 0 <= number < math.inf:
            raise ArgumentTypeError(f"expected {expected}, got {text!r}")
        return number

    return read


seconds = _measured("seconds, as in 20us or 120ms", {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})
rate = _measured("a rate, as in 1Gbit", {"bit": 1 / 8, "kbit": 125, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9})
per_second = _measured("operations a second, as in 100T", {"": 1, "g": 1e9, "t": 1e12, "p": 1e15})
share = _measured("a share, as in 5%", {"": 1, "%": 0.01})


def _read(text: str, units: Mapping[str, float]) -> float:
    """The number times its unit; NaN where it is none of them."""
    match = _NUMBER_AND_UNIT.fullmatch(text.lower())
    if match is None or match[2] not in units:
        return math.nan
    try:
        return float(match[1]) * units[match[2]]
    except ValueError:
        return math.nan
