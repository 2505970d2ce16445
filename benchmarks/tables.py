"""What was measured as a table: for the terminal, and for the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lowlevel_zero.layout.text import aligned


class Table(NamedTuple):
    """Titles of the columns, and what stands in them."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """For the terminal."""
        return aligned([tuple(self.titles), *map(tuple, self.rows)], right=range(1, len(self.titles)))

    def markdown(self) -> list[str]:
        """For a page."""
        lines = [self.titles, ["---"] * len(self.titles), *self.rows]
        return ["| " + " | ".join(line) + " |" for line in lines]


def steps(content: dict[str, Any]) -> Table:
    """A contestant's whole step beside the baseline's."""
    titles = ["", "time", "least to most", "ms", "bytes per parameter after backward, after step", "MB sent, told"]
    return Table(titles, [_step(row) for row in content["contestants"].values()])


def _step(row: dict[str, Any]) -> list[str]:
    spread = row["ratios"]["whole"]
    held = [sum(row[when].values()) / row["elements"] for when in ("held after backward", "held after step")]
    sent = [row[name] for name in ("sent bytes a step", "sent by its own account")]
    return [
        row["title"],
        f"{spread['median']:.2f}",
        f"{spread['least']:.2f} to {spread['most']:.2f}",
        f"{1e3 * row['seconds']['whole']['median']:.0f}",
        ", ".join(f"{value:.1f}" for value in held),
        ", ".join("-" if value is None else f"{value / 1e6:.0f}" for value in sent),
    ]


def hosts(content: dict[str, Any]) -> Table:
    """A contestant's whole step over links beside the baseline's, and what a host sends."""
    titles = ["", "time", "least to most", "ms", "forward and backward, ms", "step, ms"]
    titles += ["MB a host sends", "by its own account", "ms that the link takes for them", "time to that"]
    return Table(titles, [_over_links(row) for row in content["contestants"].values()])


def _over_links(row: dict[str, Any]) -> list[str]:
    spread = row["ratios"]["whole"]
    times = [row["seconds"][phase]["median"] for phase in ("whole", "forward_backward", "step")]
    sent = [
        (row[name], unit) for name, unit in (("sent by a host", 1e6), ("told by a host", 1e6), ("link seconds", 1e-3))
    ]
    return [
        row["title"],
        f"{spread['median']:.2f}",
        f"{spread['least']:.2f} to {spread['most']:.2f}",
        *(f"{1e3 * seconds:.0f}" for seconds in times),
        *("-" if value is None else f"{value / unit:.0f}" for value, unit in sent),
        f"{times[0] / row['link seconds']:.2f}" if (row["link seconds"] or 0) > 1e-3 else "-",
    ]


def peaks(content: dict[str, Any]) -> Table:
    """The most memory that a rank has taken, in a step and before the first."""
    names = ("step", "start", "after_backward", "after_step")
    cells = [[row["title"], *(f"{row[name] / 2**20:.0f}" for name in names)] for row in content["contestants"].values()]
    return Table(["MiB of a rank", "peak of a step", "peak before", "held after backward", "held after step"], cells)


def overheads(content: dict[str, Any]) -> Table:
    """Host time by simulated world size."""
    cells = [
        [f"{row['world size']:,}", *(f"{row[name]:.2f}" for name in ("plain", "overhead", "packing", "the rest"))]
        for row in content["rows"]
    ]
    titles = ["ranks", "plain, microseconds per parameter and step", "beyond that", "of it packing", "the rest"]
    return Table(titles, cells)


def scales(content: dict[str, Any]) -> Table:
    """Time and memory by simulated world size."""
    cells = [
        [
            row["title"],
            f"{row['world size']:,}",
            f"{row['forward and backward ms']:.0f}",
            f"{row['step ms']:.1f}",
            f"{row['bytes after backward'] / row['elements']:.2f}",
            f"{row['collectives']:.0f}",
        ]
        for row in content["rows"]
    ]
    titles = ["", "ranks", "forward and backward, ms", "step, ms", "bytes per parameter after backward", "collectives"]
    return Table(titles, cells)


def constructions(content: dict[str, Any]) -> Table:
    """Microseconds of computing a parameter by contestant, and how much memory each takes at most."""
    names = list(dict.fromkeys(row["name"] for row in content["rows"]))
    cases: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in content["rows"]:
        case = f"{row['parameters']:,} x {row['elements']:,}", f"{row['ranks']:,}"
        cases.setdefault(case, {})[row["name"]] = row
    cells = [
        [
            *case,
            *(f"{1e6 * rows[name]['cpu'] / rows[name]['parameters']:,.0f}" if name in rows else "-" for name in names),
            ", ".join(f"{rows[name]['memory'] / 1e6:,.0f}" for name in names if name in rows),
        ]
        for case, rows in cases.items()
    ]
    return Table(["parameters x elements", "ranks", *names, "MB beyond the model at most, each"], cells)


def collectives(content: dict[str, Any]) -> Table:
    """Milliseconds of each way, and ratios to the native one; medians over the rounds."""
    cells = [
        [
            row["collective"],
            str(row["ranks"]),
            row["dtype"],
            f"{row['elements']:,}",
            *(f"{1e3 * seconds:.2f}" for seconds in row["seconds"].values()),
            *(f"{spread['median']:.2f}" for spread in row["ratios"].values()),
        ]
        for row in content["rows"]
    ]
    first = content["rows"][0]
    times, ratios = [f"{way}, ms" for way in first["seconds"]], [f"{way} / native" for way in first["ratios"]]
    return Table(["", "ranks", "dtype", "elements", *times, *ratios], cells)


def cuda(content: dict[str, Any]) -> Table:
    """One GPU's step, at simulated world sizes."""
    names = ("step ms", "copying ms", "to copying", "host ms", "collectives", "launches", "synchronisations")
    names = (*names, "sleep ms", "wake ms")
    memory = ("peak bytes", "bytes after", "bytes asleep")
    cells = [
        [
            row["name"],
            str(row["world size"]),
            *(f"{row[name]:.2f}" if name in row else "-" for name in names),
            *(f"{row[name]:,}" if name in row else "-" for name in memory),
        ]
        for row in content["rows"]
    ]
    return Table(["", "ranks", *names, *memory], cells)


def checkpoints(content: dict[str, Any]) -> Table:
    """Saving and loading beside FSDP2."""
    titles = [
        "",
        "seconds of computing",
        "to FSDP2",
        "seconds",
        "to FSDP2",
        "MB read",
        "MB of memory",
        "the same, FSDP2",
    ]
    return Table(titles, [_operation(name, of) for name, of in content["operations"].items()])


def _operation(name: str, of: dict[str, dict[str, float]]) -> list[str]:
    ours, other = of["ours"], of["fsdp2"]
    computed, took = (f"{ours[kind] / other[kind]:.2f}" for kind in ("cpu", "wall"))
    read = f"{ours['read'] / 1e6:.0f} of {other['read'] / 1e6:.0f}"
    memory = [f"{each['memory'] / 1e6:.0f}" for each in (ours, other)]
    return [name, f"{ours['cpu']:.2f}", computed, f"{ours['wall']:.2f}", took, read, *memory]


# By the first word of a result's name.
TABLES: dict[str, Callable[[dict[str, Any]], Table]] = {
    "step": steps,
    "peak": peaks,
    "overhead": overheads,
    "scale": scales,
    "construction": constructions,
    "collectives": collectives,
    "cuda": cuda,
    "hosts": hosts,
    "checkpoints": checkpoints,
}
