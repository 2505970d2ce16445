"""The roll call: who came and who didn't is told to all that came, and a later call works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lowlevel_zero.communication import monitored_barrier as barriers
from lowlevel_zero.communication.monitored_barrier import monitored_barrier
from lowlevel_zero.communication.process_groups import GroupContext
from tests.support.ranks import run_ranks


def everyone() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def refusal(room: str, timeout: float) -> str:
    with pytest.raises(TimeoutError) as caught:
        monitored_barrier(everyone(), room, timeout)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_come_again_and_again(world_size: int) -> None:
    def come(rank: int, world_size: int) -> float:
        start = time.monotonic()
        for turn in range(5):
            time.sleep(0.01 * ((rank + turn) % 3))
            monitored_barrier(everyone(), "save", 10.0)
        return time.monotonic() - start

    assert max(run_ranks(come, world_size)) < 5.0


def test_one_rank_alone_is_told_who_came_and_a_later_call_works() -> None:
    def come(rank: int, world_size: int) -> str:
        message = refusal("save", 0.3) if rank == 1 else ""
        dist.barrier()
        monitored_barrier(everyone(), "save", 5.0)
        return message

    told = run_ranks(come, 3)
    assert told[1] == (
        "save: expected all 3 ranks, got rank 1 and, within 0.3 seconds, not ranks 0, 2: call it on every rank"
    )


def test_all_that_came_are_told_with_the_first() -> None:
    """Rank 1's patience would last much longer: it must not wait for a rank that has left."""

    def come(rank: int, world_size: int) -> tuple[str, float]:
        start = time.monotonic()
        message = refusal("save", (0.3, 30.0)[rank]) if rank < 2 else ""
        took = time.monotonic() - start
        dist.barrier()
        monitored_barrier(everyone(), "save", 5.0)
        return message, took

    (first, _), (second, took), _ = run_ranks(come, 3)
    assert "got ranks 0, 1 and" in first
    assert "not rank 2:" in first
    assert "got ranks 0, 1 and" in second
    assert took < 5.0


def test_who_comes_late_starts_anew() -> None:
    """Rank 0 has left; rank 1, later and alone, must neither meet its shadow nor fail at once."""

    def come(rank: int, world_size: int) -> tuple[str, float]:
        if rank == 1:
            dist.barrier()
        start = time.monotonic()
        message = refusal("save", 0.3)
        took = time.monotonic() - start
        if rank == 0:
            dist.barrier()
        dist.barrier()
        monitored_barrier(everyone(), "save", 5.0)
        monitored_barrier(everyone(), "save", 5.0)
        return message, took

    (first, _), (second, took) = run_ranks(come, 2)
    assert "got rank 0 and" in first
    assert "got rank 1 and" in second
    assert took >= 0.3


def test_rooms_are_apart() -> None:
    def come(rank: int, world_size: int) -> str:
        return refusal(("save", "load")[rank], 0.3)

    assert [message.split(":")[0] for message in run_ranks(come, 2)] == ["save", "load"]


def test_an_arrival_at_the_very_deadline_is_seen_alike_by_all() -> None:
    """Over many turns the second rank comes about when the first gives up: both go or both don't.

    However slow the machine is, since the first has more patience after a "no" and less after a "yes".
    """

    def come(rank: int, world_size: int) -> list[bool]:
        outcomes = []
        patience = 0.02
        for _ in range(60):
            dist.barrier()
            if rank == 1:
                time.sleep(0.02)
            try:
                monitored_barrier(everyone(), "save", patience if rank == 0 else 0.05)
                outcomes.append(True)
            except TimeoutError:
                outcomes.append(False)
            patience *= 0.95 if outcomes[-1] else 1.1
            dist.barrier()
            monitored_barrier(everyone(), "after", 60.0)
        return outcomes

    # A rank that finds the attempt over before it arrives starts the next, and waits there in vain: also "no".
    one, other = run_ranks(come, 2)
    assert one == other
    assert min(one.count(True), one.count(False)) >= 10


