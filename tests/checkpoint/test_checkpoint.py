"""Checkpoints: what was saved at one world size continues at any other, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import latest, load_checkpoint, read_manifest, read_metadata, save_checkpoint
from tests.support.checkpoints import AFTER, BEFORE, Training, differences
from tests.support.ranks import run_ranks

WORLD_SIZES = (1, 2, 3)
TRAININGS = [Training(1, torch.bfloat16), Training(2, torch.float32)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """By world size the folder of its checkpoints, and of each the whole state at the save and two steps later."""

    def save(rank: int, world_size: int, folder: Path) -> list[Any]:
        told = []
        for number, training in enumerate(TRAININGS):
            pair = training.start().train(BEFORE, rank, world_size)
            save_checkpoint(folder / str(number), pair.model, pair.optimizer)
            told.append((pair.whole(), pair.train(AFTER, rank, world_size).whole()))
        return told

    folders = {world_size: tmp_path_factory.mktemp(f"world-{world_size}") for world_size in WORLD_SIZES}
    return {n: (folder, run_ranks(save, n, folder)[0]) for n, folder in folders.items()}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_any_world_size_saved_loads_at_any_other(world_size: int, saved: dict[int, Any]) -> None:
    """Bit for bit; the run goes on bit for bit with the same ranks and options, else to rounding."""

    def load(rank: int, world_size: int) -> list[str]:
        wrong = []
        for before, (folder, wholes) in saved.items():
            for number, training in enumerate(TRAININGS):
                same = before == world_size
                if not same and (before + world_size + number) % 2:
                    continue  # of others each loads one
                other = Training(3 - training.stage, training.dtype, bucket=20)
                pair = (training if same else other).start(seed=5 + rank)
                load_checkpoint(folder / str(number), pair.model, pair.optimizer)
                at_save, later = wholes[number]
                at = f"{before} ranks, {training.stage}, {training.dtype}"
                wrong += differences(at_save, pair.whole(), at=at)
                if same or training.dtype == torch.float32:
                    pair.train(AFTER, rank, world_size)
                    wrong += differences(later, pair.whole(), 0.0 if same else 5e-6, at=f"{at}, later")
        return wrong

    assert run_ranks(load, world_size) == [[]] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_files_hold_no_padding_and_no_more_than_was_there(world_size: int, saved: dict[int, Any]) -> None:
    folder, wholes = saved[world_size]
    for number, (at_save, _) in enumerate(wholes):
        manifest = read_manifest(folder / str(number))
        metadata = read_metadata(folder / str(number)).state_dict_metadata
        assert manifest.world_size == world_size
        assert set(manifest.tensors) | set(manifest.tied) == set(at_save["model"])
        assert manifest.tied == {"layers.3.weight": "layers.0.weight"}
        for name, entry in manifest.tensors.items():
            value = at_save["model"][name]
            assert (entry.shape, entry.stride) == (value.shape, value.stride())
            assert metadata[f"model.{name}"].size == value.shape
            dropped = name.startswith("layers.2.") or not value.numel()
            has_state = entry.kind == "trainable" and not dropped
            for key in ("step", "exp_avg", "exp_avg_sq"):
                found = metadata.get(f"optim.state.{name}.{key}")
                assert (found is not None) == has_state, name
                assert found is None or found.size == (() if key == "step" else value.shape)


def test_each_rank_writes_its_slices_alone(tmp_path: Path) -> None:
    def save(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(500, 400)
        optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters()), model=model)
        save_checkpoint(tmp_path / "a", model, optimizer)

    run_ranks(save, 4)
    sizes = [(tmp_path / "a" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) < 200_400 * 4 / 4 * 1.1


def test_the_bucket_order_comes_back(tmp_path: Path) -> None:
    """The first backward teaches it; without it sums on three ranks would round differently from the first step."""

    def order_of(pair: Any) -> Any:
        return pair.optimizer.sharded_groups[0].reducer.plan.whole

    def save_and_load(rank: int, world_size: int) -> tuple[bool, bool, bool]:
        pair = Training().start().train(BEFORE, rank, world_size)
        save_checkpoint(tmp_path / "a", pair.model, pair.optimizer)
        fresh = Training().start()
        differ = order_of(fresh) != order_of(pair)
        load_checkpoint(tmp_path / "a", fresh.model, fresh.optimizer)
        same = order_of(fresh) == order_of(pair)
        blank = Training().start()
        save_checkpoint(tmp_path / "b", blank.model, blank.optimizer)
        start = order_of(blank)
        load_checkpoint(tmp_path / "b", pair.model, pair.optimizer)
        return differ, same, order_of(pair) == start

    assert run_ranks(save_and_load, 2) == [(True, True, True)] * 2


@pytest.mark.parametrize("whole", [False, True], ids=["sharded", "whole"])
def test_fp16_goes_on_with_its_loss_scale(whole: bool, tmp_path: Path) -> None:
    training = Training(dtype=torch.float16, options={"initial_scale": 2.0**20, "growth_interval": 3})

    def save_and_load(rank: int, world_size: int) -> tuple[list[str], float]:
        pair = training.start().train(range(6), rank, world_size)  # the first ones overflow
        assert pair.optimizer.loss_scale != 2.0**20
        again = training.start(seed=3)
        if whole:
            state = pair.whole()
            torch.save(state, tmp_path / f"{rank}.pt")
            state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
            again.model.load_state_dict(state["model"])
            again.optimizer.load_state_dict(state["optimizer"])
        else:
            save_checkpoint(tmp_path / "a", pair.model, pair.optimizer)
            load_checkpoint(tmp_path / "a", again.model, again.optimizer)
        wrong = differences(pair.whole(), again.whole())
        for each in (pair, again):
            each.train(range(6, 9), rank, world_size)
        return wrong + differences(pair.whole(), again.whole()), pair.optimizer.loss_scale

    for wrong, scale in run_ranks(save_and_load, 3):
        assert wrong == []
        assert scale > 1


@pytest.mark.parametrize("model_first", [True, False])
def test_a_bf16_run_goes_on_bit_for_bit_from_whole_dicts(model_first: bool) -> None:
    def save_and_load(rank: int, world_size: int) -> list[str]:
        training = Training(dtype=torch.bfloat16)
        pair = training.start().train(BEFORE, rank, world_size)
        state = pair.whole()
        again = training.start(seed=3)
        loads = [
            lambda: again.model.load_state_dict(state["model"]),
            lambda: again.optimizer.load_state_dict(state["optimizer"]),
        ]
        for load in loads if model_first else reversed(loads):
            load()
        wrong = differences(state, again.whole()) if model_first else []  # else masters follow at the next step
        pair.train(AFTER, rank, world_size)
        again.train(AFTER, rank, world_size)
        return wrong + differences(pair.whole(), again.whole())

    assert run_ranks(save_and_load, 3) == [[]] * 3


def test_scheduler_settings_and_extra_travel(tmp_path: Path) -> None:
    extra = {"step": 7, "losses": [0.5, 0.25], "tensor": torch.arange(3), "text": "ja"}

    def save_and_load(rank: int, world_size: int) -> list[str]:
        def with_schedule(seed: int) -> tuple[Any, Any]:
            pair = Training().start(seed)
            return pair, torch.optim.lr_scheduler.CosineAnnealingLR(pair.optimizer, T_max=9)

        pair, schedule = with_schedule(0)
        for _ in range(3):
            pair.train(range(1), rank, world_size)
            schedule.step()
        pair.optimizer.param_groups[1]["weight_decay"] = 0.125
        save_checkpoint(tmp_path / "a", pair.model, pair.optimizer, scheduler=schedule, extra=extra)
        again, its_schedule = with_schedule(4)
        got = load_checkpoint(tmp_path / "a", again.model, again.optimizer, scheduler=its_schedule)
        assert its_schedule.state_dict() == schedule.state_dict()
        assert load_checkpoint(tmp_path / "a", again.model, again.optimizer) is not None
        settings = [{k: v for k, v in g.items() if k != "params"} for g in pair.optimizer.param_groups]
        its_settings = [{k: v for k, v in g.items() if k != "params"} for g in again.optimizer.param_groups]
        return differences(extra, got) + differences(settings, its_settings)

    assert run_ranks(save_and_load, 2) == [[], []]


class Awkward(nn.Module):
    """Frozen, tied and adapter weights; buffers of several kinds; a module with extra state; a weight nobody has."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.again = nn.Linear(6, 2, bias=False)
        self.again.weight = self.down.weight
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=memory_format)
        self.still = nn.Conv2d(2, 3, 2).to(memory_format=memory_format).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("wide", torch.zeros(1).expand(4))
        self.counter = Counter()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.base(x) + self.up(self.down(x) + self.again(x)))
        out: Tensor = hidden.sum() + self.conv(x[:2].view(-1, 2, 2, 3)).square().sum()
        return out


