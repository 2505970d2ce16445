"""ZeRO stage 1 and 2 in one file, on torch alone: the idea of this package without its speed.

Every rank owns a slice of every parameter. Backward leaves whole gradients on each rank. A reduction sums them over the
ranks and leaves each rank the slice that it owns. The optimizer steps the slices, and a gather makes parameters whole::

    torchrun --standalone --nproc-per-node 2 examples/zero_in_one_file.py --stage 2

The package does the same while backward runs, for every dtype and device, and tells which rank made a mistake.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class ShardedParameter:
    """A parameter, padded and viewed as one row for each rank, and an fp32 copy of the row that this rank owns.

    With 2 ranks, a parameter of 5 elements is padded to 6: rank 0 owns the row ``a b c``, rank 1 the row ``d e 0``.
    """

    def __init__(self, p: nn.Parameter, rank: int, ranks: int) -> None:
        self.p = p
        self.size = -(-p.numel() // ranks)
        self.rows = p.new_zeros(ranks, self.size)
        flat = self.rows.view(-1)[: p.numel()]
        flat.copy_(p.detach().reshape(-1))
        p.data = flat.view(p.shape)  # The parameter is a view of its rows from now on: a gather into them changes it.
        self.slice = nn.Parameter(self.rows[rank].float())  # [size]


class ZeroOptimizer:
    """An optimizer that is sharded over all ranks.

    Args:
        params: the parameters, in the same order on every rank.
        make_optimizer: makes an elementwise optimizer, such as AdamW, over the slices.
        stage: 1 all-reduces gradients, 2 reduce-scatters them.
        bucket_size: a bucket is reduced at once. It is full when it has this many elements.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
        stage: int = 2,
        bucket_size: int = 2**20,
    ) -> None:
        self.rank, self.ranks, self.stage = dist.get_rank(), dist.get_world_size(), stage
        params = list(params)
        for p in params:
            dist.broadcast(p.data, src=0)  # All ranks start with the values of rank 0.
        self.parameters = [ShardedParameter(p, self.rank, self.ranks) for p in params if p.requires_grad]
        self.buckets = list(cut_into_buckets(self.parameters, bucket_size))
        self.optimizer = make_optimizer([sharded.slice for sharded in self.parameters])

    @torch.no_grad()
    def step(self) -> None:
        """Reduce all gradients, step the slices of parameters that some rank used, and gather these parameters."""
        used = dict(zip(self.parameters, self.used_by_any_rank(), strict=True))
        for bucket in self.buckets:
            gradients = torch.split(self.reduce(bucket).float(), [sharded.size for sharded in bucket])
            for sharded, gradient in zip(bucket, gradients, strict=True):
                sharded.slice.grad = gradient if used[sharded] else None
        self.optimizer.step()
        for bucket in self.buckets:
            self.gather([sharded for sharded in bucket if used[sharded]])

    def used_by_any_rank(self) -> list[bool]:
        """Return for each parameter whether any rank has a gradient for it: this is the presence map.

        A layer may drop on one rank alone. The parameters of a layer that dropped on all ranks are not stepped: neither
        weight decay nor momentum moves them.
        """
        used = torch.tensor([sharded.p.grad is not None for sharded in self.parameters], dtype=torch.uint8)
        used = used.to(self.parameters[0].p.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in used.tolist()]

    def reduce(self, bucket: list[ShardedParameter]) -> Tensor:
        """Average a bucket's gradients over the ranks, and return this rank's row of them, ``[sum of sizes]``.

        Two gradients ``a b c d e`` and ``v w x y`` are packed as the rows ``a b c v w`` and ``d e 0 x y``.
        """
        rows = torch.cat([take_gradient(sharded) for sharded in bucket], dim=1)  # [ranks, sum of sizes]
        if self.stage == 1:
            dist.all_reduce(rows)
            return rows[self.rank] / self.ranks
        row = torch.empty_like(rows[0])
        dist.reduce_scatter(row, list(rows))
        return row / self.ranks

    def gather(self, stepped: list[ShardedParameter]) -> None:
        """Bring every rank's stepped slices into the rows of the parameters, which become whole again."""
        if not stepped:
            return
        row = torch.cat([sharded.slice.to(sharded.rows.dtype) for sharded in stepped])
        rows = row.new_empty(self.ranks, row.numel())
        dist.all_gather(list(rows), row)
        columns = torch.split(rows, [sharded.size for sharded in stepped], dim=1)
        for sharded, column in zip(stepped, columns, strict=True):
            sharded.rows.copy_(column)


def take_gradient(sharded: ShardedParameter) -> Tensor:
    """Return ``p.grad`` as rows, ``[ranks, size]``, zeros where this rank has none, and set it to ``None``."""
    rows = torch.zeros_like(sharded.rows)
    if sharded.p.grad is not None:
        rows.view(-1)[: sharded.p.numel()] = sharded.p.grad.reshape(-1)
        sharded.p.grad = None
    return rows


def cut_into_buckets(parameters: list[ShardedParameter], least: int) -> Iterator[list[ShardedParameter]]:
    """Yield neighbours of one dtype, of at least ``least`` elements together where there are as many."""
    bucket: list[ShardedParameter] = []
    for sharded in parameters:
        full = sum(one.p.numel() for one in bucket) >= least
        if bucket and (full or bucket[0].p.dtype != sharded.p.dtype):
            yield bucket
            bucket = []
        bucket.append(sharded)
    yield bucket


def main() -> None:
    """Fit a linear model to points; each rank has its own share of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2)
    stage = parser.parse_args().stage
    dist.init_process_group("gloo")
    model = nn.Linear(3, 1)
    optimizer = ZeroOptimizer(model.parameters(), lambda slices: torch.optim.AdamW(slices, lr=0.05), stage)
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(101):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
