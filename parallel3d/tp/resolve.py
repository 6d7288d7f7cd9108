"""The steps of resolving a plan: matching, shared parameters, checks across modules."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from parallel3d.errors import PlanError
from parallel3d.tp.checks import ParamRule, is_plain
from parallel3d.tp.local_attributes import PlannedAttribute, local_attributes
from parallel3d.tp.styles import (
    Colwise,
    Experts,
    IdentityExpert,
    LocalParams,
    LocalSizes,
    NoFastPath,
    PrepareInput,
    PrepareOutput,
    Replicated,
    RopeOutput,
    Rowwise,
    SequenceParallel,
    SplitHeads,
    Style,
    VocabParallel,
)
from parallel3d.tp.styles.base import is_embedding
from parallel3d.tp.torch_styles import TorchStyle

# Patterns: how a plan's key names modules and parameters.

_WILDCARDS = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def expand(pattern: str) -> list[str]:
    """The patterns a pattern with brace sets stands for, without them.

    ``"layers.*.{q,k,v}_proj"`` is three. A set isn't nested, and no alternative is empty.

    Raises:
        PlanError: braces that are nested, unbalanced or hold an empty alternative; not a string.
    """
    if not isinstance(pattern, str):
        raise PlanError(
            f"a pattern is a module's path such as 'layers.*.wq', not {type(pattern).__name__}"
        )
    parts = re.split(r"\{([^{}]*)\}", pattern)  # literal, alternatives, literal, ...
    if any(brace in literal for literal in parts[::2] for brace in "{}"):
        raise PlanError(
            "its braces are unbalanced or one set is inside another; write a set as {q,k,v}_proj"
        )
    found = [parts[0]]
    for alternatives, literal in zip(parts[1::2], parts[2::2], strict=True):
        choices = [choice.strip() for choice in alternatives.split(",")]
        if not all(choices):
            raise PlanError(f"the set {{{alternatives}}} has an empty alternative")
        found = [f"{head}{choice}{literal}" for head in found for choice in choices]
    return list(dict.fromkeys(found))


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern without brace sets matches a path, segment by segment; ``""`` is the root.

    ``*`` stands for any characters within one segment, so for a layer's number too; ``?`` for one
    character and ``[...]`` for one of some.
    """
    if pattern == "" or name == "":
        return pattern == name
    # With as many dots in both, each of the pattern's has one: a wildcard that took one is one too few.
    return pattern.count(".") == name.count(".") and fnmatchcase(name, pattern)


def has_wildcard(pattern: str) -> bool:
    """Whether the pattern can match more than one path."""
    return bool(_WILDCARDS.search(pattern))


def specificity(pattern: str) -> tuple[int, int]:
    """Larger for the more specific of two patterns: segments, then characters, without wildcard."""
    literal = [segment for segment in pattern.split(".") if not has_wildcard(segment)]
    return len(literal), len(_WILDCARDS.sub("", pattern))


def numberless(path: str) -> str:
    """A path with ``*`` for each number that is a whole segment: the same for all layers."""
    return _NUMBER.sub("*", path)


def nearest(pattern: str, paths: Iterable[str], count: int = 3) -> list[str]:
    """Paths, layers' numbers as ``*``, that look like ``pattern``."""
    # Numbered modules once each, so that one layer's names don't fill the list.
    names = dict.fromkeys(numberless(path) for path in paths if path)
    return difflib.get_close_matches(numberless(pattern), names, count, 0.4)


# ChosenPlan: the rules of a plan before they meet a model, and where they come from.

Rule = str | Style | ParallelStyle
"""A style, its name, or one of torch's styles."""

Plan = Mapping[str, Rule] | Literal["auto"]
"""What users give: pattern -> style, style name or one of torch's styles, or ``"auto"``."""


@dataclass(frozen=True)
class ChosenPlan:
    """Rules, and why each is there.

    Attributes:
        rules: pattern -> style or style name.
        why: pattern -> why the rule is there, for the report; patterns the user gave have none.
        notes: what was done that a reader of the rules should know.
        source: where the rules come from; ``""`` is the user.
    """

    rules: Mapping[str, Rule]
    why: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: str = ""

    def reason(self, pattern: str) -> str:
        """Why ``pattern``'s rule is there; ``""``: the user gave it."""
        return self.why.get(pattern, self.source)


