"""Marks in the work of a device, and the time between them."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch


class Stopwatch:
    """Starts now. On CUDA its marks are events on the current stream: the host goes on, so that work overlaps.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Here, behind all that the device has been given so far."""
        if self._device == "cpu":
            self._marks.append(perf_counter())
        else:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()

    def seconds(self) -> list[float]:
        """From the start to each mark, the start being the first; waits until the device has come to the last."""
        first, *_, last = self._marks
        if self._device == "cpu":
            return [mark - first for mark in self._marks]
        last.synchronize()
        return [first.elapsed_time(mark) / 1e3 for mark in self._marks]
