"""What torchrun starts on each host of ``tests/soak/test_hosts.py``: steps of a small model, told line by line.

``python -m tests.support.over_link STEPS TIMEOUT``: with seconds after which a collective gives up. A line of JSON for
each step, for the end, or for the error that ended the run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lowlevel_zero import Diagnostics, LowLevelZeroOptimizer

PAUSE = 0.1  # seconds of a step, at least
GRACE = 5.0  # seconds in which the other rank of a host can tell its error: torchrun ends all when one ends


def main() -> None:
    steps, timeout = int(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        train(steps, timeout)
    except Exception as error:  # whatever ends a run here is what its user sees
        tell(error=type(error).__name__, message=str(error))
        time.sleep(GRACE)
        os._exit(1)
    tell(sent_again=sent_again())
    dist.barrier()
    os._exit(0)


def train(steps: int, timeout: float, pause: float = PAUSE) -> list[float]:
    """This rank's losses, which it tells, too."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = LowLevelZeroOptimizer(
        torch.optim.AdamW(model.parameters()), model=model, stage=2, diagnostics=Diagnostics(stall_timeout=timeout / 3)
    )
    losses = []
    for step in range(steps):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = model(x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tell(step=step, loss=loss.item())
        time.sleep(pause)
    return losses


def sent_again() -> int:
    """Packets that this host's kernel has sent more than once."""
    names, numbers = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
    return int(numbers[names.index("RetransSegs")])


def tell(**facts: object) -> None:
    line = json.dumps({"rank": dist.get_rank(), **facts}) + "\n"
    os.write(1, line.encode())  # in one piece: the other rank of this host writes, too


if __name__ == "__main__":
    main()
