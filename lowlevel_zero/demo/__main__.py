"""The command: read the options, join the ranks, train, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .baselines import baselines
from .model import generate
from .options import Options, choose_dtype, parse
from .picture import draw
from .progress import Progress, optional
from .ranks import Ranks, process_group
from .report import conclusion, heading, printable
from .summary import Summary, ddp_would_hold
from .text import fixed_windows, library_sources, read, split
from .training import Trainer

VALIDATION_WINDOWS = 128
PROMPT, SAMPLE_BYTES, TEMPERATURE = b"def ", 240, 0.8


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo on this rank."""
    options = parse(arguments)
    for name in ("tqdm", "matplotlib"):  # better missed now than after the training
        optional(name)
    options.out.mkdir(parents=True, exist_ok=True)
    with process_group(options.device) as ranks:
        _run(options, ranks)


def _run(options: Options, ranks: Ranks) -> None:
    files = split(library_sources(), ranks.world_size)
    windows = fixed_windows(read(files.validation), VALIDATION_WINDOWS, options.context)
    dtype = choose_dtype(options.dtype, ranks.device, options.stage)
    trainer = Trainer(options, dtype, ranks)
    newest = trainer.checkpoints.newest() if options.resume else None
    done = trainer.resume(newest) if newest else 0
    first = ranks.rank == 0
    if first:
        print(heading(options, dtype, ranks, trainer.parameters, files, newest), flush=True)
    with Progress(options.steps, visible=first, done=done) as progress:
        trainer.train(read(files.share(ranks.rank, ranks.world_size)), windows, progress.show)
    if first:
        _conclude(_summary(trainer, dtype, baselines(read(files.training), windows)), options.out)


def _conclude(summary: Summary, out: Path) -> None:
    draw(summary, Path(summary.picture))
    summary.write(out / "summary.json")
    print(conclusion(summary), flush=True)


def _summary(trainer: Trainer, dtype: str, levels: dict[str, float]) -> Summary:
    options, history = trainer.options, trainer.history
    return Summary(
        options=options.plain(),
        dtype=dtype,
        device=trainer.ranks.device.type,
        world_size=trainer.ranks.world_size,
        parameters=trainer.parameters,
        seconds=history.seconds,
        tokens_per_second=options.steps * trainer.tokens_per_step / history.seconds,
        layers_drawn=trainer.model.stack.drawn,
        layers_dropped=trainer.model.stack.dropped,
        train=history.train,
        validation=history.validation,
        baselines=levels,
        held=history.held,
        ddp=ddp_would_hold(trainer.model),
        prompt=printable(PROMPT),
        sample=printable(generate(trainer.model.eval(), PROMPT, SAMPLE_BYTES, TEMPERATURE, options.seed)),
        picture=str(options.out / "loss.png"),
    )


if __name__ == "__main__":
    main()