class Counter(nn.Module):
    """Has state that isn't a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_frozen_tied_and_other_tensors_travel_and_memory_orders_may_differ(tmp_path: Path) -> None:
    def start(seed: int, memory_format: torch.memory_format) -> tuple[Awkward, LowLevelZeroOptimizer]:
        torch.manual_seed(seed)
        model = Awkward(memory_format)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, LowLevelZeroOptimizer(torch.optim.AdamW(trained, lr=0.01), model=model, partition_grad=True)

    def whole(model: Awkward, optimizer: LowLevelZeroOptimizer) -> Any:
        return {**model.state_dict()}, optimizer.state_dict()["state"]

    def save(rank: int, world_size: int) -> Any:
        model, optimizer = start(0, torch.channels_last)
        for step in range(2):
            torch.manual_seed(step)
            optimizer.backward(model(torch.randn(6, 6)))
            optimizer.step()
            optimizer.zero_grad()
        model.counter.seen = 5
        model.mask[0] = False
        model.wide[:1].fill_(3.0)
        save_checkpoint(tmp_path / "a", model, optimizer)
        return whole(model, optimizer)

    expected = run_ranks(save, 2)[0]

    def load(rank: int, world_size: int) -> list[str]:
        wrong = []
        for memory_format in (torch.channels_last, torch.contiguous_format):
            model, optimizer = start(7, memory_format)
            load_checkpoint(tmp_path / "a", model, optimizer)
            assert model.counter.seen == 5
            assert model.again.weight is model.down.weight
            assert model.wide.stride() == (0,)
            wrong += differences(expected, whole(model, optimizer))
        return wrong

    assert run_ranks(load, 3) == [[]] * 3


def test_states_of_other_optimizers_travel(tmp_path: Path) -> None:
    """States that aren't tensors, that exist at construction, none at all, and one of a second optimizer's model."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.state[p]["times"] = self.state[p].get("times", 0) + 1
                        self.state[p]["nothing"] = None
            return super().step(closure)

    makes = [
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.5),
        lambda ps: Counting(ps, lr=0.1, momentum=0.5),
    ]

    def save_and_load(rank: int, world_size: int) -> list[str]:
        wrong = []
        for number, make in enumerate(makes):
            models = [nn.Linear(3, 5), nn.Linear(3, 5)]
            pairs = [(model, LowLevelZeroOptimizer(make(model.parameters()), model=model)) for model in models]
            model, optimizer = pairs[0]
            for _ in range(2):
                optimizer.backward(model(torch.ones(2, 3)).square().sum())
                optimizer.step()
                optimizer.zero_grad()
            save_checkpoint(tmp_path / str(number), model, optimizer)
            load_checkpoint(tmp_path / str(number), *pairs[1])
            (one, first), (two, second) = pairs
            wrong += differences(dict(one.state_dict()), dict(two.state_dict()))
            wrong += differences(first.state_dict(), second.state_dict())
        return wrong

    assert run_ranks(save_and_load, 2) == [[], []]


