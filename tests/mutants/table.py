"""Mistakes that the package might make: what is replaced where, and the tests that should be the first to see it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One deliberate mistake.

    Attributes:
        breaks: what goes wrong.
        file: of the package.
        old: a text that is there once.
        new: what stands there instead.
        likely: tests that are run first, as for pytest.
    """

    breaks: str
    file: str
    old: str
    new: str
    likely: str


REDUCER, STEPPER, SCALER = "reducer.py", "stepper.py", "loss_scaler.py"
NORM = "gradients/global_norm.py"
UNUSED, SPLIT, OPTIMIZER = "bookkeeping/unused_parameters.py", "partition.py", "optimizer.py"
PLAN, BUCKETS = "bookkeeping/bucket_plan.py", "bookkeeping/bucket_store.py"
SYNCS = "bookkeeping/gradient_sync.py"
SUMS, GATHERS = "bookkeeping/gradient_store.py", "bookkeeping/gather_store.py"
RECORDS, WHOLE = "bookkeeping/sharded_parameter.py", "state/whole.py"
FLAT, FP8 = "communication/flat_buffers.py", "communication/fp8.py"
BACKEND = "communication/backends/backend.py"
PAIRS, MEMORY = "communication/backends/pairwise.py", "communication/backends/shared_memory.py"
LEVELS, FOLDERS = "communication/backends/hybrid.py", "checkpoint/folders.py"

NUMBERS, DROPS = "tests/numbers/test_optimizer_numbers.py", "tests/simulation/test_seeds.py"
RECOMPUTATION = "tests/numbers/test_backward.py"
UNUSED_TESTS = "tests/numbers/test_unused_parameters.py"
COLLECTIVES = "tests/communication/test_collectives.py"
STATES = "tests/checkpoint/test_state.py"
STEPPING = "tests/numbers/test_stepping.py"
HANDLES = "tests/calls/test_sharded_gradient.py"

