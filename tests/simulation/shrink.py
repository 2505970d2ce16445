"""Shrinks a failing program: fewer ranks, calls, parameters and options, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.program import Call, Part, Program, Row, Weight

MOST_TRIES = 600


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = MOST_TRIES) -> Program:
    """The smallest program that greedy steps find; ``fails`` tells whether one fails as the first does."""
    went_on = True
    while went_on:
        went_on = False
        for smaller in _smaller(program):
            tries -= 1
            if tries < 0:
                return program
            if fails(smaller):
                program, went_on = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest things first."""
    yield from _fewer_rows(program)
    yield from _fewer_ranks(program)
    yield from _fewer_parts(program)
    yield from _plainer_calls(program)
    for number, part in enumerate(program.parts):
        for smaller, moved in _smaller_parts(part):
            rows = [tuple(_moved(call, number, moved) for call in row) for row in program.rows]
            parts = (*program.parts[:number], smaller, *program.parts[number + 1 :])
            if all(call is None or call.at >= 0 for row in rows for call in row):
                yield replace(program, parts=parts, rows=tuple(rows))
    if program.fault is not None:
        yield replace(program, fault=None)
        for at in (program.fault.at // 2, program.fault.at - 1):
            if 0 <= at < program.fault.at:
                yield replace(program, fault=replace(program.fault, at=at))


def _fewer_rows(program: Program) -> Iterator[Program]:
    size = len(program.rows) // 2
    while size:
        for at in range(0, len(program.rows), size):
            yield replace(program, rows=program.rows[:at] + program.rows[at + size :])
        size //= 2


def _fewer_ranks(program: Program) -> Iterator[Program]:
    if program.ranks == 2:
        return
    parts = tuple(_for_any_ranks(part) for part in program.parts)
    for gone in range(program.ranks):
        rows = tuple(row[:gone] + row[gone + 1 :] for row in program.rows)
        fault = program.fault
        if fault is not None and fault.rank >= program.ranks - 1:
            fault = replace(fault, rank=fault.rank - 1)
        yield replace(program, ranks=program.ranks - 1, parts=parts, rows=rows, fault=fault)


def _for_any_ranks(part: Part) -> Part:
    return replace(part, levels="none", weights=tuple(replace(weight, expert=False) for weight in part.weights))


def _fewer_parts(program: Program) -> Iterator[Program]:
    if len(program.parts) == 2:
        for kept in range(2):
            rows = [tuple(_of(call, kept) for call in row) for row in program.rows]
            rows = [row for row in rows if any(row)]
            yield replace(program, parts=(program.parts[kept],), rows=tuple(rows))


def _of(call: Call | None, kept: int) -> Call | None:
    return None if call is None or call.of != kept else replace(call, of=0)


def _plainer_calls(program: Program) -> Iterator[Program]:
    for at, row in enumerate(program.rows):
        first = next((call for call in row if call is not None), None)
        if first is not None and any(call != first for call in row):
            yield _with_row(program, at, (first,) * program.ranks)
        for plainer in _plainer_rows(row):
            if plainer != row:
                yield _with_row(program, at, plainer)


_LESS_PLAIN = ("pass", "nested", "through", "no_sync", "plain", "plain with graph", "by inputs")


def _plainer_rows(row: Row) -> Iterator[Row]:
    yield tuple(None if call is None else replace(call, drops=0) for call in row)
    yield tuple(None if call is None else replace(call, amount=0.5) for call in row)
    if any(call is not None and call.name in _LESS_PLAIN for call in row):
        yield tuple(None if call is None else replace(call, name="backward") for call in row)
    for rank, call in enumerate(row):
        for plainer in [] if call is None else [replace(call, drops=0), replace(call, name="backward", drops=0, at=0)]:
            if plainer.name != "backward" or (
                call is not None and call.name in ("pass", "nested", "through", "no_sync")
            ):
                yield (*row[:rank], plainer, *row[rank + 1 :])


def _with_row(program: Program, at: int, row: Row) -> Program:
    return replace(program, rows=(*program.rows[:at], row, *program.rows[at + 1 :]))


Moved = Callable[[int], int]  # a weight's new number; below 0: it is gone


def _same(at: int) -> int:
    return at


def _smaller_parts(part: Part) -> Iterator[tuple[Part, Moved]]:
    """A part with one thing less, and where its weights are then."""
    for gone in range(1, len(part.weights)):
        yield _without_weight(part, gone), lambda at, gone=gone: -1 if at == gone else at - (at > gone)  # type: ignore[misc]
    for at in range(len(part.layers)):
        if len(part.layers) > 1:
            yield replace(part, layers=part.layers[:at] + part.layers[at + 1 :]), _same
        for place in range(len(part.layers[at])):
            if len(part.layers[at]) > 1:
                members = part.layers[at][:place] + part.layers[at][place + 1 :]
                yield replace(part, layers=(*part.layers[:at], members, *part.layers[at + 1 :])), _same
    for name, _ in part.options:
        yield replace(part, options=tuple(option for option in part.options if option[0] != name)), _same
    for plainer in (replace(part, optimizer="sgd"), replace(part, groups=1), replace(part, levels="none")):
        if plainer != part:
            yield plainer, _same
    for at, weight in enumerate(part.weights):
        for simple in _plainer_weights(weight):
            if simple != weight:
                yield replace(part, weights=(*part.weights[:at], simple, *part.weights[at + 1 :])), _same


def _plainer_weights(weight: Weight) -> Iterator[Weight]:
    yield Weight()
    yield replace(weight, dtype="float32")
    yield replace(weight, shape=(3,), transposed=False)
    yield replace(weight, role="trained")
    yield replace(weight, expert=False)
    yield replace(weight, group=0)
    yield replace(weight, transposed=False)


def _without_weight(part: Part, gone: int) -> Part:
    layers = [tuple(at - (at > gone) for at in members if at != gone) for members in part.layers]
    return replace(
        part,
        weights=part.weights[:gone] + part.weights[gone + 1 :],
        layers=tuple(members for members in layers if members) or ((0,),),
    )


def _moved(call: Call | None, number: int, moved: Moved) -> Call | None:
    return call if call is None or call.of != number else replace(call, at=moved(call.at))
