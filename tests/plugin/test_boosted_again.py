"""Boosted again: what is boosted passes through, as in ColossalAI, and a new optimizer takes its parameters over."""

from __future__ import annotations

import pytest
from colossalai.booster import Booster

from tests.support.boosting import Pair, adamw, check_equal, model_of, momentum, ours
from tests.support.cases import check_each


def it_trains_on_as_a_pair_that_begins_there(rank: int, world_size: int) -> None:
    """With another optimizer, of the boosted model or of its module; the former optimizers are kept."""
    booster, model = Booster(plugin=ours(precision="fp32", stage=2)), model_of()
    boosted, none, *_ = booster.boost(model)
    again, optimizer, *_ = booster.boost(boosted, momentum(boosted.parameters()))
    assert none is None
    assert again is boosted
    kept = [optimizer]
    for turn, given in enumerate((model, boosted)):
        Pair(booster, boosted, kept[-1]).train(rank, 2 * turn, 2 * turn + 2)
        twin = model_of()
        twin.load_state_dict(model.state_dict())
        fresh = Pair(booster, *booster.boost(twin, momentum(twin.parameters()))[:2])
        later = Pair(booster, *booster.boost(given, momentum(model.parameters()))[:2])
        assert [each.is_retired for each in (*kept, later.optimizer)] == [True] * len(kept) + [False]
        assert booster.boost(later.model, later.optimizer)[:2] == (later.model, later.optimizer)
        for pair in (fresh, later):
            pair.train(rank, 2 * turn + 2, 2 * turn + 4)
        check_equal(fresh.values(), later.values())
        boosted = later.model
        kept.append(later.optimizer)


def what_is_loaded_into_a_model_reaches_the_masters_of_all_its_optimizers(rank: int, world_size: int) -> None:
    """And of none that is retired."""
    booster = Booster(plugin=ours(precision="bf16", overlap_allgather=True))
    model = model_of()
    boosted, former, *_ = booster.boost(model, adamw(model.parameters()))
    boosted, one, *_ = booster.boost(boosted, adamw(model.inward.parameters()))
    boosted, other, *_ = booster.boost(boosted, adamw(model.outward.parameters()))
    assert former.is_retired
    for p in model.parameters():
        p.data.fill_(0.5)
    boosted.update_master_params()
    boosted._force_wait_all_gather()
    for optimizer in (one, other):
        for record in optimizer.sharded_parameters:
            start, stop = record.split.span(record.rank)
            assert record.p32[: stop - start].eq(0.5).all()


def test_what_is_boosted_may_be_boosted_again(subtests: pytest.Subtests) -> None:
    checks = (
        it_trains_on_as_a_pair_that_begins_there,
        what_is_loaded_into_a_model_reaches_the_masters_of_all_its_optimizers,
    )
    check_each(subtests, 2, checks)
