"""The inputs of assert_parity, verify and audit: what the user gives, as a function of the sample's
number."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from parallel3d._util.trees import map_tensors, tensors_in
from parallel3d._util.users_code import raised_at
from parallel3d.errors import Parallel3dError

LossFn = Callable[..., torch.Tensor]

NEEDED = "a tensor, a tuple of tensors or a dict of tensors is needed"
_GIVE = "give a batch (--input, or batch=): a tensor, a tuple, a dict of keyword arguments or a function"
_ROWS, _LENGTH = 2, 8


class Samples:
    """A function of the sample's number that returns a tuple of inputs. Each data rank, micro-batch and step
    gets one sample.

    Args:
        batch: a function of the number that returns a sample; or a batch, or a function without arguments
            that returns one, whose rows are divided among ``parts`` samples. None: inputs are made as the
            model's config or its first layer says.
        build: makes the model; used if ``batch`` is None.
        parts: number of different samples that a step needs.

    Attributes:
        names: names of the keyword arguments, if a sample is a dict.
        made: description of the inputs that were made, if ``batch`` is None; else "".
    """

    def __init__(self, batch: Any, build: Callable[[], nn.Module], parts: int = 1) -> None:
        self.names: list[str] = []
        self.made = ""
        if batch is None:
            batch, self.made = _made_for(build())
        elif callable(batch) and not _takes_a_number(batch):
            with torch.random.fork_rng(devices=[]), errors_named("making the batch"):
                torch.manual_seed(0)  # the same batch on every rank
                batch = batch()
            if callable(batch):
                raise Parallel3dError(f"making the batch returned {batch!r}: {NEEDED}")
        self._sample = batch if callable(batch) else _parts_of(batch, parts)

    def __call__(self, index: int) -> tuple[torch.Tensor, ...]:
        value = self._sample(index)
        if isinstance(value, torch.Tensor):
            return (value,)
        container = isinstance(value, Mapping | tuple | list)
        if not container or not value:
            what = f"{'an empty ' if container else ''}{type(value).__name__}"
            raise Parallel3dError(f"the inputs of sample {index} are {what}: {NEEDED}")
        parts = value if isinstance(value, Mapping) else dict(enumerate(value))
        for name, part in parts.items():
            if not isinstance(part, torch.Tensor):
                what = f"{'' if isinstance(value, Mapping) else 'number '}{name}"
                raise Parallel3dError(
                    f"of the inputs of sample {index}, {what} is {type(part).__name__}: {NEEDED}"
                )
        if isinstance(value, Mapping):
            self.names[:] = list(value)
        return tuple(parts.values())

    def cut(self, inputs: tuple[Any, ...], shard_batch: Any, mesh: Any) -> tuple[Any, ...]:
        """Returns this cp rank's part of a sample: inputs, or one dict of them if there are ``names``."""
        if self.names:
            return (shard_batch(dict(zip(self.names, inputs, strict=True)), mesh),)
        return tuple(shard_batch(inputs, mesh))

    def loss_of(self, loss: LossFn | None) -> LossFn:
        """Returns a function (model, inputs) -> loss that calls ``loss`` or the default loss.

        If there are ``names``, inputs are passed by keyword; they may be given as one dict.
        """

        def of(model: nn.Module, *inputs: Any) -> torch.Tensor:
            if self.names:
                given = len(inputs) == 1 and isinstance(inputs[0], Mapping)
                named = inputs[0] if given else dict(zip(self.names, inputs, strict=True))
                return (loss or default_loss)(model, **named)
            return (loss or default_loss)(model, *inputs)

        return of


