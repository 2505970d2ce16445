"""8-bit optimizers: slices that end where blocks of elements end step as the whole does, and come back from files."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import Communication, LowLevelZeroOptimizer
from lowlevel_zero.checkpoint import Sharded, load_checkpoint, read_metadata, save_checkpoint
from lowlevel_zero.checkpoint.saved import SavedCheckpoint
from lowlevel_zero.construction import sharding
from lowlevel_zero.deepspeed import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from lowlevel_zero.layout import Layout, layout_of, memory_held
from lowlevel_zero.optim.quantised import slice_multiple
from lowlevel_zero.optim.splits import choose_splits
from lowlevel_zero.partition import EvenSplit
from lowlevel_zero.planning import estimate
from lowlevel_zero.planning.saved_layout import layout_in
from tests.support.cases import check_cases, check_each
from tests.support.patching import patch_rank
from tests.support.ranks import run_cases, run_ranks

with warnings.catch_warnings():  # torchao's, of what it was built for, and of its enums
    warnings.simplefilter("ignore")
    import bitsandbytes as bnb
    import galore_torch
    import torchao.optim

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning"),
    pytest.mark.filterwarnings("ignore:This implementation of AdamW is deprecated:FutureWarning"),
]

# Of several blocks a slice; of such, the last one cut; with slices that are too small; with fp32 states in any case.
SIZES = ((96, 256), (3, 50, 101), (5000,), (7,))

BITSANDBYTES: dict[str, Callable[[Any], Any]] = {
    "AdamW8bit": lambda params: bnb.optim.AdamW8bit(params, lr=1e-2, weight_decay=0.1),
    "Adam, told": lambda params: bnb.optim.Adam(params, lr=1e-2, optim_bits=8),
    "Lion8bit": lambda params: bnb.optim.Lion8bit(params, lr=1e-3),
    "PagedAdamW8bit": lambda params: bnb.optim.PagedAdamW8bit(params, lr=1e-2),
    "Lion": lambda params: bnb.optim.Lion(params, lr=1e-3),
}


def adamw8bit(params: Any) -> torch.optim.Optimizer:
    """torchao compiles its step, for minutes on a CPU: not here."""
    torch.compiler.set_stance("force_eager")
    optimizer: torch.optim.Optimizer = torchao.optim.AdamW8bit(params, lr=1e-2, weight_decay=0.1)
    return optimizer


@pytest.fixture(autouse=True)
def _compiling_as_before() -> Iterator[None]:
    """Other tests of this process compile."""
    yield
    torch.compiler.set_stance("default")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(0.1 * torch.randn(size, generator=generator)) for size in SIZES])

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.stack([(p * torch.randn(p.shape, generator=generator)).sum().sin() for p in self.weights]).sum()


SUMS = Communication(reduction="sum")


def wrap(model: Net, make: Callable[[Any], Any], **options: Any) -> LowLevelZeroOptimizer:
    optimizer = make(model.parameters())
    return LowLevelZeroOptimizer(optimizer, model=model, stage=2, communication=SUMS, **options)


def train(model: Net, optimizer: LowLevelZeroOptimizer, steps: range) -> list[Tensor]:
    """Gradients are the first rank's: so that their sums are exact, and all that is left is the optimizer."""
    return train_by(lambda step: optimizer.backward(model.loss(step) * (dist.get_rank() == 0)), model, optimizer, steps)


