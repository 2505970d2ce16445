"""A small mixture of experts, whole in one process or with its experts spread over ranks, and how both train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowlevel_zero import LowLevelZeroOptimizer
from tests.support.internals import as_on_a_device
from tests.support.oracle import parameters_of
from tests.support.ranks import run_ranks

EXPERTS = 4
TOKENS = 6
WIDTH = 5

Route = Callable[[int, int], Tensor]
"""The expert of each token: ``route(step, rank)``."""


def uneven(step: int, rank: int) -> Tensor:
    """Everybody; two experts for all; two experts, of which the second has one rank's tokens alone; everybody."""
    tokens = torch.arange(TOKENS)
    if step % 4 == 1:
        return tokens % 2 * 2
    if step % 4 == 2:
        return torch.full((TOKENS,), int(rank == 0))
    return (tokens + rank) % EXPERTS


class Layout(NamedTuple):
    """Where a rank stands: ``size`` neighbours share the experts out, and those ``size`` apart have the same ones."""

    size: int
    rank: int
    neighbours: dist.ProcessGroup
    twins: dist.ProcessGroup

    @property
    def own(self) -> list[int]:
        """The experts of this rank."""
        each = EXPERTS // self.size
        return list(range(self.rank * each, (self.rank + 1) * each))


def lay_out(rank: int, world_size: int, size: int) -> Layout:
    """Every rank calls it. The groups of one world are made once, however many cases train in it."""
    return _lay_out(dist.group.WORLD, rank, world_size, size)


@cache
def _lay_out(world: dist.ProcessGroup, rank: int, world_size: int, size: int) -> Layout:
    neighbours = [dist.new_group(list(range(at, at + size))) for at in range(0, world_size, size)]
    twins = [dist.new_group(list(range(at, world_size, size))) for at in range(size)]
    return Layout(size, rank % size, neighbours[rank // size], twins[rank % size])


class Swap(torch.autograd.Function):
    """All-to-all of tokens, of any dtype."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, give: list[int], take: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.give, ctx.take, ctx.group = give, take, group
        return _swapped(tokens, give, take, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _swapped(gradient, ctx.take, ctx.give, ctx.group), None, None, None


def _swapped(tokens: Tensor, give: list[int], take: list[int], group: dist.ProcessGroup) -> Tensor:
    got = tokens.new_empty(sum(take), tokens.shape[1])
    dist.all_to_all_single(got.view(torch.uint8), tokens.contiguous().view(torch.uint8), take, give, group=group)
    return got


class Expert(nn.Module):
    """One expert; ``calls`` differs between experts from the start, and is nobody else's."""

    calls: Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(100 + number)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.register_buffer("calls", torch.tensor([float(number)]))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(tokens))) + self.frozen(tokens)
        return out


