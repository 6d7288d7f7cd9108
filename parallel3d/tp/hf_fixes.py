"""What a Hugging Face plan lacks to be right for the model it comes with.

A plan says where layers are split; it can't say what the code between the layers computes. Three
things found in models' code make a split there wrong, and are told from the model itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from parallel3d.tp.patterns import matches, specificity
from parallel3d.tp.styles import Style

__all__ = ["Fix", "fixes"]

# What each style becomes in a block that every rank computes whole; the others stay as they are.
_WHOLE: dict[object, str] = {
    "colwise": "colwise_gather_output",
    "rowwise": "rowwise_split_input",
    "replicated_with_grad_allreduce": "replicate",
}


@dataclass(frozen=True)
class Fix:
    """One rule to add, by the module's path, and why."""

    path: str
    style: str
    why: str


def fixes(model: nn.Module, rules: Mapping[str, str | Style]) -> list[Fix]:
    """Rules to add to ``rules`` (pattern -> style), each more specific than what it corrects."""
    named = dict(model.named_modules(remove_duplicate=False))
    given = {path: _rule_for(path, rules) for path in named}
    found: list[Fix] = []
    for path, module in named.items():
        children = {_join(path, child): part for child, part in module.named_children()}
        styles = [given[child] for child in children]
        if "colwise" not in styles or "rowwise" not in styles:
            continue
        why = _needs_whole(path, module, rules)
        if why:
            whole = {child: _WHOLE[given[child]] for child in children if given[child] in _WHOLE}
            found += [Fix(child, style, why) for child, style in whole.items()]
        else:
            found += _split_activations(children, given)
    return found


def _rule_for(path: str, rules: Mapping[str, str | Style]) -> str | Style | None:
    """The style of the most specific rule that matches."""
    matching = [pattern for pattern in rules if matches(pattern, path)]
    return rules[max(matching, key=specificity)] if matching else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _needs_whole(path: str, module: nn.Module, rules: Mapping[str, str | Style]) -> str:
    """Why a block whose layers are split computes something on all of it; ``""``: it doesn't."""
    # Doge's attention: a number a head, used between the split layers.
    own = [
        name
        for name, p in module._parameters.items()
        if p is not None and _rule_for(_join(path, name), rules) is None
    ]
    if own:
        return f"the block's own {', '.join(own)} has no rule, so the block is computed whole"
    # Gemma 3n's MLP cuts off what lies below a quantile of the whole row.
    if getattr(module, "activation_sparsity", 0):
        return "its activation_sparsity is of the whole row, so the block is computed whole"
    return ""


def _split_activations(
    children: Mapping[str, nn.Module], given: Mapping[str, str | Style | None]
) -> Iterator[Fix]:
    """Activations with parameters (xIELU), which see only a part of the features on each rank."""
    for path, child in children.items():
        is_activation = type(child).__module__.split(".")[-1] == "activations"
        if is_activation and given[path] is None and any(child.parameters(recurse=False)):
            why = "an activation between split layers: its gradient on each rank is a part"
            yield Fix(path, "replicated_with_grad_allreduce", why)
