"""The simulated step: by arithmetic where buckets are few, and beside what two hosts over a link have measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpt import GPT, SIZES
from lowlevel_zero.__main__ import main
from lowlevel_zero.communication.backends.backend import Backend
from lowlevel_zero.options import Communication, ZeroOptions
from lowlevel_zero.planning.planned import PlannedRun
from lowlevel_zero.planning.quantities import rate
from lowlevel_zero.planning.state_sizes import StateSizes, made_optimizer
from lowlevel_zero.planning.step_time import BucketRow, Computing, Link, StepTime, bucket_rows, step_time

FP32, BF16 = torch.float32, torch.bfloat16
KEPT = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "hosts-1gbit.json").read_text())


def rows(count: int) -> list[BucketRow]:
    return [BucketRow(numel=100, reduced=100, gathered=200)] * count


def seconds(time: StepTime) -> tuple[float, ...]:
    return time.wire, time.hidden, time.exposed, time.waiting, time.step


def test_without_latency_or_computing_it_is_bytes_by_rate() -> None:
    link = Link(rate=1000.0)
    for stage, sent in ((0, 2 * 100), (1, 2 * 100 + 200), (2, 100 + 200)):
        time = step_time(rows(5), 8, stage, Computing(), link)
        assert (time.world_size, time.stage, time.buckets, time.sent) == (8, stage, 5, 5 * 7 * sent)
        taken = 5 * 7 * sent / 1000
        assert seconds(time) == pytest.approx((taken, 0, taken, 0, taken))
    assert seconds(step_time(rows(5), 1, 2, Computing(1, 2, 3), link)) == pytest.approx((0, 0, 0, 0, 6))


def test_latency_is_once_a_collective_or_once_a_neighbour() -> None:
    computing = Computing(forward=1, backward=10, step=2)
    for ring, hops in ((False, 1), (True, 7)):
        reduced, gathered = 7 * 100 / 1000 + hops / 4, 7 * 200 / 1000 + hops / 4
        time = step_time(rows(1), 8, 2, computing, Link(1000.0, 0.25, ring))
        assert time.step == pytest.approx(13 + reduced + gathered), "there is nothing for one bucket to hide behind"
        assert (time.hidden, time.exposed) == pytest.approx((0, reduced + gathered))
        assert step_time(rows(1), 8, 1, computing, Link(1000.0, 0.25, ring)).exposed == pytest.approx(
            2 * reduced + gathered
        )


def test_all_but_the_last_bucket_hides_where_computing_takes_longer() -> None:
    time = step_time(rows(10), 2, 2, Computing(1, 10, 20), Link(1000.0))
    # A reduction takes 0.1 s and a backward of a bucket 1 s; a gather 0.2 s and a step of a bucket 2 s.
    assert seconds(time) == pytest.approx((3.0, 9 * 0.3, 0.3, 0, 31.3))


def test_where_the_link_takes_longer_only_the_first_bucket_s_computing_is_beside_it() -> None:
    time = step_time(rows(10), 2, 2, Computing(1, 1, 1), Link(100.0))
    # A reduction takes 1 s and begins after 0.1 s of backward; a gather takes 2 s.
    assert time.step == pytest.approx(1 + 0.1 + 10 + 0.1 + 20)
    assert (time.wire, time.hidden) == pytest.approx((30, 3 - 1 - 0.1 - 0.1))


def test_a_backward_waits_where_too_many_buckets_are_under_way() -> None:
    """A first bucket that takes long keeps the link busy; stage 1 computes on, stage 2 has its buffers' number."""
    few = [BucketRow(0, 100, 0), *[BucketRow(100, 0, 0)] * 9]
    computing, link = Computing(backward=9), Link(10.0)
    assert step_time(few, 2, 1, computing, link).step == pytest.approx(20)
    assert step_time(few, 2, 2, computing, link).step == pytest.approx(10 + 9 - Backend.in_flight)


def test_all_wait_for_the_slowest() -> None:
    computing, link = Computing(backward=1, straggling=0.1), Link(1e9)
    assert step_time(rows(1), 1, 2, computing, link).step == pytest.approx(1.1), "alone it is slower by the mean"
    three = step_time(rows(1), 3, 2, computing, link)
    assert three.waiting == pytest.approx(0.1 * (1 + 1 / 2 + 1 / 3) - 0.1)
    assert three.step == pytest.approx(1.1 + three.waiting, abs=1e-5)
    draws = 1 + 0.1 * torch.empty(20_000, 64).exponential_(generator=torch.Generator().manual_seed(0))
    slowest, average = draws.amax(1).mean().item(), draws.mean().item()
    assert step_time(rows(1), 64, 2, computing, link).waiting == pytest.approx(slowest - average, rel=0.01)


# Beside measured steps


