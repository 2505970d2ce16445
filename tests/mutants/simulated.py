"""Mistakes that simulated ranks must show: what is replaced where, and the seed that goes wrong by it."""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """One replaced text.

    Attributes:
        file: of the package.
        old: a text that is there once.
        new: what stands there instead.
    """

    file: str
    old: str
    new: str


class Mistake(NamedTuple):
    """One deliberate mistake.

    Attributes:
        breaks: what goes wrong.
        changes: the texts that make it.
        seed: the first one of ``make simulate`` that shows it; None: none has been found yet.
    """

    breaks: str
    changes: tuple[Change, ...]
    seed: int | None = None

    @classmethod
    def of(cls, breaks: str, file: str, old: str, new: str, seed: int | None = None) -> Mistake:
        """A mistake of one change."""
        return cls(breaks, (Change(file, old, new),), seed)


REDUCER, STEPPER, OPTIMIZER = "reducer.py", "stepper.py", "optimizer.py"
BUCKETS, SUMS = "bookkeeping/bucket_store.py", "bookkeeping/gradient_store.py"
SYNCS = "bookkeeping/gradient_sync.py"
GATHERS, AGREEMENT = "bookkeeping/gather_store.py", "communication/agreement.py"
SHARD_GROUP = "communication/shard_group.py"

# Mistakes that the package has made.
MADE_ONCE = [
    Mistake.of(
        "a bucket is forgotten by what this rank alone has used",
        SUMS,
        "if len(bucket.empty) < len(bucket.records)]",
        "if any(record.worked for record in bucket.records)]",
        141,
    ),
    Mistake(
        "as many gradients as there are sums count as all of them, where some are dropped and others on their way",
        (
            Change(
                SUMS,
                "        found = self._by_bucket(records)\n        for bucket, some in found.items():\n"
                "            bucket.empty.update",
                "        found = self._by_bucket(records)\n        if len(records) == len(self._bucket_of):\n"
                "            self.buckets.clear()\n            self._bucket_of.clear()\n            return\n"
                "        for bucket, some in found.items():\n            bucket.empty.update",
            ),
            Change(
                REDUCER,
                "in_flight[-1].dropped_next += dropped\n            else:\n                with "
                "self._streams.beside():\n"
                "                    self._gradients.drop(dropped)",
                "in_flight[-1].dropped_next += dropped\n            with self._streams.beside():\n"
                "                self._gradients.drop(dropped)",
            ),
        ),
        708,
    ),
    Mistake(
        "as many factors as a bucket has gradients count as one of each",
        (Change(SUMS, "if len(set(some)) == len(some) == sum(", "if len(some) == sum("),),
        15,
    ),
    Mistake(
        "settings of param groups aren't compared in a step",
        (Change(OPTIMIZER, "call._replace(settings=settings, written=", "call._replace(written="),),
        49,
    ),
    Mistake(
        "weights that one rank alone has written are stepped",
        (Change(OPTIMIZER, ", written=[each for each in self.guard.edited if each.writes])", ")"),),
        10,
    ),
    Mistake.of(
        "a bucket is skipped for good where packing it raises",
        BUCKETS,
        "        except BaseException as error:\n            self._start(bucket)  # with zeros for what "
        "was taken of its gradients: other ranks wait for it\n            self._state.failure.defer(error)\n"
        "        finally:\n            if bucket.started:\n                "
        "self.waiting.popleft()\n",
        "        finally:\n            self.waiting.popleft()\n            if bucket.started:\n",
        210,
    ),
    Mistake(
        "ranks verify without having come to the same call",
        (
            Change(
                "sharded_optimizer.py",
                'self.calls.finish_syncs("verify buffers" if buffers else "verify")\n        verify(',
                "verify(",
            ),
            Change("diagnostics/verification.py", "with together(ranks, _COMPARE):", "if True:"),
            Change("diagnostics/verification.py", "with together(group, _COMPARE):", "if True:"),
        ),
        34,
    ),
    Mistake.of(
        "reductions of two optimizers start as their gradients come",
        REDUCER,
        "not self._state.is_alone or self.syncs.shares_order or self.syncs.put_off:",
        "self.syncs.put_off:",
        136,
    ),
    Mistake(
        "extra states are loaded by each rank for itself",
        (
            Change(
                "checkpoint/contents.py",
                "            undo.callback(module.set_extra_state, copy.deepcopy(module.get_extra_state()))\n"
                "            module.set_extra_state(saved.objects.model[name])\n",
                "            pass\n",
            ),
            Change(
                "checkpoint/contents.py",
                "            state.load_progress(objects.optimizers[of])\n",
                "            state.load_progress(objects.optimizers[of])\n        for name, module in "
                "self._stateful.items():\n            module.set_extra_state(objects.model[name])\n",
            ),
        ),
        236,
    ),
    Mistake.of(
        "groups beside a process group outlive it",
        "communication/process_groups.py",
        "                if is_alive(each):\n                    dist.destroy_process_group(each)",
        "                is_alive(each)",
        4,
    ),
    Mistake(
        "others' rows of a sum are held after a step in stage 1",
        (Change(BUCKETS, "self.rows, self.row = None, self.row.clone()", "self.rows = None"),),
        7,
    ),
    Mistake.of(
        "an error of dropping gradients behind a sum leaves the other sums unfinished",
        SYNCS,
        "self.gradients.drop(bucket.dropped_next)\n            except BaseException as error:",
        "self.gradients.drop(bucket.dropped_next)\n            except ZeroDivisionError as error:",
    ),
    Mistake.of(
        "one rank that asks for its memory makes a group that needs all ranks",
        SHARD_GROUP,
        "[level._host_backend for level in self.levels]",
        "[level.host_backend for level in self.levels]",
    ),
    Mistake.of(
        "writes are followed before what no rank used is hidden",
        SUMS,
        "            hide_gradients(record for record in unknown",
        "            follow_edits(record for record in unknown if record.worked)\n"
        "            hide_gradients(record for record in unknown",
    ),
    Mistake.of(
        "a plain backward that can't begin its sync leaves what has come until then to the step",
        REDUCER,
        "        except Exception as error:\n            self._state.failure.note(error, Damage.GRADIENTS)\n"
        "            raise\n        return True",
        "        except ZeroDivisionError:\n            raise\n        return True",
    ),
    Mistake.of(
        "a gradient counts as dropped once more while its sum is on its way",
        SUMS,
        "            held.difference_update(record.index for record in bucket.dropped_next)\n",
        "",
        19098574,
    ),
    Mistake(
        "what an owner tells of its states is made when the others have gone on to receive it",
        (
            Change("state/whole.py", "            told = told_by_owner(own, group.rank)\n", ""),
            Change(
                "state/whole.py",
                "told_states(own, told, group)",
                "told_states(own, told_by_owner(own, group.rank), group)",
            ),
        ),
    ),
]

