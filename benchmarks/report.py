"""What came out of the rounds: ratios within a round, to whichever contestant, a table, and the same as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from statistics import fmean, median
from typing import Any, NamedTuple

from .peers import CONTESTANTS, Setting
from .rounds import Record, Turn

Seen = dict[str, Record]  # by contestant, on one rank


class Spread(NamedTuple):
    """A number that was measured once a round."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of a value a round."""
        return cls(median(values), min(values), max(values))


def summarise(ranks: Sequence[Seen], setting: Setting, baseline: str) -> dict[str, Any]:
    """By contestant: what the ranks have seen, and its ratios to the baseline where that took part."""
    elements = sum(p.numel() for p in setting.fp32_model().parameters())
    turns = {name: _over_ranks([rank[name] for rank in ranks]) for name in ranks[0]}
    rows: dict[str, Any] = {
        name: {
            "title": CONTESTANTS[name].title,
            "losses": [fmean(losses) for losses in zip(*(rank[name].losses for rank in ranks), strict=True)],
            "rounds": [_known(turn) for turn in turns[name]],
            "seconds": {phase: _seconds(turns[name], phase)._asdict() for phase in PHASES},
            "sent bytes a step": _told(min(turn.sent for turn in turns[name])),  # others' are counted, too
            "sent by its own account": _told(median(turn.told for turn in turns[name])),
            "share others took": _told(median(turn.others for turn in turns[name])),
            "share stolen": _told(median(turn.stolen for turn in turns[name])),
            "held after backward": _most(rank[name].after_backward for rank in ranks),
            "held after step": _most(rank[name].after_step for rank in ranks),
            "elements": elements,
            "peak rss": [rank[name].peak_rss for rank in ranks] if len(ranks[0]) == 1 else None,
        }
        for name in ranks[0]
    }
    relate(rows, baseline)
    return rows


def relate(rows: dict[str, Any], baseline: str) -> None:
    """Set every row's ratios to those to ``baseline``'s rounds; to None where it didn't take part."""
    for row in rows.values():
        row["ratios"] = (
            {phase: ratio(row, rows[baseline], phase)._asdict() for phase in PHASES} if baseline in rows else None
        )


def ratio(row: dict[str, Any], other: dict[str, Any], phase: str = "whole") -> Spread:
    """Of one contestant's phase to another's, both in the same round."""
    return Spread.of([a[phase] / b[phase] for a, b in zip(row["rounds"], other["rounds"], strict=True)])


def strangers(rows: dict[str, Any], baseline: str, tolerance: float) -> list[str]:
    """A line for each contestant that trains something else than ``baseline``, and isn't meant to."""
    expected = rows[baseline]["losses"] if baseline in rows else []
    lines = []
    for name, row in rows.items():
        pairs = list(zip(row["losses"], expected, strict=False))
        if not CONTESTANTS[name].alike:
            pairs = []
        apart = [abs(one - other) / abs(other) for one, other in pairs]
        if not all(each <= tolerance for each in apart):  # a loss that is no number isn't alike
            lines.append(f"{name} trains something else: its losses are up to {max(apart):.1e} off {baseline}'s")
    return lines


PHASES = ("whole", "forward_backward", "step", "cpu")


def _over_ranks(records: Sequence[Record]) -> list[Turn]:
    """Round by round, the mean over the ranks."""
    return [_mean(turns) for turns in zip(*(record.turns for record in records), strict=True)]


def _mean(turns: Sequence[Turn]) -> Turn:
    return Turn(*map(fmean, zip(*turns, strict=True)))


def _known(turn: Turn) -> dict[str, float | None]:
    return {name: _told(value) for name, value in turn._asdict().items()}


def _told(value: float) -> float | None:
    """JSON has no NaN."""
    return None if isnan(value) else value


def _seconds(turns: Sequence[Turn], phase: str) -> Spread:
    return Spread.of([getattr(turn, phase) for turn in turns])


def _most(held: Any) -> dict[str, int]:
    """The account of the rank that holds most."""
    return max(held, key=lambda account: sum(account.values()))


# ---- for people ----

Cells = Callable[[dict[str, Any]], str]
COLUMNS: tuple[tuple[str, Cells], ...] = (
    ("ratio", lambda row: _ratio(row, "whole")),
    ("min-max", lambda row: _range(row)),
    ("ms", lambda row: _milliseconds(row, "whole")),
    ("fwd+bwd", lambda row: _milliseconds(row, "forward_backward")),
    ("step", lambda row: _milliseconds(row, "step")),
    ("cpu", lambda row: _milliseconds(row, "cpu")),
    ("cpu ratio", lambda row: _ratio(row, "cpu")),
    ("B/p bwd", lambda row: _per_element(row, "held after backward")),
    ("B/p step", lambda row: _per_element(row, "held after step")),
    ("MB lo", lambda row: _number(row["sent bytes a step"], 1e6)),
    ("MB told", lambda row: _number(row["sent by its own account"], 1e6)),
    ("others %", lambda row: _number(row["share others took"], 0.01)),
    ("stolen %", lambda row: _number(row["share stolen"], 0.01)),
)


def table(results: dict[str, Any]) -> str:
    """One line a contestant: medians over the rounds.

    "MB lo" are the bytes that went over the loopback interface, headers and everybody's included; "MB told" those that
    the contestant says it has handed to other ranks, over shared memory too.
    """
    lines = [f"{'':44}" + "".join(f"{name:>12}" for name, _ in COLUMNS)]
    for row in results.values():
        lines.append(f"{row['title']:44}" + "".join(f"{cell(row):>12}" for _, cell in COLUMNS))
    return "\n".join(lines)


def _ratio(row: dict[str, Any], phase: str) -> str:
    return f"{row['ratios'][phase]['median']:.2f}" if row["ratios"] else "-"


def _range(row: dict[str, Any]) -> str:
    ratio = (row["ratios"] or {}).get("whole")
    return f"{ratio['least']:.2f}-{ratio['most']:.2f}" if ratio else "-"


def _milliseconds(row: dict[str, Any], phase: str) -> str:
    return f"{1e3 * row['seconds'][phase]['median']:.1f}"


def _per_element(row: dict[str, Any], moment: str) -> str:
    return f"{sum(row[moment].values()) / row['elements']:.2f}"


def _number(number: float | None, unit: float) -> str:
    return "-" if number is None else f"{number / unit:.1f}"
