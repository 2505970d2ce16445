"""Process groups of ranks that stand in rows and columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lowlevel_zero import Communication


class Grid(NamedTuple):
    """The outer and the inner process group of a rank, of ``shape`` ``(outer, inner)``."""

    outer: Any
    inner: Any

    @classmethod
    def of(cls, rank: int, shape: tuple[int, int], first: int = 0, turned: bool = False) -> Grid:
        """``turned``: ranks are counted from column to column."""
        ranks = torch.arange(first, first + shape[0] * shape[1])
        ranks = ranks.view(shape[::-1]).t() if turned else ranks.view(shape)
        (outer,) = [group for line in ranks.t().tolist() if rank in line for group in [group_among(line)]]
        (inner,) = [group for line in ranks.tolist() if rank in line for group in [group_among(line)]]
        return cls(outer, inner)

    def options(self, form: str) -> dict[str, Any]:
        if form == "flat":
            return {}
        if form == "pair":
            return {"dp_process_group": (self.outer, self.inner)}
        options = {"dp_process_group": self.inner, "extra_dp_group": self.outer}
        return options | ({"communication": Communication(hybrid_shard=True)} if form == "hybrid" else {})


def group_among(ranks: list[int]) -> Any:
    """Their process group; these ranks alone call it."""
    return dist.new_group(ranks, use_local_synchronization=True)