def check_plan_type(plan: Any) -> None:
    """Refuses what is neither a dict nor ``"auto"``.

    Raises:
        PlanError: it is neither.
    """
    if plan == "auto" or isinstance(plan, Mapping):
        return
    said = f"the plan is {plan!r}; it must be a dict from module-name patterns to styles, such as "
    raise PlanError(
        said + '{"layers.*.wq": "colwise"}, or "auto", which takes the plan the model brings or '
        "derives one"
    )


# The names styles go by in plans.

STYLE_NAMES: dict[str, Style] = {
    "attention": SplitHeads(),
    "colwise": Colwise(),
    "colwise_gather_output": Colwise(output="replicate"),
    "colwise_rep": Colwise(output="replicate"),
    "rowwise": Rowwise(),
    "rowwise_split_input": Rowwise(input="replicate"),
    "rowwise_rep": Rowwise(input="replicate"),
    "packed_colwise": Colwise(packed=2),
    "packed_rowwise": Rowwise(packed=2),
    "embedding": VocabParallel(),
    "embedding_rowwise": VocabParallel(),
    "embedding_colwise": Colwise(output="replicate"),
    "sequence_parallel": SequenceParallel(),
    "replicate": Replicated(),
    "replicated": Replicated(),
    "replicated_with_grad_allreduce": Replicated("partial"),
    "moe_tp_experts": Experts(),
    "moe_identity_expert": IdentityExpert(),
    "local_params": LocalParams(),
    "mla_kv_a_proj": RopeOutput(),
    "all_reduce": PrepareOutput(),
}
"""The names that rules of a plan may have, Hugging Face's old and new ones, and the styles they stand for."""
"""Hugging Face's names, old and new, and the style each means."""

_EXPERT_PARALLEL = ("grouped_gemm", "ep_", "moe_ep")


def parse_style(value: Any) -> Style:
    """A style, the style a name stands for, or one around one of torch's.

    Raises:
        PlanError: an unknown name, or neither a name nor a style.
    """
    if isinstance(value, Style):
        return value
    if isinstance(value, ParallelStyle):
        return TorchStyle(value)
    if not isinstance(value, str):
        raise PlanError(f"a style is a name or a Style, not {type(value).__name__} ({value!r})")
    if value.startswith(_EXPERT_PARALLEL):
        raise PlanError(
            f"style {value!r} is expert parallelism, which gives ranks different experts; tensor "
            "parallelism splits every expert: 'packed_colwise' and 'rowwise' for its weights, "
            "'moe_tp_experts' for their module"
        )
    if value not in STYLE_NAMES:
        near = difflib.get_close_matches(value, STYLE_NAMES, 1, 0.0)[0]
        raise PlanError(
            f"unknown style {value!r}; did you mean {near!r}? Known: {', '.join(STYLE_NAMES)}"
        )
    return STYLE_NAMES[value]


# In inference they read the weights of modules inside them instead of calling these.
_HAS_FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class RuledModule:
    """A module with the style a rule gave it, and why it has that rule where the user gave none."""

    name: str
    pattern: str
    style: Style
    module: nn.Module
    why: str = ""


@dataclass(frozen=True)
class _ParamStyle:
    """What a rule gave a single parameter."""

    pattern: str
    style: Style
    why: str


Role = Literal["query", "key", "value", "fused", "latent", "other"]


@dataclass(frozen=True)
class Projection:
    """A linear of an attention layer that the plan splits.

    Attributes:
        key: of its module in ``Resolution.ruled``.
        ruled: the module and its style.
        role: what it makes; ``"fused"``: of several kinds; ``"latent"``: keys and values for each query
            head, as DeepSeek's kv_b_proj.
        size: how many of its features the plan splits.
        dim: of its weight that they are.
    """

    key: int
    ruled: RuledModule
    role: Role
    size: int
    dim: int


@dataclass(frozen=True)
class Attention:
    """An attention layer whose heads the plan splits.

    Attributes:
        name: its path.
        module: that holds the projections.
        inputs: projections split by output features: query, key, value and others, such as gates.
        outputs: those split by input features.
        heads, kv_heads: numbers of heads; None: they could not be found out, ``why`` says why.
    """

    name: str
    module: nn.Module
    inputs: tuple[Projection, ...]
    outputs: tuple[Projection, ...]
    heads: int | None = None
    kv_heads: int | None = None
    why: str = ""

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.inputs + self.outputs

    @property
    def group(self) -> int:
        """Query heads that attend to the same key and value head."""
        assert self.heads is not None and self.kv_heads is not None
        return self.heads // self.kv_heads

    def heads_of(self, projection: Projection) -> int:
        """How many heads a projection has a part for."""
        assert self.heads is not None and self.kv_heads is not None
        return self.kv_heads if projection.role in ("key", "value", "fused") else self.heads