def built(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Returns the model that ``build`` makes after ``torch.manual_seed(seed)``: the same on every rank."""
    torch.manual_seed(seed)
    with errors_named("building the model"):
        model = build()
    if not isinstance(model, nn.Module):
        raise Parallel3dError(f"the model that was built is a {type(model).__name__}, no nn.Module")
    return model


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns ``model`` with its parameters and buffers in ``dtype``. In float64 the experts of a Hugging
    Face model use batched matmuls, as torch has no grouped ones of it."""
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_experts_implementation", None)
    if dtype == torch.float64 and implementation == "grouped_mm":
        model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    return model.to(dtype)


def default_loss(model: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    """Returns the model's own loss or output, if a scalar, or the mean square of its first output."""
    output = model(*args, **kwargs)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    floats = [t for t in tensors_in(output) if t.is_floating_point()]
    if not floats:
        raise Parallel3dError(
            f"{type(model).__name__} puts out {type(output).__name__} without a floating-point tensor: "
            "give a loss function"
        )
    return floats[0] if floats[0].dim() == 0 else floats[0].square().mean()


def _takes_a_number(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function in C
        return True
    for arguments in ((0,), ()):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return bool(arguments)
    name = getattr(function, "__name__", repr(function))
    raise Parallel3dError(
        f"{name}{signature} must take the number of a sample, or nothing: it makes the inputs"
    )


def _parts_of(batch: Any, parts: int) -> Callable[[int], Any]:
    """Returns a function: a sample's number -> the rows of ``batch`` in its part ``number % parts``."""
    tensors = [t for t in tensors_in(batch) if t.dim()]
    rows = {t.shape[0] for t in tensors}
    if not tensors:
        raise Parallel3dError(f"the batch is {type(batch).__name__}: {NEEDED}, or a function")
    if len(rows) > 1:
        sizes = " and ".join(map(str, sorted(rows)))
        raise Parallel3dError(
            f"the tensors of the batch have {sizes} rows (dim 0), so that they can't be divided among ranks: "
            "give a function of the sample's number, which returns the inputs of one rank"
        )
    if min(rows) < parts:
        raise Parallel3dError(
            f"the batch has {min(rows)} row{'s' * (min(rows) != 1)} (dim 0) for {parts} data ranks and "
            f"micro-batches: give {parts} rows or more, or a function of the sample's number, which returns "
            "the inputs of one rank"
        )
    return lambda index: map_tensors(
        lambda t: t.tensor_split(parts)[index % parts] if t.dim() else t, batch
    )


def _made_for(model: Any) -> tuple[Callable[[int], Any], str]:
    """Returns a function that makes the inputs of a sample by its number, and a text that describes them.

    The inputs are known if the model says them (Hugging Face), or if its forward needs one tensor and its
    first module with parameters is an embedding or linear layer; a forward shows whether that is so.
    """
    tried: Exception | None = None
    for make, what in _guesses(model):
        try:
            with torch.no_grad():
                default_loss(model, **make(0)) if isinstance(make(0), dict) else model(make(0))
        except Exception as error:  # whatever the model's code raises
            tried = tried or error
        else:
            return make, what
    why = f": with inputs that its first layer takes, its forward raised {tried}" if tried else ""
    raise Parallel3dError(
        f"{type(model).__name__} doesn't say which inputs it takes{why}; {_GIVE}"
    ) from tried


def _guesses(model: Any) -> Iterator[tuple[Callable[[int], Any], str]]:
    def ids(below: int) -> Callable[[int], torch.Tensor]:
        return lambda index: torch.randint(0, below, (_ROWS, _LENGTH), generator=_seeded(index))

    if not isinstance(model, nn.Module):
        return
    vocab = getattr(getattr(model, "config", None), "vocab_size", None)
    if getattr(model, "main_input_name", "") == "input_ids" and isinstance(vocab, int):
        tokens = ids(vocab)
        what = f"input_ids of shape ({_ROWS}, {_LENGTH}) below config.vocab_size, {vocab:,}"
        yield lambda index: {"input_ids": tokens(index)}, what
        return
    signature = inspect.signature(model.forward).parameters.values()
    if sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in signature) > 1:
        return
    own = ((n, m) for n, m in model.named_modules() if any(True for _ in m.parameters(False)))
    name, first = next(own, ("", None))
    reads = f"as {name or 'it'} ({type(first).__name__}) reads"
    if isinstance(first, nn.Embedding):
        below = first.num_embeddings
        yield ids(below), f"token ids of shape ({_ROWS}, {_LENGTH}) below {below:,}, {reads}"
    elif isinstance(first, nn.Linear):
        shape: tuple[int, ...]
        for shape in ((_ROWS, _LENGTH, first.in_features), (_ROWS, first.in_features)):
            yield (
                lambda index, shape=shape: torch.randn(shape, generator=_seeded(index)),  # type: ignore[misc]
                f"numbers of shape {shape}, {reads}",
            )


def _seeded(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


@contextmanager
def errors_named(what: str, model: nn.Module | None = None) -> Iterator[None]:
    """Context manager: turns errors of the body into Parallel3dErrors that say that ``what`` raised them, in
    which line and in which module of ``model``."""
    try:
        yield
    except Parallel3dError:
        raise
    except Exception as error:
        line = raised_at(error)
        where = f", at {line}" if line else ""
        raise Parallel3dError(
            f"{what} raised {type(error).__name__}: {error}{where}{_module_in(error, model)}"
        ) from error


def _module_in(error: Exception, model: nn.Module | None) -> str:
    """Returns a text that names the innermost module whose forward raised ``error``, and its input; or ""."""
    names = {} if model is None else {id(m): name for name, m in model.named_modules()}
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if id(module) in names and frame.f_code.co_name == "forward":
            named = f"{names[id(module)] or 'the model itself'} ({type(module).__name__})"
            values = (v for n, v in frame.f_locals.items() if n != "self")
            shapes = [
                f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
                for value in values
                for t in tensors_in(value)
            ]
            return f", module {named}" + (f" with input {shapes[0]}" if shapes else "")
    return ""
