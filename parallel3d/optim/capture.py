"""capture: a training step as one CUDA graph, which is replayed with new batches.

A replay launches what the step has put on streams, with the same addresses and the same numbers of the host:
no Python runs. So nothing that Python decides may differ from step to step, and what does is compared before
each replay, or copied into memory of the graph. ``parallel3d dryrun --check-capture`` tells without a GPU
whether a step can be captured (``docs/capture.md``).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallel3d._torch.dtensor import get_local_tensor
from parallel3d._torch.groups import group_timeout
from parallel3d._util import dry_run
from parallel3d._util.arguments import as_count
from parallel3d._util.dry_run import first_obstacle
from parallel3d._util.trees import map_tensors
from parallel3d._util.users_code import raised_at
from parallel3d.errors import Parallel3dError, StateError, WrongTypeError
from parallel3d.fsdp import FSDPModule
from parallel3d.fsdp.inspect import units_of
from parallel3d.mesh.agreement import name_ranks, ranks_by_value
from parallel3d.mesh.exchange import StoreExchange
from parallel3d.mesh.store import next_table, others
from parallel3d.optim.local import Snapshot

_LOGGER = logging.getLogger(__name__)
_SYNC = "called a synchronizing CUDA operation"  # torch's warning, by its sync debug mode
_CHECK = "parallel3d dryrun --check-capture lists all that stands against a capture"

Call = Callable[[], Any]
_T = TypeVar("_T")


class CudaGraph:
    """Records the kernels that a call launches as a CUDA graph, and replays them. Warm-up and capture use one
    stream, because autograd's nodes, and handles of libraries, keep the stream on which they were made."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, call: Call) -> Any:
        """Calls ``call`` eagerly, on the stream of the capture, and returns its result."""
        before = torch.cuda.current_stream()
        self.stream.wait_stream(before)
        with torch.cuda.stream(self.stream):
            result = call()
        before.wait_stream(self.stream)
        return result

    def watch(self, call: Call) -> tuple[Any, list[str]]:
        """Calls ``call`` as ``run`` does; returns its result, and the lines at which the host waited for the
        device."""
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = self.run(call)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        syncs = [f"{w.filename}:{w.lineno}" for w in caught if _SYNC in str(w.message)]
        return result, list(dict.fromkeys(syncs))

    def record(self, call: Call) -> Any:
        """Records the kernels of ``call``, without executing them; returns its result, which replays fill."""
        self.graph = None  # frees the memory of an earlier one
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        for generator in self.generators:
            graph.register_generator_state(generator)
        try:
            # Other threads, as NCCL's watchdog, may do meanwhile what a capture may not.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                result = call()
        finally:
            torch.cuda.set_stream(before)  # an error at the capture's end leaves the other one
        self.graph = graph
        return result

    def replay(self) -> None:
        assert self.graph is not None
        self.graph.replay()


