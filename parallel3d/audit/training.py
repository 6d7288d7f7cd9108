"""When a step is audited: hooks that exist until it is, the comparison after its backward, the error."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d._torch.autograd import function_modes, in_backward_pass, untraced
from parallel3d._torch.dtensor import gather_whole, get_local_tensor, make_dtensor
from parallel3d._torch.simulated import ranks_are_simulated
from parallel3d._trace.copies import meta_copy
from parallel3d._util import dry_run
from parallel3d._util.trace import issuing
from parallel3d.audit.findings import Finding, Report, bound_of, cause_of, message
from parallel3d.audit.recording import Recording, leaves, left_on, replaced, set_dropout
from parallel3d.audit.replay import Replay
from parallel3d.audit.whole import Whole
from parallel3d.cp.batch import Batch, cp_axis
from parallel3d.cp.state import CpState, state_of
from parallel3d.errors import AuditError, StateError
from parallel3d.fsdp.inspect import buffer_dtypes, cast_around, data_axes, units_of
from parallel3d.mesh.joined import joined_mesh
from parallel3d.mesh.store import others

_ATTRIBUTE = "_parallel3d_audit"
MOST = 8
"""Forwards that are kept for one backward."""


def skeleton_of(model: nn.Module) -> nn.Module | Exception:
    """Returns a copy of the plain ``model`` on meta, or the error that says why there is none."""
    if (
        ranks_are_simulated()
        or dry_run.active()
        or (dist.get_world_size() > 1 and others() is None)
    ):
        return StateError("its ranks are simulated, or a dry run's")
    try:
        return meta_copy(model)
    except Exception as error:
        return error


def attach(
    model: nn.Module, skeleton: nn.Module | Exception, mesh: DeviceMesh, *, due: bool
) -> None:
    """Gives the parallel ``model`` an Audit; with ``due`` its next step is compared."""
    vars(model)[_ATTRIBUTE] = audit = Audit(model, skeleton, mesh)
    if due and not isinstance(skeleton, Exception):
        audit.arm()
    elif due and not isinstance(skeleton, StateError):  # else its ranks are simulated
        warnings.warn(
            f"its first step is not audited: it can't be copied: {skeleton}", stacklevel=4
        )


def audit_of(model: nn.Module) -> Audit:
    """Returns the audit of ``model``; raises StateError if it has none."""
    found = vars(model).get(_ATTRIBUTE)
    if found is None:
        raise StateError(
            f"{type(model).__name__} has no audit: give the model that parallelize has returned, with "
            "parallelize(..., checks=Checks(audit=True)) where neither cp > 1 nor a plan by hand has it by "
            "itself"
        )
    return found


def next_step(model: nn.Module) -> None:
    """Compares the next training step of ``model``, and its next evaluation on parts of sequences, with the
    plain computation; see ``docs/audit.md``.

    Args:
        model: the model that ``parallelize`` has returned.

    Raises:
        StateError: the model was parallelized without an audit, or could not be copied for one.
    """
    audit = audit_of(model)
    if isinstance(audit.skeleton, Exception):
        raise StateError(
            f"audit: {type(model).__name__} has no plain copy to compare with: {audit.skeleton}"
        ) from audit.skeleton
    audit.arm()


def report(model: nn.Module) -> Report | None:
    """Returns the report of the last audit of ``model``, None before one; StateError if it has no audit."""
    return audit_of(model).report


class Audit:
    """Compares training steps of one model with the plain computation.

    ``skeleton`` is the plain model on meta, or the exception that says why there is none.
    """

    def __init__(self, model: nn.Module, skeleton: nn.Module | Exception, mesh: DeviceMesh) -> None:
        self._model = weakref.ref(model)
        self.skeleton = skeleton
        self.mesh = mesh
        # Whether the next training step, or evaluation on parts of sequences, is to be compared.
        self.train_due = self.eval_due = False
        self.report: Report | None = None  # of the last comparison
        # Whether the skeleton casts around ``full_precision_modules`` as units do.
        self.is_cast = False
        self._hooks: list[Any] = []
        self._running: AuditedStep | None = None
        self._steps: list[AuditedStep] = []  # forwards whose backward has not come
        self._dropout: dict[tuple[int, str], float] = {}
        self._waiting: dict[str, Tensor] = {}  # of micro-batches that were not reduced
        self.earlier: dict[int, Tensor] = {}  # id of a parameter -> its gradient before the step

    def __deepcopy__(self, memo: dict[int, Any]) -> Audit:
        model = memo.get(id(self._model()), self.model)
        return Audit(model, StateError("it is a copy"), self.mesh)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    def arm(self) -> None:
        """Has the next training step compared and, with cp, the next evaluation."""
        self.train_due = True
        self.eval_due = cp_axis(self.mesh) is not None
        if not self._hooks:
            self._hooks = [
                self.model.register_forward_pre_hook(self._before, with_kwargs=True),
                self.model.register_forward_hook(self._after, always_call=True),
            ]

    @untraced
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward_pass():
            return
        if issuing.after_backward == self._finish:  # an exception has broken its backward off
            issuing.after_backward = None
            for step in [step for step in self._steps if step.recording.is_reached]:
                step.recording.stop()
                self._steps.remove(step)
        trains = module.training and torch.is_grad_enabled()
        state = state_of(module)
        batch = state.forward if isinstance(state, CpState) else None
        self._running = None
        if not (self.train_due if trains else self.eval_due):
            return
        if not trains and (batch is None or batch.sequence is None):
            return
        if trains and any(b.settings.on_reduced is not None for _, b in _params(module)):
            # An optimizer uses gradients within the backward, so that its weights are gone afterwards.
            self.train_due = False
            self.report = Report(left_out={"the step: its backward changes the weights": None})
            return
        if self.train_due:
            set_dropout(module, self._off)
            if not self._steps and not self._waiting:
                self.earlier = {
                    id(param.sharded): grad.detach().clone()
                    for param, _ in _params(module)
                    if (grad := param.sharded.grad) is not None
                }
        self._running = AuditedStep(self, args, kwargs, batch, trains=trains)

    @untraced
    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        step, self._running = self._running, None
        if step is None or in_backward_pass():
            return output
        if output is None:  # it has raised
            step.recording.stop()
            if not self._steps:
                self._restore_dropout()
            return output
        output = step.recording.end_forward(output, module)
        if not step.trains:
            step.recording.stop()
            self._compare([step], backward=False)
            return output
        self._steps.append(step)
        if len(self._steps) > MOST:  # no backward seems to follow the first
            self._steps.pop(0).recording.stop()
        for _, tensor in (*leaves(output), *left_on(module)):
            if tensor.requires_grad:
                tensor.register_hook(self._begins)
        return output

    def _off(self, module: nn.Module, name: str, value: float) -> float:
        self._dropout.setdefault((id(module), name), value)
        return 0.0

    def _restore_dropout(self) -> None:
        if self._dropout:
            set_dropout(self.model, lambda m, name, value: self._dropout.get((id(m), name), value))
            self._dropout = {}

    @untraced
    def _begins(self, _: Tensor) -> None:
        issuing.after_backward = self._finish

    def _finish(self) -> None:
        """After a backward: compares the forwards that it belongs to; other forwards wait for theirs."""
        reached = [step for step in self._steps if step.recording.is_reached]
        self._steps = [step for step in self._steps if step not in reached]
        if reached:
            self._compare(reached, backward=True)

    def _compare(self, steps: list[AuditedStep], *, backward: bool) -> None:
        report = self.report = Report()
        for step in steps:
            step.recording.stop()
        done = False
        try:
            for step in steps:
                step.compare(report, self._waiting, backward=backward)
            done = backward and steps[-1].compare_parameters(report, self._waiting)
        finally:
            if done:
                self.train_due, self._waiting, self.earlier = False, {}, {}
                for step in self._steps:
                    step.recording.stop()
                self._steps = []
            elif not backward:
                self.eval_due = False
            if backward and not self._steps:
                self._restore_dropout()
        if not (self.train_due or self.eval_due):
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        self._raise(report)

    def _raise(self, report: Report) -> None:
        """Raises AuditError on all ranks if one of them has a finding."""
        found = {dist.get_rank(): report.findings}
        for axis in range(self.mesh.ndim):
            if self.mesh.size(axis) > 1:
                parts: list[Any] = [None] * self.mesh.size(axis)
                dist.all_gather_object(parts, found, group=self.mesh.get_group(axis))
                found = {rank: each for part in parts for rank, each in part.items()}
        merged: dict[tuple[str, str], Finding] = {}
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, findings in sorted(found.items()):
            for each in findings:
                key = each.unit, each.what
                ranks.setdefault(key, []).append(rank)
                if key not in merged or each.gap.difference > merged[key].gap.difference:
                    merged[key] = each
        if not merged:
            return
        sizes = dict(zip(self.mesh.mesh_dim_names or (), self.mesh.mesh.shape, strict=False))
        state = state_of(self.model)
        report.findings = [
            cause_of(each, tuple(ranks[key]), sizes, state if isinstance(state, CpState) else None)
            for key, each in merged.items()
        ]
        raise AuditError(message(report.findings, report, sizes))


class AuditedStep:
    """A training step or an evaluation, from its forward until it is compared."""

    def __init__(
        self, audit: Audit, args: Any, kwargs: Any, batch: Batch | None, *, trains: bool
    ) -> None:
        model = audit.model
        self.audit, self.batch, self.trains = audit, batch, trains
        self.inputs = args, kwargs  # whose tensors are parts of the sequences
        self.modules = {
            name: module
            for name, module in model.named_modules()
            if not name
            or any(module is each for unit in units_of(module, False) for each in unit.modules)
        }
        self.params = dict(model.named_parameters(remove_duplicate=False))
        dtypes, self.buffers = buffer_dtypes(model), {}
        for name, buffer in model.named_buffers(remove_duplicate=False):
            dtype = dtypes.get(id(model.get_submodule(name.rpartition(".")[0])))
            cast = dtype is not None and buffer.is_floating_point()
            self.buffers[name] = buffer.detach().to(dtype if cast else buffer.dtype, copy=True)
        rows = None if batch is None or batch.sequence is None else batch.sequence.rows
        # Path of an input -> its dim that was cut; None: it is whole.
        self.dims = {path: _cut_dim(t, rows) for path, t in leaves(self.inputs)}
        self.autocast = {
            device: torch.get_autocast_dtype(device)
            for device in {"cpu", audit.mesh.device_type}
            if torch.is_autocast_enabled(device)
        }
        self.modes = function_modes()
        self.recording = Recording(self.modules, (args, kwargs))

    def compare(self, report: Report, waiting: dict[str, Tensor], *, backward: bool) -> None:
        """Compares forward and backward; adds the plain parameters' gradients, by name, to ``waiting``."""
        start = time.perf_counter()
        audit, mesh = self.audit, self.audit.mesh
        device = torch.device(mesh.device_type)
        if mesh.device_type != "cpu":
            current = torch.get_device_module(mesh.device_type).current_device()
            device = torch.device(mesh.device_type, current)
        joined = joined_mesh(mesh)
        axes = data_axes(joined)
        tp = None if axes.size(axes.tp) == 1 else joined[(mesh.mesh_dim_names or ())[-1]]
        shapes = [tuple(t.shape[:2]) for _, t in leaves(self.inputs) if t.dim() > 1]
        tokens = frozenset(samples * length for samples, length in shapes if samples > 1)
        whole = Whole(cp_axis(mesh), tp, self.batch, device, tokens)
        skeleton = audit.skeleton
        assert isinstance(skeleton, nn.Module)
        self._take_modes(skeleton)
        modules = {name: skeleton.get_submodule(name) for name in self.modules}
        # Name of a parameter -> the engine's record of it and its bucket; of ignored ones (None, None).
        known = {id(param.sharded): (param, bucket) for param, bucket in _params(audit.model)}
        self.by_name: dict[str, tuple[Any, Any]] = {
            name: known.get(id(param), (None, None))
            for name, param in audit.model.named_parameters(remove_duplicate=False)
        }
        self.replay = Replay(
            skeleton, modules, self._value, self.recording, whole, report, backward=backward
        )
        args, kwargs = self._whole_inputs(whole)
        set_dropout(skeleton, lambda *_: 0.0)
        with ExitStack() as stack:
            for name, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(name, dtype=dtype))
            for mode in () if function_modes() else self.modes:  # the backward has left them
                stack.enter_context(mode)
            devices = [device] if device.type != "cpu" else []
            stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(torch.set_grad_enabled(backward))
            self.replay.run(args, kwargs)
        for name, grad in self.replay.grads.items():
            waiting[name] = grad if name not in waiting else waiting[name] + grad
        report.findings += self.replay.findings
        report.seconds += time.perf_counter() - start
        if self.trains and audit._dropout:
            report.notes = ["the step ran without dropout"]

    def _take_modes(self, skeleton: nn.Module) -> None:
        """Sets train or eval mode and ``requires_grad`` in the skeleton as they are in the model."""
        plain = dict(skeleton.named_modules())
        for name, module in self.audit.model.named_modules():
            if name in plain:
                plain[name].training = module.training
        frozen = {
            name: param.requires_grad
            for name, param in self.audit.model.named_parameters(remove_duplicate=False)
        }
        for name, param in skeleton.named_parameters(remove_duplicate=False):
            param.requires_grad_(frozen.get(name, param.requires_grad))
        if not self.audit.is_cast:
            self.audit.is_cast = True
            names = {id(module): name for name, module in self.audit.model.named_modules()}
            for unit in units_of(self.audit.model, recurse=True):
                cast_around([plain[names[id(module)]] for module in unit.modules], unit.policy)

    def _value(self, name: str, unit: str) -> Tensor | None:
        """Returns the whole value of a parameter or buffer, in the dtype in which the unit computes."""
        device = torch.device(self.audit.mesh.device_type)
        if name in self.buffers:
            return self.buffers[name].to(device)
        param, bucket = self.by_name.get(name, (None, None))
        if param is None:
            plain = self.params.get(name)
            return None if plain is None else _full(plain.detach())
        value = _full(param.sharded.detach())
        return value.to(bucket.precision.compute_dtype) if value.is_floating_point() else value

    def _whole_inputs(self, whole: Whole) -> tuple[Any, Any]:
        recorded = self.recording.root.inputs
        key_mask = None if self.batch is None else self.batch.key_mask
        tensors = {
            path: whole.of_input(recorded[path], dim)
            for path, dim in self.dims.items()
            if path in recorded
        }
        for path, tensor in tensors.items():
            key = path.rpartition(".")[2]
            if key == "num_items_in_batch" and whole.cp is not None:
                tensors[path] = tensor * whole.cp.size  # see ``shard_batch``
            elif key == "attention_mask" and key_mask is not None:
                tensors[path] = whole.of_input(key_mask.to(tensor.dtype), 1)
        for path, given in leaves(self.inputs):
            if given.requires_grad and path in tensors:
                tensors[path].requires_grad_()
        args, kwargs = replaced(self.inputs, tensors)
        packed = whole.sequence is not None and whole.sequence.documents is not None
        if packed and key_mask is None:
            kwargs = {**kwargs, "attention_mask": None} if "attention_mask" in kwargs else kwargs
        return args, kwargs

    def compare_parameters(self, report: Report, waiting: Mapping[str, Tensor]) -> bool:
        """Compares reduced gradients with the plain ones in ``waiting``; False if not reduced yet."""
        axes, replay = data_axes(joined_mesh(self.audit.mesh)), self.replay
        units = list(units_of(self.audit.model, recurse=True))
        if any(not (unit.sync and unit.all_reduce) for unit in units):
            return False
        data = [a for a in (axes.replicate, axes.shard) if a is not None and axes.size(a) > 1]
        groups = [axes.group(axis) for axis in data]
        computes = {
            id(bucket): {
                each.precision.compute_dtype
                for each in unit.group.buckets
                if each.precision.compute_dtype.is_floating_point
            }
            for unit in units
            for bucket in unit.group.buckets
        }
        largest = 0.0
        found: list[tuple[str, Tensor, Tensor]] = []
        for name, want in waiting.items():
            param, bucket = self.by_name.get(name, (None, None))
            if param is None or name in replay.unknown:
                continue
            if not bucket.settings.reducer.is_exact:
                report.left_out["gradients that a communication hook reduces"] = None
                continue
            want = want.to(torch.float32 if want.dtype != torch.float64 else want.dtype)
            for group in groups:
                dist.all_reduce(want, group=group)
            count = axes.size(axes.replicate) * axes.size(axes.shard)
            factor = bucket.settings.divide_factor
            want = want / (count if factor is None else factor)
            grad = param.sharded.grad
            got = torch.zeros_like(want) if grad is None else _full(grad)
            earlier = self.audit.earlier.get(id(param.sharded))
            if earlier is not None:
                if any(p.is_partial() for p in getattr(earlier, "placements", ())):
                    report.left_out["gradients added to earlier ones, not yet summed"] = None
                    continue
                got = got - _full(earlier)
            largest = max(largest, float(want.abs().max()) if want.numel() else 0.0)
            now = bucket.precision
            dtypes = now.reduce_dtype, now.wire_dtype or now.reduce_dtype, *computes[id(bucket)]
            lowest = max(dtypes, key=bound_of)
            found.append((name, want.to(lowest), got))
        for name, want, got in found:
            unit = next((u for u, places in replay._places.items() if name in places), "")
            own = name.removeprefix(f"{unit}.") if unit else name
            # One may be zero but for rounding, as a key's bias is.
            floor = largest * max(1e-3, bound_of(want.dtype) / 4)
            replay.compare(unit, f"gradient of {own}", want, got, floor=floor)
        report.findings += [each for each in replay.findings if each not in report.findings]
        return True


def _params(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yields (the engine's record of a parameter, its bucket) for all parameters."""
    for unit in units_of(model, recurse=True):
        for bucket in unit.group.buckets:
            for param in bucket.params:
                yield param, bucket


def _cut_dim(tensor: Tensor, rows: int | None) -> int | None:
    """Returns the dim along which cp has cut an input: that of size ``rows``, rather dim 1; None if none."""
    if rows is None:
        return None
    order = sorted(range(tensor.dim()), key=lambda d: (d != 1, d))
    return next((d for d in order if tensor.shape[d] == rows), None)


def _full(tensor: Tensor) -> Tensor:
    """Returns the whole of a sharded tensor on the device of its mesh; other tensors as they are."""
    if not isinstance(tensor, DTensor):
        return tensor
    kind = tensor.device_mesh.device_type
    local = get_local_tensor(tensor)
    if local.device.type != kind:  # CPU offload
        tensor = make_dtensor(local.to(kind), tensor._spec)
    return gather_whole(tensor)