class Numbered(nn.ModuleDict):
    """Experts by their numbers in the whole model."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


class Mixture(nn.Module):
    """Dense layers, which may be dropped, around experts: those of ``layout``, or all; two before and some behind.

    Experts have the names of the whole model if they are ``numbered``, else those of places in a list.
    """

    def __init__(self, layout: Layout | None = None, behind: int = 0, numbered: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward = nn.Linear(4, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.behind = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(behind))
        self.outward = nn.Linear(WIDTH, 3)
        self.layout = layout
        own = {number: Expert(number) for number in (range(EXPERTS) if layout is None else layout.own)}
        by_number = {str(number): expert for number, expert in own.items()}
        self.experts: Any = Numbered(by_number) if numbered else nn.ModuleList(own.values())

    def forward(self, x: Tensor, routes: Sequence[Tensor], rank: int, drop: set[int]) -> Tensor:
        """``routes`` are of all ranks."""
        hidden = torch.tanh(self.inward(x))
        for at, layer in enumerate(self.layers):
            if at not in drop:
                hidden = hidden + torch.tanh(layer(hidden))
        weight = torch.softmax(self.gate(hidden), 1).gather(1, routes[rank][:, None])
        mixed = self._alone(hidden, routes[rank]) if self.layout is None else self._spread(hidden, routes, rank)
        hidden = hidden + weight * mixed
        for at, layer in enumerate(self.behind, start=len(self.layers)):
            if at not in drop:
                hidden = hidden + torch.tanh(layer(hidden))
        out: Tensor = self.outward(hidden)
        return out

    def _alone(self, hidden: Tensor, route: Tensor) -> Tensor:
        mixed = torch.zeros_like(hidden)
        for at, expert in enumerate(self.experts):
            mine = (route == at).nonzero()[:, 0]
            if len(mine):
                mixed = mixed.index_add(0, mine, expert(hidden[mine]))
        return mixed

    def _spread(self, hidden: Tensor, routes: Sequence[Tensor], rank: int) -> Tensor:
        layout = cast(Layout, self.layout)
        each = EXPERTS // layout.size
        first = rank - layout.rank
        near = [routes[first + other] for other in range(layout.size)]
        order = routes[rank].argsort(stable=True)
        give = [int((routes[rank] // each == other).sum()) for other in range(layout.size)]
        coming = [(route // each == layout.rank) for route in near]
        take = [int(mask.sum()) for mask in coming]
        tokens = Swap.apply(hidden[order], give, take, layout.neighbours)
        whose = torch.cat(
            [
                route[route.argsort(stable=True)][mask[route.argsort(stable=True)]]
                for route, mask in zip(near, coming, strict=True)
            ]
        )
        done = torch.zeros_like(tokens) + tokens * 0
        for at, expert in zip(layout.own, self.experts, strict=True):
            mine = (whose == at).nonzero()[:, 0]
            if len(mine):
                done = done.index_add(0, mine, expert(tokens[mine]))
        back = Swap.apply(done, take, give, layout.neighbours)
        return torch.zeros_like(hidden).index_add(0, order, back)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True)
class Run:
    """One training run of a mixture, by one process or by several."""

    world_size: int = 4
    size: int = 2
    steps: int = 4
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    route: Route = uneven
    drop: Callable[[int, int], set[int]] = lambda step, rank: set()
    bare: bool = False
    behind: int = 0
    as_on_device: bool = False
    numbered: bool = False
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    clip: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


class Trace(NamedTuple):
    """What a run left: parameters by the names of the whole model, first gradients likewise, norms and losses."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    norms: list[float]
    losses: list[float]


def loss_of(model: nn.Module, run: Run, step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 100 * micro + 10_000 * step)
    x = torch.randn(TOKENS, 4, generator=generator).to(run.dtype)
    y = torch.randn(TOKENS, 3, generator=generator).to(run.dtype)
    routes = [run.route(step, each) for each in range(run.world_size)]
    loss: Tensor = (model(x, routes, rank, run.drop(step, rank)) - y).square().mean() / run.micro_batches
    return loss


def train_alone(run: Run) -> Trace:
    """The oracle: all experts and every rank's share of the batch in one process, in fp32."""
    model = Mixture(behind=run.behind).to(run.dtype).float()
    exact = Run(**{**vars(run), "dtype": torch.float32})
    optimizer = run.optimizer([p for p in model.parameters() if p.requires_grad])
    gradients: dict[str, Tensor | None] = {}
    norms, losses = [], []
    for step in range(run.steps):
        total = 0.0
        for micro in range(run.micro_batches):
            shares = [loss_of(model, exact, step, micro, rank) for rank in range(run.world_size)]
            mean = torch.stack(shares).sum() / run.world_size
            mean.backward()
            total += mean.item()
        if step == 0:
            gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip or float("inf"))))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return Trace(parameters_of(model), gradients, norms, losses)


class Trained(NamedTuple):
    """A rank's mixture, ready to train."""

    model: Mixture
    optimizer: LowLevelZeroOptimizer
    layout: Layout