class Resolution:
    """A plan being resolved. Collects problems instead of raising the first.

    Attributes:
        tp: ranks of the ``tp`` axis.
        ruled: the modules with a style, by identity, so that one with two paths counts once.
        problems: what is wrong.
        notes: what was done that the plan doesn't say.
        attributes: what modules' attributes become on each rank.
        attentions: the attention layers among what is split, as ``align_heads`` found them.
        local_sizes: paths of the modules to which the plan gives ``LocalSizes``.
    """

    def __init__(self, model: nn.Module, tp: int) -> None:
        self.tp = tp
        self.ruled: dict[int, RuledModule] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.attributes: list[PlannedAttribute] = []
        self.attentions: list[Attention] = []
        self.local_sizes: set[str] = set()
        self._rules_given = 0
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._params = dict(model.named_parameters(remove_duplicate=False))
        self._param_rules: dict[str, _ParamStyle] = {}

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The model's modules, by each of their paths."""
        return self._modules

    # ---- patterns -> modules and parameters ----

    def add_plan(self, chosen: ChosenPlan, *, strict: bool) -> None:
        """Gives modules and parameters the styles of the plan's rules.

        Args:
            strict: a rule that matches nothing is a problem; otherwise a note.
        """
        rules = list(chosen.rules.items())
        self._rules_given = len(rules)
        for pattern, value in rules:
            try:
                style, simple = parse_style(value), expand(pattern)
            except PlanError as error:
                self.problems.append(f"rule {pattern!r}: {error}")
                continue
            found = [self._match(p) for p in simple]
            for one, (modules, params) in zip(simple, found, strict=True):
                if not modules and not params:
                    which = f"rule {pattern!r}" + (f": {one!r}" if one != pattern else "")
                    said = f"{which} matches no module and no parameter; {self._nearest(one)}"
                    (self.problems if strict else self.notes).append(said)
                for name in modules:
                    self._rule_module(name, pattern, style, chosen)
                for path in params:
                    self._rule_param(path, pattern, style, chosen)
        self._settle_params()

    def _match(self, pattern: str) -> tuple[list[str], list[str]]:
        """Paths of the modules and of the parameters that ``pattern`` names."""
        modules = [name for name in self._modules if matches(pattern, name)]
        # "mlp.*" is meant for modules, not for parameters beside them.
        if has_wildcard(pattern.rpartition(".")[2]):
            return modules, []
        return modules, [path for path in self._params if matches(pattern, path)]

    def _rule_module(self, name: str, pattern: str, style: Style, chosen: ChosenPlan) -> None:
        module = self._modules[name]
        before = self.ruled.get(id(module))
        if before is None:
            fit = style.for_module(module).in_model(self._modules[""], name)
            why = chosen.reason(pattern)
            self.ruled[id(module)] = RuledModule(name, pattern, fit, module, why)
            if isinstance(fit, LocalSizes):
                self.local_sizes.add(name)
            for inner, inner_style in fit.inside(module).items():
                path, child = f"{name}.{inner}".lstrip("."), module.get_submodule(inner)
                self.ruled[id(child)] = RuledModule(path, pattern, inner_style, child, why)
        elif before.pattern != pattern:
            self.problems.append(
                f"module {name!r} has two rules: {before.pattern!r} ({before.style}) and "
                f"{pattern!r} ({style}); keep one"
            )

    def _rule_param(self, path: str, pattern: str, style: Style, chosen: ChosenPlan) -> None:
        before = self._param_rules.get(path)
        if before is None:
            self._param_rules[path] = _ParamStyle(pattern, style, chosen.reason(pattern))
        elif before.pattern != pattern:
            self.problems.append(
                f"parameter {path!r} has two rules: {before.pattern!r} ({before.style}) and "
                f"{pattern!r} ({style}); keep one"
            )

    def _settle_params(self) -> None:
        """Hands the rules on parameters to the styles of the modules that own them."""
        by_owner: dict[str, dict[str, _ParamStyle]] = {}
        for path, rule in self._param_rules.items():
            owner, _, name = path.rpartition(".")
            by_owner.setdefault(owner, {})[name] = rule
        for owner, rules in by_owner.items():
            try:
                self._settle_owner(owner, rules)
            except PlanError as error:
                which = ", ".join(repr(rule.pattern) for rule in rules.values())
                self.problems.append(f"rule {which} on {owner or 'the root'!r}: {error}")

    def _settle_owner(self, owner: str, rules: dict[str, "_ParamStyle"]) -> None:
        module = self._modules[owner]
        ruled = self.ruled.get(id(module))
        styles = {name: rule.style for name, rule in rules.items()}
        first = next(iter(rules.values()))
        if ruled is not None:
            fit = ruled.style.with_params(styles)
            self.ruled[id(module)] = replace(ruled, style=fit)
        elif is_plain(module, nn.Linear) or is_embedding(module):
            # As transformers has it: "lm_head.weight" means the module.
            if len(set(styles.values())) > 1:
                raise PlanError("its parameters have different rules; give the module one")
            fit = first.style.for_module(module)
            self.ruled[id(module)] = RuledModule(owner, first.pattern, fit, module, first.why)
        else:
            raise PlanError(
                f"{owner or 'the root'!r}, a {type(module).__name__}, has no style, so its forward "
                f"would be the plain one on parts of {', '.join(styles)}. Give it one too: "
                "'local_params' where each rank's part is used with that rank's heads or features"
            )

    def _nearest(self, pattern: str) -> str:
        near = nearest(pattern, [*self._modules, *self._params])
        if near:
            return f"nearest: {', '.join(map(repr, near))}"
        children = dict.fromkeys(name.split(".")[0] for name in self._modules if name)
        return f"the model's modules are {', '.join(map(repr, children)) or 'none'}"

    # ---- shared parameters ----

    def _owners(self) -> Iterator[tuple[str, list[tuple[nn.Module, str]]]]:
        """The path of each distinct parameter, and who owns it: (module, its name for it)."""
        owners: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
        paths: dict[int, str] = {}
        for path, param in self._params.items():
            parent, _, name = path.rpartition(".")
            module = self._modules[parent]
            paths.setdefault(id(param), path)
            owners.setdefault(id(param), {})[id(module), name] = (module, name)
        for key, found in owners.items():
            yield paths[key], list(found.values())

    def add_tied_embeddings(self) -> None:
        """Gives embeddings and heads without a rule that share a weight whose vocabulary is split the
        style that splits it alike."""
        names = {id(module): name for name, module in reversed(self._modules.items())}
        for _, owners in self._owners():
            modules = [module for module, _ in owners]
            ruled = [self.ruled[id(module)] for module in modules if id(module) in self.ruled]
            partner = next(filter(_splits_vocabulary, ruled), None)
            for module in modules:
                if partner is None or id(module) in self.ruled:
                    continue
                style = self._style_tied_to(partner.style, module)
                if style is None:
                    continue
                name, why = names[id(module)], f"tied to {partner.name!r}"
                self.ruled[id(module)] = RuledModule(name, name, style, module, why)
                self.notes.append(
                    f"{name!r} shares its weight with {partner.name!r} ({partner.style}) and has no "
                    f"rule: it gets {style}, so that they stay tied"
                )

    def _style_tied_to(self, partner: Style, module: nn.Module) -> Style | None:
        if isinstance(module, nn.Embedding):
            if isinstance(partner, VocabParallel):
                return partner
            return VocabParallel(output=self._embedding_output(partner))
        if isinstance(partner, VocabParallel) and partner.output == "sequence":
            return None  # the head's input may be whole or a part
        tied = isinstance(partner, VocabParallel) and is_plain(module, nn.Linear)
        return Colwise(output="replicate") if tied else None

    def _embedding_output(self, head: Style) -> Any:
        """``"sequence"`` when the head reads parts of a sequence that nothing else splits first."""
        entered = any(
            isinstance(ruled.style, SequenceParallel) and ruled.style.splits_sequence
            for ruled in self.ruled.values()
        )
        return "sequence" if head.takes_parts and not entered else "replicate"

    def ruled_in_order(self) -> list[tuple[int, RuledModule]]:
        """The modules with a style, in the model's order, whatever the order of the rules."""
        place = {name: i for i, name in enumerate(self._modules)}
        return sorted(self.ruled.items(), key=lambda item: place[item[1].name])

    # ---- checks ----

    def rules(self) -> dict[int, dict[str, ParamRule]]:
        """Each ruled module's parameter rules; a style that doesn't fit its module is a problem."""
        rules: dict[int, dict[str, ParamRule]] = {}
        for key, ruled in self.ruled.items():
            try:
                rules[key] = ruled.style.plan(ruled.module, self.tp)
            except PlanError as error:
                self.problems.append(f"module {ruled.name!r} as {ruled.style}: {error}")
        return rules

    def add_attributes(self, rules: dict[int, dict[str, ParamRule]]) -> None:
        """Plans the attributes that styles change, of modules whose parameters have ``rules``."""
        for ruled in (self.ruled[key] for key in rules):
            try:
                values = ruled.style.attributes(ruled.module, self.tp)
                self.attributes += local_attributes(ruled.name, ruled.module, values)
            except PlanError as error:
                self.problems.append(f"module {ruled.name!r} as {ruled.style}: {error}")

    def check_as_a_whole(self, rules: dict[int, dict[str, ParamRule]]) -> None:
        """Checks what no module alone shows."""
        if not self._rules_given and self.tp > 1:
            self.problems.append(
                f"the plan is empty: with tp={self.tp} every rank would compute the same. Give "
                "rules or use tp=1"
            )
        self._check_shared(rules)
        self._check_inputs()
        self._check_sequence()

    def _check_shared(self, rules: dict[int, dict[str, ParamRule]]) -> None:
        names = {id(module): name for name, module in reversed(self._modules.items())}
        for _, owners in self._owners():
            if len(owners) == 1:
                continue
            wanted = {
                f"{names[id(module)]}.{name}": rules[id(module)][name]
                for module, name in owners
                if name in rules.get(id(module), {})
            }
            free = [
                f"{names[id(module)]}.{name}"
                for module, name in owners
                if id(module) not in self.ruled
            ]
            if len(set(wanted.values())) > 1:
                how = ", ".join(f"{who} as {rule.describe()}" for who, rule in wanted.items())
                self.problems.append(f"one parameter can't be held in two ways: {how}")
            elif free and any(rule.changes_compute for rule in wanted.values()):
                by = next(iter(wanted))
                self.problems.append(
                    f"{', '.join(free)} shares its parameter with {by}, which a rule makes "
                    f"{wanted[by].describe()}; give its module a rule that does the same"
                )

    def _check_inputs(self) -> None:
        prepared = [r.name for r in self.ruled.values() if isinstance(r.style, PrepareInput)]
        for ruled in self.ruled.values():
            if getattr(ruled.style, "input", None) == "gathered" and not any(
                name == "" or ruled.name.startswith(f"{name}.") for name in prepared
            ):
                self.problems.append(
                    f"module {ruled.name!r} as {ruled.style}: no module around it has the style "
                    'PrepareInput, which prepares a "gathered" input'
                )
        for name, module in self._modules.items():
            if isinstance(module, _HAS_FAST_PATH + (nn.MultiheadAttention,)):
                own = self.ruled.get(id(module))
                inside = self._split_inside(name)
                if inside and not (own and isinstance(own.style, (NoFastPath, SplitHeads))):
                    self.problems.append(
                        f"module {inside[0]!r} is inside {name!r}, an nn.{type(module).__name__}, which "
                        "reads weights without calling their modules: it can't be split. Give an "
                        "nn.MultiheadAttention the style 'attention'"
                    )

    def _split_inside(self, name: str) -> list[str]:
        """Modules with a style that splits features, inside the one called ``name``."""
        return [
            r.name
            for r in self.ruled.values()
            if isinstance(r.style, (Colwise, Rowwise, SplitHeads))
            and r.name != name
            and (name == "" or r.name.startswith(f"{name}."))
        ]

    def leave_fast_paths(self) -> None:
        """Sees to it that torch's transformer encoders call the modules in them that are split."""
        for name, module in self._modules.items():
            free = isinstance(module, _HAS_FAST_PATH) and id(module) not in self.ruled
            if free and self._split_inside(name):
                why = "calls the modules inside it in inference too"
                self.ruled[id(module)] = RuledModule(name, name, NoFastPath(), module, why)

    def _check_sequence(self) -> None:
        styles = [ruled.style for ruled in self.ruled.values()]
        needing = [ruled for ruled in self.ruled.values() if ruled.style.takes_parts]
        if needing and not any(style.splits_sequence for style in styles):
            self.problems.append(
                f"module {needing[0].name!r} as {needing[0].style} takes a part of the sequence, "
                'but no style of the plan splits it; start with VocabParallel(output="sequence"), '
                'Rowwise(output="sequence") or SequenceParallel(input="replicate")'
            )

    def unplanned(self, rules: dict[int, dict[str, ParamRule]]) -> Iterator[str]:
        """Paths of the parameters no style has."""
        for path, owners in self._owners():
            if not any(name in rules.get(id(module), {}) for module, name in owners):
                yield path


def _splits_vocabulary(ruled: RuledModule) -> bool:
    head = isinstance(ruled.style, Colwise) and isinstance(ruled.module, nn.Linear)
    return head or isinstance(ruled.style, VocabParallel)
