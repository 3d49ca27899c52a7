"""Private torch APIs, each with a fallback.

No other module of gadam may use a torch name that starts with an underscore. A symbol that a
version of torch does not have is ``None`` here, and the function that wraps it falls back to public
APIs: a moved symbol costs speed, not ``import gadam``.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = [
    "BATCHNORM_TYPES",
    "buffer_table",
    "capturable_devices",
    "check_fused_support",
    "check_graph_capture",
    "disable_dynamo",
    "enable_amp_scaling",
    "foreach_by_default",
    "fused_adam",
    "global_step_post_hooks",
    "group_by_device_and_dtype",
    "is_nested_step",
    "is_on_host",
    "is_zero_tensor",
    "new_dtensor",
    "openmp_parallel",
    "optimizer_hooks",
    "restore_buffer_table",
    "tensor_check",
    "tree_leaves",
    "tree_map",
    "unwrap_compiled",
    "use_grad_if_differentiable",
    "versions",
    "wait_event",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")
Hooks = OrderedDict[int, Callable[..., Any]]
BufferTable = dict[str, Tensor | None]


def _find(module: str, name: str) -> Any:
    """Return a private symbol, or None if this version of torch does not have it."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


# ------------------------------------------------------------------------------------- compiling

_disable_dynamo = _find("torch", "_disable_dynamo")


