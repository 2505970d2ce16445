"""One rank of ``benchmarks.hosts``, as ``torchrun`` starts it: runs the course, and writes down what it has seen."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch.distributed as dist

from .rounds import Course, run_course, settle

COURSE = "course.pickle"


def main() -> None:
    """``python -m benchmarks.host_rank FOLDER``: the course is in ``FOLDER``, and what is seen goes there."""
    folder = Path(sys.argv[1])
    course: Course = pickle.loads((folder / COURSE).read_bytes())
    settle()
    dist.init_process_group("gloo")
    seen = run_course(dist.get_rank(), dist.get_world_size(), course)
    (folder / result_of(dist.get_rank())).write_bytes(pickle.dumps(seen))
    dist.barrier()  # torchrun ends all when one ends
    os._exit(0)  # some peers' threads would not come to an end


def result_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}.pickle"


if __name__ == "__main__":
    main()
