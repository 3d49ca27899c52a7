"""Every private torch symbol may be missing: the fallback returns the same results."""

from __future__ import annotations

import contextlib
import copy
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import gadam
from average_models import BATCHES, fit, small_model, snapshot
from contract import parameters, same, train
from gadam import _torch
from missing_symbols_worker import find, results

FOREACH = sorted(name for name in vars(_torch) if name.startswith("foreach_") and "by" not in name)
OPTIMIZER = "torch.optim.optimizer"
SYMBOLS = [
    "torch:_disable_dynamo",
    "torch._C._dynamo.guards:TensorGuards",
    f"{OPTIMIZER}:_use_grad_for_differentiable",
    f"{OPTIMIZER}:_default_to_fused_or_foreach",
    f"{OPTIMIZER}:_device_dtype_check_for_fused",
    f"{OPTIMIZER}:_get_capturable_supported_devices",
    f"{OPTIMIZER}:Optimizer._group_tensors_by_device_and_dtype",
    f"{OPTIMIZER}:Optimizer._accelerator_graph_capture_health_check",
    f"{OPTIMIZER}:_global_optimizer_post_hooks",
    "torch.nn.modules.batchnorm:_BatchNorm",
    "torch.utils:_pytree",
    *(f"torch:_{name}" for name in FOREACH),
]


def exists(path: str) -> bool:
    try:
        owner, name = find(path)
    except (ImportError, AttributeError):
        return False
    return name in vars(owner)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return results()


