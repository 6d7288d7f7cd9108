"""Every private torch name the library uses, in one place.

For torch 2.11 to 2.15: ``python docs/versions.py`` runs the tests on each.
"""

import atexit
import importlib
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import DTensor

__all__ = [
    "FULLY_SHARD_KEYS",
    "BatchNorm",
    "DTensorSpec",
    "DataParallelMeshDims",
    "FSDPState",
    "OpOverload",
    "ShardPlacementResult",
    "StridedShard",
    "TensorMeta",
    "TorchDispatchMode",
    "TorchMixedPrecisionPolicy",
    "all_gather_single",
    "assert_async",
    "backend_name",
    "backward_id",
    "backward_order",
    "call_torch_dispatch_of",
    "chunk_cat",
    "clear_dtensor_caches",
    "concatenate_meshes",
    "default_store",
    "dtensor_shard_box",
    "enter_module_state",
    "fake_outputs_written",
    "flatten_axes",
    "follows_grad_dtype",
    "for_compiled_function",
    "foreach_copy_",
    "fully_shard_state",
    "functorch_is_active",
    "functorch_left",
    "get_local_tensor",
    "grad_dtype_of",
    "gradient_hooks",
    "grads_may_differ_in_dtype",
    "graph_is_kept",
    "has_gradient_hooks",
    "has_tensor_hooks",
    "hook_gradient",
    "in_backward_pass",
    "init_fake_group",
    "inner_tensors",
    "is_torch_hook_state",
    "keep_partial_gradients",
    "let_gloo_finish_at_exit",
    "local_tensor_of",
    "make_dtensor",
    "make_spec",
    "no_torch_function",
    "node_is_in_backward",
    "preserved_versions",
    "process_group_of",
    "queue_backward_callback",
    "reduce_scatter_single",
    "root_mesh",
    "set_backward_order",
    "set_fully_shard_state",
    "set_grad",
    "set_grad_dtype",
    "set_local_tensor",
    "set_versions",
    "spec_of",
    "torch_function_off",
    "unflatten_mesh",
    "untraced",
    "wrap_backward",
]

from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed._local_tensor import (
    LocalIntNode,
    LocalTensor,
)
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING or hasattr(torch_fsdp, "DataParallelMeshDims"):
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
else:  # 2.11 has neither
    from parallel3d._torch_2_11 import DataParallelMeshDims, ShardPlacementResult


def call_torch_dispatch_of(kind: type[DTensor]) -> None:
    """Sees to it that operations on tensors of class ``kind`` go to its ``__torch_dispatch__``."""
    if not hasattr(torch_fsdp, "DataParallelMeshDims"):  # 2.11
        from parallel3d._torch_2_11 import call_torch_dispatch_of

        call_torch_dispatch_of(kind)


if not hasattr(LocalIntNode, "str"):
    # rms_norm and others prepare an error message with the sizes, and ask each for its text; on
    # 2.13 a size that differs by simulated rank has none under the name they use.
    LocalIntNode.str = LocalIntNode._str  # type: ignore[attr-defined]


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The real tensors behind ``tensor``: itself, or one per simulated rank, in their order."""
    if isinstance(tensor, LocalTensor):
        by_rank = tensor._local_tensors
        yield from (by_rank[rank] for rank in sorted(by_rank))
    else:
        yield tensor


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` was sliced from, or ``mesh`` itself."""
    return mesh._get_root_mesh()


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of ``meshes`` in order; they must be slices of one root mesh."""
    return DeviceMesh._concatenate(list(meshes))


def flatten_axes(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The axes ``names`` of ``mesh`` as one, of the name torch gives it; made once per mesh."""
    return mesh[names]._flatten("_".join(names))