def test_dtypes_may_differ(tmp_path: Path) -> None:
    """An fp32 run goes on in bf16 with its full precision in the masters, and in fp32 from a bf16 one's masters."""

    def start(dtype: torch.dtype) -> Any:
        return Training(dtype=dtype).start()

    def save_and_load(rank: int, world_size: int) -> list[str]:
        wide = start(torch.float32).train(BEFORE, rank, world_size)
        save_checkpoint(tmp_path / "wide", wide.model, wide.optimizer)
        narrow = start(torch.bfloat16)
        load_checkpoint(tmp_path / "wide", narrow.model, narrow.optimizer)
        pairs = zip(
            wide.optimizer.get_working_to_master_map().values(),
            narrow.optimizer.get_working_to_master_map().values(),
            strict=True,
        )
        wrong = [line for one, two in pairs for line in differences(one.clone(), two.clone())]
        before = {name: value.clone() for name, value in wide.model.state_dict().items()}
        rounded = {name: value.bfloat16() for name, value in before.items()}
        wrong += differences(rounded, dict(narrow.model.state_dict()))
        save_checkpoint(tmp_path / "narrow", narrow.model, narrow.optimizer)
        load_checkpoint(tmp_path / "narrow", wide.model, wide.optimizer)
        trained = {name for name, p in wide.model.named_parameters(remove_duplicate=False) if p.requires_grad}
        exact = {name: value if name in trained else rounded[name].float() for name, value in before.items()}
        return wrong + differences(exact, dict(wide.model.state_dict()))

    assert run_ranks(save_and_load, 2) == [[], []]