def _disable_lazily(function: Callable[_P, _T]) -> Callable[_P, _T]:
    disabled: Callable[_P, _T] | None = None

    @functools.wraps(function)
    def inner(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        nonlocal disabled
        if disabled is None:
            disable: Callable[[Callable[_P, _T]], Callable[_P, _T]] = torch.compiler.disable
            disabled = disable(function)
        return disabled(*args, **kwargs)

    return inner


def disable_dynamo(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep ``torch.compile`` out of a function.

    The public ``torch.compiler.disable`` imports the compiler when it decorates, which takes
    seconds. This waits for the first call.
    """
    decorate: Callable[[Callable[_P, _T]], Callable[_P, _T]] = _disable_dynamo or _disable_lazily
    return decorate(function)


_use_grad_for_differentiable = _find("torch.optim.optimizer", "_use_grad_for_differentiable")


def _use_grad(step: Callable[_P, _T]) -> Callable[_P, _T]:
    @functools.wraps(step)
    def inner(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        optimizer = args[0]
        assert isinstance(optimizer, Optimizer)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(*args, **kwargs)

    return inner


def use_grad_if_differentiable(step: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate an optimizer's ``step``: gradients on if it is differentiable, else off."""
    decorate: Callable[[Callable[_P, _T]], Callable[_P, _T]]
    decorate = _use_grad_for_differentiable or _use_grad
    return decorate(step)


def unwrap_compiled(model: nn.Module) -> nn.Module | None:
    """Return the model inside the wrapper of ``torch.compile``, or None if it is not wrapped."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        return inner
    children = list(model.children())
    if type(model).__name__ == "OptimizedModule" and len(children) == 1:
        return children[0]
    return None


# --------------------------------------------------------------------------- threads and streams


def openmp_parallel() -> int | None:
    """Return the address of ``GOMP_parallel`` in the OpenMP runtime that torch uses.

    Returns:
        The address, or None if torch was built without OpenMP, or if its runtime has no such
        function.
    """
    try:  # a symbol is also looked up in the libraries that torch's own library depends on
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def wait_event(stream: Any, event: Any) -> None:
    """Make a stream wait for an event.

    Args:
        stream: A stream. Those of the CPU do nothing. Before torch 2.7 they cannot wait either.
        event: An event of the same device.
    """
    wait: Callable[[Any], None] | None = getattr(stream, "wait_event", None)
    if wait is not None:
        wait(event)


# ------------------------------------------------------------------------------------ optimizers

_HOOKS = "_optimizer_{}_hooks"


def optimizer_hooks(optimizer: Optimizer, kind: str) -> Hooks:
    """Return the table of an optimizer's hooks, in the order in which they run.

    Args:
        optimizer: The optimizer.
        kind: One of ``"step_pre"``, ``"step_post"``, ``"state_dict_pre"``, ``"state_dict_post"``,
            ``"load_state_dict_pre"`` and ``"load_state_dict_post"``.
    """
    table = getattr(optimizer, _HOOKS.format(kind), None)
    if table is None:  # a handle knows the table that it is in
        handle = getattr(optimizer, f"register_{kind}_hook")(lambda *_: None)
        table = handle.hooks_dict_ref()
        handle.remove()
    hooks: Hooks = table
    return hooks


_global_step_post_hooks = _find("torch.optim.optimizer", "_global_optimizer_post_hooks")


def global_step_post_hooks() -> Hooks:
    """Return the table of the hooks that run after every optimizer's step, in their order."""
    table = _global_step_post_hooks
    if table is None:  # a handle knows the table that it is in
        handle = register_optimizer_step_post_hook(lambda *_: None)
        table = handle.hooks_dict_ref()
        handle.remove()
    hooks: Hooks = table
    return hooks


_wrap_step: Any = getattr(Optimizer, "profile_hook_step", None)
# All steps are wrapped by closures of one function, which call the hooks.
_STEP_CODE = None if _wrap_step is None else _wrap_step(lambda *_: None).__code__


def is_nested_step(optimizer: Optimizer) -> bool:
    """Return True in a hook of a step that was called within another step of the same optimizer.

    If a class and its subclass have a ``step`` each, and both have been instantiated, torch calls
    the hooks in both: a subclass that calls ``super().step()`` runs them twice. The outer step is
    the one that counts.

    Args:
        optimizer: The optimizer whose hook calls this function.
    """
    steps = [vars(one).get("step") for one in type(optimizer).__mro__]
    if _STEP_CODE is None or sum(hasattr(step, "hooked") for step in steps) < 2:
        return False
    found = 0
    frame = inspect.currentframe()
    while frame is not None and found < 2:
        if frame.f_code is _STEP_CODE:
            found += frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found == 2


def check_graph_capture(optimizer: Optimizer) -> None:
    """Warn or raise if a step that is not capturable runs under a CUDA graph."""
    for name in _HEALTH_CHECKS:
        check = getattr(optimizer, name, None)
        if check is not None:
            check()
            return


_HEALTH_CHECKS = ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")


def enable_amp_scaling(optimizer: Optimizer) -> None:
    """Ask GradScaler to pass its scale and its verdict to ``step`` instead of unscaling first.

    A GradScaler that does not know the flag unscales the gradients itself.
    """
    optimizer.__dict__["_step_supports_amp_scaling"] = True


_default_to_fused_or_foreach = _find("torch.optim.optimizer", "_default_to_fused_or_foreach")


def foreach_by_default(params: list[Tensor], differentiable: bool) -> bool:
    """Return True if torch's Adam would choose its multi-tensor implementation."""
    if _default_to_fused_or_foreach is None:
        return False
    return bool(_default_to_fused_or_foreach(params, differentiable, use_fused=False)[1])


_device_dtype_check_for_fused = _find("torch.optim.optimizer", "_device_dtype_check_for_fused")
_FUSED_DEVICES = ("mps", "cuda", "xpu", "hpu", "cpu", "mtia")


def check_fused_support(param: Tensor) -> None:
    """Raise RuntimeError, in torch's words, if no fused kernel supports the parameter."""
    if _device_dtype_check_for_fused is not None:
        _device_dtype_check_for_fused(param)
    elif param.device.type not in _FUSED_DEVICES or not param.is_floating_point():
        raise RuntimeError(
            "`fused=True` requires all the params to be floating point Tensors of "
            f"supported devices: {list(_FUSED_DEVICES)} but {param.dtype} and {param.device.type}"
        )


_ADAM_DECOUPLES = "decoupled_weight_decay" in inspect.signature(adam).parameters


def fused_adam(*lists: list[Tensor], decoupled_weight_decay: bool, **options: Any) -> None:
    """Perform a step with torch's fused Adam.

    Args:
        *lists: The parameters, gradients, both moments, the maxima, and the step counts.
        decoupled_weight_decay: Decay the weights instead of adding to the gradients. Before torch
            2.7 this is a function of its own.
        **options: As ``torch.optim.adam.adam`` takes them.
    """
    function: Callable[..., None] = adam
    if _ADAM_DECOUPLES:
        options["decoupled_weight_decay"] = decoupled_weight_decay
    elif decoupled_weight_decay:
        function = adamw
    function(*lists, fused=True, foreach=False, **options)


_get_capturable_supported_devices = _find(
    "torch.optim.optimizer", "_get_capturable_supported_devices"
)


def capturable_devices() -> list[str]:
    """Return the device types that support ``capturable=True``."""
    if _get_capturable_supported_devices is None:
        return ["cuda", "xpu", "hpu", "xla"]
    return list(_get_capturable_supported_devices())


_group_tensors = getattr(Optimizer, "_group_tensors_by_device_and_dtype", None)


def group_by_device_and_dtype(lists: list[list[Tensor]]) -> list[list[list[Tensor]]]:
    """Split parallel lists of tensors by the device and dtype of the first list's tensors.

    A list may be empty: it stays empty in every group.
    """
    if _group_tensors is not None:
        return [group for group, _ in _group_tensors(lists).values()]
    groups: dict[object, list[list[Tensor]]] = {}
    for i, tensor in enumerate(lists[0]):
        group = groups.setdefault((tensor.device, tensor.dtype), [[] for _ in lists])
        for column, tensors in zip(group, lists):
            if tensors:
                column.append(tensors[i])
    return list(groups.values())


# --------------------------------------------------------------------------- multi-tensor functions


def _loop(name: str) -> Callable[..., list[Tensor]]:
    """Return the multi-tensor function of this name as a loop over its tensors."""
    in_place = name.endswith("_")
    operation: Callable[..., Tensor]
    operation = (lambda _, source: source) if name == "copy_" else getattr(torch, name.rstrip("_"))

    def function(first: Any, *others: Any, **keywords: Any) -> list[Tensor]:
        arguments = (first, *others)
        count = next(len(x) for x in arguments if isinstance(x, (list, tuple)))
        results = []
        for i in range(count):
            row = [x[i] if isinstance(x, (list, tuple)) else x for x in arguments]
            if name.startswith("addc") and len(row) == 4:
                keywords["value"] = row.pop()
            result = operation(*row, **keywords)
            results.append(row[0].copy_(result) if in_place else result)
        return results

    return function


def _foreach(name: str) -> Callable[..., list[Tensor]]:
    found: Callable[..., list[Tensor]] | None = getattr(torch, f"_foreach_{name}", None)
    return found if found is not None else _loop(name)


foreach_add, foreach_add_ = _foreach("add"), _foreach("add_")
foreach_addcdiv_, foreach_addcmul_ = _foreach("addcdiv_"), _foreach("addcmul_")
foreach_copy_ = _foreach("copy_")
foreach_div, foreach_div_ = _foreach("div"), _foreach("div_")
foreach_lerp_ = _foreach("lerp_")
foreach_maximum_ = _foreach("maximum_")
foreach_mul, foreach_mul_ = _foreach("mul"), _foreach("mul_")
foreach_neg, foreach_neg_ = _foreach("neg"), _foreach("neg_")
foreach_norm = _foreach("norm")
foreach_pow, foreach_pow_ = _foreach("pow"), _foreach("pow_")
foreach_sqrt = _foreach("sqrt")
foreach_sub_ = _foreach("sub_")


# --------------------------------------------------------------------------------------- tensors

_TensorGuards = _find("torch._C._dynamo.guards", "TensorGuards")


def tensor_check(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that tells if other tensors match these in all but address and values.

    It compares type, device, dtype, sizes, strides and laziness. torch's own check of the
    arguments of a compiled graph does this many times faster than Python can.
    """
    if _TensorGuards is not None:
        try:
            check: Callable[..., bool] = _TensorGuards(
                *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
            ).check
        except TypeError:  # the signature of another version
            pass
        else:
            return check
    expected = [_description(tensor) for tensor in tensors]

    def compare(*others: object) -> bool:
        return [_description(other) for other in others] == expected

    return compare


def _description(tensor: object) -> tuple[object, ...] | None:
    if not isinstance(tensor, Tensor):
        return None
    return (
        type(tensor),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.requires_grad,
        tensor.is_neg(),
        tensor.is_conj(),
        is_zero_tensor(tensor),
    )


def is_on_host(tensor: Tensor) -> bool:
    """Return True if reading a tensor's value does not wait for an accelerator."""
    return tensor.device.type == "cpu"


_is_zerotensor = getattr(Tensor, "_is_zerotensor", None)


def is_zero_tensor(tensor: Tensor) -> bool:
    """Return True for a lazy tensor of zeros, which has no memory."""
    if _is_zerotensor is not None:
        return bool(_is_zerotensor(tensor))
    return tensor.numel() > 0 and tensor.data_ptr() == 0


_version = attrgetter("_version") if hasattr(Tensor, "_version") else None


def versions(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return how often autograd has seen a write to each tensor, or None if it does not tell.

    A caller that gets None must assume that the tensors have changed.
    """
    if _version is None or any(tensor.is_inference() for tensor in tensors):
        return None
    return list(map(_version, tensors))


_pytree = _find("torch.utils", "_pytree")


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to every leaf of nested dicts, lists and tuples.

    Args:
        function: The function.
        tree: The leaves, or containers of them. Without torch's own pytrees, containers of other
            types count as leaves.
    """
    if _pytree is not None:
        return _pytree.tree_map(function, tree)
    if isinstance(tree, dict):
        return type(tree)((key, tree_map(function, value)) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(function, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(tree_map(function, value) for value in tree)
    return function(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested dicts, lists and tuples."""
    leaves: list[Any] = []
    tree_map(leaves.append, tree)
    return leaves


# --------------------------------------------------------------------------------------- modules

_BatchNorm = _find("torch.nn.modules.batchnorm", "_BatchNorm")
BATCHNORM_TYPES: tuple[type[nn.Module], ...] = (
    (_BatchNorm,)
    if _BatchNorm is not None
    else (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
)
_BUFFERS = "_buffers"


def buffer_table(module: nn.Module) -> BufferTable:
    """Return a module's own buffers by name. Buffers that are None are included if known."""
    table = getattr(module, _BUFFERS, None)
    if table is not None:
        return dict(table)
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def restore_buffer_table(module: nn.Module, saved: BufferTable) -> None:
    """Restore the buffers that :func:`buffer_table` returned.

    Args:
        module: The module.
        saved: The table. Buffers registered since are removed, or set to None if torch does not
            tell apart what was removed from what was None.
    """
    table = getattr(module, _BUFFERS, None)
    if table is not None:
        table.clear()
        table.update(saved)
        return
    now = dict(module.named_buffers(recurse=False, remove_duplicate=False))
    for name in {**now, **saved}:
        setattr(module, name, saved.get(name))


# ----------------------------------------------------------------------------- distributed tensors

_SPEC_MODULE = "torch.distributed.tensor._dtensor_spec"


def new_dtensor(shard: Tensor, like: Any) -> Tensor:
    """Return a DTensor of this process's shard, sharded as another one.

    Args:
        shard: The shard. It may live on another device than the mesh, such as the host.
        like: The DTensor that defines the mesh, the placements, the shape and the strides. Without
            torch's own constructor, the shard moves to the mesh's device.
    """
    from torch.distributed.tensor import DTensor

    spec_type, meta_type = _find(_SPEC_MODULE, "DTensorSpec"), _find(_SPEC_MODULE, "TensorMeta")
    if spec_type is not None and meta_type is not None:
        meta = meta_type(like.shape, like.stride(), shard.dtype)
        spec = spec_type(like.device_mesh, like.placements, tensor_meta=meta)
        construct: Callable[..., Tensor] = DTensor
        return construct(shard, spec, requires_grad=False)
    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