def prepare(rank: int, run: Run) -> Trained:
    layout = lay_out(rank, run.world_size, run.size)
    model = Mixture(layout, run.behind, run.numbered).to(run.dtype)
    optimizer = wrap(run, model, layout)
    if run.as_on_device:
        as_on_a_device(optimizer)
    return Trained(model, optimizer, layout)


def wrap(run: Run, model: Mixture, layout: Layout, **options: Any) -> LowLevelZeroOptimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    experts = [p for p in model.experts.parameters() if p.requires_grad]
    assigned = {dist.group.WORLD: [p for p in trained if not any(p is e for e in experts)], layout.twins: experts}
    options = {"pg_to_param_list": assigned, **run.options, **options}
    return LowLevelZeroOptimizer(run.optimizer(trained), model=model, clip_grad_norm=run.clip, **options)


def whole_name(name: str, layout: Layout) -> str:
    """A parameter's name in the whole model."""
    parts = name.split(".")
    if parts[0] == "experts":
        parts[1] = str(layout.own[int(parts[1])])
    return ".".join(parts)


def train_step(trained: Trained, run: Run, step: int, rank: int) -> float:
    """All micro-batches of a step, up to the optimizer's own; the loss on this rank."""
    model, optimizer, _ = trained
    total = 0.0
    for micro in range(run.micro_batches):
        loss = loss_of(model, run, step, micro, rank)
        total += loss.item()
        if run.bare:
            loss.backward()
        else:
            optimizer.backward(loss)
    return total


def train_spread(rank: int, world_size: int, run: Run) -> Trace:
    """A run as one rank of several, of its own experts."""
    trained = prepare(rank, run)
    model, optimizer, layout = trained
    names = {whole_name(name, layout): p for name, p in model.named_parameters()}
    gradients: dict[str, Tensor | None] = {}
    norms, losses = [], []
    for step in range(run.steps):
        losses.append(train_step(trained, run, step, rank))
        if step == 0:
            gradients = {name: optimizer.get_param_grad(p) for name, p in names.items() if p.requires_grad}
        optimizer.step()
        norms.append(cast(float, optimizer.get_grad_norm()))
        optimizer.zero_grad()
    return Trace({name: p.detach().clone() for name, p in names.items()}, gradients, norms, losses)


def check(run: Run, tolerance: float) -> None:
    """Gradients, norms, losses and parameters are those of one process.

    Gradients to ``tolerance`` of their size, parameters of the way that they went: a factor 2 or a lost micro-batch is
    off by half of that or more, a rank left out or a skipped step by a quarter.
    """
    judge(run, run_ranks(train_spread, run.world_size, run), tolerance)


def judge(run: Run, ranks: list[Trace], tolerance: float) -> None:
    """As ``check``, of ``ranks`` that have run."""
    expected = train_alone(run)
    start = dict(Mixture(behind=run.behind).to(run.dtype).named_parameters())
    assert {name for trace in ranks for name in trace.parameters} == expected.parameters.keys()
    for trace in ranks:
        assert trace.norms == pytest.approx(expected.norms, rel=tolerance)
        for name, gradient in trace.gradients.items():
            exact = expected.gradients[name]
            assert (gradient is None) == (exact is None), name
            if gradient is not None and exact is not None:
                assert (gradient.float() - exact).norm() <= tolerance * exact.norm(), name
        for name, value in trace.parameters.items():
            exact = expected.parameters[name]
            way = (exact - start[name].float()).norm()
            rounding = torch.finfo(value.dtype).eps / 2 * exact.norm()
            assert (value.float() - exact).norm() <= tolerance * way + rounding, name
    losses = torch.tensor([trace.losses for trace in ranks]).mean(0)
    assert losses.tolist() == pytest.approx(expected.losses, rel=tolerance)
    held: dict[str, Tensor] = {}
    for trace in ranks:  # who has the same parameter has the same values
        for name, value in trace.parameters.items():
            assert torch.equal(held.setdefault(name, value), value)