def test_gadam_imports_and_trains_without_any_of_the_symbols(tmp_path, expected):
    worker = Path(__file__).with_name("missing_symbols_worker.py")
    missing = [symbol for symbol in SYMBOLS if exists(symbol)]
    assert len(missing) > 20
    done = subprocess.run(
        [sys.executable, worker, str(tmp_path / "out.pt"), *missing], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    same(torch.load(tmp_path / "out.pt", weights_only=True), expected)


RUNTIME = [
    {"_TensorGuards": None},
    {"_default_to_fused_or_foreach": None},
    {"_device_dtype_check_for_fused": None},
    {"_get_capturable_supported_devices": None},
    {"_group_tensors": None},
    {"_is_zerotensor": None},
    {"_global_step_post_hooks": None},
    {"_version": None},
    {"_HOOKS": "_no_such_{}_table"},
    {"_HEALTH_CHECKS": ()},
    {"_TensorGuards": None, "_is_zerotensor": None},
    {name: _torch._loop(name.removeprefix("foreach_")) for name in FOREACH},
]


@pytest.mark.parametrize("missing", RUNTIME, ids=lambda missing: next(iter(missing)))
def test_training_does_not_depend_on_a_symbol(missing, monkeypatch, expected):
    for name, value in missing.items():
        monkeypatch.setattr(_torch, name, value)
    same(results(), expected)


def test_no_other_module_uses_private_torch_names():
    """In gadam's own sources, outside of gadam._torch."""
    package = Path(gadam.__file__).parent
    private = re.compile(r"\btorch(\.\w+)*\._(?!_)\w|from torch[\w.]* import [^#\n]*\b_(?!_)\w")
    for path in package.rglob("*.py"):
        if path.name != "_torch.py":
            assert not private.search(path.read_text()), path.name


# ------------------------------------------------------------------------------------- compiling


def test_disable_dynamo_fallback_breaks_the_graph():
    from torch._dynamo.testing import CompileCounter

    seen: list[bool] = []

    def record() -> None:
        seen.append(torch.compiler.is_compiling())

    for decorate in (_torch.disable_dynamo, _torch._disable_lazily):
        counter = CompileCounter()
        disabled = decorate(record)
        assert disabled.__name__ == "record"

        def run(x: torch.Tensor, disabled=disabled) -> torch.Tensor:
            y = x * 2
            disabled()
            return y + 1

        assert torch.compile(run, backend=counter)(torch.ones(2)).tolist() == [3.0, 3.0]
        assert counter.frame_count == 2
    torch.compiler.reset()
    assert seen == [False, False]


@pytest.mark.parametrize("differentiable", [False, True])
def test_use_grad_fallback_sets_and_restores_the_mode(differentiable):
    class Recorder(torch.optim.SGD):
        seen: bool | None = None

        @_torch._use_grad
        def step(self, closure: Any = None) -> Any:
            self.seen = torch.is_grad_enabled()
            if closure is not None:
                raise OSError

    recorder = Recorder(parameters(), differentiable=differentiable)
    recorder.step()
    assert recorder.seen == differentiable
    with pytest.raises(OSError):
        recorder.step(lambda: None)
    assert torch.is_grad_enabled()


def test_unwrap_compiled_without_its_attribute():
    class OptimizedModule(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.renamed = inner

    inner = nn.Linear(2, 2)
    assert _torch.unwrap_compiled(torch.compile(inner, backend="eager")) is inner  # type: ignore[arg-type]
    assert _torch.unwrap_compiled(OptimizedModule(inner)) is inner
    assert _torch.unwrap_compiled(inner) is None


# ------------------------------------------------------------------------------------ optimizers


def test_hook_tables_without_their_attributes(monkeypatch):
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    kinds = [
        f"{when}_{order}"
        for when in ("step", "state_dict", "load_state_dict")
        for order in ("pre", "post")
    ]
    tables = [_torch.optimizer_hooks(optimizer, kind) for kind in kinds]
    monkeypatch.setattr(_torch, "_HOOKS", "_no_such_{}_table")
    assert all(_torch.optimizer_hooks(optimizer, k) is t for k, t in zip(kinds, tables))
    assert list(tables[1]) == [handle.id]


def test_samples_are_taken_last_without_the_hook_tables(monkeypatch):
    monkeypatch.setattr(_torch, "_HOOKS", "_no_such_{}_table")
    params = parameters()
    optimizer = gadam.Gadam(params, 0.5, average=gadam.Averaging(start=1))

    def project(*_: object) -> None:
        for p in params:
            p.data.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(project)
    train(optimizer, params, 4)
    with optimizer.average.applied():
        assert params[0].abs().max() <= 0.1


def test_fused_check_has_torchs_message(monkeypatch):
    bad = torch.zeros(2, dtype=torch.complex64)
    for missing in (False, True):
        if missing:
            monkeypatch.setattr(_torch, "_device_dtype_check_for_fused", None)
        _torch.check_fused_support(torch.zeros(2))
        with pytest.raises(RuntimeError, match="requires all the params to be floating point"):
            _torch.check_fused_support(bad)


def test_capturable_devices_fallback(monkeypatch):
    known = set(_torch.capturable_devices())
    monkeypatch.setattr(_torch, "_get_capturable_supported_devices", None)
    assert set(_torch.capturable_devices()) <= known


@pytest.mark.parametrize("decoupled", [False, True])
def test_fused_adam_without_an_option_for_decoupled_decay(decoupled, monkeypatch):
    """As before torch 2.7. The kernel of gadam is out of the way."""
    monkeypatch.setattr(_torch, "_ADAM_DECOUPLES", False)
    monkeypatch.setattr(gadam.optim.cpu, "_library", lambda: (None, "not built"))
    results = []
    for fused, foreach in ((True, None), (None, False)):
        params = parameters()
        optimizer = gadam.Gadam(
            params,
            lr=0.1,
            weight_decay=0.3,
            decoupled_weight_decay=decoupled,
            fused=fused,
            foreach=foreach,
        )
        train(optimizer, params, 8)
        results.append([p.detach() for p in params])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_without_openmp_the_kernel_uses_one_thread(monkeypatch, expected):
    cpu = gadam.optim.cpu
    if not cpu.is_available():
        pytest.skip(cpu.describe())
    cpu._library.cache_clear()
    monkeypatch.setattr(_torch.ctypes, "CDLL", lambda path: open_without(path, "GOMP_parallel"))
    try:
        assert _torch.openmp_parallel() is None
        assert cpu.describe().endswith(", one thread")
        same(results(), expected)
    finally:
        monkeypatch.undo()
        cpu._library.cache_clear()
        cpu._library()


def test_streams_that_cannot_wait(monkeypatch):
    """Streams of the CPU before torch 2.7: an overlapped average equals a plain one."""
    from gadam.average.offload import OverlappedFold

    class Stream:
        pass

    monkeypatch.setattr(torch.cpu, "Stream", Stream)
    monkeypatch.setattr(torch.cpu, "stream", lambda _: contextlib.nullcontext())
    average, weights = torch.zeros(5), torch.arange(5.0)
    fold = OverlappedFold()
    fold.start([average], [weights], 0.25)
    fold.wait()
    assert torch.equal(average, 0.25 * weights)


def open_without(path: str, symbol: str, load: Any = _torch.ctypes.CDLL) -> Any:
    """Return a library that does not have a symbol."""
    library = load(path)
    library.__class__ = type(
        "Library", (load,), {symbol: property(lambda _: library.no_such_symbol)}
    )
    return library


@pytest.mark.skipif(sys.platform != "linux", reason="reads the list of libraries from /proc")
def test_the_kernel_shares_the_openmp_runtime_of_torch():
    """A second runtime has its own threads, which compete for the same cores."""
    program = (
        "import torch, gadam; torch.set_num_threads(2);"
        "p = torch.nn.Parameter(torch.randn(10**6)); p.grad = torch.randn(10**6);"
        "torch.sin(p.detach()); gadam.GadamX([p]).step(); print(gadam.backends()['cpu']);"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernel, libraries = done.stdout.splitlines()
    runtimes = [
        path for path in libraries.split() if re.search(r"/lib(gomp|omp|iomp)[\w.-]*$", path)
    ]
    if "OpenMP" in kernel:
        assert len(runtimes) == 1, runtimes


# --------------------------------------------------------------------------------------- tensors


def changed(how: str) -> list[Any]:
    tensors: list[Any] = [torch.randn(4, 4), torch.randn(3)]
    replacement: Any = {
        "nothing": lambda t: t.clone(),
        "dtype": lambda t: t.double(),
        "shape": lambda t: t[:2],
        "stride": lambda t: t.t(),
        "type": lambda t: nn.Parameter(t),
        "negative": lambda t: torch._neg_view(t),
        "zeros": lambda t: torch._efficientzerotensor(4, 4),
        "missing": lambda t: None,
        "device": lambda t: t.to("meta"),
    }[how]
    tensors[0] = replacement(tensors[0])
    return tensors


@pytest.mark.parametrize(
    "how",
    ["nothing", "dtype", "shape", "stride", "type", "negative", "zeros", "missing", "device"],
)
@pytest.mark.parametrize("guards", ["torch", "missing", "other signature"])
def test_tensor_check_sees_every_change(how, guards, monkeypatch):
    if guards != "torch":
        broken = None if guards == "missing" else SimpleNamespace
        monkeypatch.setattr(_torch, "_TensorGuards", broken)
    check = _torch.tensor_check([torch.randn(4, 4), torch.randn(3)])
    assert check(*changed(how)) == (how == "nothing")


def test_zero_tensors_without_the_method(monkeypatch):
    for missing in (False, True):
        if missing:
            monkeypatch.setattr(_torch, "_is_zerotensor", None)
        assert _torch.is_zero_tensor(torch._efficientzerotensor(2))
        assert not _torch.is_zero_tensor(torch.zeros(2))
        assert not _torch.is_zero_tensor(torch.zeros(0))


def test_tree_functions_without_pytrees(monkeypatch):
    class Pair(NamedTuple):
        a: int
        b: list[int]

    tree = {"x": (1, [2, 3]), "y": Pair(4, [5])}
    expected = _torch.tree_map(lambda leaf: leaf + 1, tree), _torch.tree_leaves(tree)
    monkeypatch.setattr(_torch, "_pytree", None)
    assert (_torch.tree_map(lambda leaf: leaf + 1, tree), _torch.tree_leaves(tree)) == expected
    assert expected[1] == [1, 2, 3, 4, 5]


# --------------------------------------------------------------------------------------- modules


def test_batchnorm_refresh_without_the_base_class(monkeypatch):
    states = []
    public = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for types in (_torch.BATCHNORM_TYPES, public):
        monkeypatch.setattr(_torch, "BATCHNORM_TYPES", types)
        model = small_model()
        gadam.refresh_batchnorm(model, BATCHES)
        states.append(snapshot(model))
    same(states[1], states[0])


def test_buffers_are_restored_without_their_table(monkeypatch):
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.register_buffer("cache", None)
            self.register_buffer("replaced", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = self.layer.weight.detach().clone()
            self.replaced = torch.ones(2)
            self.register_buffer("late", torch.zeros(1))
            return self.layer(x)

    monkeypatch.setattr(_torch, "_BUFFERS", "_no_such_table")
    model = Cached()
    optimizer = gadam.Gadam(model.parameters(), average=gadam.Averaging(start=1))
    model.layer(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with optimizer.average.applied(model):
            model(torch.randn(2, 3))
        assert model.cache is None
        same(dict(model.state_dict()), dict(before))

    model_with_statistics = small_model()
    sgd = torch.optim.SGD(model_with_statistics.parameters(), lr=0.1)
    average = gadam.IterateAverage(sgd, gadam.Averaging(start=1))
    fit(model_with_statistics, sgd, 3)
    raw = snapshot(model_with_statistics)
    with average.applied(model_with_statistics, batchnorm=BATCHES):
        pass
    same(dict(snapshot(model_with_statistics)), dict(raw))
