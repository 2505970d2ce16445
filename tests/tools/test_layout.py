"""The layout: that it is what ranks hold and buckets carry, of an optimizer and of a checkpoint, in all its forms."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.__main__ import main
from lowlevel_zero.checkpoint import load_checkpoint, save_checkpoint
from lowlevel_zero.checkpoint.saved import SavedCheckpoint
from lowlevel_zero.layout import Held, Layout, layout_of, memory_held
from lowlevel_zero.layout.text import in_bytes, ranks_text, shares_text
from lowlevel_zero.partition import Owned
from lowlevel_zero.planning.saved_layout import layout_in
from tests.support.oracle import Odd, Run, groups, train_rank
from tests.support.ranks import run_cases, run_ranks

RUN = Run(steps=2).with_options(reduce_bucket_size=50)


def of_run(rank: int, world_size: int, run: Run) -> tuple[Layout, Held, dict[str, tuple[int, int]]]:
    """The layout after some steps, what is held then, and where each slice's gradient lies in its bucket's row."""
    model, optimizer, _ = train_rank(rank, world_size, run)
    held = memory_held(optimizer)
    layout = layout_of(optimizer)
    optimizer.backward(model(torch.randn(3, 4).to(run.dtype), set()).sum())
    optimizer.get_working_grads_by_group_id(0)  # finishes what is in flight
    parts = {}
    for record in optimizer.sharded_parameters:
        bucket = optimizer.gradients.group_of(record).gradients.bucket_of(record)
        if bucket is not None:
            part = bucket.part_of(record, bucket.row)
            parts[record.name] = (part.storage_offset() - bucket.row.storage_offset(), part.numel())
    return layout, held, parts


@pytest.mark.parametrize(("world_size", "stage", "dtype"), [(2, 1, torch.float32), (3, 2, torch.bfloat16)])
def test_it_is_what_ranks_hold_and_buckets_carry(world_size: int, stage: int, dtype: torch.dtype) -> None:
    run = replace(RUN, world_size=world_size, dtype=dtype).with_options(partition_grad=stage == 2)
    expected = {name: p for name, p in Odd().named_parameters() if p.requires_grad}
    frozen = sum(p.numel() for p in Odd().parameters() if not p.requires_grad) * dtype.itemsize
    ranks = run_ranks(of_run, world_size, run)
    for rank, (layout, held, parts) in enumerate(ranks):
        assert (layout.world_size, layout.rank, layout.stage) == (world_size, rank, stage)
        assert {p.name for p in layout.parameters} == expected.keys()
        assert layout.bytes.parameters + frozen == held.parameters
        assert (layout.bytes.masters, layout.bytes.states) == (held.masters, held.states)
        for p in layout.parameters:
            assert (p.shape, p.split.numel) == (expected[p.name].shape, expected[p.name].numel())
            assert p.dtype == dtype
            assert p.process_group == tuple(range(world_size))
            spans = map(p.split.span, range(world_size))
            owned = [list(range(p.split.numel)[start:stop]) for start, stop in spans]
            assert list(chain.from_iterable(owned)) == list(range(p.split.numel))
            assert sum(map(bool, owned)) == p.owners
            assert p.split.slice_size * world_size == p.split.numel + p.split.padding
            if p.name in parts:
                assert (p.offset, p.split.slice_size) == parts[p.name]
        check_buckets(layout)
    assert all(replace(layout, rank=0) == ranks[0][0] for layout, *_ in ranks)


def test_where_slices_lie_in_padded_rows_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(RUN, world_size=3, model=partial(Odd, 42))
    monkeypatch.setattr("lowlevel_zero.options.FP8_MIN_NUMEL", 50)
    run = run.with_options(reduce_bucket_size=10_000, fp8_communication=True)
    layout, held, parts = run_ranks(of_run, 3, run)[1]
    assert any(len(bucket.members) > 1 and bucket.planned.row > bucket.planned.body for bucket in layout.buckets)
    assert {p.name: (p.offset, p.split.slice_size) for p in layout.parameters if p.name in parts} == parts
    assert (layout.bytes.masters, layout.bytes.states) == (held.masters, held.states)
    check_buckets(layout)


def check_buckets(layout: Layout) -> None:
    by_name = {p.name: p for p in layout.parameters}
    travelling = sorted(name for bucket in layout.buckets for name in bucket.members)
    assert travelling == sorted(p.name for p in layout.parameters if p.split.numel)
    for at, bucket in enumerate(layout.buckets):
        assert bucket.number == at
        end = 0
        for name in bucket.members:
            assert by_name[name].bucket == at
            assert by_name[name].offset == end
            end += by_name[name].split.slice_size
        assert end == bucket.planned.body <= bucket.planned.row
        assert bucket.buffer_bytes == bucket.rows * bucket.planned.row * bucket.dtype.itemsize
    if "empty" in by_name:
        assert by_name["empty"].bucket is by_name["empty"].offset is None


def test_before_a_step_and_in_a_group_of_some_ranks() -> None:
    def work(rank: int, world_size: int) -> Layout | None:
        group = torch.distributed.new_group([1, 2])
        if rank == 0:
            return None
        model = Odd()
        optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(groups(model)), dp_process_group=group)
        return layout_of(optimizer)

    _, first, second = run_ranks(work, 3)
    assert first.parameters[0].process_group == (1, 2)
    assert (first.rank, second.rank, first.bytes.states) == (1, 2, 0)
    assert {p.group for p in first.parameters} == {0, 1}


def test_a_group_of_some_ranks_that_own_parameters_whole() -> None:
    """Owners are counted by their places in the group, and told by their global ranks."""

    def work(rank: int, world_size: int) -> tuple[Layout, Held] | None:
        group = torch.distributed.new_group([1, 2])
        if rank == 0:
            return None
        model = nn.Sequential(*(nn.Linear(4, 5 + at, bias=False) for at in range(3))).bfloat16()
        options = {"dp_process_group": group, "stage": 2, "split": "parameters"}
        optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model, **options)
        return layout_of(optimizer), memory_held(optimizer)

    _, *ranks = run_ranks(work, 3)
    for rank, (layout, held) in enumerate(ranks, start=1):
        assert layout.bytes.masters == held.masters
        assert layout.totals == {each: replace(layout, rank=each).bytes.total for each in (1, 2)}
        assert layout.totals[rank] == layout.bytes.total
        elements = dict.fromkeys((1, 2), 0)
        for p in layout.parameters:
            elements[p.process_group[p.split.owner]] += p.split.numel
        assert {each: share.elements for each, share in layout.owned.items()} == elements
    assert ranks[0][1].masters != ranks[1][1].masters


def test_experts_that_fewer_ranks_share() -> None:
    def work(rank: int, world_size: int) -> Layout:
        crossing = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        model = nn.ModuleDict({"dense": nn.Linear(5, 7), "expert": nn.Linear(7, 3)})
        members = {
            torch.distributed.group.WORLD: list(model["dense"].parameters()),
            crossing[rank % 2]: list(model["expert"].parameters()),
        }
        optimizer = torch.optim.AdamW(model.parameters())
        return layout_of(LowLevelZeroOptimizer(optimizer, members, model=model))

    layout = run_ranks(work, 4)[3]
    groups_of = {p.name: (p.process_group, p.split.slice_size) for p in layout.parameters}
    assert groups_of["dense.weight"] == ((0, 1, 2, 3), 9)
    assert groups_of["expert.weight"] == ((1, 3), 11)
    (expert,) = (p for p in layout.parameters if p.name == "expert.weight")
    assert layout.buckets[expert.bucket].process_group == (1, 3)
    assert [bucket.number for bucket in layout.buckets] == list(range(len(layout.buckets)))
    assert (layout.world_size, layout.rank) == (4, 3)
    lines = [line.split() for line in layout.table().splitlines()]
    assert any(line[:2] == [str(expert.bucket), "1,3"] for line in lines)
    assert next(line for line in lines if "expert.weight" in line)[8] == "11:21"


@pytest.mark.usefixtures("unaligned")
def test_the_table_and_json() -> None:
    def work(rank: int, world_size: int) -> Layout:
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1, bias=False)).bfloat16()
        decayed, rest = [model[0].weight, model[1].weight], [model[0].bias]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}])
        return layout_of(LowLevelZeroOptimizer(optimizer, model=model, partition_grad=True, reduce_bucket_size=16))

    layout = run_ranks(work, 3)[1]
    told = layout.table().splitlines()
    assert told[0] == "28 elements in 3 parameters over 3 ranks, stage 2, 2 buckets, padding 17.86%"
    cells = [" ".join(line.split()) for line in told]
    assert cells[3:7] == [
        "0.weight 4x5 bfloat16 0 20 1 7 3 7:14 1 0 42 B 14 B 28 B 0 B",
        "1.weight 1x4 bfloat16 0 4 2 2 2 2:4 0 2 12 B 4 B 8 B 0 B",
        "0.bias 4 bfloat16 1 4 2 2 2 2:4 0 0 12 B 4 B 8 B 0 B",
        "together 66 B 22 B 44 B 0 B",
    ]
    assert cells[9:] == ["0 0-2 bfloat16 2 parameters 4 4 24 B", "1 0-2 bfloat16 1 parameter 7 7 42 B"]
    assert len({len(line) for line in told[2:7]}) == 1
    found = json.loads(layout.json())
    assert found == json.loads(json.dumps(layout.as_dict()))
    first = found["parameters"][0]
    assert (first["name"], first["spans"]) == ("0.weight", [[0, 7], [7, 14], [14, 20]])
    assert Held(**first["bytes"]) == layout.parameters[0].bytes_on(1)
    assert found["buckets"][0]["members"] == ["0.bias", "1.weight"]


# A checkpoint's


def comparable(layout: Layout) -> dict[str, Any]:
    """What doesn't depend on who tells it; buckets, which are a run's, left out."""
    parameters = tuple(replace(p, bucket=None, offset=None) for p in layout.parameters)
    return replace(layout, rank=0, parameters=parameters, buckets=()).as_dict()


def saved(rank: int, world_size: int, run: Run, path: Path) -> dict[str, Any]:
    trained = train_rank(rank, world_size, run)
    save_checkpoint(path, trained.model, trained.optimizer)
    return comparable(layout_of(trained.optimizer))


def loaded(rank: int, world_size: int, run: Run, path: Path) -> dict[str, Any]:
    trained = train_rank(rank, world_size, replace(run, steps=0))
    load_checkpoint(path, trained.model, trained.optimizer)
    return comparable(layout_of(trained.optimizer))


SAVED = {
    "fp32, stage 2": RUN.with_options(partition_grad=True),
    "bf16, a dropped layer": replace(RUN, dtype=torch.bfloat16, drop=lambda step, rank: {1}),
    "fp8 on the wire": RUN.with_options(fp8_communication=True),
}


def test_a_checkpoint_s_is_that_of_the_runs_that_saved_and_load_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr("lowlevel_zero.options.FP8_MIN_NUMEL", 20)
    cases = [(run, tmp_path / name) for name, run in SAVED.items()]
    for world_size, by in ((2, saved), (3, loaded)):
        for (_, path), ran in run_cases(by, world_size, cases):
            with subtests.test(path.name, world_size=world_size):
                assert comparable(layout_in(SavedCheckpoint(path), world_size=world_size)) == ran.values()[0]


def saved_whole(rank: int, world_size: int, path: Path) -> Layout:
    model = nn.Sequential(*(nn.Linear(4, 5 + at, bias=False) for at in range(4)))
    optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model, stage=2, split="parameters")
    optimizer.backward(sum(layer(torch.ones(1, 4)).sum() for layer in model))
    optimizer.step()
    save_checkpoint(path, model, optimizer)
    return layout_of(optimizer)


def test_parameters_that_one_rank_owns_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step-1"
    ranks = run_ranks(saved_whole, 3, path)
    layout = layout_in(SavedCheckpoint(path))
    owners = [p.split.owner for p in layout.parameters]
    assert set(owners) == {0, 1, 2}
    for rank, own in enumerate(ranks):
        assert [p.split.owner for p in own.parameters] == owners
        assert [p.bytes_on(rank) for p in own.parameters] == [p.bytes_on(rank) for p in layout.parameters]
        assert own.bytes == replace(layout, rank=rank).bytes
        check_buckets(own)
        spans = [line.split()[8] for line in own.table().splitlines()[3:7]]
        assert [span == "nothing" for span in spans] == [owner != rank for owner in owners]
    assert main(["inspect", str(path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert all(f"rank {owner}" in lines[p.name] for p, owner in zip(layout.parameters, owners, strict=True))
    totals = [replace(layout, rank=rank).bytes.total for rank in range(3)]
    expected = (
        f"{in_bytes(max(totals))} at most, {in_bytes(min(totals))} at least, {in_bytes(sum(totals) // 3)} on average"
    )
    assert expected in lines["a"]
    other = layout_in(SavedCheckpoint(path), world_size=2)
    assert {p.split.owner for p in other.parameters} == {0, 1}


def test_inspect_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step-2"
    run_ranks(saved, 2, RUN, path)
    layout = layout_in(SavedCheckpoint(path))
    assert main(["inspect", str(path)]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    for p in (each for each in layout.parameters if each.split.numel):
        padding, size, owners = lines[p.name][-7 if p.owners > 1 else -6 :][:3]  # a span of several has dots behind it
        assert (padding, size, owners) == (str(p.split.padding), str(p.split.slice_size), str(p.owners))
    trained = sum(p.split.numel for p in layout.parameters)
    assert lines["layout"][1:7] == [str(trained), "elements", "in", str(len(layout.parameters)), "parameters", "over"]

    assert main(["inspect", str(path), "--world-size", "64", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["world_size"] == 2
    assert told["layout"] == json.loads(layout_in(SavedCheckpoint(path), 64).json())
    assert told["layout"]["world_size"] == 64


class CountsElements(torch.optim.SGD):
    """Counts steps for each element, so that a state of a step's name is no count of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad / self.state[p].setdefault("step", torch.zeros_like(p)).add_(1), alpha=0.1)