def train_by(run_back: Callable[[int], None], model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    for step in steps:
        run_back(step)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def trained_alone(make: Callable[[Any], Any], steps: int) -> list[Tensor]:
    model = Net()
    return train_by(lambda step: model.loss(step).backward(), model, make(model.parameters()), range(steps))


def quantised(optimizer: LowLevelZeroOptimizer) -> list[bool]:
    """Of each parameter, whether its states are."""
    states = [list(optimizer.state[p32].values()) for p32 in optimizer.param_groups[0]["params"]]
    return [
        any(hasattr(each, "codes") or getattr(each, "dtype", None) == torch.uint8 for each in own) for own in states
    ]


def test_bitsandbytes_numbers_are_those_of_one_process(subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, which: str) -> tuple[list[Tensor], list[bool]]:
        model = Net()
        optimizer = wrap(model, BITSANDBYTES[which])
        return train(model, optimizer, range(4)), quantised(optimizer)

    for (which,), ran in run_cases(work, 3, [(which,) for which in BITSANDBYTES]):
        with subtests.test(which):
            expected = trained_alone(BITSANDBYTES[which], 4)
            for values, are in ran.values():
                assert are == [which != "Lion"] * 2 + [False] * 2
                for at in (0, 1, 3):  # of the third one process quantises the states
                    assert torch.equal(values[at], expected[at]), SIZES[at]
                assert (values[2] - expected[2]).abs().max() <= 5e-3


def test_torchao_numbers_are_those_of_one_process() -> None:
    """Whose second parameter isn't made of whole blocks, so that nobody quantises its states."""

    def alone(rank: int, world_size: int) -> list[Tensor]:
        return trained_alone(adamw8bit, 3)

    def work(rank: int, world_size: int) -> tuple[list[Tensor], list[bool]]:
        model = Net()
        optimizer = wrap(model, adamw8bit)
        return train(model, optimizer, range(3)), quantised(optimizer)

    (expected,) = run_ranks(alone, 1, init=False)
    for values, are in run_ranks(work, 2):
        assert are == [True, False, False, False]
        for value, exact in zip(values, expected, strict=True):
            assert torch.equal(value, exact)


def test_slices_of_just_enough_elements_are_of_whole_blocks_where_the_parameter_is() -> None:
    """torchao quantises states of 4,096 elements, and of whole blocks alone."""
    multiple = slice_multiple(adamw8bit([nn.Parameter(torch.zeros(8))]))
    sizes = {numel: EvenSplit(numel, 2, multiple(numel, 2)).slice_size for numel in (8189, 8191, 8192, 8193)}
    assert sizes == {8189: 4095, 8191: 4097, 8192: 4096, 8193: 4097}


MAKE = {"torchao": adamw8bit, "bitsandbytes": BITSANDBYTES["AdamW8bit"], "Lion": BITSANDBYTES["Lion8bit"]}


def test_a_run_goes_on_from_its_state_as_it_would_have(tmp_path: Path, subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, which: str, way: str) -> None:
        path, model, again = tmp_path / which, Net(), Net()
        optimizer, other = wrap(model, MAKE[which]), wrap(again, MAKE[which])
        train(model, optimizer, range(2))
        if way == "files":
            save_checkpoint(path, model, optimizer)
            load_checkpoint(path, again, other)
        elif way == "whole":
            again.load_state_dict(model.state_dict())
            other.load_state_dict(optimizer.state_dict())
        else:
            again.load_state_dict(model.state_dict())
            Sharded(other).load_state_dict(copy.deepcopy(Sharded(optimizer).state_dict()))
        assert quantised(other) == quantised(optimizer)
        assert memory_held(optimizer) == memory_held(other)
        expected, got = train(model, optimizer, range(2, 4)), train(again, other, range(2, 4))
        assert all(map(torch.equal, expected, got))

    check_cases(subtests, 2, work, list(product(MAKE, ("whole", "sharded", "files"))))


def test_files_have_a_scale_for_each_block_and_are_laid_out_as_what_was_saved(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """And so few bytes a parameter: a code each for one or two states, and their scales."""
    numel = 512 * 1000

    def save(rank: int, world_size: int, which: str) -> Layout:
        model = nn.Linear(1000, 512, bias=False)
        optimizer = LowLevelZeroOptimizer(MAKE[which](model.parameters()), model=model, stage=2)
        optimizer.backward(model(torch.randn(2, 1000)).square().mean())
        optimizer.step()
        save_checkpoint(tmp_path / which, model, optimizer)
        return layout_of(optimizer)

    for (which,), ran in run_cases(save, 3, [(which,) for which in MAKE]):
        with subtests.test(which):
            live, saved = ran.values()[0], layout_in(SavedCheckpoint(tmp_path / which))
            assert [p.split for p in saved.parameters] == [p.split for p in live.parameters]
            assert saved.parameters[0].split.multiple > 1
            assert saved.bytes.states == pytest.approx(live.bytes.states, rel=0.01, abs=4096)  # bitsandbytes' tables
            places = read_metadata(tmp_path / which).storage_data.items()
            of_states = [place.length for index, place in places if index.fqn.startswith("optim.state.")]
            assert 1.0 < sum(of_states) / numel < (1.3 if which == "Lion" else 2.6)
            assert sum(file.stat().st_size for file in (tmp_path / which).iterdir()) / numel < 4 + 2.6


def test_a_run_goes_on_with_other_slices(tmp_path: Path) -> None:
    """On 3 ranks after 2, on one, and on so many that none is quantised any more."""

    def save(rank: int, world_size: int) -> list[Tensor]:
        model = Net()
        optimizer = wrap(model, BITSANDBYTES["AdamW8bit"])
        train(model, optimizer, range(2))
        save_checkpoint(tmp_path / "saved", model, optimizer)
        return train(model, optimizer, range(2, 4))

    def load(rank: int, world_size: int, multiple: int) -> tuple[list[Tensor], list[bool]]:
        model = Net()
        if multiple > 1:
            patch_rank(sharding, "slice_multiple", lambda optimizer: lambda numel, world_size: multiple)
        optimizer = wrap(model, BITSANDBYTES["AdamW8bit"])
        load_checkpoint(tmp_path / "saved", model, optimizer)
        are = quantised(optimizer)
        return train(model, optimizer, range(2, 4)), are

    expected = run_ranks(save, 2)[0]
    for world_size, multiple, tolerance in ((3, 1, 0.0), (2, 512, 0.0), (7, 1, 2e-3)):
        for ((_, ran),) in [run_cases(load, world_size, [(multiple,)])]:
            for values, are in ran.values():
                assert are == [world_size < 7] * 2 + [False] * 2
                for value, exact in zip(values, expected, strict=True):
                    assert (value - exact).abs().max() <= tolerance


def states_that_are_quantised_as_a_whole_are_refused(rank: int, world_size: int) -> None:
    model = Net()
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    model.loss(0).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="weights.0: expected no quantised states yet"):
        LowLevelZeroOptimizer(optimizer, model=model)


def codes_are_not_taken_for_numbers(rank: int, world_size: int) -> None:
    for make, key in ((adamw8bit, "exp_avg"), (BITSANDBYTES["AdamW8bit"], "state1")):
        model = Net()
        optimizer = wrap(model, make)
        train(model, optimizer, range(1))
        p = model.weights[0]
        with pytest.raises(ValueError, match=f"0: expected a state of numbers, got '{key}', which is quantised"):
            safe_get_full_optimizer_state(p, key)
        with pytest.raises(ValueError, match="which is quantised"):
            safe_set_full_optimizer_state(p, torch.ones_like(p), key)
        assert safe_get_full_optimizer_state(p, "step") == 1


def states_are_estimated(rank: int, world_size: int) -> None:
    told = []
    for make, shared in ((BITSANDBYTES["AdamW8bit"], 2048), (adamw8bit, 0)):  # two tables of 256 numbers aren't counted
        model = Net()
        optimizer = wrap(model, make)
        train(model, optimizer, range(1))
        told.append((estimate(Net(), world_size, 2, None, make).states, memory_held(optimizer).states - shared))
    made = adamw8bit(Net().parameters())
    told.append((estimate(Net(), world_size, 2, None, made).states, told[-1][1]))
    for estimated, held in told:
        assert estimated == pytest.approx(held, rel=0.01), (rank, told)


def a_setting_by_parameter_that_slices_cannot_have_is_refused(rank: int, world_size: int) -> None:
    with manager() as found:
        model = Embedded()
        found.override_config(model.other, "min_8bit_size", 100)
        with pytest.raises(ValueError, match=r"other: expected a setting .*got min_8bit_size=100 from bitsandbytes"):
            LowLevelZeroOptimizer(bnb.optim.AdamW8bit(model.parameters()), model=model)
        found.initialize()
        found.register_module_override(model.embedding, "weight", {"optim_bits": 8})
        with pytest.raises(ValueError, match=r"embedding.weight: expected a setting .*got optim_bits=8"):
            LowLevelZeroOptimizer(bnb.optim.AdamW(model.parameters()), model=model)


def test_what_is_told_of_quantised_states(tmp_path: Path, subtests: pytest.Subtests) -> None:
    def another_block_size_is_refused(rank: int, world_size: int) -> None:
        model, again = Net(), Net()
        optimizer = wrap(model, adamw8bit)
        train(model, optimizer, range(1))
        save_checkpoint(tmp_path / "a", model, optimizer)
        other = wrap(again, lambda params: torchao.optim.AdamW8bit(params, block_size=128))
        with pytest.raises(ValueError, match="expected states quantised in blocks of 128, got blocks of 256"):
            load_checkpoint(tmp_path / "a", again, other)

    checks = (
        another_block_size_is_refused,
        states_that_are_quantised_as_a_whole_are_refused,
        codes_are_not_taken_for_numbers,
        states_are_estimated,
        a_setting_by_parameter_that_slices_cannot_have_is_refused,
    )
    check_each(subtests, 2, checks)


def test_who_steps_slices_and_who_whole_parameters() -> None:
    def chosen(make: Callable[..., Any], **options: Any) -> Any:
        return choose_splits(make([nn.Parameter(torch.zeros(8))], **options))

    for kind, bits in product(("Adam", "AdamW", "Lion", "RMSprop", "Adagrad"), ("", "8bit", "32bit")):
        assert chosen(getattr(bnb.optim, kind + bits), lr=0.1) == ["elements"], kind + bits
    for make in (bnb.optim.AdEMAMix8bit, galore_torch.GaLoreAdamW, torchao.optim.AdamW4bit):
        assert chosen(make) == ["parameters"], make
    with pytest.raises(TypeError, match=r"norms of the whole tensor.*MockArgs.*split='parameters'"):
        chosen(bnb.optim.LAMB8bit)  # of which no probe can make one
    assert choose_splits(bnb.optim.LAMB8bit([nn.Parameter(torch.zeros(8))]), "parameters") == ["parameters"]


class Embedded(nn.Module):
    """A frozen parameter stands before the others, so that slices have other places than parameters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.weight = nn.Parameter(0.1 * torch.randn(96, 256, generator=generator))
        self.embedding = nn.Embedding(96, 256)
        self.other = nn.Parameter(0.1 * torch.randn(64, 256, generator=generator))
        with torch.no_grad():
            self.embedding.weight.copy_(0.1 * torch.randn(96, 256, generator=generator))

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        trained = (self.weight, self.embedding.weight, self.other)
        return torch.stack([(p * torch.randn(p.shape, generator=generator)).sum().sin() for p in trained]).sum()


@contextmanager
def manager() -> Iterator[Any]:
    """bitsandbytes' manager, which is one for all optimizers of a process, with nothing in it."""
    found = bnb.optim.GlobalOptimManager.get_instance()
    found.initialize()
    yield found
    found.initialize()


def override(model: Embedded, way: str, found: Any) -> None:
    if way == "by module":  # as transformers' Trainer does
        found.register_module_override(model.embedding, "weight", {"optim_bits": 32})
        found.register_module_override(model, "other", {"weight_decay": 0.5, "lr": 1e-3})
    else:
        found.override_config(model.embedding.weight, "optim_bits", 32)
        found.override_config(model.other, key_value_dict={"weight_decay": 0.5, "lr": 1e-3})
        found.register_parameters(model.parameters())


def train_embedded(way: str, when: str, rank: int, wrapped: bool) -> tuple[list[Tensor], list[bool]]:
    with manager() as found:
        model = Embedded()
        if when == "before" and way == "by id":
            override(model, way, found)
        optimizer: Any = bnb.optim.AdamW8bit(model.parameters(), lr=1e-2)
        if when == "before" and way == "by module":
            override(model, way, found)
        if wrapped:
            optimizer = LowLevelZeroOptimizer(optimizer, model=model, stage=2, communication=SUMS)
        if when == "after":
            override(model, way, found)
        back = optimizer.backward if wrapped else Tensor.backward
        values = train_by(lambda step: back(model.loss(step) * (rank == 0)), model, optimizer, range(4))
        held = [each for each in optimizer.param_groups[0]["params"] if optimizer.state.get(each)]
        return values, ["absmax1" in optimizer.state[each] for each in held]


def test_settings_by_parameter_come_along_to_slices(subtests: pytest.Subtests) -> None:
    def work(rank: int, world_size: int, way: str, when: str) -> tuple[list[Tensor], list[bool]]:
        return train_embedded(way, when, rank, wrapped=True)

    cases = list(product(("by module", "by id"), ("before", "after")))
    for (way, when), ran in run_cases(work, 2, cases):
        with subtests.test(way=way, when=when):
            expected, quantised = train_embedded(way, when, 0, wrapped=False)
            assert quantised == [True, True, False]  # the embedding comes last
            for values, are in ran.values():
                assert are == quantised
                assert all(map(torch.equal, values, expected))


def a_setting_of_a_parameter_that_is_added_comes_along(rank: int, world_size: int) -> None:
    with manager() as found:
        model, alone = Embedded().requires_grad_(False), Embedded()
        optimizer = bnb.optim.AdamW8bit([model.weight.requires_grad_(True)], lr=1e-2)
        sharded = LowLevelZeroOptimizer(optimizer, model=model, stage=2, communication=SUMS)
        back = lambda step: sharded.backward(model.loss(step) * (rank == 0))  # noqa: E731
        train_by(back, model, sharded, range(1))
        found.register_parameters([model.other])
        found.override_config(model.other, "lr", 1e-3)
        sharded.add_param_group({"params": [model.other.requires_grad_(True)]})
        train_by(back, model, sharded, range(1, 4))
        by_itself = bnb.optim.AdamW8bit([alone.other], lr=1e-3)
        train_by(lambda step: alone.loss(step).backward(), alone, by_itself, range(1, 4))
        assert torch.equal(model.other, alone.other)


def settings_of_slices_go_with_them(rank: int, world_size: int) -> None:
    """Another tensor may have such an id afterwards."""
    with manager() as found:
        model = Embedded()
        override(model, "by id", found)
        before = set(found.pid2config)
        optimizer: Any = bnb.optim.AdamW8bit(model.parameters(), lr=1e-2)
        sharded: Any = LowLevelZeroOptimizer(optimizer, model=model, stage=2, communication=SUMS)
        train_by(lambda step: sharded.backward(model.loss(step)), model, sharded, range(2))
        assert len(found.pid2config) == len(before) + 2
        sharded = optimizer = None
        gc.collect()
        assert set(found.pid2config) == before


def test_settings_of_parameters_that_come_and_slices_that_go(subtests: pytest.Subtests) -> None:
    check_each(subtests, 2, (a_setting_of_a_parameter_that_is_added_comes_along, settings_of_slices_go_with_them))


def with_overrides(params: Any) -> Any:
    """Keep the first parameter's states in 32 bits, and give the second a rate of its own."""
    params = list(params)
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.register_parameters(params)
    manager.override_config(params[0], "optim_bits", 32)
    manager.override_config(params[1], "lr", 1e-3)
    return bnb.optim.AdamW8bit(params, lr=1e-2)


WHOLE = {"torchao": adamw8bit, "bitsandbytes": BITSANDBYTES["AdamW8bit"], "overrides": with_overrides}


def test_whole_parameters_have_the_states_of_one_process_and_go_on_at_another_number_of_ranks(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Parameters that are too small for 8 bits, too: a slice of a larger one would be as small."""

    def work(rank: int, world_size: int, name: str, steps: range) -> list[Tensor]:
        with manager():  # it keeps overrides by id, which the parameters of a later run may reuse
            return trained(world_size, name, steps)

    def trained(world_size: int, name: str, steps: range) -> list[Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(size)) for size in SIZES]
        path, model, optimizer = tmp_path / name, nn.ParameterList(params), WHOLE[name](params)
        if world_size:
            optimizer = LowLevelZeroOptimizer(optimizer, model=model, stage=2, split="parameters")
        if world_size and steps.start:
            load_checkpoint(path, model, optimizer)

        def run_back(step: int) -> None:
            generator = torch.Generator().manual_seed(step)
            loss = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in params)
            optimizer.backward(loss) if world_size else loss.backward()  # type: ignore[union-attr]

        values = train_by(run_back, model, optimizer, steps)
        if world_size and not steps.start:
            save_checkpoint(path, model, optimizer)
        return values

    check_cases(subtests, 2, work, [(name, range(2)) for name in WHOLE])
    for world_size in (1, 2):
        for (name, _), ran in run_cases(work, world_size, [(name, range(2, 4)) for name in WHOLE]):
            with subtests.test(name, world_size=world_size):
                alone = work(0, 0, name, range(4))
                for each in ran.values():
                    assert all(map(torch.equal, each, alone))
