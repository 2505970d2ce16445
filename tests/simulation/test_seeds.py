"""Programs of fixed seeds do what one process does, or are refused by all ranks: thirty seconds of one core.

``make simulate`` runs others for as long as it is let.
"""

from __future__ import annotations

import pytest

from tests.simulation.draw import draw
from tests.simulation.run import run, told

SEEDS = [*range(300), *(each + at for each in (330, 370, 430, 700, 980) for at in range(10))]
EACH = 10  # a test, so that processes share them


@pytest.mark.parametrize("first", range(0, len(SEEDS), EACH))
def test_programs_of_seeds(first: int) -> None:
    for seed in SEEDS[first : first + EACH]:
        verdict = run(draw(seed))
        assert verdict.failure is None, told(seed, verdict)
