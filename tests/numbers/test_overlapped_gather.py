"""Gathers that go on after the step: never a stale weight, whoever reads it, and they really overlap the forward."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.bookkeeping import gather_store
from lowlevel_zero.bookkeeping.awaited import AwaitedParameter
from lowlevel_zero.bookkeeping.sharded_parameter import ShardedParameter
from lowlevel_zero.streams import Mark, Streams
from tests.support.on_ranks import on_ranks


@pytest.fixture(autouse=True)
def every_bucket_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is: else these models would be stepped, and gathered, in one."""
    monkeypatch.setattr(gather_store, "PART", 1)


class Odd(nn.Module):
    """Uses its weights in every way but the plain one: tied, functionally, twice, and out of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.held = [self.blocks[2].weight]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = self.blocks[1](torch.tanh(self.blocks[0](self.blocks[1](x))))
        x = F.linear(x, self.held[0], self.blocks[2].bias)
        return F.linear(self.norm(x), self.tokens.weight).square().mean()


def sharded(model: nn.Module, overlap: bool = True) -> LowLevelZeroOptimizer:
    return LowLevelZeroOptimizer(
        AdamW(model.parameters(), lr=0.05), model=model, reduce_bucket_size=40, overlap_allgather=overlap
    )


def stepped(model: nn.Module, width: int = 3) -> LowLevelZeroOptimizer:
    """Return the model's optimizer after a step, whose gathers go on."""
    optimizer = sharded(model)
    optimizer.backward(model(torch.ones(2, width)).sum())
    optimizer.step()
    return optimizer


READERS: dict[str, Callable[[nn.Linear], Tensor]] = {
    "a state dict": lambda layer: layer.state_dict()["weight"],
    "a state dict of the parameters themselves": lambda layer: layer.state_dict(keep_vars=True)["weight"] * 1,
    "a deep copy": lambda layer: copy.deepcopy(layer).weight,
    "a deep copy of the parameter": lambda layer: copy.deepcopy(layer.weight),
    "a pickle": lambda layer: pickle.loads(pickle.dumps(layer.weight)),
    "a saved file": lambda layer: _saved_and_loaded(layer),
    "data": lambda layer: layer.weight.data,
    "an operation": lambda layer: layer.weight + 0,
    "an operation on a list": lambda layer: torch.stack([layer.weight, layer.weight])[1],
    "an operation by keyword": lambda layer: torch.add(other=layer.weight, input=torch.zeros(3, 3)),
    "a multi-tensor operation": lambda layer: torch._foreach_mul([layer.weight], 1.0)[0],
    "a module": lambda layer: F.linear(torch.eye(3), layer.weight).T,
    "numpy": lambda layer: torch.from_numpy(layer.weight.detach().numpy()),
    "an item": lambda layer: torch.tensor([[layer.weight[i, j].item() for j in range(3)] for i in range(3)]),
    "a functional call": lambda layer: (
        torch.func.functional_call(layer, dict(layer.named_parameters()), torch.eye(3)).T - layer.bias[:, None]
    ),
    "another parameter": lambda layer: nn.Parameter(layer.weight),
    "another class": lambda layer: layer.weight.as_subclass(Tensor),
    "a fake copy": lambda layer: _faked(layer),
    "an average": lambda layer: torch.optim.swa_utils.AveragedModel(layer).module.weight,
}


def _saved_and_loaded(layer: nn.Linear) -> Tensor:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)["weight"]


def _faked(layer: nn.Linear) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        mode.from_tensor(layer.weight)
    return layer.weight