class CapturedStep:
    """A training step that ``capture`` has made.

    Args:
        step_function, model, example_batch, warm_up: as for ``capture``.
        optimizers: all of the step.
        graph: what records the step. None: it runs eagerly.
        reason: why, if it runs eagerly from the start.

    Attributes:
        reason: why it runs eagerly; None while it warms up and when it is captured.
        is_captured: whether calls replay a graph.
        steps: how many steps were made.
    """

    def __init__(
        self,
        step_function: Callable[[Any], Any],
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        example_batch: Any,
        warm_up: int,
        graph: CudaGraph | None,
        reason: str | None,
    ) -> None:
        self.reason: str | None = None
        self.is_captured = False
        self.steps = 0
        self._function, self._model, self._optimizers = step_function, model, optimizers
        self._warm_up, self._left, self._graph = warm_up, warm_up, graph
        device = next(model.parameters()).device
        self._batch = map_tensors(lambda t: _static(t, device), example_batch)
        self._inputs = dict(_leaves(self._batch, "batch"))
        self._outputs: Any = None
        self._fixed: _Fixed | None = None  # what the graph relies on
        if reason is not None:
            self._fall_back(reason)

    def __call__(self, batch: Any) -> Any:
        """Makes a step with ``batch`` and returns what the step function returns, with tensors detached.

        Raises:
            Parallel3dError: a tensor of ``batch`` has another shape or dtype than the example, or another
                value is not equal.
            StateError: a setting of an optimizer that the graph has as a number was changed.
        """
        self._fill(batch)
        if self.is_captured:
            assert self._fixed is not None
            if self._fixed.is_unchanged(self._model, self._optimizers):
                return self._replay()
            _LOGGER.warning("capture: tensors were replaced, and the step is captured again")
            self.is_captured, self._fixed, self._outputs = False, None, None
            self._left = self._warm_up
        if self.reason is not None or self._graph is None:
            return self._eagerly()
        if self._left > 1:
            self._left -= 1
            return self._made(self._graph.run(self._call))
        if self._left:
            self._left = 0
            result, syncs = self._graph.watch(self._call)
            where = ", ".join(syncs)
            self._agree(
                f"the host waits for the GPU in the step, at {where}; {_CHECK}" if syncs else ""
            )
            return self._made(result)
        return self._capture()

    def _call(self) -> Any:
        """Calls the step function and returns its results, detached, so that they keep no autograd graph
        alive. Its inputs are new containers and leaves: it may change the containers, and gradients of inputs
        don't accumulate over steps."""
        return map_tensors(Tensor.detach, self._function(map_tensors(_leaf, self._batch)))

    def _eagerly(self) -> Any:
        with dry_run.captured(self._batch):
            return self._made(self._call())

    def _made(self, result: Any) -> Any:
        self.steps += 1
        return result

    def _capture(self) -> Any:
        assert self._graph is not None
        grads = _Gradients(self._model)
        reason = ""
        try:
            self._outputs = self._graph.record(lambda: grads.after(self._call))
        except Exception as error:
            cause = error
            while cause.__context__ is not None and isinstance(cause.__context__, Exception):
                cause = cause.__context__
            where = raised_at(cause) or "?"
            reason = f"the capture failed at {where}: {str(cause).splitlines()[0]}; {_CHECK}"
            grads.put(replayed=False)  # nothing was executed: its own ones have no values
            if isinstance(self._model, FSDPModule):
                self._model.reset_iter_state()  # nor have its unsharded parameters
        self._agree(reason)
        if self.reason is not None:
            self._outputs = None
            return self._eagerly()
        self._fixed = _Fixed(self._model, self._optimizers, grads)
        self.is_captured = True
        return self._replay()

    def _replay(self) -> Any:
        assert self._graph is not None
        self._graph.replay()
        assert self._fixed is not None
        self._fixed.weights_changed()
        self._fixed.grads.put(replayed=True)
        return self._made(map_tensors(Tensor.clone, self._outputs))

    def _agree(self, reason: str) -> None:
        """Makes all ranks run eagerly if any rank has a ``reason`` (not ``""``)."""
        peers = others()
        if peers is not None:
            store, rank, world_size = peers
            table = next_table(store, "optim/capture", rank)
            reasons = StoreExchange(table, rank, range(world_size), group_timeout())
            reasons.put(reason)
            ranks_of = ranks_by_value(reasons.collect())
            ranks_of.pop("", None)
            if ranks_of and not reason:
                reason, ranks = next(iter(ranks_of.items()))
                reason += f" (on {name_ranks(ranks)})"
        if reason:
            self._fall_back(reason)

    def _fall_back(self, reason: str) -> None:
        self.reason = reason
        _LOGGER.warning("capture: the step runs eagerly: %s", reason)

    def _fill(self, batch: Any) -> None:
        """Copies ``batch`` to where the graph reads it; Parallel3dError if it doesn't fit the example."""
        given = dict(_leaves(batch, "batch"))
        if only := given.keys() ^ self._inputs.keys():
            raise Parallel3dError(
                f"the batch has another structure than the example: {', '.join(sorted(only))} "
                "is in one of them only; give every step the same"
            )
        for path, static in self._inputs.items():
            value = given[path]
            if not isinstance(static, Tensor):
                if not _is_equal(value, static):
                    raise Parallel3dError(
                        f"{path} is {value!r}; the step was made with {static!r}, which a graph repeats: "
                        "make it a tensor, or call capture for each value"
                    )
            elif not isinstance(value, Tensor) or _kind(value) != _kind(static):
                raise Parallel3dError(
                    f"{path} is {_text(value)}; the step was made with {_text(static)}: pad the batch, or "
                    "call capture for each shape"
                )
        with torch.no_grad():
            for path, static in self._inputs.items():
                if isinstance(static, Tensor) and given[path] is not static:
                    static.copy_(given[path], non_blocking=True)