def test_saving_changes_nothing_and_edits_of_weights_are_saved(tmp_path: Path) -> None:
    """What a user wrote into 16-bit weights reaches the masters at the next step, saved in between or not."""

    def save(rank: int, world_size: int) -> list[str]:
        pairs = [Training(dtype=torch.bfloat16).start().train(BEFORE, rank, world_size) for _ in range(3)]
        for pair in pairs[:2]:
            with torch.no_grad():
                pair.model.outward.weight.clamp_(-0.1, 0.1)
        save_checkpoint(tmp_path / "a", pairs[0].model, pairs[0].optimizer)
        load_checkpoint(tmp_path / "a", pairs[2].model, pairs[2].optimizer)
        one, two, three = (pair.train(AFTER, rank, world_size).whole() for pair in pairs)
        return differences(two, one) + differences(two, three)

    assert run_ranks(save, 2) == [[], []]


def test_only_the_newest_are_kept_and_latest_finds_the_newest_whole_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert latest(run) is None

    def save(rank: int, world_size: int) -> list[Path | None]:
        pair = Training().start()
        found = []
        for step in (30, 200, 100):  # not in the order of names
            save_checkpoint(run / f"step-{step}", pair.model, pair.optimizer, keep=2, extra=step)
            found.append(latest(run))
        return found

    (run / "other").mkdir(parents=True)
    (run / "other" / "file").write_text("not ours")
    (run / "step-7.0123456789abcdef.tmp").mkdir()
    found = run_ranks(save, 2)[0]
    assert found == [run / "step-30", run / "step-200", run / "step-100"]
    assert {place.name for place in run.iterdir()} == {"other", "step-200", "step-100"}
    assert latest(run / "step-200") == run / "step-200"
    (run / "step-100" / "objects.pt").write_bytes(b"")
    assert latest(run) == run / "step-200"


def test_a_group_of_some_ranks_saves_and_loads(tmp_path: Path) -> None:
    """Not all ranks, and without the first; refused where torch can't."""

    def save_and_load(rank: int, world_size: int) -> list[str]:
        group = dist.new_group([1, 2])
        if rank == 0:
            return []
        pairs = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = nn.Linear(3, 5)
            inner = torch.optim.AdamW(model.parameters(), lr=0.1)
            pairs.append((model, LowLevelZeroOptimizer(inner, model=model, dp_process_group=group)))
        (model, optimizer), (other, its_optimizer) = pairs
        optimizer.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        save_checkpoint(tmp_path / "a", model, optimizer)
        load_checkpoint(tmp_path / "a", other, its_optimizer)
        return differences(dict(model.state_dict()), dict(other.state_dict())) + differences(
            optimizer.state_dict(), its_optimizer.state_dict()
        )

    assert run_ranks(save_and_load, 3) == [[]] * 3
