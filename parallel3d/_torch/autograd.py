"""Private names of autograd, hooks, the compiler and torch.func."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Literal, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed import fsdp as torch_fsdp
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def preserved_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Hides the body's writes to ``tensors`` from autograd, which may have saved them for backward."""
    # A tensor made in inference mode has no version, and can't be saved.
    counted = tuple(t for t in tensors if not t.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(counted)


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Sets version counters: what autograd compares before it reads a tensor that it has saved."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


def wrap_backward(around: Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]) -> None:
    """Lets every call of autograd's engine from Python go by ``around(run, args, kwargs)``.

    ``run(*args, **kwargs)`` is the call; its arguments are the outputs, their gradients, whether the graph is
    kept and whether one is created, and the inputs.
    """
    engine = torch.autograd.Variable._execution_engine
    run = engine.run_backward

    class Engine(type(engine)):  # type: ignore[misc]
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            return around(run, args, kwargs)

    torch.autograd.Variable._execution_engine = Engine()


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Runs ``callback`` once when the backward pass under way ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Raises if ``condition`` is false, without waiting for an accelerator."""
    torch._assert_async(condition, message)


def in_backward_pass() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def graph_is_kept() -> bool:
    """Whether the backward that runs on this thread has ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def backward_id() -> int:
    """The number of the backward that runs on this thread, one inside another having its own; -1: none."""
    return torch._C._current_graph_task_id()


def backward_order(node: Any) -> int:
    """The number of ``node`` of the graph: of those that can run, backward runs the highest first."""
    return node._sequence_nr()


def set_backward_order(node: Any, number: int) -> None:
    """Gives ``node`` another one."""
    node._set_sequence_nr(number)


def node_is_in_backward(node: Any) -> bool:
    """Whether the backward that runs on this thread comes, or has come, to ``node`` of the graph."""
    return torch._C._will_engine_execute_node(node)


def gradient_hooks(param: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """What ``register_post_accumulate_grad_hook`` has set on ``param``."""
    hooks = param._post_accumulate_grad_hooks
    return list(hooks.values()) if hooks else []


# What tells whether there may be any.
has_gradient_hooks: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")


def has_tensor_hooks(param: torch.Tensor) -> bool:
    """Whether ``register_hook`` was called on ``param``."""
    return bool(param._backward_hooks)


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """``tensor.register_hook(hook)`` for a tensor with a node, without the handle (1 us, not 6)."""
    node = (
        tensor.grad_fn
    )  # None where the node is of an inner level of torch.func: nothing calls the hook
    if node is None or type(tensor) is not torch.Tensor or tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    tensor._backward_hooks = OrderedDict({_FIRST: hook})
    node._register_hook_dict(tensor)


_FIRST = -1  # a handle's id is none below 0


_copies_outputs = not hasattr(torch_fsdp, "DataParallelMeshDims")  # 2.11


def for_compiled_function(output: torch.Tensor) -> torch.Tensor:
    """What an autograd function may return that a collective has written to ``output``.

    In a graph that torch 2.11 compiles, the gradient of an output that was written in place comes to nothing:
    there it is a copy.
    """
    return output.clone() if _copies_outputs and torch.compiler.is_compiling() else output


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


def functorch_is_active() -> bool:
    """Whether this runs within a transform of ``torch.func`` (``grad``, ``jvp``, ``vmap``)."""
    return torch._C._are_functorch_transforms_active()


def functorch_left() -> AbstractContextManager[Any]:
    """Within it tensors and autograd functions are of no transform of ``torch.func`` that is under way."""
    return temporarily_clear_interpreter_stack()


# A subclass's ``__torch_function__`` that leaves its functions to ``__torch_dispatch__``.
no_torch_function: Any = torch._C._disabled_torch_function_impl


def torch_function_off() -> AbstractContextManager[None]:
    """Within it ``__torch_function__`` of subclasses is not called."""
    return torch._C.DisableTorchFunctionSubclass()


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