# Mistakes that the package might make, written down from reading the files before any was tried.
DRAWN = [
    Mistake(
        "edits are compared without their numbers",
        (Change("gradients/of_optimizer.py", "{some[0].common_name}{more} by {what}", "{some[0].common_name}{more}"),),
        334,
    ),
    Mistake.of(
        "sharded gradients that a second backward didn't touch don't come back to p.grad",
        SYNCS,
        "        self.gradients.put_back()\n        self._group",
        "        self.gradients.taken_out.clear()\n        self._group",
        983,
    ),
    Mistake(
        "edits of a step that was refused are compared again",
        (Change(REDUCER, "        self.edited.clear()\n        return agreed", "        return agreed"),),
        22,
    ),
    Mistake(
        "one of several announced syncs is read before the ranks agree",
        (Change(SYNCS, "        while self._unread:\n", "        if self._unread:\n"),),
    ),
    Mistake.of(
        "a gradient that was dropped while it was on its way stays",
        SYNCS,
        "        if bucket.dropped_next:\n",
        "        if False:\n",
        438,
    ),
    Mistake.of(
        "a step is taken with what an error has left of the gradients",
        "bookkeeping/step_state.py",
        "        if uses_gradients and Damage.GRADIENTS in self.causes:",
        "        if False:",
        51,
    ),
    Mistake.of(
        "a gradient that comes twice counts for two of its bucket",
        BUCKETS,
        "            self.repeats.add(index)\n        waited_for = index not in self.repeats and (",
        "            self.repeats.add(index)\n        waited_for = (",
    ),
    Mistake.of(
        "gradients that were edited are averaged again by the step",
        SUMS,
        "bucket.rows, bucket.row, bucket.scale = None, row, 1.0",
        "bucket.rows, bucket.row, bucket.scale = None, row, None",
        7,
    ),
    Mistake.of(
        "a bucket of another dtype than the buffer's is reduced where it lies",
        BUCKETS,
        "if may and first is not None and first.dtype == lead.communication_dtype:",
        "if may and first is not None:",
    ),
    Mistake(
        "a bucket whose gradient was dropped and has come again counts as empty",
        (Change(SUMS, "            kept.empty.clear()\n", ""),),
    ),
    Mistake.of(
        "gradients that wait behind a sharded one are lost in the next backward",
        SUMS,
        "record.p.grad is record.shown and record.pending is None:",
        "record.p.grad is record.shown:",
        376,
    ),
    Mistake.of(
        "parameters of a forgotten bucket are still found in it",
        SUMS,
        "        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.planned.members}\n",
        "",
        1,
    ),
    Mistake(
        "a gradient that its caller has assigned to a slice isn't stepped",
        (Change(REDUCER, "            if assigned:\n                self._assign(assigned)\n", ""),),
        69,
    ),
    Mistake.of(
        "gathers that readers wait for are forgotten at the end of a step",
        GATHERS,
        "            self._under_way.remove(gather)\n            gather.finish_gather()",
        "            gather.finish_gather()\n        self._under_way.clear()",
    ),
    Mistake.of(
        "parameters of several dtypes are gathered in one call",
        GATHERS,
        "if part and (elements >= PART or kind != before):",
        "if part and elements >= PART:",
        5,
    ),
    Mistake.of(
        "gradients are scaled once more when they are read after a step",
        STEPPER,
        "if row.dtype == dtype and not keeps_sums:\n            bucket.scale = 1.0",
        "if row.dtype == dtype and not keeps_sums:\n            bucket.scale = factor",
        15,
    ),
    Mistake.of(
        "param groups are left in parts where the wrapped optimizer's step raises",
        STEPPER,
        "            self._optim.step()\n        finally:\n            self._optim.param_groups = groups\n",
        "            self._optim.step()\n        except MemoryError:\n            raise\n        else:\n"
        "            self._optim.param_groups = groups\n",
        125,
    ),
    Mistake.of(
        "an error that was once raised on all ranks isn't told again when one rank alone raises it",
        AGREEMENT,
        "and agreed > since)",
        ")",
    ),
    Mistake.of(
        "ranks that call different optimizers don't notice",
        AGREEMENT,
        "same = (doing, group.number, settings.digest, done)",
        "same = (doing, settings.digest, done)",
        98,
    ),
    Mistake.of(
        "reductions of a dropped optimizer are dropped with it",
        SHARD_GROUP,
        "            worker.submit(partial(_finish, list(works.values()), self))",
        "            worker.submit(partial(_finish, [], self))",
        32,
    ),
]

MISTAKES = [*MADE_ONCE, *DRAWN]
