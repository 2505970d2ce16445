"""Errors for uses of ``p.grad`` that can't be right: one for each cause, with its remedy."""

from __future__ import annotations


class Refusal(str):
    """The text of an error about the gradient of one parameter; ``{}`` stands for the refused operation."""

    __slots__ = ()

    def __call__(self, name: str, *done: object) -> RuntimeError:
        """Return a ``RuntimeError`` with this text about the parameter ``name``, in which ``done`` fills ``{}``."""
        return RuntimeError(f"{name}: {self.format(*done)}")


SCALER = Refusal(
    "expected no enabled torch.amp.GradScaler around this optimizer: it scales losses and steps by what one rank "
    "finds. Convert the model to fp16 and call optimizer.backward(loss), which scales the loss by itself; or use bf16 "
    "(model or autocast), which needs no scaling; or GradScaler(enabled=False)"
)
MEMORY = Refusal(
    "expected a tensor with memory, got {} of p.grad, of which this rank holds a slice: take p.grad.full_tensor() on "
    "every rank, and write it back by p.grad.copy_(tensor)"
)
PICKLING = Refusal(
    "expected a plain tensor to save, pickle or copy, got p.grad, of which this rank holds a slice: save "
    "p.grad.full_tensor(), which every rank calls"
)
DATA = Refusal(
    "expected p.grad.copy_(tensor), got p.grad.data = tensor, which would leave each rank's slice of the gradient as "
    "it is: call p.grad.copy_(tensor) on every rank"
)
CONVERSION = Refusal(
    "expected no gradients while the model is converted, got p.grad converted to {} on {}: call optimizer.zero_grad() "
    "first"
)
SHAPE = Refusal("expected a tensor that fits p.grad, {}, got {}: pass one of that shape, or one that broadcasts to it")
RESHAPING = Refusal(
    "expected p.grad to keep its shape and memory, got {}: take p.grad.clone() on every rank, and change that"
)
COLLECTIVE = Refusal(
    "expected no collective on p.grad, which is averaged over the ranks already, got {}: leave it out; "
    "p.grad.full_tensor() is the averaged gradient on every rank"
)
KEPT = Refusal(
    "expected p.grad of the present step, got one that was kept while its gradient was cleared: take p.grad anew "
    "after each backward, or keep p.grad.clone()"
)
HOOK = Refusal(
    "expected p.grad to be left alone within a backward, got {} in a hook, before the ranks have averaged it: call it "
    "between backward and step"
)
DDP = Refusal(
    "expected this optimizer alone to reduce gradients, got another reduction of p.grad within the backward, as of "
    "DistributedDataParallel: leave that wrapper out, and run the plain model (ddp.module)"
)
DEAD = Refusal(
    "expected the optimizer that reduced this gradient, which is gone: keep a reference to the optimizer, or set "
    "p.grad to None"
)
