"""Errors for uses of ``p.grad`` that can't be right: one for each cause, with its remedy."""

from __future__ import annotations

from collections.abc import Sequence

GRAD_SCALER = (
    "expected no enabled torch.amp.GradScaler around this optimizer: it scales losses and steps by what one rank "
    "finds. Convert the model to fp16 and call optimizer.backward(loss), which scales the loss by itself; or use bf16 "
    "(model or autocast), which needs no scaling; or GradScaler(enabled=False)"
)


def of_scaler(name: str, what: str) -> RuntimeError:
    """Return the error for an enabled GradScaler."""
    return RuntimeError(f"{name}: {GRAD_SCALER}")


def of_memory(name: str, what: str) -> RuntimeError:
    """Return the error for access to the memory of a sharded gradient, which has none."""
    return RuntimeError(
        f"{name}: expected a tensor with memory, got {what} of p.grad, of which this rank holds a slice: take "
        "p.grad.full_tensor() on every rank, and write it back by p.grad.copy_(tensor)"
    )


def of_pickling(name: str) -> RuntimeError:
    """Return the error for pickling, saving or copying a sharded gradient."""
    return RuntimeError(
        f"{name}: expected a plain tensor to save, pickle or copy, got p.grad, of which this rank holds a slice: save "
        "p.grad.full_tensor(), which every rank calls"
    )


def of_data(name: str) -> RuntimeError:
    """Return the error for ``p.grad.data = tensor``."""
    return RuntimeError(
        f"{name}: expected p.grad.copy_(tensor), got p.grad.data = tensor, which would leave each rank's slice of the "
        "gradient as it is: call p.grad.copy_(tensor) on every rank"
    )


def of_conversion(name: str, what: str) -> RuntimeError:
    """Return the error for a model that is converted while there are gradients."""
    return RuntimeError(
        f"{name}: expected no gradients while the model is converted, got p.grad converted to {what}: call "
        "optimizer.zero_grad() first"
    )


def of_shape(name: str, expected: Sequence[int], got: Sequence[int]) -> RuntimeError:
    """Return the error for a tensor that can't be broadcast to the gradient's shape."""
    return RuntimeError(
        f"{name}: expected a tensor that fits p.grad, {tuple(expected)}, got {tuple(got)}: pass one of that shape, or "
        "one that broadcasts to it"
    )


def of_reshaping(name: str, what: str) -> RuntimeError:
    """Return the error for an operation that changes shape or memory in place."""
    return RuntimeError(
        f"{name}: expected p.grad to keep its shape and memory, got {what}: take p.grad.clone() on every rank, and "
        "change that"
    )


def of_collective(name: str, what: str) -> RuntimeError:
    """Return the error for a collective of the caller's own."""
    return RuntimeError(
        f"{name}: expected no collective on p.grad, which is averaged over the ranks already, got {what}: leave it "
        "out; p.grad.full_tensor() is the averaged gradient on every rank"
    )


def of_kept(name: str) -> RuntimeError:
    """Return the error for a ``p.grad`` object that is used after its gradient was cleared."""
    return RuntimeError(
        f"{name}: expected p.grad of the present step, got one that was kept while its gradient was cleared: take "
        "p.grad anew after each backward, or keep p.grad.clone()"
    )


def of_hook(name: str, what: str) -> RuntimeError:
    """Return the error for using ``p.grad`` in a hook during a backward."""
    return RuntimeError(
        f"{name}: expected p.grad to be left alone within a backward, got {what} in a hook, before the ranks have "
        "averaged it: call it between backward and step"
    )


def of_ddp(name: str) -> RuntimeError:
    """Return the error for a model that is wrapped in DistributedDataParallel."""
    return RuntimeError(
        f"{name}: expected this optimizer alone to reduce gradients, got another reduction of p.grad within the "
        "backward, as of DistributedDataParallel: leave that wrapper out, and run the plain model (ddp.module)"
    )


def of_dead(name: str) -> RuntimeError:
    """Return the error for a gradient whose optimizer is gone."""
    return RuntimeError(
        f"{name}: expected the optimizer that reduced this gradient, which is gone: keep a reference to the optimizer, "
        "or set p.grad to None"
    )
