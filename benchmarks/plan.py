"""What `make bench` runs: each part's name, which is its result's, and its command line."""

from __future__ import annotations

from dataclasses import dataclass

_PEAKS = "fsdp2 deepspeed-1 deepspeed-2 ours-1 ours-2 ours-1-offload ours-2-offload floor"
_SOME = "zro fsdp2 deepspeed-1 deepspeed-2 colossalai-1 colossalai-2 ours-1 ours-2 floor"


@dataclass(frozen=True)
class Part:
    """One benchmark with its arguments.

    Attributes:
        name: of the part and its files.
        module: of this package.
        arguments: of its command line.
        quick: those that are added for a quick look, later ones winning: small sizes, so that figures mean nothing.
    """

    name: str
    module: str
    arguments: str = ""
    quick: str = ""

    def command(self, quick: bool) -> list[str]:
        """Behind ``python -m``."""
        return [f"benchmarks.{self.module}", *self.arguments.split(), *(self.quick.split() if quick else ())]


@dataclass(frozen=True)
class Whole:
    """One cell of the matrix of whole steps."""

    size: str
    dtype: str
    micro_batches: int
    ranks: int
    turns: str
    names: str = ""

    def part(self) -> Part:
        """As a part of the plan."""
        name = f"step-{self.size}-{self.dtype}-{self.micro_batches}x-{self.ranks}r"
        what = f"--size {self.size} --dtype {self.dtype} --micro-batches {self.micro_batches} --world-size {self.ranks}"
        names = self.names.split() + (["ours-2-each"] if self.micro_batches > 1 else [])
        who = f"--contestants {' '.join(_suiting(names, self.dtype))}" if self.names else ""
        return Part(
            name, "step", f"{what} {self.turns} {who}", "--size tiny --rounds 1 --steps 1 --warm-up 2 --patience 0"
        )


def _suiting(names: list[str], dtype: str) -> list[str]:
    return [name for name in names if dtype == "fp32" or name != "zro"]


WHOLE = (
    Whole("25m", "fp32", 1, 2, "--rounds 9 --steps 4"),
    Whole("25m", "bf16", 1, 2, "--rounds 7 --steps 3"),
    Whole("25m", "fp32", 4, 2, "--rounds 5 --steps 2 --warm-up 3", _SOME),
    Whole("25m", "fp32", 1, 4, "--rounds 7 --steps 3", _SOME),
    Whole("85m", "fp32", 1, 4, "--rounds 3 --steps 2 --warm-up 2", "ours-1 ours-2 floor"),
)


# Two hosts at the rates of a data centre's link, of a cheaper one, and of two sites', where bytes are all that counts
# and a smaller model tells as much; and two ranks on each.
LINKS = {
    "10gbit": "--rate 10gbit --rounds 5 --steps 2",
    "1gbit": "--rate 1gbit --rounds 5 --steps 2",
    "100mbit": "--rate 100mbit --delay 20 --size 6m --rounds 3 --steps 1 --warm-up 2 --patience 0",
    "1gbit-2x2": "--rate 1gbit --ranks 2 --rounds 5 --steps 2",
    "100mbit-2x2": "--rate 100mbit --ranks 2 --size 6m --rounds 3 --steps 1 --warm-up 2",
}


PARTS = (
    *(whole.part() for whole in WHOLE),
    Part("peak", "peak", f"--dtype fp32 --contestants {_PEAKS}", "--size tiny"),
    Part("peak-bf16", "peak", f"--dtype bf16 --contestants {_PEAKS}", "--size tiny"),
    Part("overhead", "overhead", "", "--parameters 50 --rounds 1 --world-sizes 1 8 64"),
    Part("overhead-4096-elements", "overhead", "--elements 4096 --rounds 7", "--parameters 50 --rounds 1"),
    Part("scale", "scale", "", "--size tiny --world-sizes 8 64"),
    Part("construction", "construction", "", "--models 50x10 --rounds 1 --simulated 8"),
    Part("collectives", "collectives", "--rounds 7", "--world-sizes 2 --elements 1024 --rounds 1"),
    *(
        Part(f"hosts-{name}", "hosts", link, "--size tiny --rounds 1 --steps 1 --warm-up 2 --patience 0")
        for name, link in LINKS.items()
    ),
    Part("checkpoints", "checkpoints", "--rounds 5", "--layers 2 --width 64 --rounds 1"),
    Part("cuda", "cuda", "", "--device cpu --size tiny --world-sizes 1 8 --copied 1000000 --steps 1"),
)
