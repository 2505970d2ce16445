"""LoRA through Booster: adapters reach an optimizer that was made before, train, and come back from files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.interface.model import PeftUnwrapMixin
from peft import LoraConfig, PeftModel, VBLoRAConfig, get_peft_model
from torch import Tensor, nn

from lowlevel_zero.plugin.lora import add_lora_parameters
from tests.support.boosting import adamw, check_close, check_equal, ddp, momentum, ours
from tests.support.cases import check_each
from tests.support.ranks import run_cases_expecting, run_ranks
from tests.support.trainers import llama


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **options)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """The second group, slower, has the value projections."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if "v_proj" not in name]},
        {"params": [p for name, p in named if "v_proj" in name], "lr": 5e-3},
    ]


def train(booster: Booster, model: Any, optimizer: Any, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        tokens = torch.randint(31, (2, 8), generator=torch.Generator().manual_seed(100 * rank + step))
        booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def adapters(model: Any) -> dict[str, Tensor]:
    named = model.unwrap(unwrap_peft=False).named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


def test_it_trains_as_under_ddp() -> None:
    def rank(rank: int, world_size: int) -> None:
        results = []
        for plugin, later in ((ddp(), False), (ours(stage=2, precision="fp32"), False), (ours(precision="fp32"), True)):
            booster = Booster(plugin=plugin)
            torch.manual_seed(1)
            model = llama()
            before = momentum(groups_of(model))
            model = booster.enable_lora(model, lora_config=lora())
            model = booster.boost(model)[0] if later else model
            optimizer = before if plugin.__class__.__name__.startswith("LowLevel") else momentum(groups_of(model))
            boosted, wrapped, *_ = booster.boost(model, optimizer)
            started = adapters(boosted)
            train(booster, boosted, wrapped, rank, 0, 5)
            results.append(adapters(boosted))
        check_close(*results[:2], 1e-6)  # a hundredth of the way that the slowest goes, by gradients alone
        assert all((started[name] - value).abs().max() > 1e-4 for name, value in results[1].items())
        check_close(*results[1:], 1e-7)  # boosted before it gets its optimizer
        assert len(results[1]) == 8
        state = wrapped.optim.state
        assert len(state) == 8, "frozen weights have no state"
        assert isinstance(boosted.unwrap(), PeftUnwrapMixin)
        names = {p: name for name, p in boosted.unwrap(unwrap_peft=False).named_parameters()}
        found = {names[record.p]: record.group for record in wrapped.sharded_parameters}
        assert found == {name: int("v_proj" in name) for name in found}

    run_ranks(rank, 2)


def test_adapters_and_optimizer_come_back(tmp_path: Path) -> None:
    folder, state = str(tmp_path / "adapters"), str(tmp_path / "optimizer")

    def rank(rank: int, world_size: int) -> None:
        booster, again = (Booster(plugin=ours(stage=2, precision="bf16")) for _ in range(2))
        model = llama()
        twin = copy.deepcopy(model)
        optimizer, other = adamw(groups_of(model)), adamw(groups_of(twin))
        torch.manual_seed(1)
        boosted, optimizer, *_ = booster.boost(booster.enable_lora(model, lora_config=lora()), optimizer)
        train(booster, boosted, optimizer, rank, 0, 3)
        booster.save_lora_as_pretrained(boosted, folder)
        booster.save_optimizer(optimizer, state, shard=True)
        dist.barrier()
        loaded, other, *_ = again.boost(again.enable_lora(twin, pretrained_dir=folder, lora_config=lora()), other)
        again.load_optimizer(other, state)
        check_equal(dict(boosted.state_dict()), dict(loaded.state_dict()))
        check_equal(optimizer.optim.state_dict(), other.optim.state_dict())
        check_equal([r.p32 for r in optimizer.sharded_parameters], [r.p32 for r in other.sharded_parameters])
        train(booster, boosted, optimizer, rank, 3, 5)
        train(again, loaded, other, rank, 3, 5)
        check_equal(adapters(boosted), adapters(loaded))

    run_ranks(rank, 2)
    assert isinstance(PeftModel.from_pretrained(llama(), folder), PeftModel)  # elsewhere, without this package


def copies_of_whole_modules_come_along(rank: int, world_size: int) -> None:
    booster = Booster(plugin=ours(precision="fp32"))
    model = llama()
    optimizer = adamw(groups_of(model))
    model = booster.enable_lora(model, lora_config=lora(modules_to_save=["lm_head"]))
    boosted, wrapped, *_ = booster.boost(model, optimizer)
    assert "base_model.model.lm_head.modules_to_save.default.weight" in adapters(boosted)
    assert len(wrapped.optim.param_groups[0]["params"]) == 4 + 1
    train(booster, boosted, wrapped, rank, 0, 1)
    assert len(wrapped.optim.state) == 9


def test_what_all_adapters_share_comes_along_once() -> None:
    """As VB-LoRA's bank of vectors, which is in each of its layers."""
    model = llama()
    optimizer = adamw(groups_of(model))
    layers = ["q_proj", "v_proj"]
    shared = VBLoRAConfig(task_type="CAUSAL_LM", r=4, vector_length=4, num_vectors=8, target_modules=layers)
    adapted = get_peft_model(model, shared)
    add_lora_parameters(adapted, optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    trained = {p for p in adapted.parameters() if p.requires_grad}
    assert any("vector_bank" in name for name, _ in adapted.named_parameters())
    assert len(held) == len(trained)
    assert set(held) == trained


def test_what_belongs_to_the_optimizer(caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests) -> None:
    def what_adapts_strangers_stays_out(rank: int, world_size: int) -> None:
        booster = Booster(plugin=ours(precision="fp32"))
        model = llama()
        optimizer = adamw([p for name, p in model.named_parameters() if "v_proj" in name])
        boosted, wrapped, *_ = booster.boost(booster.enable_lora(model, lora_config=lora()), optimizer)
        train(booster, boosted, wrapped, rank, 0, 1)
        assert len(wrapped.optim.state) == 4
        assert rank > 0 or "4 parameters adapt weights that the optimizer doesn't have" in caplog.text

    check_each(subtests, 2, [copies_of_whole_modules_come_along, what_adapts_strangers_stays_out])


def after_boosting(booster: Booster) -> None:
    model = llama()
    booster.enable_lora(booster.boost(model, adamw(model.parameters()))[0], lora_config=lora())


def without_adapters(booster: Booster) -> None:
    booster.enable_lora(llama(), lora_config=lora())
    model = llama()
    booster.boost(model, adamw(model.parameters()))


def saved_without_adapters(booster: Booster) -> None:
    booster.save_lora_as_pretrained(booster.boost(llama())[0], "unused")


def test_mistakes_are_refused_on_every_rank(tmp_path: Path, subtests: pytest.Subtests) -> None:
    def over_a_file(booster: Booster) -> None:
        model = booster.boost(booster.enable_lora(llama(), lora_config=lora()))[0]
        booster.save_lora_as_pretrained(model, str(tmp_path / "file"))

    (tmp_path / "file").write_text("precious")
    mistakes = {
        after_boosting: "call booster.enable_lora before booster.boost",
        without_adapters: "expected what booster.enable_lora returned, got a LlamaForCausalLM",
        saved_without_adapters: "enable lora before saving",
        over_a_file: "expected a directory to save adapters in, got a file",
    }

    def rank(rank: int, world_size: int, mistake: Callable[[Booster], None]) -> None:
        mistake(Booster(plugin=ours(precision="fp32")))

    for (mistake,), ran in run_cases_expecting(rank, 2, [(each,) for each in mistakes]):
        with subtests.test(mistake.__name__):
            for raised in ran.raised():
                assert mistakes[mistake] in raised.message
    assert raised.message.startswith("rank 0 could not save its adapters")  # the last one's, on rank 1
    assert (tmp_path / "file").read_text() == "precious"
