"""The roll call: who came and who didn't is told to all that came, and a later call works."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lowlevel_zero.communication import roll_call
from lowlevel_zero.communication.roll_call import call_roll
from tests.support.ranks import run_ranks


def everyone() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def refusal(room: str, timeout: float) -> str:
    with pytest.raises(TimeoutError) as caught:
        call_roll(everyone(), room, timeout)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_come_again_and_again(world_size: int) -> None:
    def come(rank: int, world_size: int) -> float:
        start = time.monotonic()
        for turn in range(5):
            time.sleep(0.01 * ((rank + turn) % 3))
            call_roll(everyone(), "save", 10.0)
        return time.monotonic() - start

    assert max(run_ranks(come, world_size)) < 5.0


def test_one_rank_alone_is_told_who_came_and_a_later_call_works() -> None:
    def come(rank: int, world_size: int) -> str:
        message = refusal("save", 0.3) if rank == 1 else ""
        dist.barrier()
        call_roll(everyone(), "save", 5.0)
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
        call_roll(everyone(), "save", 5.0)
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
        call_roll(everyone(), "save", 5.0)
        call_roll(everyone(), "save", 5.0)
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
                call_roll(everyone(), "save", patience if rank == 0 else 0.05)
                outcomes.append(True)
            except TimeoutError:
                outcomes.append(False)
            patience *= 0.95 if outcomes[-1] else 1.1
            dist.barrier()
            call_roll(everyone(), "after", 60.0)
        return outcomes

    # A rank that finds the attempt over before it arrives starts the next, and waits there in vain: also "no".
    one, other = run_ranks(come, 2)
    assert one == other
    assert min(one.count(True), one.count(False)) >= 10


class TestStores:
    """The protocol over each of torch's stores, by threads."""

    @pytest.fixture(params=["hash", "file", "tcp"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
        if request.param == "hash":
            return dist.HashStore()
        if request.param == "file":
            return dist.FileStore(str(tmp_path / "store"), 3)
        return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))

    def test_the_store_has_what_a_roll_call_needs(self, store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
        size = 3
        here = threading.local()
        monkeypatch.setattr(roll_call, "store_of", lambda group: dist.PrefixStore("group", store))
        monkeypatch.setattr(roll_call.dist, "get_rank", lambda group: here.rank)
        monkeypatch.setattr(roll_call.dist, "get_world_size", lambda group: size)
        monkeypatch.setattr(roll_call.dist, "get_process_group_ranks", lambda group: list(range(size)))
        monkeypatch.setattr(roll_call.dist, "get_backend", lambda group: "gloo")
        over: list[dict[object, dict[str, int]]] = [{} for _ in range(size)]
        outcomes: dict[tuple[int, int], str] = {}

        class Counts:
            """``_over``, a thread for a process."""

            def setdefault(self, group: object, value: dict[str, int]) -> dict[str, int]:
                return over[here.rank].setdefault(group, value)

            def __getitem__(self, group: object) -> dict[str, int]:
                return over[here.rank][group]

        monkeypatch.setattr(roll_call, "_over", Counts())

        def come(rank: int, turn: int, timeout: float) -> None:
            here.rank = rank
            try:
                call_roll("group", "save", timeout)  # type: ignore[arg-type]
                outcomes[turn, rank] = "came"
            except TimeoutError as error:
                outcomes[turn, rank] = str(error)

        for turn, ranks in enumerate(((0, 1, 2), (2,), (0, 2), (0, 1, 2), (0, 1, 2))):
            threads = [
                threading.Thread(target=come, args=(rank, turn, 0.3 if len(ranks) < 3 else 10.0)) for rank in ranks
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert {key for key, said in outcomes.items() if said == "came"} == {
            (t, r) for t in (0, 3, 4) for r in range(3)
        }
        assert "got rank 2 and, within 0.3 seconds, not ranks 0, 1:" in outcomes[1, 2]
        assert "got ranks 0, 2 and, within 0.3 seconds, not rank 1:" in outcomes[2, 0]
        assert "got ranks 0, 2 and, within 0.3 seconds, not rank 1:" in outcomes[2, 2]
