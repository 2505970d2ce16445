"""What was measured beside what is asked for: ``python -m benchmarks.bars [folder]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .gpt import SIZES, make_model
from .output import RESULTS
from .report import ratio

FP32, BF16, FOUR = "step-25m-fp32-1x-2r", "step-25m-bf16-1x-2r", "step-25m-fp32-1x-4r"
ACCUMULATED, LARGE = "step-25m-fp32-4x-2r", "step-85m-fp32-1x-4r"
LINK, SLOW_LINK = "hosts-1gbit", "hosts-100mbit"
TWO_BY_TWO = {link: f"{link}-2x2" for link in (LINK, SLOW_LINK)}
PEAKS = ("peak", "peak-bf16")
MOMENTS = ("held after backward", "held after step")


class Bar(NamedTuple):
    """A whole step's time beside another's; ``{}`` in a name stands for the stage.

    Attributes:
        part: whose result tells.
        ours: the contestant that is judged.
        other: whom it is compared with.
        most: the largest ratio allowed in stages 1 and 2; None: not asked for.
    """

    part: str
    ours: str
    other: str
    most: tuple[float | None, float | None]


BARS = (
    Bar(FP32, "ours-{}", "ddp", (0.92, 0.88)),
    Bar(BF16, "ours-{}", "ddp-masters", (0.85, 0.75)),
    Bar(FP32, "ours-{}", "zro", (0.85, 0.80)),
    Bar(FP32, "ours-{}", "fairscale", (0.87, 0.80)),
    Bar(FP32, "ours-{}", "fsdp2", (0.65, 0.60)),
    Bar(BF16, "ours-{}", "fsdp2", (None, 0.82)),
    Bar(FP32, "ours-{}", "deepspeed-{}", (0.55, 0.50)),
    Bar(BF16, "ours-{}", "deepspeed-{}", (None, 0.83)),
    Bar(FP32, "ours-{}", "colossalai-{}", (0.60, 0.50)),
    Bar(BF16, "ours-{}", "colossalai-{}", (None, 0.80)),
    Bar(FOUR, "ours-{}", "ddp", (1.00, 0.85)),
    Bar(LARGE, "ours-{}", "ddp", (1.00, 0.85)),
    Bar(ACCUMULATED, "ours-{}", "ddp", (0.97, 0.93)),
    Bar(ACCUMULATED, "ours-{}-each", "ddp", (None, 0.97)),
    Bar(FP32, "ours-{}-drop", "ours-{}", (0.75, 0.75)),
    Bar(FP32, "ours-{}-messages", "ddp", (1.30, 1.06)),
    Bar(LINK, "ours-{}", "ddp", (1.30, 0.90)),
    Bar(LINK, "ours-{}-overlap", "ddp", (None, 0.82)),
    Bar(LINK, "ours-{}-bf16", "ddp", (None, 0.55)),
    Bar(LINK, "ours-{}-fp8", "ddp", (None, 0.55)),
    Bar(LINK, "ours-{}-drop", "ddp", (None, 0.60)),
    Bar(TWO_BY_TWO[LINK], "ours-{}-hybrid", "ours-{}", (None, 1.00)),
    Bar(TWO_BY_TWO[SLOW_LINK], "ours-{}-hybrid", "ours-{}", (None, 1.00)),
)


class Verdict(NamedTuple):
    """One line of the report; ``measured`` is None where there is no result."""

    part: str
    what: str
    measured: float | None
    bar: float
    spread: str = ""

    @property
    def holds(self) -> bool:
        """Whether the bar is reached."""
        return self.measured is not None and self.measured <= self.bar


def verdicts(folder: Path) -> list[Verdict]:
    """Every bar, judged by the results in ``folder``."""
    found = [verdict for stage in (1, 2) for bar in BARS for verdict in _time(folder, bar, stage)]
    found += [verdict for stage in (1, 2) for verdict in _dropped_bytes(folder, stage)]
    found += [verdict for part in (FP32, BF16) for stage in (1, 2) for verdict in _held(folder, part, stage)]
    told = (_over_links, _peak, _construction, _overhead, _checkpoints)
    return [*found, *(verdict for about in told for verdict in about(folder))]


def report(folder: Path) -> str:
    """A line a bar, and how many hold."""
    judged = verdicts(folder)
    lines = [f"{'':64}{'measured':>9}{'bar':>7}         min-max"]
    for verdict in judged:
        told = "-" if verdict.measured is None else f"{verdict.measured:.2f}"
        end = ("holds " if verdict.holds else "MISSES") if verdict.measured is not None else "not measured"
        name = f"{verdict.part}: {verdict.what}"
        lines.append(f"{name:64}{told:>9}{verdict.bar:7.2f}  {end} {verdict.spread}".rstrip())
    known = [verdict for verdict in judged if verdict.measured is not None]
    lines.append(f"{sum(verdict.holds for verdict in known)} of {len(known)} measured bars hold; {len(judged)} in all")
    return "\n".join(lines)


def _read(folder: Path, part: str) -> dict[str, Any]:
    path = folder / f"{part}.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content


def _rows(folder: Path, part: str) -> dict[str, Any]:
    rows: dict[str, Any] = _read(folder, part).get("contestants", {})
    return rows


# ---- each kind of bar ----


def _time(folder: Path, bar: Bar, stage: int) -> Iterator[Verdict]:
    most = bar.most[stage - 1]
    if most is None:
        return
    rows, ours, other = _rows(folder, bar.part), bar.ours.format(stage), bar.other.format(stage)
    what = f"{ours} / {other}"
    if ours in rows and other in rows:
        spread = ratio(rows[ours], rows[other])
        yield Verdict(bar.part, what, spread.median, most, f"{spread.least:.2f}-{spread.most:.2f}")
    else:
        yield Verdict(bar.part, what, None, most)


def _dropped_bytes(folder: Path, stage: int) -> Iterator[Verdict]:
    """Bytes sent to those of a run without drops, as a share of what the used parameters' elements allow."""
    rows, what = _rows(folder, FP32), f"bytes of ours-{stage}-drop / of its used share"
    sent = [rows.get(name, {}).get("sent by its own account") for name in (f"ours-{stage}-drop", f"ours-{stage}")]
    dropped, whole = sent
    measured = dropped / whole / _used_share(_read(folder, FP32)["run"]["size"]) if dropped and whole else None
    yield Verdict(FP32, what, measured, 1.01)


