"""Private names of autograd, hooks, the compiler and torch.func."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Literal, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from parallel3d._torch.v2_11 import IS_2_11


def preserved_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Hides the body's writes to ``tensors`` from autograd, which may have saved them for backward."""
    # A tensor made in inference mode has no version, and can't be saved.
    counted = tuple(t for t in tensors if not t.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(counted)


# F.batch_norm writes buffers of these names without a change of their version counters.
WRITTEN_WITHOUT_VERSION = ("running_mean", "running_var")

set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None]
"""Sets the version counters of tensors: autograd compares them before it reads a tensor that it has saved."""
set_versions = torch._C._autograd._unsafe_set_version_counter


@contextmanager
def noted_saves(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Calls ``note`` with each tensor that autograd saves within the body, before the hooks in force."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def noted(tensor: torch.Tensor) -> Any:
        note(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(noted, unpack):
        yield


def same_version_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a change in place of one is noticed as a change of the other.

    Tensors on one storage may have a counter each: parts of ``unsafe_chunk``, ``.data``.
    """
    version = one._version
    if other._version != version:
        return False
    set_versions((one,), (version + 1,))
    same = other._version != version
    set_versions((one,), (version,))
    return same


def saved_by(node: Any) -> Iterator[Callable[[], Any]]:
    """Yields functions that read what ``node`` of the graph has saved for its backward, but for what hooks
    have packed, whose unpacking may compute."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                raw = getattr(node, f"_raw_{name.lstrip('_')}", None)
            except RuntimeError:  # a backward has freed it
                continue
            saved = raw if isinstance(raw, (tuple, list)) else [raw]
            if all(each is not None and each.unpack_hook is None for each in saved):
                yield partial(getattr, node, name)


def version_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor with the version counter of ``tensor``: it holds none of its memory."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def route_data(
    kind: type[torch.Tensor],
    read: Callable[[torch.Tensor], torch.Tensor | None],
    write: Callable[[torch.Tensor, Any], bool],
) -> None:
    """Asks ``read(tensor)`` for ``tensor.data``, and has ``write(tensor, value)`` set it, in class ``kind``.

    Where they return None and False, torch does it.
    """
    own: Any = torch.Tensor.data

    def get(tensor: torch.Tensor) -> torch.Tensor:
        found = read(tensor)
        return own.__get__(tensor) if found is None else found

    def put(tensor: torch.Tensor, value: Any) -> None:
        if not write(tensor, value):
            own.__set__(tensor, value)

    kind.data = property(get, put)  # type: ignore[assignment]


def wrap_backward(around: Callable[..., Any]) -> None:
    """Routes every call of autograd's engine from Python through ``around(run, *args, **kwargs)``.

    ``run(*args, **kwargs)`` makes the call. Its arguments are the outputs, their gradients, whether the graph
    is kept, whether one is created, and the inputs.
    """
    engine = torch.autograd.Variable._execution_engine
    run_backward = staticmethod(partial(around, engine.run_backward))
    kind = type("Engine", (type(engine),), {"run_backward": run_backward})
    torch.autograd.Variable._execution_engine = kind()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` runs the forward of ``module``."""
    forward = type(module).forward
    own = getattr(module, "_compiled_call_impl", None) is not None
    return own or hasattr(forward, "_torchdynamo_orig_callable")


queue_backward_callback: Callable[[Callable[[], None]], None]
"""Runs a function once when the backward pass under way ends."""
queue_backward_callback = torch.autograd.Variable._execution_engine.queue_callback


assert_async: Callable[[torch.Tensor, str], None] = torch._assert_async
"""``assert_async(condition, message)`` raises if it is false, without waiting for an accelerator."""


def function_modes() -> list[Any]:
    """The ``TorchFunctionMode`` s in force, such as ``torch.device(...)``, the outermost first."""
    return list(torch.overrides._get_current_function_mode_stack())


def has_compiled() -> bool:
    """Whether ``torch.compile`` has run in this process."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    # Its import alone puts a None there.
    return compiler is not None and any(compiler.cached_backends.values())


def profiler_runs() -> bool:
    """Whether ``torch.profiler``, or autograd's, records in this process."""
    return torch.autograd.profiler._is_profiler_enabled


def in_backward_pass() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that runs on this thread has ``retain_graph=True``."""

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward that runs on this thread; one inside another has its own. -1: none."""


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without a graph on the same memory and version counter, also below autograd.

    There (within ``__torch_dispatch__``) ``detach`` alone would give it a counter of its own.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def backward_order(node: Any) -> int:
    """The number of ``node`` of the graph: of those that can run, backward runs the highest first."""
    return node._sequence_nr()


next_backward_order: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node made on this thread gets."""


def before_changes(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """What to hook for the gradient of ``tensor``, so that the hook is called also if it is changed in place.

    A change in place of a view puts another node in the place of the view's own, whose hooks are then not
    called. That of what it is a view of stays: that tensor is returned, if it was made at ``first`` or later.
    """
    base = tensor._base
    node = None if base is None else base.grad_fn
    return tensor if base is None or node is None or backward_order(node) < first else base


def set_backward_order(node: Any, number: int) -> None:
    """Gives ``node`` another one."""
    node._set_sequence_nr(number)


node_is_in_backward: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the backward that runs on this thread comes, or has come, to a node of the graph."""


def gradient_hooks(param: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """What ``register_post_accumulate_grad_hook`` has set on ``param``."""
    hooks = param._post_accumulate_grad_hooks
    return list(hooks.values()) if hooks else []


_GRADIENT_HOOKS = attrgetter("_post_accumulate_grad_hooks")
_TENSOR_HOOKS = attrgetter("_backward_hooks")


def have_gradient_hooks(params: Iterable[torch.Tensor]) -> bool:
    """Whether one of ``params`` has any of ``gradient_hooks``."""
    with torch_function_off():  # DTensor's takes several times as long
        return any(map(_GRADIENT_HOOKS, params))


def have_tensor_hooks(params: Iterable[torch.Tensor]) -> bool:
    """Whether ``register_hook`` was called on one of ``params``."""
    with torch_function_off():
        return any(map(_TENSOR_HOOKS, params))


def for_compiled_function(output: torch.Tensor) -> torch.Tensor:
    """What an autograd function may return that a collective has written to ``output``.

    In a graph that torch 2.11 compiles, the gradient of an output that was written in place comes to nothing:
    there it is a copy.
    """
    return output.clone() if IS_2_11 and torch.compiler.is_compiling() else output


_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def untraced(function: _FunctionT) -> _FunctionT:
    """Keeps ``function``, and all that it calls, out of ``torch.compile``'s graphs.

    A graph that reaches it ends there. Unlike ``torch.compiler.disable``, which wraps the function (0.2 us
    a call, compiled or not) and imports the compiler, it costs nothing.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "the sharding engine's"  # type: ignore[attr-defined]
    return function


def no_frame_of_its_own(function: _FunctionT) -> _FunctionT:
    """Keeps ``function`` out of ``torch.compile``'s graphs as ``untraced`` does, but not what it calls."""
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
    """What ``param.grad_dtype`` was set to, ``"any"`` for None; ``"own"``: it was not."""
    if not follows_grad_dtype or not param._has_grad_dtype_override:  # type: ignore[attr-defined]
        return "own"
    return param.grad_dtype or "any"


def set_grad_dtype(param: torch.Tensor, wanted: torch.dtype | Literal["own", "any"]) -> None:
    """Sets it to what ``grad_dtype_of`` has returned."""
    if wanted != "own":
        param.grad_dtype = None if wanted == "any" else wanted


def set_grad(param: torch.Tensor, grad: torch.Tensor, *, lasting: bool = False) -> None:
    """``param.grad = grad``, whatever the dtype of ``grad``, and of the gradient that is there.

    Args:
        lasting: whether ``param`` takes gradients of any dtype from now on.
    """
    wanted = None if lasting else grad.dtype
    if grads_may_differ_in_dtype and param.grad_dtype not in (None, wanted):
        param.grad = None
        param.grad_dtype = wanted
    param.grad = grad
