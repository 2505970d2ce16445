"""simulate: a job on some ranks in one process, under a seed.

def simulate(
    job: Callable[[int], T],
    ranks: int,
    seed: int,
    carrier: Carrier = "messages",
    fault: Fault | None = None,
    *,
    count: bool = False,      # count operations, which a fault of the kind "raise" does anyway
) -> Outcome[T]
"""

from .outcome import CARRIERS, Carrier, Fault, FaultKind, InjectedFault, Left, Outcome, SimulationEnded

__all__ = ["CARRIERS", "Carrier", "Fault", "FaultKind", "InjectedFault", "Left", "Outcome", "SimulationEnded"]