class _Gradients:
    """The parameters' ``.grad`` before and after the recorded step, which replays find and leave too."""

    def __init__(self, model: nn.Module) -> None:
        self._named = list(model.named_parameters())
        self._before = [param.grad for _, param in self._named]
        self._versions = self._versions_now()
        self._needed = self._left = self._before

    def _versions_now(self) -> list[int]:
        return [-1 if grad is None else _local(grad)._version for grad in self._before]

    def after(self, call: Call) -> Any:
        """Calls the step that is recorded, notes the gradients that it leaves, and returns its result."""
        result = call()
        self._left = [param.grad for _, param in self._named]
        # What it has dropped and not written to, as ``zero_grad`` at its beginning does, may be anything.
        self._needed = [
            _ANY if grad is not None and left is not grad and now == version else grad
            for grad, left, version, now in zip(
                self._before, self._left, self._versions, self._versions_now(), strict=True
            )
        ]
        return result

    def put(self, replayed: bool) -> None:
        """Sets ``.grad`` to the tensors that the recorded step left, or to those from before it."""
        grads = self._left if replayed else self._before
        for (_, param), grad in zip(self._named, grads, strict=True):
            if param.grad is not grad:
                param.grad = grad

    def check(self) -> None:
        """Raises StateError if a parameter's ``.grad`` is not the one that the recorded step found."""
        for (name, param), needed in zip(self._named, self._needed, strict=True):
            if needed is not _ANY and param.grad is not needed:
                had = "no gradient" if needed is None else "another gradient"
                raise StateError(
                    f"{name}.grad was changed between two steps; the captured one began with {had}, and "
                    "would not see it. Let the step function compute all gradients of a step, and zero "
                    "them at its end, or all at its beginning"
                )


_ANY: Any = object()


class _Fixed:
    """What a graph contains and users may change: addresses of tensors, numbers in optimizers' settings."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], grads: _Gradients
    ) -> None:
        self.grads = grads
        self._training = model.training
        self._modules = list(model.modules())
        self._contents = _contents(self._modules)
        self._params = list(model.parameters())
        self._locals = list(map(_local, self._params))
        self._addresses = list(map(Tensor.data_ptr, self._locals))
        self._states = [Snapshot(optimizer.state) for optimizer in optimizers]
        self._settings = [list(_settings(optimizer)) for optimizer in optimizers]

    def weights_changed(self) -> None:
        """Increments the parameters' versions after a replay, which autograd and the engine don't see: units
        that an evaluation left unsharded are then gathered again."""
        torch.autograd.graph.increment_version(self._locals)

    def is_unchanged(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
        """Whether a replay does what the step would do now; False: parameters, state or settings were
        replaced, so that the step must be captured again.

        Raises:
            StateError: a number in an optimizer's settings, the training mode, or a gradient was changed.
        """
        for optimizer, before in zip(optimizers, self._settings, strict=True):
            now = list(_settings(optimizer))
            if len(now) != len(before):
                return False
            for (index, name, value), (_, _, old) in zip(now, before, strict=True):
                if value is old:
                    continue
                if isinstance(old, Tensor) or isinstance(value, Tensor):
                    return False
                if value != old:
                    raise StateError(
                        f"{name} of group {index} of {type(optimizer).__name__} is {value!r}; {old!r} is in "
                        f"the captured graph. Make {name} a tensor on the GPU before capture(...), "
                        f"torch.tensor({old!r}, device=...), and change it in place: .fill_(value)"
                    )
        if model.training != self._training:
            mode = "training" if self._training else "evaluation"
            raise StateError(f"the step was captured in {mode} mode; call model.train() before it")
        is_same = (
            _contents(self._modules) == self._contents
            and all(map(is_, map(_local, self._params), self._locals))
            and list(map(Tensor.data_ptr, self._locals)) == self._addresses
            and all(s.matches(o.state) for s, o in zip(self._states, optimizers, strict=True))
        )
        if is_same:
            self.grads.check()
        return is_same


def capture(
    step_function: Callable[[Any], Any],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    example_batch: Any,
    *,
    warm_up: int = 3,
    generators: torch.Generator | Iterable[torch.Generator] = (),
) -> CapturedStep:
    """Returns ``step``: ``step(batch)`` calls ``step_function(batch)``, or replays it as one CUDA graph.

    ::

        def train_step(batch):
            loss = model(batch["ids"], labels=batch["labels"])
            loss.backward()
            p3d.optim.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = p3d.capture(train_step, model, optimizer, batch)
        for batch in loader:
            loss = step(batch)

    Nothing runs in this call, and each call of ``step`` is one step of training: the first ``warm_up`` run
    eagerly, the next one is recorded, which executes nothing, and replayed, and all later ones are replayed.
    Weights are the same as without a graph. All micro-batches of a step belong into the step function. A
    batch is copied into memory that the graph reads, on the device of the parameters; results are copies.

    What Python decides is that of the recorded step. Hooks, metrics and guards don't run in replays; random
    numbers of the GPU's default generator go on (seed it between steps); a learning rate that changes must be
    a tensor on the GPU, ``AdamW(params, lr=torch.tensor(1e-3, device="cuda"), capturable=True)``, which
    schedulers fill in place. A changed number is an error. Where parameters, state or tensors of settings
    were replaced, as by ``load_state_dict``, the step warms up and is captured again.

    Args:
        step_function: forward, backward, clipping and optimizer, of a batch; returns tensors, in any
            structure.
        model: what is trained.
        optimizer: one, or several.
        example_batch: a batch of the shapes and dtypes of all others: a tensor, or a dict, list, tuple or
            dataclass of tensors and of values that stay the same.
        warm_up: how many steps are made before the capture, at least 2: in the first, the engine learns the
            order of its units, and the optimizer makes its state.
        generators: those that the step draws from, beside the default one.

    Returns:
        The step. ``step.reason`` says why it runs eagerly, which a warning of the logger says too: without a
        GPU, with options that can't be captured, or where the host waits for the GPU in the step. All ranks
        do the same.

    Raises:
        Parallel3dError: ``warm_up`` is below 2; the model has no parameters; there is no optimizer.
        WrongTypeError: an argument of a wrong type.
    """
    if not callable(step_function):
        raise WrongTypeError(
            f"step_function is {step_function!r}; it must be a function of a batch"
        )
    if not isinstance(model, nn.Module):
        raise WrongTypeError(f"model is {model!r}; it must be a module")
    optimizers = _several("optimizer", optimizer, Optimizer, "a torch optimizer, or several")
    if not optimizers:
        raise Parallel3dError("optimizer is empty; it must be a torch optimizer, or several")
    drawn_from = _several("generators", generators, torch.Generator, "some torch.Generators")
    if next(model.parameters(), None) is None:
        raise Parallel3dError(f"{type(model).__name__} has no parameters, so nothing to train")
    count = as_count("warm_up", warm_up, 2)
    reason = why_not(model, optimizers, example_batch)
    graph = CudaGraph(drawn_from) if reason is None else None
    return CapturedStep(step_function, model, optimizers, example_batch, count, graph, reason)


def _several(name: str, given: Any, kind: type[_T], expected: str) -> list[_T]:
    """Returns ``given``, one object of class ``kind`` or several, as a list; WrongTypeError, with
    ``expected``, for another class."""
    values = list(given) if isinstance(given, Iterable) else [given]
    for value in values:
        if not isinstance(value, kind):
            raise WrongTypeError(f"{name} is {value!r}; it must be {expected}")
    return values


def why_not(model: nn.Module, optimizers: Sequence[Optimizer], batch: Any) -> str | None:
    """Returns why a step of ``model`` can't be captured, as far as that is known before it runs, or None."""
    if dry_run.active():
        return "this is a dry run"
    device = next(model.parameters()).device
    if device.type != "cuda":
        return f"no CUDA device: the model is on {device.type!r}"
    return option_against(model, optimizers, batch)


