"""Random numbers under tensor parallelism: the same dropout on whole tensors, different dropout on parts.

The ranks of a tp group are seeded alike (``torch.manual_seed`` with the *data* rank). Random numbers for
whole activations must be equal on them; those for their parts (heads, hidden features, a part of the
sequence) must differ, or each mask would be used ``tp`` times. Dropout draws from the device's default
generator. That is switched to a stream of this rank's own after a module of the plan that puts out parts,
back after one that puts out a whole tensor, and in any case when the model's forward ends.

The generator's state has all that is needed, so activation checkpointing, which saves and restores it,
recomputes the same masks, and a run resumed from a saved state continues as it would have::

    s      = hash(state)                      of the common stream, where parts begin
    parts:   seed(MARK | s + rank * STEP)     48 bits below the mark
    whole:   seed(hash(s))                    where they end: a function of the seed before it

Only models with dropout when the plan is applied do this; the dropout modules of others refuse a ``p`` that
is set later. The ranks' states are compared in the first forward and, less and less often, in later ones.
Limits:

- From a module's first Colwise to its Rowwise all tensors count as parts. Dropout of a whole tensor *there*
  differs by rank. (Inside a wrapper of the Colwise alone it doesn't, nor in a LoRA layer of peft's.)
- Where the model runs on an accelerator, numbers from the CPU's default generator are equal on all ranks, as
  the dropping of layers needs. On the CPU itself they aren't equal among parts.
- In code under ``torch.compile`` nothing is switched: masks are then the same on all tp ranks, on parts too.
- The same holds for submodules called by themselves, outside the model's forward.
- ``checkpoint(preserve_rng_state=False)`` recomputes other masks, as without tensor parallelism.
"""

import ctypes
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from parallel3d._torch.autograd import in_backward_pass, queue_backward_callback
from parallel3d._torch.groups import all_gather_single
from parallel3d._torch.simulated import for_each_rank, ranks_are_simulated, value_on_rank
from parallel3d._util import dry_run
from parallel3d._util.dry_run import note_obstacle
from parallel3d._util.forwards import as_if, wrap_forward
from parallel3d.errors import AgreementError, StateError
from parallel3d.tp.collectives import TpAxis

if TYPE_CHECKING:
    from parallel3d.tp.styles.base import Style

_BITS = 48
_FIELD = 2**_BITS - 1
_MARK = 0x9E37 << _BITS
_STEP = 0x5851F42D4C95  # any odd number
_COMPARED_EVERY = 256


def can_drop(model: nn.Module) -> bool:
    """Whether a module, or its ``config``, has an attribute with a dropout probability above 0."""
    return any(
        "drop" in name
        and not name.startswith("summary_")  # of a head that GPT-2's language model does not have
        and isinstance(value, (int, float))
        and value > 0
        for module in model.modules()
        for owner in (module, getattr(module, "config", None))
        for name, value in getattr(owner, "__dict__", {}).items()
    ) or any(isinstance(m, _DROPOUT) and m.p > 0 for m in model.modules())


