"""What is remembered of a run: its losses, what it held, the time it took."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class History:
    """What is remembered of a run; the losses are the same on every rank."""

    train: list[float] = field(default_factory=list)  # of each step: nats a byte, averaged over the ranks
    validation: list[tuple[int, float]] = field(default_factory=list)  # after how many steps, nats a byte
    held: dict[str, int] = field(default_factory=dict)  # bytes on this rank by owner
    seconds: float = 0.0  # spent in steps, not in validation

    def remember_held(self, now: dict[str, int]) -> None:
        """Keep the most of each owner: a step that dropped layers holds fewer gradients than others."""
        self.held = {owner: max(size, self.held.get(owner, 0)) for owner, size in now.items()}
