"""Private names of autograd, hooks, the compiler and torch.func."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from typing import Any, Literal, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None]
"""Sets the version counters of tensors: autograd compares them before it reads a tensor that it has saved."""
set_versions = torch._C._autograd._unsafe_set_version_counter


def route_data(
    kind: type[torch.Tensor],
    read: Callable[[torch.Tensor], torch.Tensor | None],
    write: Callable[[torch.Tensor, Any], bool],
) -> None:
    """Makes ``tensor.data`` of class ``kind`` return ``read(tensor)``, and setting it call ``write(tensor,
    value)``. If they return None or False, torch's own ``.data`` is used."""
    own: Any = torch.Tensor.data

    def get(tensor: torch.Tensor) -> torch.Tensor:
        found = read(tensor)
        return own.__get__(tensor) if found is None else found

    def put(tensor: torch.Tensor, value: Any) -> None:
        if not write(tensor, value):
            own.__set__(tensor, value)

    kind.data = property(get, put)  # type: ignore[assignment]


def wrap_backward(around: Callable[..., Any]) -> None:
    """Makes every call of autograd's engine from Python call ``around(run, *args, **kwargs)``, which must
    call ``run(*args, **kwargs)``. The arguments are the outputs, their gradients, retain_graph, create_graph,
    and the inputs."""
    engine = torch.autograd.Variable._execution_engine
    run_backward = staticmethod(partial(around, engine.run_backward))
    kind = type("Engine", (type(engine),), {"run_backward": run_backward})
    torch.autograd.Variable._execution_engine = kind()


def is_compiled(module: torch.nn.Module) -> bool:
    forward = type(module).forward
    own = getattr(module, "_compiled_call_impl", None) is not None
    return own or hasattr(forward, "_torchdynamo_orig_callable")


queue_backward_callback: Callable[[Callable[[], None]], None]
"""Runs a function once when the backward pass under way ends."""
queue_backward_callback = torch.autograd.Variable._execution_engine.queue_callback


assert_async: Callable[[torch.Tensor, str], None] = torch._assert_async
"""``assert_async(condition, message)`` raises if it is false, without waiting for an accelerator."""


def function_modes() -> list[Any]:
    """Returns the active ``TorchFunctionMode`` s, such as ``torch.device(...)``, the outermost first."""
    return list(torch.overrides._get_current_function_mode_stack())


def has_compiled() -> bool:
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    # Its import alone puts a None there.
    return compiler is not None and any(compiler.cached_backends.values())


def profiler_runs() -> bool:
    """Whether ``torch.profiler`` or autograd's profiler is recording in this process."""
    return torch.autograd.profiler._is_profiler_enabled


def in_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1


graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs on this thread has ``retain_graph=True``."""

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward that runs on this thread; one inside another has its own. -1: none."""


def backward_order(node: Any) -> int:
    """Returns the sequence number of a graph's ``node``: of ready nodes, backward runs the highest first."""
    return node._sequence_nr()


next_backward_order: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node made on this thread gets."""


def before_changes(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Returns the tensor to hook for the gradient of ``tensor``, as in-place changes may lose a hook.

    Changing a view in place gives it a new node, and hooks on the old one are not called. Its base keeps its
    node: the base is returned if it was made at sequence number ``first`` or later.
    """
    base = tensor._base
    node = None if base is None else base.grad_fn
    return tensor if base is None or node is None or backward_order(node) < first else base


def set_backward_order(node: Any, number: int) -> None:
    """Sets the sequence number of ``node``; see ``backward_order``."""
    node._set_sequence_nr(number)


node_is_in_backward: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the backward that runs on this thread comes, or has come, to a node of the graph."""


def gradient_hooks(param: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Returns the hooks that ``register_post_accumulate_grad_hook`` has set on ``param``."""
    hooks = param._post_accumulate_grad_hooks
    return list(hooks.values()) if hooks else []


_GRADIENT_HOOKS = attrgetter("_post_accumulate_grad_hooks")
_TENSOR_HOOKS = attrgetter("_backward_hooks")


def have_gradient_hooks(params: Iterable[torch.Tensor]) -> bool:
    """Whether any of ``params`` has a post-accumulate hook."""
    with torch_function_off():  # DTensor's takes several times as long
        return any(map(_GRADIENT_HOOKS, params))


def have_tensor_hooks(params: Iterable[torch.Tensor]) -> bool:
    """Whether ``register_hook`` was called on one of ``params``."""
    with torch_function_off():
        return any(map(_TENSOR_HOOKS, params))


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """Does ``tensor.register_hook(hook)`` for a tensor that is no leaf, without a handle (1 us, not 6)."""
    node = tensor.grad_fn  # None within torch.func, of an inner level: nothing calls the hook
    if node is None or type(tensor) is not torch.Tensor or tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    tensor._backward_hooks = OrderedDict({-1: hook})  # a handle's id is none below 0
    node._register_hook_dict(tensor)


_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def untraced(function: _FunctionT) -> _FunctionT:
    """Decorator: ``torch.compile`` ends its graph at ``function``, and does not trace what that calls. Unlike
    ``torch.compiler.disable``, which wraps it (0.2 us a call) and imports the compiler, it costs nothing."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "the sharding engine's"  # type: ignore[attr-defined]
    return function


def no_frame_of_its_own(function: _FunctionT) -> _FunctionT:
    """Decorator: ``torch.compile`` does not trace ``function`` itself, but what it calls."""
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


functorch_is_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Returns whether this runs within a transform of ``torch.func`` (``grad``, ``jvp``, ``vmap``)."""

functorch_left: Callable[[], AbstractContextManager[Any]] = temporarily_clear_interpreter_stack
"""Within it tensors and autograd functions are of no transform of ``torch.func`` that is under way."""

# A subclass's ``__torch_function__`` that leaves its functions to ``__torch_dispatch__``.
no_torch_function: Any = torch._C._disabled_torch_function_impl

torch_function_off: Callable[[], AbstractContextManager[None]] = (
    torch._C.DisableTorchFunctionSubclass
)
"""A context within which ``__torch_function__`` of subclasses is not called."""


# Of torch 2.13: lets a leaf's gradient have another dtype than the leaf.
grads_may_differ_in_dtype = hasattr(torch.Tensor, "grad_dtype")

# Of torch 2.15: whether ``grad_dtype`` of a parameter was set is known, and torch's engine follows it.
follows_grad_dtype = hasattr(torch.Tensor, "_has_grad_dtype_override")


def grad_dtype_of(param: torch.Tensor) -> torch.dtype | Literal["own", "any"]:
    """Returns the ``param.grad_dtype`` that was set, ``"any"`` for None; ``"own"`` if none was set."""
    if not follows_grad_dtype or not param._has_grad_dtype_override:  # type: ignore[attr-defined]
        return "own"
    return param.grad_dtype or "any"


def set_grad_dtype(param: torch.Tensor, wanted: torch.dtype | Literal["own", "any"]) -> None:
    """Sets ``param.grad_dtype`` to ``wanted``, a result of ``grad_dtype_of``."""
    if wanted != "own":
        param.grad_dtype = None if wanted == "any" else wanted


def set_grad(param: torch.Tensor, grad: torch.Tensor, *, lasting: bool = False) -> None:
    """Sets ``param.grad`` to ``grad``, whatever its dtype and that of a gradient that is there. ``lasting``:
    ``param`` takes gradients of any dtype from now on."""
    wanted = None if lasting else grad.dtype
    if grads_may_differ_in_dtype and param.grad_dtype not in (None, wanted):
        param.grad = None
        param.grad_dtype = wanted
    param.grad = grad