_DROPOUT: tuple[type[Any], ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_DROPOUT += (nn.AlphaDropout, nn.FeatureAlphaDropout)


def install_random(model: nn.Module, styles: dict[str, "Style"], axis: TpAxis) -> None:
    """Wraps the forwards of ``model`` and its modules so that they switch the random generator between the
    stream of whole tensors and the one of parts. ``styles``: path -> style of an applied plan."""
    regions = _Regions(axis)
    done = set()
    for name, style in styles.items():
        if style.random_after or style.random_before:
            module = _outermost(name, model, style.random_after == "features")
            if id(module) not in done:
                done.add(id(module))
                place = _Draw(regions, style.random_before, style.random_after)
                # In a region of parts, the input of a LoRA layer may be whole, and so its dropout.
                part = getattr(style, "input", "") in ("sequence", "shard")
                place.whole = hasattr(module, "base_layer") and not part
                _wrap(module, "_parallel3d_random", place, _at_place)
    _wrap(model, "_parallel3d_random_root", _Draw(regions, False, ""), _at_root)


def _wrap(module: nn.Module, name: str, place: "_Draw", forward: Callable[..., Any]) -> None:
    place.inner = wrap_forward(module, functools.partial(as_if, forward), forward)
    module.__dict__[name] = place


def refuse_later_dropout(model: nn.Module) -> None:
    """Makes the dropout modules of a model without dropout (``install_random`` was not called) raise if their
    ``p`` is above 0 in a later forward."""
    for module in model.modules():
        if isinstance(module, _DROPOUT):
            module.register_forward_pre_hook(_refuse_dropout)


def _refuse_dropout(module: Any, args: Any) -> None:
    if module.training and module.p > 0:
        raise StateError(
            f"{type(module).__name__}.p is {module.p}, but nothing in the model dropped anything when it "
            "was parallelized: tp ranks would drop the same elements of their different parts. Give one "
            "dropout a p above 0 before parallelize, and set it to 0 after"
        )


def _outermost(name: str, model: nn.Module, split: bool) -> nn.Module:
    """Returns the linear layer ``name``, or the outermost LoRA layer around it, whose dropout runs after the
    base layer. ``split``: whether the layer's output features are split; then a wrapper of any class with as
    many output features counts too."""
    module = model.get_submodule(name)
    size = getattr(module, "out_features", None)
    while "." in name and size is not None:
        name = name.rpartition(".")[0]
        outer = model.get_submodule(name)
        same = split and getattr(outer, "out_features", None) == size
        if same or hasattr(outer, "base_layer"):
            module = outer
        elif not isinstance(outer, nn.ModuleDict):  # peft's, of adapters
            break
    return module


# ---- forwards ----


@dataclass
class _Regions:
    """State that the wrapped forwards of one model share. ``depth``: how many of the model's forwards are
    under way; ``forwards``: how many ran in training."""

    axis: TpAxis
    depth: int = 0
    forwards: int = 0

    def compare_now(self) -> bool:
        """Counts a forward in training, and returns whether the ranks' generator states are to be compared in
        it: in the first, second, fourth, eighth ... and each 256th. They differ if a rank alone draws
        numbers, to log or to evaluate."""
        n = self.forwards = self.forwards + 1
        return n & (n - 1) == 0 or n % _COMPARED_EVERY == 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Regions":
        return _Regions(self.axis)


@dataclass
class _Draw:
    regions: _Regions
    before: bool
    after: str
    inner: Callable[..., Any] = nn.Module.forward
    whole: bool = False


def _at_place(self: Any, *args: Any, **kwargs: Any) -> Any:
    place: _Draw = self._parallel3d_random
    if torch.compiler.is_compiling():
        return place.inner(self, *args, **kwargs)
    if place.before and self.training:
        _to_parts(place.regions)
    elif place.whole:
        _to_whole(place.regions.axis)
    y = place.inner(self, *args, **kwargs)
    if place.after == "whole":
        _to_whole(place.regions.axis)
    elif place.after and self.training:
        _to_parts(place.regions)
    return y


def _at_root(self: Any, *args: Any, **kwargs: Any) -> Any:
    root: _Draw = self._parallel3d_random_root
    if torch.compiler.is_compiling():
        return root.inner(self, *args, **kwargs)
    regions = root.regions
    if self.training and regions.depth == 0 and regions.compare_now():
        try:
            _compare(regions.axis)
        except AgreementError:
            regions.forwards -= 1  # the next forward compares again
            raise
    regions.depth += 1
    try:
        return root.inner(self, *args, **kwargs)
    finally:
        regions.depth -= 1
        if regions.depth == 0:
            _to_whole(regions.axis)  # the next numbers may shuffle data


# ---- streams ----


def _to_parts(regions: _Regions) -> None:
    axis = regions.axis
    if regions.depth == 0:  # a recomputation, or a module called by itself
        if not in_backward_pass():
            return
        # For preserve_rng_state=False, which doesn't restore the state after it.
        queue_backward_callback(functools.partial(_to_whole, axis))

    def switch(generator: torch.Generator, rank: int) -> None:
        if not _is_marked(generator):
            s = _hash_of_state(generator)
            generator.manual_seed(_MARK | ((s + rank * _STEP) & _FIELD))

    _switch(axis, switch)


def _to_whole(axis: TpAxis) -> None:
    def switch(generator: torch.Generator, rank: int) -> None:
        if _is_marked(generator):
            s = (generator.initial_seed() - rank * _STEP) & _FIELD
            generator.manual_seed(_hash(s.to_bytes(8, "little")))

    _switch(axis, switch)


@note_obstacle
def _seeds_in_forward(model: nn.Module, batch: Any) -> str | None:
    if not any("_parallel3d_random_root" in vars(module) for module in model.modules()):
        return None
    return (
        "dropout on parts of tensors, under tensor parallelism, seeds the generator in each forward; set "
        "dropout to 0 before parallelize"
    )


def _switch(axis: TpAxis, switch: Callable[[torch.Generator, int], None]) -> None:
    dry_run.seeds("dropout on parts of a tensor, which differs by tp rank")
    generator = _generator(axis)
    if generator is None:
        return
    if ranks_are_simulated():
        for_each_rank(lambda rank: switch(generator, value_on_rank(axis.rank, rank)))
    else:
        switch(generator, axis.rank)


def _is_marked(generator: torch.Generator) -> bool:
    return generator.initial_seed() & ~_FIELD == _MARK


def _generator(axis: TpAxis) -> torch.Generator | None:
    kind = axis.mesh.device_type
    if kind == "cpu":
        return torch.default_generator
    device = torch.get_device_module(kind)
    if kind == "cuda" and device.is_current_stream_capturing():
        return None  # a graph being captured has fixed seeds
    return device.default_generators[device.current_device()]


def _hash_of_state(generator: torch.Generator) -> int:
    state = generator.get_state()  # on the CPU, also an accelerator's: no wait
    return _hash(ctypes.string_at(state.data_ptr(), state.numel()))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "little")


def _compare(axis: TpAxis) -> None:
    """Raises AgreementError if the generators of the tp ranks have different states."""
    generator = _generator(axis)
    if generator is None or ranks_are_simulated():  # simulated ranks begin alike
        return
    own = _hash_of_state(generator)
    # A fake group receives nothing: all stay equal, and unknown in a dry run.
    states = torch.full((axis.size,), own, dtype=torch.int64, device=axis.mesh.device_type)
    all_gather_single(states, states[axis.rank].view(1).clone(), group=axis.group)
    if dry_run.active():
        return
    hashes = states.tolist()
    if hashes != [own] * axis.size:
        other = next(rank for rank, state in enumerate(hashes) if state != hashes[0])
        ranks = [dist.get_global_rank(axis.group, rank) for rank in (0, other)]
        raise AgreementError(
            f"the model has dropout, but the default random generators of the ranks {ranks[0]} and "
            f"{ranks[1]}, of one tp group, have different states: they would drop different elements of "
            "the same tensors. Seed them alike, by the data rank: "
            "torch.manual_seed(seed + layout.data_rank(dist.get_rank()))"
        )
