"""Bad input is refused with a message that says what to do, on every rank alike, and changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowlevel_zero import LowLevelZeroOptimizer
from lowlevel_zero.loss_scaler import LossScaler
from lowlevel_zero.options import ZeroOptions
from tests.support.ranks import run_cases_expecting, run_ranks, run_ranks_expecting


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def wrap(model: nn.Module, **options: Any) -> LowLevelZeroOptimizer:
    return LowLevelZeroOptimizer(adam(model), model=model, **options)


def test_without_a_process_group() -> None:
    def rank(rank: int, world_size: int) -> None:
        wrap(net())

    (error,) = run_ranks_expecting(rank, 1, init=False)
    assert error.type == "RuntimeError"
    assert "init_process_group" in error.message


BAD_OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"reduce_bucket_size": 0}, "ValueError", "reduce_bucket_size: expected at least 1"),
    ({"reduce_bucket_size": -4}, "ValueError", "reduce_bucket_size"),
    ({"reduce_bucket_size": 1.5}, "TypeError", "reduce_bucket_size: expected an int"),
    ({"clip_grad_norm": -1.0}, "ValueError", "clip_grad_norm: expected a number >= 0"),
    ({"clip_grad_norm": float("nan")}, "ValueError", "clip_grad_norm"),
    ({"clip_grad_norm": "1"}, "TypeError", "clip_grad_norm"),
    ({"communication_dtype": torch.int32}, "ValueError", "communication_dtype"),
    ({"communication_dtype": "bf16"}, "TypeError", "communication_dtype"),
    ({"forced_dtype": torch.int8}, "ValueError", "forced_dtype"),
    ({"backward_context": 3}, "TypeError", "backward_context"),
    ({"initial_scale": 2.0, "min_scale": 4.0}, "ValueError", "min_scale"),
    ({"initial_scale": 2.0**30}, "ValueError", "max_scale"),
    ({"growth_factor": 1.0}, "ValueError", "growth_factor"),
    ({"backoff_factor": 1.0}, "ValueError", "backoff_factor"),
    ({"growth_interval": 0}, "ValueError", "growth_interval"),
    ({"hysteresis": -1}, "ValueError", "hysteresis"),
    ({"stall_timeout": -1.0}, "ValueError", "stall_timeout: expected a number of seconds >= 0"),
    ({"stall_timeout": float("inf")}, "ValueError", "stall_timeout"),
    ({"stall_timeout": None}, "TypeError", "stall_timeout"),
    ({"verify_every": -1}, "ValueError", "verify_every: expected at least 0 steps"),
    ({"verify_every": True}, "TypeError", "verify_every: expected an int"),
    ({"max_skipped_steps": 2.5}, "TypeError", "max_skipped_steps: expected an int"),
    ({"pg_to_param_list": {1: []}}, "TypeError", "pg_to_param_list: expected process groups"),
    ({"fp8_communication": True, "fp8_min_numel": -1}, "ValueError", "fp8_min_numel: expected 0 or more"),
    ({"slice_multiple": 0}, "ValueError", "slice_multiple: expected at least 1 element"),
    ({"fp8_min_numel": 1e6}, "TypeError", "fp8_min_numel: expected an int"),
    ({"reduce_scatter_with_fp32_accumulation": True}, "ValueError", "pass partition_grad=True or reduce_scatter=True"),
]


def test_a_bad_option(subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, options: dict[str, Any], error: str, message: str) -> None:
        wrap(net(), **options)

    for (options, error, message), ran in run_cases_expecting(rank, 2, BAD_OPTIONS, timeout=20):
        with subtests.test(options=options):
            for raised in ran.raised():
                assert raised.type == error
                assert message in raised.message


def frozen(model: nn.Module) -> torch.optim.Optimizer:
    return adam(model.requires_grad_(False))


def not_a_leaf(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adam(model)
    optimizer.param_groups[0]["params"][1] = model[0].weight * 2
    return optimizer


def whole_numbers(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adam(model)
    # torch lets no integer require grad: a parameter that claims to
    optimizer.param_groups[0]["params"][1] = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
    return optimizer


def on_meta(model: nn.Module) -> torch.optim.Optimizer:
    model[1].weight = nn.Parameter(torch.empty(2, 4, device="meta"))
    return adam(model)


def sharing_memory(model: nn.Module) -> torch.optim.Optimizer:
    model[1].bias = nn.Parameter(model[0].bias.data[1:3])
    return adam(model)


def not_an_optimizer(model: nn.Module) -> Any:
    return list(model.parameters())


def not_elementwise(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(model.parameters()))


BAD_OPTIMIZERS: list[tuple[Callable[[Any], Any], str, tuple[str, ...]]] = [
    (frozen, "ValueError", ("requires_grad=True",)),
    (not_a_leaf, "ValueError", ("param_groups[0]['params'][1]", "leaf")),
    (whole_numbers, "TypeError", ("param_groups[0]['params'][1]", "complex64")),
    (on_meta, "ValueError", ("1.weight", "meta", "cpu")),
    (sharing_memory, "ValueError", ("1.bias", "0.bias", "tie")),
    (not_an_optimizer, "TypeError", ("torch.optim.Optimizer", "list")),
    (not_elementwise, "TypeError", ("LBFGS",)),
    (sparse_adam, "TypeError", ("SparseAdam",)),
]


def test_a_bad_optimizer(subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, make: Callable[[Any], Any], error: str, words: tuple[str, ...]) -> None:
        model = net()
        optimizer = make(model)
        LowLevelZeroOptimizer(optimizer, model=model)

    for (make, error, words), ran in run_cases_expecting(rank, 2, BAD_OPTIMIZERS, timeout=20):
        with subtests.test(make.__name__):
            for raised in ran.raised():
                assert raised.type == error
                assert all(word in raised.message for word in words), raised.message


def test_a_wrapped_optimizer_is_not_wrapped_again() -> None:
    def rank(rank: int, world_size: int) -> None:
        model = net()
        LowLevelZeroOptimizer(wrap(model), model=model)

    assert all("wrap each optimizer once" in raised.message for raised in run_ranks_expecting(rank, 2, timeout=20))


def test_a_model_in_distributed_data_parallel() -> None:
    def rank(rank: int, world_size: int) -> None:
        wrap(DistributedDataParallel(net()))

    assert all("model.module" in raised.message for raised in run_ranks_expecting(rank, 2, timeout=20))


def test_a_model_that_the_optimizer_knows_nothing_of() -> None:
    def rank(rank: int, world_size: int) -> None:
        LowLevelZeroOptimizer(adam(net()), model=net())

    assert all("model.parameters()" in raised.message for raised in run_ranks_expecting(rank, 2, timeout=20))


def test_a_bare_backward_of_an_fp16_model() -> None:
    def rank(rank: int, world_size: int) -> None:
        model = net().half()
        optimizer = wrap(model)
        with pytest.raises(RuntimeError, match=r"1\.bias.*optimizer\.backward"):
            model(torch.ones(1, 3, dtype=torch.float16)).sum().backward()
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(1, 3, dtype=torch.float16)).sum())
        optimizer.step()

    run_ranks(rank, 2)


def test_a_group_that_is_added_by_half() -> None:
    def rank(rank: int, world_size: int) -> None:
        model = net()
        optimizer = wrap(model)
        before = len(optimizer.param_groups)
        late = nn.Parameter(
            torch.zeros(3, dtype=torch.float32 if rank == 0 else torch.int32, requires_grad=False), requires_grad=False
        )
        for params, error, words in [
            ([model[0].weight], ValueError, r"0\.weight: expected a parameter this optimizer doesn't have"),
            ([nn.Parameter(torch.zeros(2, dtype=torch.float16))], ValueError, "fp16"),
            ([nn.Parameter(torch.zeros(2 + rank))], ValueError, "rank 1"),
            ([late], ValueError, "rank 1"),
        ]:
            with pytest.raises(error, match=words):
                optimizer.add_param_group({"params": params})
            assert len(optimizer.param_groups) == before

    run_ranks(rank, 2)


def test_a_sparse_embedding() -> None:
    def rank(rank: int, world_size: int) -> None:
        wrap(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)))

    for raised in run_ranks_expecting(rank, 2, timeout=20):
        assert raised.type == "ValueError"
        assert "0.weight" in raised.message
        assert "sparse=False" in raised.message


def test_a_sparse_gradient_that_no_module_announced() -> None:
    def rank(rank: int, world_size: int) -> None:
        table = nn.Parameter(torch.randn(5, 3))
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD([table], lr=0.1))
        rows = nn.functional.embedding(torch.tensor([1, 2]), table, sparse=True)
        optimizer.backward(rows.sum())

    for raised in run_ranks_expecting(rank, 2, timeout=20):
        assert raised.type == "RuntimeError"
        assert "sparse=False" in raised.message


# ---- ranks that differ: every rank raises, and says where ----


def other_shape(rank: int) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2 if rank == 0 else 5))


def other_order(rank: int) -> Any:
    first, second = nn.Linear(3, 4), nn.Linear(4, 3)
    return nn.Sequential(first, second) if rank == 0 else nn.Sequential(second, first)


def other_count(rank: int) -> Any:
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(2 if rank == 0 else 3)])


def other_dtype(rank: int) -> Any:
    return net() if rank == 0 else net().to(torch.bfloat16)


def other_frozen(rank: int) -> Any:
    model = net()
    model[1].weight.requires_grad_(rank == 0)
    return model


def other_buffer(rank: int) -> Any:
    model = net()
    model.register_buffer("seen", torch.zeros(1 + rank))
    return model


DIFFERENCES = [
    (other_shape, ("1.weight", "(2, 4)", "(5, 4)")),
    (other_order, ("0.weight", "(4, 3)", "(3, 4)")),
    (other_count, ("2.weight",)),
    (other_dtype, ("0.weight", "bfloat16")),
    (other_frozen, ("1.weight", "frozen")),
    (other_buffer, ("seen", "(2,)")),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_models_that_differ(world_size: int, subtests: pytest.Subtests) -> None:
    def rank(rank: int, world_size: int, make: Callable[[int], nn.Module], words: tuple[str, ...]) -> None:
        wrap(make(rank))

    for (make, words), ran in run_cases_expecting(rank, world_size, DIFFERENCES, timeout=20):
        with subtests.test(make.__name__):
            for raised in ran.raised():
                assert raised.type == "ValueError"
                assert "rank 0" in raised.message
                assert "rank 1" in raised.message
                assert all(word in raised.message for word in words), raised.message


def test_options_that_differ() -> None:
    def rank(rank: int, world_size: int) -> None:
        wrap(net(), partition_grad=rank == 1)

    assert all("partition_grad" in raised.message for raised in run_ranks_expecting(rank, 2, timeout=20))


def test_learning_rates_that_differ() -> None:
    def rank(rank: int, world_size: int) -> None:
        model = net()
        LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank)), model=model)

    assert all("lr" in raised.message for raised in run_ranks_expecting(rank, 2, timeout=20))


def test_what_may_differ() -> None:
    def rank(rank: int, world_size: int) -> bool:
        wrap(net(), verbose=rank == 0, backward_context=lambda: torch.autograd.set_detect_anomaly(rank == 0))
        return True

    assert run_ranks(rank, 2) == [True, True]


def test_an_error_of_one_rank_reaches_the_others() -> None:
    def rank(rank: int, world_size: int) -> None:
        wrap(net(), clip_grad_norm=-1.0 if rank == 1 else 0.0)

    zero, one = run_ranks_expecting(rank, 2, timeout=20)
    assert (zero.type, one.type) == ("RuntimeError", "ValueError")
    assert "rank 1" in zero.message
    assert "clip_grad_norm" in zero.message


def test_a_refused_construction_changes_nothing() -> None:
    def rank(rank: int, world_size: int) -> None:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2 + rank))
        optimizer = adam(model)
        before = snapshot(model, optimizer)
        with pytest.raises(ValueError, match=r"1\.weight"):
            LowLevelZeroOptimizer(optimizer, model=model, forced_dtype=torch.bfloat16)
        assert snapshot(model, optimizer) == before
        model(torch.ones(1, 3)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())  # no hook took it

    run_ranks(rank, 2)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        [(p.data_ptr(), p.dtype, p.tolist()) for p in model.parameters()],
        [id(p) for group in optimizer.param_groups for p in group["params"]],
        len(optimizer.state),
    ]


def test_a_tensor_that_is_not_a_parameter_of_the_optimizer() -> None:
    def rank(rank: int, world_size: int) -> None:
        optimizer = wrap(net())
        with pytest.raises(ValueError, match="expected a trainable parameter"):
            optimizer.get_param_grad(torch.zeros(4))
        with pytest.raises(ValueError, match="max_norm"):
            optimizer.clip_grad_norm_(-1.0)
        with pytest.raises(ValueError, match="norm_type"):
            optimizer.get_grad_norm(norm_type=1)

    run_ranks(rank, 1)


def test_a_process_group_that_this_rank_is_not_in() -> None:
    def rank(rank: int, world_size: int) -> str:
        first = dist.new_group([0])
        if rank == 0:
            wrap(net(), dp_process_group=first)
            return "built"
        with pytest.raises(ValueError, match="dp_process_group"):
            wrap(net(), dp_process_group=first)
        return "refused"

    assert run_ranks(rank, 2) == ["built", "refused"]


def test_a_subgroup_trains_on_its_own() -> None:
    def rank(rank: int, world_size: int) -> Tensor:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        model = net()
        optimizer = wrap(model, dp_process_group=pairs[rank // 2])
        optimizer.backward(model(torch.full((1, 3), float(1 + rank))).sum())
        optimizer.step()
        return model[0].weight.detach().clone()

    weights = run_ranks(rank, 4)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[0], weights[2])


def test_every_option_is_a_documented_keyword_with_the_same_default() -> None:
    keywords = inspect.signature(LowLevelZeroOptimizer).parameters
    documented = LowLevelZeroOptimizer.__doc__ or ""
    for option in fields(ZeroOptions):
        assert keywords[option.name].default == option.default, option.name
        assert f"        {option.name}: " in documented
    scale = inspect.signature(LossScaler).parameters
    for name in LossScaler.chosen({name: each.default for name, each in keywords.items()}):
        assert keywords[name].default == scale[name].default, name


def test_buckets_are_larger_on_a_gpu_unless_they_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ZeroOptions().bucket_size(kind) for kind in ("cpu", "cuda")] == [2**20, 12 * 2**20]
    assert ZeroOptions(reduce_bucket_size=5).bucket_size("cuda") == 5

    def work(rank: int, world_size: int) -> int:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        return len(optimizer.layout().buckets)

    assert run_ranks(work, 1) == [1]
    monkeypatch.setattr(ZeroOptions, "bucket_size", lambda self, kind: {"cpu": 1}[kind])  # its parameters' device
    assert run_ranks(work, 1) == [4]


def test_a_group_that_comes_later_is_converted_too() -> None:
    def work(rank: int, world_size: int) -> tuple[torch.dtype, torch.dtype, float]:
        model, late = nn.Linear(3, 2), nn.Parameter(torch.ones(3))
        optimizer = LowLevelZeroOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), forced_dtype=torch.bfloat16)
        before = [record.p32.dtype for record in optimizer.sharded_parameters]
        optimizer.add_param_group({"params": [late]})
        assert [record.p32.dtype for record in optimizer.sharded_parameters][: len(before)] == before
        optimizer.backward((late * torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)).sum())
        optimizer.step()
        return late.dtype, optimizer.sharded_parameters[late].p32.dtype, late[2].item()

    assert run_ranks(work, 2) == [(torch.bfloat16, torch.float32, -0.5)] * 2