@on_ranks(2, READERS)
def test_whoever_reads_a_parameter_gets_its_new_values(rank: int, reader: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    optimizer = sharded(layer)
    for _ in range(2):
        optimizer.backward(layer(torch.ones(2, 3)).square().sum())
        optimizer.step()
        assert type(layer.weight) is AwaitedParameter
        seen = READERS[reader](layer).detach().clone()
        assert type(layer.weight) is nn.Parameter
        optimizer._force_wait_all_gather()
        torch.testing.assert_close(seen, layer.weight.detach(), rtol=1e-6, atol=1e-6)
        optimizer.zero_grad()


class Unreached(Mark):
    """A point that the device has yet to reach when the host asks."""

    def query(self) -> bool:
        return False


@on_ranks(2, READERS)
def test_readers_before_the_device_has_written(rank: int, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameter stays awaited, since readers on other streams have to wait too, unless the host itself waits."""
    monkeypatch.setattr(Streams, "mark", lambda streams: Unreached())
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    optimizer = stepped(layer)
    seen = READERS[reader](layer)
    assert seen is layer.weight or type(seen) in (nn.Parameter, Tensor)
    copying = ("deep copy", "a pickle", "another", "an average")
    assert (type(layer.weight) is nn.Parameter) == any(word in reader for word in copying)
    optimizer._force_wait_all_gather()
    assert type(layer.weight) is nn.Parameter
    torch.testing.assert_close(seen.detach(), layer.weight.detach(), rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_looking_at_a_parameter_waits_for_nothing(rank: int) -> None:
    layer = nn.Linear(3, 3)
    optimizer = stepped(layer)
    layer.zero_grad()
    optimizer.zero_grad()
    assert isinstance(layer.weight, nn.Parameter)
    looked = layer.weight.shape, layer.weight.dtype, layer.weight.device, layer.weight.requires_grad
    assert looked == (torch.Size([3, 3]), torch.float32, torch.device("cpu"), True)
    assert layer.weight.numel() == 9
    assert layer.weight.grad is None
    assert type(layer.weight) is AwaitedParameter


class Tagged(Tensor):
    """A tensor whose class its results have, too."""


@on_ranks(2, timeout=30)
def test_what_is_made_of_a_tensor_of_another_class_has_that_class(rank: int) -> None:
    model = nn.Linear(3, 3)
    _ = stepped(model)
    awaited = type(model.weight) is AwaitedParameter
    x = torch.ones(2, 3).as_subclass(Tagged)
    assert (awaited, type(model(x)), type(model(x))) == (True, Tagged, Tagged)


@on_ranks(2)
def test_a_parameter_waits_for_its_own_bucket_alone(rank: int) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    _ = stepped(model, 6)
    model[2].weight.sum()
    assert type(model[2].weight) is nn.Parameter
    assert type(model[0].weight) is AwaitedParameter
    assert type(model[3].weight) is AwaitedParameter
    model(torch.ones(2, 6))
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks(2)
def test_what_a_step_writes_is_not_taken_for_an_edit(rank: int, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """Masters would be made to agree with their parameters at every step, which takes longer than the step."""
    layer = nn.Linear(4, 2).bfloat16()  # its storage needs no padding, and is kept
    optimizer = LowLevelZeroOptimizer(AdamW(layer.parameters()), overlap_allgather=overlap)
    settled = []
    monkeypatch.setattr(ShardedParameter, "_settle", lambda record: settled.append(record.name))
    for step in range(3):
        optimizer.backward(layer(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
        optimizer.step()
        assert settled == (["param_groups[0]['params'][0]"] if step == 2 else [])
        if step == 1:
            with torch.no_grad():
                layer.weight.mul_(2)


@on_ranks(2)
def test_an_optimizer_that_goes_leaves_new_values_behind(rank: int) -> None:
    layer = nn.Linear(3, 3)
    old = layer.weight.detach().clone()
    optimizer = stepped(layer)
    del optimizer
    assert type(layer.weight) is nn.Parameter
    assert bool((layer.weight != old).all())


class Own(nn.Parameter):
    pass


@on_ranks(2)
def test_parameters_of_a_class_of_their_own_are_there_when_the_step_ends(rank: int) -> None:
    layer = nn.Linear(3, 3, bias=False)
    layer.weight = Own(layer.weight.detach().clone())
    old = layer.weight.detach().clone()
    _ = stepped(layer)
    assert type(layer.weight) is Own
    assert bool((layer.weight.view(-1).data != old.view(-1)).all())


@on_ranks(2)
def test_compiled_code_stays_whole(rank: int) -> None:
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizers = sharded(model), sharded(plain, overlap=False)
    for step in range(4):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        for optimizer, each in zip(optimizers, (compiled, plain), strict=True):
            optimizer.backward(each(x).square().sum())
            optimizer.step()
            optimizer.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for p, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, other)


@on_ranks(2)
def test_a_model_may_be_compiled_while_its_parameters_are_on_their_way(rank: int) -> None:
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = Odd()
    plain = copy.deepcopy(model)
    optimizer, other = sharded(model), sharded(plain, overlap=False)
    forward: Callable[[Tensor], Tensor] = model
    for step in range(6):
        tokens = torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(step))
        if step == 2:
            assert type(model.norm.weight) is AwaitedParameter
            forward = torch.compile(lambda tokens: model(tokens), backend="eager", fullgraph=True)
        optimizer.backward(forward(tokens))
        optimizer.step()
        optimizer.zero_grad()
        other.backward(plain(tokens))
        other.step()
        other.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1
    for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected)


@on_ranks(1)
def test_the_compiler_is_asked_once_to_wait(rank: int) -> None:
    """However many steps there are before it starts."""
    from torch._dynamo.callback import callback_handler

    torch.manual_seed(0)
    model, counts = Odd(), []
    optimizer = sharded(model)
    for _ in range(3):
        optimizer.backward(model(torch.arange(3)))
        optimizer.step()
        assert type(model.norm.weight) is AwaitedParameter
        counts.append(len(callback_handler.start_callbacks))
    assert counts[0] == counts[-1]


class Scripted(nn.Module):
    """Reads its weights in TorchScript: in a scripted module, in a traced one, and by a scripted function."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        if way == "a scripted module":
            self.first = torch.jit.script(self.first)
        elif way == "a traced module":
            self.first = torch.jit.trace(self.first, torch.ones(2, 4))
        elif way == "a module from a file":
            file = io.BytesIO()
            torch.jit.save(torch.jit.script(self.first), file)
            self.first = torch.jit.load(io.BytesIO(file.getvalue()))
        self.times = torch.jit.script(times) if way == "a scripted function" else times

    def forward(self, x: Tensor) -> Tensor:
        return self.times(self.last(self.first(x)), self.last.weight).square().mean()


def times(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@on_ranks(2, ["none", "a scripted module", "a traced module", "a module from a file", "a scripted function"])
def test_torchscript_reads_new_values(rank: int, way: str) -> None:
    ended, awaited = [], False
    for overlap in (False, True):
        model = Scripted(way)
        optimizer = sharded(model, overlap)
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            optimizer.backward(model(torch.randn(3, 4)))
            optimizer.step()
            awaited |= any(type(p) is AwaitedParameter for p in model.parameters())
            optimizer.zero_grad()
        ended.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ended))
    assert awaited == (way == "none")