def unflatten_mesh(mesh: DeviceMesh, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """The one axis of ``mesh``, which has a name, as several; makes their groups on all ranks of its root."""
    return mesh._unflatten(0, tuple(sizes), tuple(names))


def default_store() -> dist.Store:
    """The key-value store of the default process group."""
    return dist.distributed_c10d._get_default_store()


pretended_backend: str | None = None
"""What ``backend_name`` says whatever the group is: a dry run's."""


_GLOO_DROPS_WITHIN = 0.2
"""Seconds without the interpreter's lock that gloo's threads get at exit; they need microseconds."""


def backend_name(group: ProcessGroup, device_type: str) -> str:
    """The backend that carries ``device_type``'s tensors in ``group``: ``gloo``, ``nccl``, ``fake``.

    A group that is a ``ProcessGroup`` of its own, as a third party's may be, is asked itself: it has no
    backends inside.
    """
    if pretended_backend is not None:
        return pretended_backend
    try:
        return group._get_backend(torch.device(device_type)).name()
    except RuntimeError:
        return group.name()


@cache
def let_gloo_finish_at_exit() -> None:
    """Lets gloo's threads drop the tensors of their last collectives before the interpreter goes.

    A work holds the Python objects of its tensors, and is dropped by the thread that ran it, which
    then waits for the interpreter's lock. Where the interpreter is already going, Python ends that
    thread, and C++ the process: exit code 134, after everything was right (pytorch/pytorch#179291).
    """
    atexit.register(time.sleep, _GLOO_DROPS_WITHIN)


def dtensor_shard_box(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset) DTensor gives to the rank at ``coordinate``."""
    return _compute_local_shape_and_global_offset(
        tuple(shape), tuple(mesh_shape), list(coordinate), list(placements)
    )


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """The description of a contiguous DTensor of global ``shape``.

    A placement of ours (``PackedShard``) says by ``spec_class`` that it needs a description of its own.
    """
    stride = torch.empty(shape, device="meta").stride()
    kinds = [p.spec_class for p in placements if hasattr(p, "spec_class")]
    kind = kinds[0] if kinds else DTensorSpec
    return kind(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, dtype))


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor of ``local`` without ``from_local``'s checks and autograd node (1 us, not 30).

    Of a description of our own, the subclass that it names. ``__init__`` does nothing, behind three frames
    that keep the compiler out.
    """
    kind = DTensor if type(spec) is DTensorSpec else spec.tensor_class  # type: ignore[attr-defined]
    return kind.__new__(kind, local, spec, requires_grad=False)


def spec_of(tensor: DTensor) -> DTensorSpec:
    """The description of ``tensor``."""
    return tensor._spec


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


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source into its target, casting, in few kernels."""
    torch._foreach_copy_(targets, sources)


def chunk_cat(tensors: list[torch.Tensor], chunks: int, out: torch.Tensor) -> None:
    """Cuts each tensor into as many chunks of dim 0, the last filled up with zeros: row i of ``out``
    (chunks, numbers) becomes the i-th ones, one after another, cast."""
    torch._chunk_cat(tensors, dim=0, num_chunks=chunks, out=out)


if hasattr(dist, "all_gather_single"):  # 2.13 deprecated the names 2.11 has
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor


_copies_outputs = not hasattr(torch_fsdp, "DataParallelMeshDims")  # 2.11


def for_compiled_function(output: torch.Tensor) -> torch.Tensor:
    """What an autograd function may return that a collective has written to ``output``.

    In a graph that torch 2.11 compiles, the gradient of an output that was written in place comes to nothing:
    there it is a copy.
    """
    return output.clone() if _copies_outputs and torch.compiler.is_compiling() else output


def init_fake_group(rank: int, world_size: int) -> None:
    """Make this process rank ``rank`` of a default group that communicates nothing."""
    # Importing the module registers the backend; init_process_group does so itself on 2.13 only.
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())


def fake_outputs_written() -> AbstractContextManager[None]:
    """Within it the fake group's collectives write their outputs, on every torch."""
    if hasattr(torch_fsdp, "DataParallelMeshDims"):  # since 2.12
        return nullcontext()
    from parallel3d._torch_2_11 import fake_outputs_written

    return fake_outputs_written()


def keep_partial_gradients(param: torch.Tensor) -> None:
    """Sees to it that a partial gradient of ``param`` is partial still in ``param.grad``."""
    if isinstance(param, DTensor) and not hasattr(torch_fsdp, "DataParallelMeshDims"):
        # 2.11 copies a gradient of other strides than the parameter's into a new DTensor, and sums it.
        param.register_hook(torch.Tensor.contiguous)


def process_group_of(argument: ProcessGroup | str | torch.ScriptObject) -> ProcessGroup:
    """The group behind what a c10d op is called with: a group, its boxed form or its name."""
    if isinstance(argument, ProcessGroup):
        return argument
    if isinstance(argument, str):
        return dist.distributed_c10d._resolve_process_group(
            dist.distributed_c10d.GroupName(argument)
        )
    return ProcessGroup.unbox(argument)


def clear_dtensor_caches() -> None:
    """Forget DTensor's propagation results, which hold meshes of groups that may be destroyed.

    A mesh equal to a destroyed one would be taken for it, and its group names, which torch
    counts from zero again, could then mean other groups.
    """
    # What torch.distributed.tensor.debug does, whose import alone takes half a second.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    caches = (
        (_redistribute, "_gen_transform_infos.cache_clear"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (_collective_utils, "MeshTopoInfo.build_from_mesh.cache_clear"),
        (_sharding_prop, "ShardingPropagator._propagate_tensor_meta_cached.cache_clear"),
    )
    for module, path in caches:
        with suppress(AttributeError):  # of another version
            attrgetter(path)(module)()


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The very tensor object ``tensor`` wraps; ``to_local`` may return a view of it."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


# The same of what is known to be a DTensor.
local_tensor_of: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")


def set_local_tensor(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Points ``tensor`` at ``local``, which must have the same shape, dtype and device."""
    assert isinstance(tensor, DTensor)
    tensor._local_tensor = local


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


# Attributes of modules: what was applied to them, and its state.
FULLY_SHARD_KEYS = (STATE_KEY, REGISTRY_KEY)


def set_fully_shard_state(module: nn.Module, state: Any) -> None:
    """Makes ``state`` what ``torch.distributed.fsdp.fully_shard.state(module)`` returns.

    And enters fully_shard in torch's registry of what was applied to the module.
    """
    attributes = vars(module)  # new dicts: a rollback puts the old ones back
    # From where torch defines it: ``torch.distributed.fsdp.fully_shard`` may have been replaced by ours.
    function = torch_fully_shard.__wrapped__  # type: ignore[attr-defined]
    attributes[STATE_KEY] = {**attributes.get(STATE_KEY, {}), function: state}
    attributes[REGISTRY_KEY] = {**attributes.get(REGISTRY_KEY, {}), "fully_shard": RegistryItem()}


def enter_module_state(module: nn.Module, state: Any) -> None:
    """Makes ``state``, which the caller keeps alive, what torch's ``_get_module_fsdp_state(module)`` finds.

    That function wants an instance of ``FSDPState``.
    """
    _module_state_mapping[module] = weakref.ref(state)


def fully_shard_state(module: nn.Module) -> Any:
    """``torch.distributed.fsdp.fully_shard.state(module)``."""
    return torch_fully_shard.state(module)  # type: ignore[attr-defined]


def is_torch_hook_state(state: object) -> bool:
    """Whether ``state`` is one that torch's own FSDP1 communication hooks take."""
    # By its name: who has one has imported the module, which nobody else needs.
    home = "torch.distributed.algorithms._comm_hooks.default_hooks"
    return any((c.__module__, c.__name__) == (home, "DefaultState") for c in type(state).__mro__)


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
