"""``ZeroAccelerator``: accelerate's ``Accelerator`` with sharded optimizers instead of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypeVarTuple, Unpack

from ..communication.process_groups import start_alone
from ..optimizer import LowLevelZeroOptimizer
from .checks import check_accelerator, check_loss_scales, check_plain
from .files import load_optimizer, save_sharded

M = TypeVar("M")
Ts = TypeVarTuple("Ts")


class ZeroAccelerator(Accelerator):  # type: ignore[misc]  # accelerate ships no types
    """An ``Accelerator`` whose ``prepare`` takes plain models and optimizers, and shards the optimizers.

    A model is moved, cast and compiled as accelerate does it, but not wrapped. Every rank calls ``prepare``,
    ``backward``, ``save_state`` and ``load_state``. A single process makes itself a process group of one rank.

    Args:
        zero_options: keywords of ``LowLevelZeroOptimizer``, for each optimizer that is prepared.
        args, kwargs: ``Accelerator``'s.

    Raises:
        TypeError, ValueError: fp16 or fp8 by accelerate, or another way to shard beside this.
        RuntimeError: accelerate doesn't see the processes that were launched.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, zero_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.zero_options = dict(zero_options or {})
        super().__init__(*args, **kwargs)
        check_accelerator(self)

    # ---- prepare ----

    @overload
    def prepare(self, one: M, /, *, device_placement: list[bool] | None = None) -> M: ...
    @overload
    def prepare(self, *args: Unpack[Ts], device_placement: list[bool] | None = None) -> tuple[Unpack[Ts]]: ...
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> object:  # type: ignore[misc]
        """Return objects as accelerate prepares them, models first; raise if one isn't plain. Communicates."""
        for each in args:
            check_plain(each)
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        self._kept_beside([each for each in optimizers if not isinstance(each, AcceleratedOptimizer)])
        placed = zip(args, device_placement or len(args) * [None], strict=True)
        ready = [self.prepare_model(each, to) if isinstance(each, nn.Module) else each for each, to in placed]
        return super().prepare(*ready, device_placement=device_placement)

    def prepare_model(self, model: M, device_placement: bool | None = None, evaluation_mode: bool = False) -> M:
        """Return ``model``, moved, autocast and compiled, but not wrapped; raise if it is in DDP or FSDP."""
        check_plain(model)
        prepared: M = super().prepare_model(model, device_placement, evaluation_mode=True)
        # A compiled one, which prepare hands over again, would be listed and saved beside the module that it wraps.
        self._models = list(dict.fromkeys(getattr(each, "_orig_mod", each) for each in self._models))
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Shard a plain optimizer of prepared models, unless it is wrapped already; return it wrapped. Communicates."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            check_plain(optimizer)
            optimizer = self._shard(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=False)

    def _shard(self, optimizer: Optimizer) -> LowLevelZeroOptimizer:
        """Return ``optimizer`` sharded; raise ``ValueError`` if no prepared model has its parameters. Communicates."""
        own, kept = _parameters_of([optimizer]), self._kept_beside([optimizer])
        models = [model for model in self._models if not own.isdisjoint(model.parameters())]
        if not models:
            raise ValueError(
                "prepare: expected an optimizer over parameters of a prepared model, got one that holds none of them: "
                "call prepare(model, optimizer), with an optimizer made from model.parameters()"
            )
        start_alone()
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        sharded = LowLevelZeroOptimizer(optimizer, model=model, **self.zero_options)
        self._optimizers = kept
        return sharded

    def _kept_beside(self, new: list[Optimizer]) -> list[Any]:
        """Return the prepared optimizers that ``new`` ones won't retire; raise if one of several scales the loss."""
        own = {p for p in _parameters_of(new) if p.requires_grad}  # what they have frozen is another's to train
        alive = [each for each in self._optimizers if not each.optimizer.is_retired]
        kept = [each for each in alive if all(record.p not in own for record in each.optimizer.sharded_parameters)]
        check_loss_scales([*(each.optimizer for each in kept), *new], self.zero_options.get("forced_dtype"))
        return kept

    def _sharded(self) -> list[LowLevelZeroOptimizer]:
        return [each.optimizer for each in self._optimizers]

    # ---- backward ----

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run accelerate's backward, and reduce all gradients; raise if only models were prepared. Communicates."""
        if self._models and not self._optimizers:
            raise RuntimeError(
                "backward: expected prepare(model, optimizer), got a model alone, whose gradients would not be "
                "reduced: pass its optimizer to prepare, too"
            )
        with ExitStack() as passes:
            for optimizer in self._sharded():
                loss = passes.enter_context(optimizer.backward_pass(loss, kwargs.get("inputs")))
            super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients of ``model`` in ``p.grad``, unreduced, as in DDP, unless ``sync_each_batch`` is set."""
        with ExitStack() as pauses:
            for optimizer in () if self.gradient_state.plugin_kwargs.get("sync_each_batch") else self._of(model):
                pauses.enter_context(optimizer.no_sync())
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce the gradients of ``model`` in the body's backwards, though they are run within ``no_sync``."""
        with ExitStack() as syncs:
            for optimizer in self._of(model):
                syncs.enter_context(optimizer.step_state.syncing(True))
            yield

    def _of(self, model: nn.Module) -> list[LowLevelZeroOptimizer]:
        """Return the prepared optimizers that train parameters of ``model``."""
        own = set(model.parameters())
        return [each for each in self._sharded() if any(record.p in own for record in each.sharded_parameters)]

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Raise ``NotImplementedError``: ``Join`` needs DDP."""
        raise NotImplementedError(
            "join_uneven_inputs: expected the same number of batches on every rank, got a Join context, which needs "
            "DDP: prepare the data loader with even_batches=True"
        )

    # ---- checkpoints: accelerate's, and a folder for each optimizer, in which every rank writes its slices ----

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> str:
        """Save as accelerate does, and each optimizer's slices to a folder; return the path. Every rank calls it."""
        with self._without_optimizers():
            saved: str = super().save_state(output_dir, *args, **kwargs)
        for number, optimizer in enumerate(self._sharded()):
            save_sharded(optimizer, *_places(saved, number))
        return saved

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load as accelerate does, and each optimizer from its folder, or else from ``optimizer.bin``. Communicates."""
        found: list[str] = []
        hook = self.register_load_state_pre_hook(lambda models, folder: found.append(folder))
        with hook, self._without_optimizers():
            super().load_state(input_dir, *args, **kwargs)
        for number, optimizer in enumerate(self._sharded()):
            load_optimizer(optimizer, *_places(found[0], number))

    @contextmanager
    def _without_optimizers(self) -> Iterator[None]:
        """Hide the prepared optimizers from accelerate for the time of the body."""
        prepared, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._optimizers = prepared


def _parameters_of(optimizers: Iterable[Optimizer]) -> set[Tensor]:
    return {p for each in optimizers for group in each.param_groups for p in group["params"]}


def _places(directory: str, number: int) -> tuple[Path, Path]:
    """Return the folder of an optimizer's slices, and the file to which accelerate writes an unsharded one."""
    file = f"optimizer_{number}.bin" if number else "optimizer.bin"
    return Path(directory, f"optimizer_{number}"), Path(directory, file)