def option_against(model: nn.Module, optimizers: Sequence[Optimizer], batch: Any) -> str | None:
    """Returns which option of the model, the optimizers or torch prevents a capture, or None."""
    for unit in units_of(model, recurse=True):
        if any(bucket.offload is not None for bucket in unit.group.buckets):
            return f"the parameters of unit {unit.label} are offloaded to the CPU (offload_policy)"
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            name, lr = type(optimizer).__name__, group.get("lr")
            if "capturable" in group and not group["capturable"]:
                return (
                    f"{name} refuses a capture without capturable=True; fused=True may be beside it"
                )
            if isinstance(lr, Tensor) and lr.device.type == "cpu":
                return f"the learning rate of {name} is a tensor on the CPU; make it on the GPU"
    if torch.is_anomaly_enabled():
        return "torch.autograd.detect_anomaly() reads each gradient; leave it out"
    return first_obstacle(model, batch)


def _local(param: Tensor) -> Tensor:
    return get_local_tensor(param) if isinstance(param, DTensor) else param


def _contents(modules: Sequence[nn.Module]) -> list[Any]:
    """Returns what a replay needs unchanged: ids of children, parameters and buffers, and flags."""
    found: list[Any] = []
    for module in modules:
        params = module._parameters.values()
        found.append(module.training)
        found += map(id, module._modules.values())
        found += map(id, params)
        found += map(id, module._buffers.values())
        found += [param is not None and param.requires_grad for param in params]
    return found


def _settings(optimizer: Optimizer) -> Iterator[tuple[int, str, Any]]:
    """Yields (index of a group, name, value) of the optimizer's settings that a step reads."""
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in ("params", "initial_lr"):
                yield index, name, value


def _static(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of ``tensor`` on ``device``, a leaf that requires a gradient if ``tensor`` does."""
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _is_equal(value: Any, other: Any) -> bool:
    """Whether the two are equal, or both NaN; False for arrays, whose comparison has several answers."""
    if value is other:
        return True
    try:
        return bool(value == other) or bool(value != value and other != other)
    except (ValueError, RuntimeError):
        return False


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of all values inside nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