def simulated(stage: int, **options: Any) -> StepTime:
    """The step that was measured: two hosts of a rank each, which compute as they do without communication."""
    run, floor = KEPT["run"], KEPT["contestants"]["floor"]["seconds"]
    with torch.device("meta"):
        model = GPT(SIZES[run["size"]])
    both, step = floor["forward_backward"]["median"], floor["step"]["median"]
    computing = Computing(both / 3, both * 2 / 3, step)  # a backward is two products where a forward is one
    sgd = StateSizes(*made_optimizer("sgd"))
    run_of = PlannedRun(model, ZeroOptions(communication=Communication(**options)), sgd, "cpu")
    ranks = run["hosts"] * run["ranks a host"]
    return step_time(bucket_rows(run_of.layout(ranks)), ranks, stage, computing, Link(rate(run["rate"])))


OF_STAGE = {"ours-1": 1, "ours-2": 2, "ours-2-bf16": 2, "ours-2-fp8": 2}
OPTIONS: dict[str, dict[str, Any]] = {"ours-2-bf16": {"dtype": BF16}, "ours-2-fp8": {"fp8": True}}


@pytest.mark.parametrize("name", OF_STAGE)
def test_it_is_what_two_hosts_measured_and_sent(name: str) -> None:
    """Headers of packages are at most 1% of what was counted at the interface."""
    row, found = KEPT["contestants"][name], simulated(OF_STAGE[name], **OPTIONS.get(name, {}))
    assert found.sent == row["told by a host"]
    assert found.sent == pytest.approx(row["sent by a host"], rel=0.01)
    if name not in OPTIONS:  # which take time to convert
        assert found.step == pytest.approx(row["seconds"]["whole"]["median"], rel=0.15)


# The command


def test_the_step_for_people_and_machines(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --params 10M --device cpu --world-size 8 1024 --link 100Gbit --latency 20us --backward 120ms"
    command += " --straggling 5%"
    assert main(command.split()) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "10,000,000 parameters, bf16: ms a step, of which a rank computes 180.00"
    assert told[2].split() == ["ranks", *StepTime._fields[1:]]
    assert [line.split()[:3] for line in told[3:10] if line] == [
        [ranks, stage, "10"] for ranks in ("8", "1,024") for stage in "012"
    ]
    assert main([*command.split(), "--stage", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rate"], found["computing"]["backward"]) == (12.5e9, 0.12)
    for shown, step in zip((told[5], told[9]), found["steps"], strict=True):
        assert shown.split()[-1] == f"{1e3 * step['step']:,.2f}"
        assert step["hidden"] + step["exposed"] == pytest.approx(step["wire"])
    planned = PlannedRun(10**7, ZeroOptions(forced_dtype=BF16), StateSizes(*made_optimizer("sgd")), "cpu")
    rows = bucket_rows(planned.layout(1024))
    computing = Computing(0.06, 0.12, straggling=0.05)
    assert StepTime(**found["steps"][1]) == pytest.approx(step_time(rows, 1024, 2, computing, Link(12.5e9, 20e-6)))


def test_a_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --model tests.tools.test_step_time:tiny --world-size 4 --stage 2 --json"
    assert main([*command.split(), "--link", "1Gbit", "--flops", "1T", "--tokens", "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    numel = sum(p.numel() for p in tiny().parameters())
    assert (found["params"], found["computing"]["backward"]) == (numel, 4 * numel * 1000 / 1e12)
    assert main([*command.split(), "--no-cpu-offload"]) == 0
    (estimated,) = json.loads(capsys.readouterr().out)["estimates"]
    assert estimated["parameters"] >= 2 * numel


def tiny() -> GPT:
    return GPT(SIZES["tiny"])


made = nn.Linear(3, 5)


def test_a_model_may_be_named_that_has_been_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tests.tools.test_step_time:made", "--world-size", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params"] == 20


MISTAKES = {
    "--link 100": "--link: expected a rate of at least 1bit, as in 1Gbit, got '100'",
    "--link 1Gbit --latency 20": "--latency: expected seconds, as in 20us or 120ms, got '20'",
    "--link 1Gbit --flops many": "--flops: expected operations a second, as in 100T",
    "--link 1Gbit --straggling 5ms": "--straggling: expected a share, as in 5%, got '5ms'",
    "--model nowhere": "--model: expected MODULE:NAME, as in torch.nn:Transformer, got 'nowhere'",
    "--model torch:get_rng_state": "--model: expected torch:get_rng_state to return a torch.nn.Module, got Tensor",
    "--model torch.nn:Linear": "--model: expected a function that is called without arguments, got torch.nn:Linear (",
    "--params 7e9 --model torch.nn:Tanh": "--model: not allowed with argument --params",
}


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in MISTAKES.items():
        assert main(["plan", "--world-size", "8", *arguments.split()]) == 2
        told = capsys.readouterr()
        assert (told.out, told.err.count("\n")) == ("", 1)
        assert told.err.startswith("lowlevel_zero plan: error: ")
        assert message in told.err