def _used_share(size: str) -> float:
    """Of all elements, those that are left when half of the blocks are dropped."""
    model = make_model(SIZES[size])
    block = sum(p.numel() for p in model.blocks[0].parameters())
    elements = sum(p.numel() for p in model.parameters())
    return 1 - block * (len(model.blocks) - len(model.blocks) // 2) / elements


def _held(folder: Path, part: str, stage: int) -> Iterator[Verdict]:
    """Bytes held to what sharding must hold, with bucket buffers told apart."""
    content = _read(folder, part)
    row = content.get("contestants", {}).get(f"ours-{stage}")
    for moment in MOMENTS:
        measured = None
        if row:
            must = _must_hold(content["run"], stage, moment) * row["elements"]
            measured = sum(row[moment].values()) / (must + row[moment].get("bucket_buffers", 0))
        yield Verdict(part, f"ours-{stage}, {moment} / the least", measured, 1.02)


def _must_hold(run: dict[str, Any], stage: int, moment: str, offload: bool = False) -> float:
    """Bytes of an element: parameter, gradient or its slice, master if it isn't the parameter itself, states."""
    width = 4 if run["dtype"] == "fp32" else 2
    share = 1 / run["ranks"]
    gradient = width * (1 if stage == 1 else share) if moment == "held after backward" else 0
    return width + gradient + (8 if run["dtype"] == "fp32" and not offload else 12) * share


def _over_links(folder: Path) -> Iterator[Verdict]:
    """Bytes that cross with replicas to those without; and a step's time to the link's, where that is slow."""
    for part in TWO_BY_TWO.values():
        rows, what = _rows(folder, part), "bytes of ours-2-hybrid / of ours-2"
        sent = [rows.get(name, {}).get("sent by a host") for name in ("ours-2-hybrid", "ours-2")]
        yield Verdict(part, what, sent[0] / sent[1] if all(sent) else None, 0.505)  # headers
    for part, names in ((SLOW_LINK, ("ours-1", "ours-2")), (TWO_BY_TWO[SLOW_LINK], ("ours-2", "ours-2-hybrid"))):
        for name in names:
            row = _rows(folder, part).get(name)
            measured = row["seconds"]["whole"]["median"] / row["link seconds"] if row else None
            yield Verdict(part, f"{name}, time / the link's", measured, 1.1)


def _peak(folder: Path) -> Iterator[Verdict]:
    """The peak of a step to the least that a rank can take, in which two bucket buffers count."""
    for part in PEAKS:
        content = _read(folder, part)
        rows = content.get("contestants", {})
        for name in ("ours-1", "ours-2", "ours-1-offload", "ours-2-offload"):
            row = rows.get(name)
            measured = row["step"] / (least_peak(content, name) + 2 * row["buffer"]) if row else None
            yield Verdict(part, f"{name}, peak of a step / the least and two buckets", measured, 1.05)


def least_peak(content: dict[str, Any], name: str) -> float:
    """Bytes at the peak of a step, at least: in forward, or in backward with the gradients that the stage keeps."""
    run, floor = content["run"], content["contestants"]["floor"]
    stage, offload = int(name.split("-")[1]), name.endswith("offload")
    held = [_must_hold(run, stage, moment, offload) * run["elements"] for moment in MOMENTS]
    return max(held[0] + floor["step"] - floor["after_backward"], held[1] + floor["forward"])


def _construction(folder: Path) -> Iterator[Verdict]:
    """Microseconds of computing a parameter, of models that have more parameters than elements in each."""
    for row in _read(folder, "construction").get("rows", []):
        if row["name"] == "ours" and row["parameters"] > 1000:
            what = f"us a parameter, {row['parameters']:,} on {row['ranks']:,} ranks"
            yield Verdict("construction", what, 1e6 * row["cpu"] / row["parameters"], 50.0)


def _overhead(folder: Path) -> Iterator[Verdict]:
    rows = {row["world size"]: row for row in _read(folder, "overhead").get("rows", [])}
    for size, row in rows.items():
        yield Verdict("overhead", f"us per parameter and step, {size} ranks", row["overhead"], 5.0)
    first, last = rows.get(8), rows.get(4096)
    for name in ("the rest", "overhead"):
        measured = last[name] / first[name] if first and last else None
        what = "without packing" if name == "the rest" else "packing of padding included"
        yield Verdict("overhead", f"4,096 ranks / 8 ranks, {what}", measured, 1.1)


# By operation: what it takes to what FSDP2's takes, or to a plain copy.
CHECKPOINTS = {
    "save": {"cpu": 1.1, "wall": 1.0},
    "async save": {"cpu": 1.1, "wall": 1.0},
    "load": {"cpu": 1.1, "wall": 1.1, "read": 1.1},
    "load on other ranks": {"cpu": 1.1, "wall": 1.1, "read": 1.1},
}


def _checkpoints(folder: Path) -> Iterator[Verdict]:
    """What saving and loading take to what FSDP2's do; and memory, older checkpoints, exchanges and 8-bit states."""
    content, part = _read(folder, "checkpoints"), "checkpoints"
    operations = content.get("operations", {})
    for operation, asked in CHECKPOINTS.items():
        of = operations.get(operation)
        for kind, most in asked.items():
            measured = of["ours"][kind] / of["fsdp2"][kind] if of else None
            yield Verdict(part, f"{operation}, {kind} / fsdp2's", measured, most)
        if operation.startswith("load"):
            beside = of["ours"]["memory"] / content["run"]["bytes of a parameter"] if of else None
            yield Verdict(part, f"{operation}, memory / a parameter's", beside, 1.0)
    stall = operations.get("stall of an async save")
    measured = stall["ours"]["wall"] / stall["copy"]["wall"] if stall else None
    yield Verdict(part, "stall of an async save / one plain copy", measured, 1.1)
    few, many, exchanges = (content.get("beside", {}).get(name) for name in ("3", "1000", "exchanges"))
    yield Verdict(part, "a save beside 1,000 checkpoints / beside 3", many / few if few else None, 1.1)
    yield Verdict(part, "exchanges of a save", exchanges, 2.0)
    for library in ("bitsandbytes", "torchao"):
        measured = content.get("8 bits", {}).get(library)
        yield Verdict(part, f"bytes a parameter on disk, {library}", measured, 2.6)


if __name__ == "__main__":
    print(report(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS))
