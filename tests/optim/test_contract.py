"""The contract of every optimizer: what torch.optim requires of its own."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.optim import Optimizer
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    optim_error_inputs_func_adam,
    optim_inputs_func_adam,
)

import gadam
from contract import BY_NAME, FLAGGED, ROWS, parameters, same, set_gradients, train

every_row = pytest.mark.parametrize("row", ROWS, ids=str)
flagged_row = pytest.mark.parametrize("row", FLAGGED, ids=str)

INFOS = [
    OptimizerInfo(
        cls,  # type: ignore[arg-type]
        optim_inputs_func=optim_inputs_func_adam,
        optim_error_inputs_func=optim_error_inputs_func_adam,
        supported_impls=("foreach", "differentiable"),
        has_capturable_arg=True,
    )
    for cls in (gadam.Padam, gadam.PadamW, gadam.Gadam, gadam.GadamX)
]
each_info = pytest.mark.parametrize("info", INFOS, ids=lambda info: info.optim_cls.__name__)


# ------------------------------------------------------------------------ construction, errors


@each_info
def test_rejects_what_torchs_adam_rejects(info):
    inputs = info.optim_error_inputs_func("cpu", torch.float32)
    assert len(inputs) > 5
    for error_input in inputs:
        params, kwargs = (
            error_input.optimizer_error_input.params,
            error_input.optimizer_error_input.kwargs,
        )
        if params is None:
            params = [torch.nn.Parameter(torch.randn(2, 3))]
        with pytest.raises(error_input.error_type, match=error_input.error_regex):
            info.optim_cls(params, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"partial": 0.6}, ValueError, "Invalid partial value: 0.6"),
        ({"partial": -0.1}, ValueError, "Invalid partial value: -0.1"),
        ({"form": "printed"}, ValueError, "Invalid form: 'printed'"),
        ({"eps": -1.0}, ValueError, "Invalid epsilon value: -1.0"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        ({"betas": (0.9,)}, ValueError, "betas must be two numbers, got 1"),
        ({"betas": gadam.Averaging(start=1)}, TypeError, "got Averaging. Pass a plan as average="),
        ({"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element"),
        ({"fused": True, "foreach": True}, RuntimeError, "cannot be `True` together"),
        (
            {"fused": True, "differentiable": True},
            RuntimeError,
            "does not support `differentiable`",
        ),
    ],
)
def test_rejects_invalid_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        gadam.Padam(parameters(), **{"partial": 0.5, **kwargs})


@pytest.mark.parametrize("option", [{"partial": 3.0}, {"form": "xx"}])
def test_rejects_invalid_options_of_a_group(option):
    with pytest.raises(ValueError, match=f"Invalid {next(iter(option))}"):
        gadam.Padam([{"params": parameters(), **option}])


def test_fused_reports_what_it_has_no_kernel_for(monkeypatch):
    optimizer = gadam.Gadam([torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))], fused=True)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="requires all the params to be floating point"):
        optimizer.step()
    # Without the compiled kernel, torch's own supports one of the updates.
    monkeypatch.setattr(gadam.optim.cpu, "_library", lambda: (None, "not built"))
    params = parameters()
    train(gadam.Gadam(params, fused=True), params, 2)
    train(gadam.GadamX(params), params, 2)
    with pytest.raises(RuntimeError, match=r"partial=0\.125.*the CPU kernel: not built"):
        train(gadam.GadamX(params, fused=True), params, 1)
    with pytest.raises(RuntimeError, match="form='paper'"):
        train(gadam.Gadam(params, form="paper", fused=True), params, 1)


def test_rejects_an_average_that_is_not_a_plan():
    with pytest.raises(TypeError, match="Averaging"):
        gadam.Gadam(parameters(), average=100)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", [row for row in ROWS if row.name != "Lookahead-SGD"], ids=str)
def test_sparse_gradients_are_rejected(row):  # SGD supports them
    p = torch.nn.Parameter(torch.randn(3, 2))
    p.grad = torch.randn(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        row([p]).step()


# ------------------------------------------------------------------------------------ stepping


@each_info
@pytest.mark.parametrize("foreach", [False, True])
def test_every_configuration_goes_in_the_right_direction(info, foreach):
    for optim_input in info.optim_inputs_func("cpu"):
        kwargs = {"lr": 1e-3, **optim_input.kwargs, "foreach": foreach}
        if torch.is_tensor(kwargs["lr"]) and foreach:
            continue
        if any(map(torch.is_tensor, kwargs.get("betas", ()))) and foreach:
            continue
        torch.manual_seed(1)
        weight = torch.nn.Parameter(torch.randn(10, 5))
        bias = torch.nn.Parameter(torch.randn(10, 2)[..., 0])  # with gaps
        data = torch.randn(5)
        optimizer = info.optim_cls([weight, bias], **kwargs)

        def closure(optimizer=optimizer, weight=weight, bias=bias, data=data):
            optimizer.zero_grad()
            loss = (weight.mv(data) + bias).pow(2).sum()
            loss.backward()
            return loss

        before = closure().item()
        for _ in range(20):
            optimizer.step(closure)
        after = closure().item()
        assert (after > before) == bool(kwargs.get("maximize")), optim_input.desc


@every_row
def test_the_closure_runs_with_gradients_and_its_loss_is_returned(row):
    params = parameters()
    optimizer = row(params)

    def closure():
        optimizer.zero_grad()
        loss = torch.stack([p.square().sum() for p in params]).sum()
        loss.backward()
        return loss

    expected = closure()
    with torch.no_grad():
        assert optimizer.step(closure) == expected


@every_row
def test_gradients_are_not_modified(row):
    params = parameters()
    optimizer = row(params)
    for flag in [{}] if not row.flags else [{"foreach": False}, {"foreach": True}]:
        optimizer = row(params, **flag)
        for step in range(5):
            set_gradients(params, step)
            before = [p.grad.clone() for p in params]  # type: ignore[union-attr]
            optimizer.step()
            same([p.grad for p in params], before)


@flagged_row
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_foreach_equals_the_loop(row, dtype):
    loop, multi = parameters(dtype), parameters(dtype)
    optimizers = row(loop, foreach=False), row(multi, foreach=True)
    for optimizer, params in zip(optimizers, (loop, multi)):
        train(optimizer, params, 7)
    tight = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.0}[dtype]
    torch.testing.assert_close(multi, loop, rtol=tight, atol=tight)
    for a, b in zip(loop, multi):
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, (a, b))]
        assert states[0].keys() == states[1].keys()
        torch.testing.assert_close(states[1], states[0], rtol=tight, atol=tight)
        assert all(torch.is_tensor(value) for value in states[0].values())


@flagged_row
def test_maximize_mirrors_minimize(row):
    up, down = parameters(torch.float64), parameters(torch.float64)
    ascent, descent = row(up, maximize=True), row(down)
    for step in range(5):
        set_gradients(down, step)
        for a, b in zip(up, down):
            a.grad = -b.grad  # type: ignore[operator]
        ascent.step()
        descent.step()
    same(up, down)


@flagged_row
@pytest.mark.parametrize("foreach", [False, True])
def test_complex_parameters_equal_pairs_of_real_ones(row, foreach):
    z = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.complex128))
    pair = torch.nn.Parameter(torch.view_as_real(z).detach().clone())
    extra = {"average": gadam.Averaging(start=2)} if row.averages else {}
    of_complex, of_real = row([z], foreach=foreach, **extra), row([pair], foreach=foreach, **extra)
    for _ in range(4):
        z.grad = torch.randn_like(z)
        pair.grad = torch.view_as_real(z.grad)
        of_complex.step()
        of_real.step()
    same(torch.view_as_real(z), pair)
    if row.averages:
        with of_complex.average.applied(), of_real.average.applied():
            same(torch.view_as_real(z), pair)


@flagged_row
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr_equals_the_number(row, shape):
    numbers, tensors = parameters(), parameters()
    lr = row.keywords["lr"]
    train(row(numbers), numbers, 5)
    tensor_lr = torch.full(shape, lr)
    train(row(tensors, lr=tensor_lr), tensors, 5)
    torch.testing.assert_close(tensors, numbers)
    assert tensor_lr == torch.tensor(lr)


@every_row
def test_a_parameter_without_gradient_does_not_change_and_may_join_later(row):
    params = parameters()
    optimizer = row(params)
    before = params[0].detach().clone()
    for step in range(4):
        set_gradients(params, step)
        params[0].grad = None
        optimizer.step()
    same(params[0].detach(), before)
    train(optimizer, params, 4)
    assert not torch.equal(params[0], before)


@every_row
def test_a_step_without_any_gradient_is_a_no_op(row):
    params = parameters()
    before = [p.detach().clone() for p in params]
    row(params).step()
    same([p.detach() for p in params], before)


@every_row
def test_groups_have_their_own_lr_and_may_be_added(row):
    params = parameters()
    extra = torch.nn.Parameter(torch.randn(3))
    optimizer = row(
        [{"params": params[:2]}, {"params": params[2:], "lr": 0.0, "weight_decay": 0.0}]
    )
    frozen = params[4].detach().clone()
    train(optimizer, params, 4)
    same(params[4].detach(), frozen)
    optimizer.add_param_group({"params": [extra]})
    assert len(optimizer.param_groups) == 3
    before = extra.detach().clone()
    train(optimizer, [*params, extra], 2)
    assert not torch.equal(extra, before)


@every_row
def test_named_parameters(row):
    params = parameters()
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    optimizer = row(named)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in named]
    unnamed = parameters()
    unnamed_optimizer = row(unnamed)
    train(optimizer, params, 3)
    unnamed_optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(unnamed_optimizer.state_dict())
    train(optimizer, params, 3, first=4)


@every_row
def test_works_with_torchs_schedulers_and_prints(row):
    params = parameters()
    optimizer = row(params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    lr = optimizer.param_groups[0]["lr"]
    train(optimizer, params, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr / 2)
    assert type(optimizer).__name__ in repr(optimizer)


# ----------------------------------------------------------------------------------- state dicts


@every_row
def test_state_dict_resumes_bitwise(row):
    extra = {"average": gadam.Averaging(start=3, every=2)} if row.averages else {}
    straight, resumed = parameters(), parameters()
    optimizer = row(straight, **extra)
    train(optimizer, straight, 5)
    for p, q in zip(straight, resumed):
        q.data.copy_(p.data)
    other = row(resumed, **extra)
    saved = copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(saved)
    same(saved, optimizer.state_dict())
    train(optimizer, straight, 6, first=6)
    train(other, resumed, 6, first=6)
    same(resumed, straight)
    same(other.state_dict(), optimizer.state_dict())


@every_row
def test_state_dict_survives_weights_only_loading(row):
    extra = {"average": gadam.Averaging(start=gadam.Plateau(2))} if row.averages else {}
    params = parameters()
    optimizer = row(params, **extra)
    train(optimizer, params, 3)
    if row.averages:
        for metric in (0.5, 0.6, 0.55, 0.54):
            optimizer.average.observe(metric)
        train(optimizer, params, 3, first=4)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    same(loaded, optimizer.state_dict())
    other = row(parameters(), **extra)
    other.load_state_dict(loaded)
    same(other.state_dict(), optimizer.state_dict())


@flagged_row
def test_loads_state_dicts_of_older_versions_and_of_torch(row):
    params = parameters()
    optimizer = row(params)
    train(optimizer, params, 2)
    for flag in ("maximize", "foreach", "capturable", "differentiable", "fused", "partial", "form"):
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            del group[flag]
            group.pop("average_progress", None)
        for state in saved["state"].values():
            state["step"] = float(state["step"])
        optimizer.load_state_dict(saved)
        train(optimizer, params, 1)
    adamw = torch.optim.AdamW(params, amsgrad=optimizer.param_groups[0]["amsgrad"])
    train(adamw, params, 2)
    optimizer.load_state_dict(adamw.state_dict())
    train(optimizer, params, 1)
    assert optimizer.state[params[0]]["step"] == 3


@every_row
def test_a_wrong_state_dict_is_rejected_before_anything_changes(row):
    params = parameters()
    optimizer = row(params)
    train(optimizer, params, 2)
    other = row(parameters()[:2])
    train(other, other.param_groups[0]["params"], 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(other.state_dict())
    same(optimizer.state_dict(), before)


# --------------------------------------------------------------------------------- copies, hooks


@every_row
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_are_independent(row, duplicate):
    extra = {"average": gadam.Averaging(start=3)} if row.averages else {}
    params = parameters()
    optimizer = row(params, **extra)
    train(optimizer, params, 4)
    twin = duplicate(optimizer)
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert public == {name for name in vars(twin) if not name.startswith("_")}
    twins = [p for group in twin.param_groups for p in group["params"]]
    train(optimizer, params, 3, first=5)
    assert not torch.equal(params[0], twins[0])
    train(twin, twins, 3, first=5)
    same(twins, params)
    same(twin.state_dict(), optimizer.state_dict())
    if row.averages:
        assert twin.average.count == optimizer.average.count == 5


@every_row
def test_all_hooks_are_called(row):
    params = parameters()
    optimizer = row(params)
    calls: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("step pre")),
        optimizer.register_step_post_hook(lambda *_: calls.append("step post")),
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save pre")),
        optimizer.register_state_dict_post_hook(lambda _, s: calls.append("save post")),
        optimizer.register_load_state_dict_pre_hook(lambda _, s: calls.append("load pre")),
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append("load post")),
    ]
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    expected = ["step pre", "step post", "save pre", "save post", "load pre", "load post"]
    assert calls == expected
    for handle in handles:
        handle.remove()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == expected


@every_row
def test_hooks_may_replace_the_state_dict(row):
    params = parameters()
    optimizer = row(params)
    train(optimizer, params, 2)

    def halve(_: Optimizer, state_dict: dict) -> dict:
        changed = copy.deepcopy(state_dict)
        changed["param_groups"][0]["lr"] = 0.125
        return changed

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.125
    optimizer.register_state_dict_post_hook(lambda _, s: {**s, "note": 1})
    assert optimizer.state_dict()["note"] == 1


# -------------------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("row", [BY_NAME["Gadam"], BY_NAME["Padam"]], ids=str)
def test_compiled_step_equals_eager_and_is_compiled_once(row):
    from torch._dynamo.testing import CompileCounter

    extra = {"average": gadam.Averaging(start=3)} if row.averages else {}
    eager, compiled = parameters(), parameters()
    expected = row(eager, **extra)
    train(expected, eager, 6)
    torch.compiler.reset()
    counter = CompileCounter()
    optimizer = row(compiled, **extra)
    step = torch.compile(optimizer.step, backend=counter)
    graphs = []
    for i in range(1, 7):
        set_gradients(compiled, i)
        step()
        graphs.append(counter.frame_count)
    torch.compiler.reset()
    assert graphs[0] > 0
    assert graphs[-1] == graphs[0], "the average's progress must not be part of the graph"
    torch.testing.assert_close(compiled, eager)
    if row.averages:
        assert optimizer.average.count == expected.average.count == 4
        with optimizer.average.applied(), expected.average.applied():
            torch.testing.assert_close(compiled, eager)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.name in ("Padam", "Padam-paper", "Gadam") or "fused" in row.name],
    ids=str,
)
def test_whole_training_step_compiles_with_inductor(row):
    extra = {"average": gadam.Averaging(start=3)} if row.averages else {}
    results = []
    for compiling in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = row(model.parameters(), **extra)

        def training_step(data, model=model, optimizer=optimizer):
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = torch.compile(training_step) if compiling else training_step
        generator = torch.Generator().manual_seed(5)
        for _ in range(5):
            run(torch.randn(16, 6, generator=generator))
        results.append([p.detach().clone() for p in model.parameters()])
        if row.averages:
            assert optimizer.average.count == 3
    torch.compiler.reset()
    torch.testing.assert_close(results[1], results[0])