MUTANTS = [
    # who owns what
    Mutant(
        "a slice is an element short",
        SPLIT,
        "-(-self.numel // (self.world_size * self.multiple))",
        "self.numel // (self.world_size * self.multiple)",
        "tests/numbers/test_partition.py",
    ),
    Mutant(
        "a span runs into the padding",
        SPLIT,
        "min(start + self.slice_size, self.numel)",
        "start + self.slice_size",
        "tests/numbers/test_partition.py",
    ),
    Mutant(
        "owners are dealt out in turn, whatever they have",
        SPLIT,
        "heapq.heapreplace(heap, (take(owner, costs[place]), owner))",
        "heapq.heapreplace(heap, (heap[0][0] + 1, owner))",
        "tests/numbers/test_partition.py",
    ),
    Mutant(
        "every rank takes a whole parameter for its own",
        SPLIT,
        "return (0, self.numel) if rank == self.owner else (0, 0)",
        "return 0, self.numel",
        "tests/numbers/test_partition.py",
    ),
    Mutant(
        "whole parameters begin anywhere in a bucket",
        SPLIT,
        "return -(-self.numel // _ROUND) * _ROUND",
        "return self.numel",
        "tests/numbers/test_partition.py",
    ),
    Mutant(
        "parts are cut by what this rank has of them",
        STEPPER,
        "bucket.records[0].kind, bucket.planned.body, bucket",
        "bucket.records[0].kind, bucket.row.numel(), bucket",
        "tests/numbers/test_whole_parameters.py",
    ),
    Mutant(
        "rows aren't aligned",
        SPLIT,
        "return -(-columns // unit) * unit",
        "return columns",
        "tests/numbers/test_alignment.py",
    ),
    # what is packed
    Mutant(
        "gradients aren't divided before they are summed",
        BUCKETS,
        "pack(buffer, flats, reduction.divisor)",
        "pack(buffer, flats)",
        "tests/numbers/test_reduction.py",
    ),
    Mutant(
        "rows of a bucket are not cut where slices end",
        BUCKETS,
        "row.split_with_sizes(self.planned.sizes, dim=-1)",
        "row.split_with_sizes(self.planned.sizes[::-1], dim=-1)[::-1]",
        NUMBERS,
    ),
    Mutant(
        "a bucket is reduced in place though gradients are to be divided",
        BUCKETS,
        " and reduction.group.size > 1 and reduction.divisor == 1.0",
        " and reduction.group.size > 1",
        "tests/numbers/test_reduction.py",
    ),
    Mutant(
        "a rank starts buckets in another order",
        BUCKETS,
        "self.waiting = deque(buckets)\n",
        "self.waiting = deque(buckets[:: 1 if self._reduction.group.group_rank == 0 else -1])\n",
        NUMBERS,
    ),
    Mutant(
        "a late gradient is forgotten",
        BUCKETS,
        "                note_waiting(record)\n",
        "                record.p.grad = None\n",
        RECOMPUTATION,
    ),
    Mutant(
        "a bucket that waits for a repeated gradient doesn't wait",
        BUCKETS,
        "waited_for = index not in self.repeats",
        "waited_for = True",
        RECOMPUTATION,
    ),
    # who had a gradient
    Mutant(
        "weight decay on a dropped layer",
        SUMS,
        "record.worked = present[record.index] != 0",
        "record.worked = True",
        DROPS,
    ),
    Mutant(
        "a rank that lacks a gradient doesn't tell",
        REDUCER,
        "lacks = self._unused.lacked or False in here",
        "lacks = False",
        DROPS,
    ),
    Mutant(
        "a stale presence map",
        REDUCER,
        "present = self._unused.exchange([record.index for record in self._records if record.worked]).wait()",
        "own = [record.index for record in self._records if record.worked]\n"
        "            present = vars(self).setdefault('_map', self._unused.exchange(own).wait())",
        DROPS,
    ),
    Mutant(
        "a rank doesn't join the syncs of others",
        SYNCS,
        "while self._group.progress.micro_batch < syncs:",
        "while False:",
        UNUSED_TESTS,
    ),
    Mutant(
        "a message names less than the graph shows",
        UNUSED,
        "return found | self.learnt",
        "return self.learnt",
        UNUSED_TESTS,
    ),
    Mutant(
        "detection never starts", REDUCER, "self._unused.lacked and not self._unused.detecting", "False", UNUSED_TESTS
    ),
    Mutant("what came unforeseen isn't learnt", SYNCS, "self.unused.learnt.update(", "set().update(", UNUSED_TESTS),
    Mutant(
        "a narrowed plan keeps what nobody uses", PLAN, "strict=True) if used[index]]", "strict=True)]", UNUSED_TESTS
    ),
    Mutant(
        "ranks follow each its own order of gradients",
        PLAN,
        "self._group.from_rank_zero([len(came), *came, *lacked])",
        "[len(came), *came, *lacked]",
        UNUSED_TESTS,
    ),
    # what is summed
    Mutant(
        "a rank's own row is left out of a sum",
        BACKEND,
        "theirs | {self.rank: own}",
        "theirs | {self.rank: next(iter(theirs.values()))}",
        COLLECTIVES,
    ),
    Mutant(
        "a rank reads the first part of a buffer in shared memory",
        MEMORY,
        "places[of].offset + places[of].start",
        "places[of].offset",
        COLLECTIVES,
    ),
    Mutant(
        "three rows are summed, and not four",
        FLAT,
        "for other in others:\n            exact += other",
        "for other in others[:1]:\n            exact += other",
        COLLECTIVES,
    ),
    Mutant(
        "16-bit sums are rounded at each rank",
        FLAT,
        "wide = torch.promote_types(total.dtype, torch.float32)",
        "wide = total.dtype",
        COLLECTIVES,
    ),
    Mutant(
        "a gather of the wrong row",
        MEMORY,
        "out=[each[of] for each in rows]",
        "out=[each[of - 1] for each in rows]",
        COLLECTIVES,
    ),
    Mutant(
        "messages of a gather come from the wrong rank",
        PAIRS,
        "(each[self.rank], each[of]) for _, of",
        "(each[self.rank], each[to]) for to, of",
        COLLECTIVES,
    ),
    Mutant(
        "an all-reduce lacks this rank's row of the sum",
        BACKEND,
        "keep_own([row], [total], self.rank)",
        "pass",
        COLLECTIVES,
    ),
    Mutant(
        "an outer level isn't summed",
        LEVELS,
        "self._inner.reduce_scatter(buffer, own), self._outer.all_reduce, own.zero_)",
        "self._inner.reduce_scatter(buffer, own), lambda row: Work(lambda: row), own.zero_)",
        "tests/communication/test_two_levels.py",
    ),
    Mutant(
        "fp8: a rank's own row isn't rounded as the others have it",
        FP8,
        "lambda _: unpack(decode(encoded, row).to(rows[0].dtype), rows))",
        "lambda _: (unpack(decode(encoded, row).to(rows[0].dtype), rows), rows[0][self.rank].copy_(own[0]))[0])",
        "tests/communication/test_compression.py",
    ),
    # how gradients are scaled
    Mutant(
        "the norm is one rank's",
        NORM,
        "self._pending = self._group.sum_scalar(squares)",
        "self._pending = self._group.sum_scalar(squares * 0 + squares / self._group.size)",
        "tests/numbers/test_clipping.py",
    ),
    Mutant(
        "norms are added, not squares", NORM, ".square().sum()", ".sum().square()", "tests/numbers/test_clipping.py"
    ),
    Mutant(
        "clipping makes small gradients larger",
        NORM,
        "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "max_norm / (norm + 1e-6)",
        "tests/numbers/test_clipping.py",
    ),
    Mutant(
        "a fused kernel multiplies where it should divide",
        STEPPER,
        "inverse = 1.0 / factor",
        "inverse = factor",
        STEPPING,
    ),
    Mutant("gradients are scaled twice", STEPPER, "if not (by_optimizer or exact):", "if not exact:", STEPPING),
    Mutant(
        "a sum of several micro-batches forgets its scale",
        SUMS,
        "sums = sums * (bucket.scale / self._state.gradient_scale())",
        "pass",
        "tests/calls/test_misuse.py",
    ),
    Mutant(
        "micro-batches are summed in 16 bits",
        SUMS,
        "sums = at_least_fp32(before)",
        "sums = before",
        "tests/numbers/test_reduction.py",
    ),
    # overflows
    Mutant(
        "an fp16 overflow doesn't lower the scale",
        SCALER,
        "torch.where(backs_off, self._backoff,",
        "torch.where(backs_off, self._stay,",
        "tests/numbers/test_loss_scaler.py",
    ),
    Mutant(
        "the scale grows one step late",
        SCALER,
        "growth_step >= self.growth_interval",
        "growth_step > self.growth_interval",
        "tests/numbers/test_loss_scaler.py",
    ),
    Mutant(
        "a step that overflows is taken",
        STEPPER,
        "if flag.item():",
        "if False:",
        DROPS,
    ),
    Mutant("the loss isn't scaled", "backward.py", "loss * scale.to(loss.device)", "loss * 1", NUMBERS),
    # steps
    Mutant(
        "param groups are left in parts",
        STEPPER,
        'for group, all_of_it, _ in stepped:\n                group["params"] = all_of_it',
        "for group, all_of_it, _ in stepped:\n                pass",
        STEPPING,
    ),
    Mutant(
        "old gradients are stepped again",
        SUMS,
        "        self.buckets.clear()\n        self._bucket_of.clear()\n        clear_gradients(",
        "        self._bucket_of.clear()\n        clear_gradients(",
        NUMBERS,
    ),
    # p.grad after backward
    Mutant(
        "a whole bucket isn't multiplied",
        "bookkeeping/gradient_store.py",
        "bucket.scale = self._scale(bucket) * factor",
        "bucket.scale = self._scale(bucket)",
        "tests/numbers/test_clipping.py",
    ),
    Mutant(
        "norms are kept when gradients change",
        "gradients/of_optimizer.py",
        "self._known_at != self.versions or norm_type",
        "norm_type",
        HANDLES,
    ),
    Mutant(
        "what one rank has cleared isn't told",
        "communication/agreement.py",
        "settings, *done = progress[2:]",
        "settings, _, *done = progress[2:]",
        DROPS,
    ),
    Mutant(
        "each rank counts its shard groups alone",
        "communication/agreement.py",
        "*most, group.context.shard_groups = group.all_reduce_max(told)",
        "*most, _ = group.all_reduce_max(told)",
        "tests/calls/test_failed_construction.py",
    ),
    Mutant(
        "model.zero_grad() drops nothing",
        REDUCER,
        "self._gradients.hide_cleared(touched, adds) if touched else []",
        "self._gradients.hide_cleared(touched)[:0]",
        HANDLES,
    ),
    Mutant(
        "no_sync synchronises",
        OPTIMIZER,
        "self.step_state.syncing(False)",
        "self.step_state.syncing(self.step_state.syncs)",
        DROPS,
    ),
    # masters, and what is saved
    Mutant(
        "edits of parameters don't reach masters",
        RECORDS,
        "self._settle()\n            self.saved_master = None",
        "self.saved_master = None",
        "tests/numbers/test_edited_parameters.py",
    ),
    Mutant(
        "a master that isn't the model's any more comes back",
        RECORDS,
        "settled = torch.where(_rounds_to(row, known),",
        "settled = torch.where(row == row,",
        "tests/communication/test_compression.py",
    ),
    Mutant(
        "a stepped parameter looks edited",
        GATHERS,
        "                record.version = record.p._version",
        "                record.version = -1",
        "tests/numbers/test_overlapped_gather.py",
    ),
    Mutant(
        "a loaded state is the first rank's slice",
        RECORDS,
        "own[: stop - start] = flat[start:stop]",
        "own[: stop - start] = flat[: stop - start]",
        STATES,
    ),
    Mutant(
        "another world size's states load unseen",
        WHOLE,
        "is_other = value.shape != record.p.shape and not is_number",
        "is_other = value.dim() > 9",
        STATES,
    ),
    Mutant(
        "the oldest checkpoint counts as the newest",
        FOLDERS,
        "each.head else math.inf, reverse=True",
        "each.head else math.inf",
        "tests/checkpoint/test_checkpoint_folders.py",
    ),
    # what callers do to parameters and gradients
    Mutant(
        "slices are cut by the strides that a caller has given a parameter",
        RECORDS,
        "return flat_in_memory_order(tensor, self.view)",
        "return flat_in_memory_order(tensor, self.p)",
        "tests/numbers/test_edited_parameters.py",
    ),
    Mutant(
        "parameters that change places end alike",
        RECORDS,
        "for record in moved if len(moved) > 1 else ():",
        "for record in ():",
        "tests/numbers/test_edited_parameters.py",
    ),
    Mutant(
        "an assigned gradient is added to the sum",
        SUMS,
        "(adds or record.p.grad is None or record.arrived)",
        "(record.p.grad is None or record.arrived)",
        "tests/numbers/test_gradient_methods.py",
    ),
    Mutant(
        "the backward around a nested one doesn't end the sync",
        "bookkeeping/plain_backwards.py",
        "        if self is not None:\n            self.watch()",
        "        if False:\n            self.watch()",
        RECOMPUTATION,
    ),
    Mutant(
        "a plain backward that has ended by an error is stepped",
        REDUCER,
        "        if self._backwards.running:\n            self._backwards.running.clear()",
        "        if False:\n            self._backwards.running.clear()",
        "tests/numbers/test_backward.py",
    ),
    Mutant(
        "a child that was forked ends its parent's threads and memory",
        "communication/process_groups.py",
        "        self.is_alive = False\n        if os.getpid() != self.process:\n            return\n",
        "        self.is_alive = False\n",
        "tests/calls/test_forked_children.py",
    ),
]