@pytest.mark.parametrize("timeout", [None, 1.5])
def test_a_group_s_own_timeout_is_waited_for_unless_another_is_given(timeout: float | None) -> None:
    def come(rank: int, world_size: int) -> tuple[str, float]:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1 if timeout is None else 50))
        message, start = "", time.monotonic()
        if rank == 1:
            with pytest.raises(TimeoutError) as caught:
                monitored_barrier(group, "save", timeout)
            message = str(caught.value)
        took = time.monotonic() - start
        dist.barrier()
        return message, took

    message, took = run_ranks(come, 2)[1]
    assert f"within {timeout or 1:g} seconds, not rank 0:" in message
    assert (timeout or 1) <= took < 20


# ---- over any store, by threads for ranks ----


class Counting:
    """A store that counts each thread's requests; all pass on at once when one has been made that settles anything."""

    def __init__(self, store: dist.Store, here: threading.local, settled: threading.Event) -> None:
        self._store = store
        self._here = here
        self.settled = settled

    def under(self, prefix: str) -> Counting:
        return Counting(dist.PrefixStore(prefix, self._store), self._here, self.settled)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        request = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self._here.requests += 1
            answer = request(*args)
            if name == "compare_set":
                self.settled.set()
            return answer

        return counted


class Ranks:
    """``size`` ranks that are threads."""

    def __init__(self, store: dist.Store, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = size
        self.here = here = threading.local()
        self.store = Counting(store, here, threading.Event())
        self._contexts = [GroupContext() for _ in range(size)]
        monkeypatch.setattr(barriers, "store_of", lambda group, prefix: self.store.under(prefix))
        monkeypatch.setattr(barriers, "context_of", lambda group: self._contexts[here.rank])
        monkeypatch.setattr(barriers, "lost", lambda ranks: [])
        monkeypatch.setattr(barriers.dist, "get_rank", lambda group: here.rank)
        monkeypatch.setattr(barriers.dist, "get_world_size", lambda group: size)
        monkeypatch.setattr(barriers.dist, "get_process_group_ranks", lambda group: list(range(size)))
        monkeypatch.setattr(barriers.dist, "get_backend", lambda group: "gloo")

    def come(self, ranks: Iterable[int], timeout: float) -> dict[int, tuple[str, int]]:
        """Some call the roll: what they are told, and how many requests each has made."""
        told: dict[int, tuple[str, int]] = {}

        def come(rank: int) -> None:
            self.here.rank, self.here.requests, message = rank, 0, "came"
            try:
                monitored_barrier("group", "save", timeout)  # type: ignore[arg-type]
            except TimeoutError as error:
                message = str(error)
            told[rank] = message, self.here.requests

        self.store.settled.clear()
        threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return told


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), 3)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))


def test_the_store_has_what_a_roll_call_needs(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(store, 3, monkeypatch)
    turns: tuple[tuple[int, ...], ...] = ((0, 1, 2), (2,), (0, 2), (0, 1, 2), (0, 1, 2))
    outcomes = [ranks.come(turn, 0.3 if len(turn) < 3 else 10.0) for turn in turns]
    for turn in (0, 3, 4):
        assert {message for message, _ in outcomes[turn].values()} == {"came"}
    assert "got rank 2 and, within 0.3 seconds, not ranks 0, 1:" in outcomes[1][2][0]
    for rank in (0, 2):
        assert "got ranks 0, 2 and, within 0.3 seconds, not rank 1:" in outcomes[2][rank][0]


@pytest.mark.parametrize("size", [4, 64])
def test_a_rank_asks_for_as_much_however_many_there_are(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(dist.HashStore(), size, monkeypatch)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: ranks.store.settled.wait(10))
    monkeypatch.setattr(barriers, "time", clock)
    for _ in range(3):
        told = ranks.come(range(size), 30.0)
        assert {message for message, _ in told.values()} == {"came"}
        assert max(requests for _, requests in told.values()) <= 10


def test_where_one_stays_away_all_are_told_who_it_is_and_nobody_asks_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(dist.HashStore(), 64, monkeypatch)
    told = ranks.come(range(63), 0.5)
    assert all("and, within 0.5 seconds, not rank 63:" in message for message, _ in told.values())
    assert max(requests for _, requests in told.values()) <= 40  # in which they have looked now and then