def test_inspect_takes_several_numbers_for_no_step_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def save(rank: int, world_size: int) -> None:
        model = nn.Linear(4, 2)
        optimizer = LowLevelZeroOptimizer(CountsElements(model.parameters()), model=model)
        optimizer.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        save_checkpoint(tmp_path / "step-1", model, optimizer)

    run_ranks(save, 2)
    assert main(["inspect", str(tmp_path / "step-1")]) == 0
    assert "steps    not counted: no parameter has a step counter" in capsys.readouterr().out


def test_inspect_s_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mistake in ("--world-size=0", "--world-size=two", "--world-size="):
        assert main(["inspect", str(tmp_path), mistake]) == 2
        told = capsys.readouterr().err
        assert told.startswith("lowlevel_zero inspect: error: --world-size: expected a whole number"), mistake
        assert told.count("\n") == 1


def test_amounts_and_ranks_for_people() -> None:
    """In three digits or four, and no more ranks than a line takes."""
    amounts = {0: "0 B", 1023: "1,023 B", 2**10: "1.00 KiB", 10 * 2**20 - 1: "10.0 MiB", 2**70: "1,048,576.0 PiB"}
    assert {count: in_bytes(count) for count in amounts} == amounts
    ranks = {(4,): "4", (4, 5): "4-5", (0, 1, 2): "0-2", (0, 2): "0,2", (1, 0): "1,0"}
    assert {each: ranks_text(each) for each in ranks} == ranks
    listed = {
        16: " 1 elements, the fullest 1.00",
        17: " 1 and 1 rank more elements",
        18: " 1 and 2 ranks more elements",
    }
    for count, expected in listed.items():
        text = shares_text([Owned(1, 1)] * count)
        assert expected in text
        assert text.count("1, ") == 15
