"""Rounds in one process, each of which joins a process group, trains and leaves it: nothing of a round is left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.grid import Grid
from tests.support.on_ranks import on_ranks
from tests.support.ranks import run_ranks
from tests.support.saving import linear

SWITCH = "LOWLEVEL_ZERO_SHARED_MEMORY"
REPOSITORY = Path(__file__).parents[2]


class Round:
    """A model and its optimizer in a process group of their own."""

    def __init__(self, carrier: str, rank: int, world_size: int, rendezvous: Path, width: int = 40) -> None:
        os.environ[SWITCH] = str(int("messages" not in carrier))
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world_size)
        torch.manual_seed(0)
        self.rank = rank
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.optimizer: LowLevelZeroOptimizer | None = self.wrap(carrier)
        self.step()

    def wrap(self, carrier: str, **options: Any) -> LowLevelZeroOptimizer:
        """Shard over all ranks, over rows, or with half of the model as experts of pairs."""
        if "levels" in carrier:
            options |= Grid.of(self.rank, (2, 2)).options("hybrid")
        if "experts" in carrier:
            pair = dist.new_group([self.rank % 2, self.rank % 2 + 2], use_local_synchronization=True)
            options["pg_to_param_list"] = {pair: list(self.model[2:].parameters())}
        sgd = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        return LowLevelZeroOptimizer(sgd, model=self.model, reduce_bucket_size=1000, **options)

    def loss(self) -> Tensor:
        return self.model(torch.ones(2, self.model[0].in_features)).square().mean()

    def backward(self) -> None:
        assert self.optimizer is not None
        self.optimizer.backward(self.loss())

    def step(self) -> None:
        self.backward()
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward_without_sync(self) -> None:
        assert self.optimizer is not None
        with self.optimizer.no_sync():
            self.backward()

    def fail_in_backward(self) -> None:
        """On every rank, in the midst of it: the last layers' reductions are under way."""

        def fail(_: Tensor) -> None:
            raise ZeroDivisionError

        self.model[1].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            self.backward()

    def drop(self) -> None:
        self.optimizer = None

    def destroy(self) -> None:
        dist.destroy_process_group()

    def keep(self) -> None:
        """Whoever keeps the optimizer keeps nothing of the group."""
        KEPT.append(self.optimizer)


KEPT: list[Any] = []
# How a round may end: its calls, one after another.
ENDS = [
    (Round.drop, Round.destroy),
    (Round.destroy, Round.drop),
    (Round.backward, Round.drop, Round.destroy),
    (Round.backward, Round.destroy, Round.drop),
    (Round.backward, Round.backward_without_sync, Round.drop, Round.destroy),
    (Round.fail_in_backward, Round.drop, Round.destroy),
    (Round.destroy, Round.keep),
]
CARRIERS = {"shared memory": 2, "messages": 3, "levels by messages": 4, "experts": 4}


def held() -> tuple[Counter[str], int]:
    """Descriptors of this process by kind, and its threads, those of gloo included."""
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            kinds.append(os.readlink(f"/proc/self/fd/{name}").partition(":")[0])
        except FileNotFoundError:  # what listed them
            continue
    return Counter(kinds), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_nothing_is_left_of_a_round_however_it_ends(carrier: str, tmp_path: Path) -> None:
    """Nobody looks for garbage meanwhile."""

    def live(rank: int, world_size: int) -> list[tuple[Counter[str], int]]:
        gc.collect()
        gc.disable()
        found = [held()]
        for number, end in enumerate(ENDS):
            one = Round(carrier, rank, world_size, tmp_path / str(number))
            for call in end:
                call(one)
            del one
            until = time.monotonic() + 5  # threads take a moment to end
            while (now := held()) != found[0] and time.monotonic() < until:
                time.sleep(0.02)
            found.append(now)
        return found

    for first, *others in run_ranks(live, CARRIERS[carrier], init=False, timeout=120):
        assert dict(zip(ENDS, others, strict=True)) == dict.fromkeys(ENDS, first)


@on_ranks(2)
def test_a_group_of_some_ranks_takes_what_was_made_for_it_along(rank: int) -> None:
    """Made and destroyed over and over, over the same ranks, while the default group stays."""
    found: list[tuple[Counter[str], int]] = []
    for _ in range(4):
        group = dist.new_group([0, 1])
        _, optimizer = linear(dp_process_group=group, steps=1)
        dist.destroy_process_group(group)
        del group
        until = time.monotonic() + 5  # threads take a moment to end
        while (now := held()) != (found or [None])[0] and time.monotonic() < until - (0 if found else 4.5):
            time.sleep(0.02)
        found.append(now)
        with pytest.raises(RuntimeError, match="process group over which .* was constructed, found it destroyed"):
            optimizer.step()
    assert found == found[:1] * 4


ROUNDS = """
import os, sys, time
from pathlib import Path
from lowlevel_zero.communication.process_groups import context_of, default_group, start_alone
from lowlevel_zero.communication.work import OnThread, Work
from tests.communication.test_rounds import Round
child = os.fork()
for number, carrier in enumerate(("shared memory", "messages", "shared memory", "messages")):
    one = Round(carrier, int(child == 0), 2, Path(sys.argv[1], str(number)))
    one.destroy()
    one.drop()
start_alone()
chain = OnThread(context_of(default_group()).threads)
chain.after(Work(lambda: time.sleep(0.3)), lambda _: Work(print("started", flush=True)), lambda: None)
if child and os.waitpid(child, 0)[1]:
    raise SystemExit("the other rank failed")
"""


def test_two_processes_end_normally_after_four_rounds_and_when_their_threads_have_finished(tmp_path: Path) -> None:
    """No thread is left that would come back from a wait when the interpreter has gone."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ROUNDS, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "started\n" * 2
