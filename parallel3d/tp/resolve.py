"""Resolving a plan against a model: patterns, shared parameters, checks across modules."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from parallel3d._util.quantised import packed_kind
from parallel3d.errors import PlanError
from parallel3d.tp.local_attributes import PlannedAttribute, local_attributes
from parallel3d.tp.lora import adapter_styles, check_wrapper, is_wrapper
from parallel3d.tp.parts import hooks_on_parts, refused_hook
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
from parallel3d.tp.styles.base import ParamRule, is_embedding, is_plain
from parallel3d.tp.torch_styles import TorchStyle

_WILDCARDS = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def expand(pattern: str) -> list[str]:
    """Returns the patterns without brace sets that ``pattern`` stands for: three for ``"*.{q,k,v}_proj"``.
    Raises PlanError if it is no string, or its braces are nested, unbalanced or hold an empty alternative."""
    if not isinstance(pattern, str):
        raise PlanError(
            f"a pattern is a module's path such as 'layers.*.wq', not {type(pattern).__name__}"
        )
    parts = re.split(r"\{([^{}]*)\}", pattern)  # literal, alternatives, literal, ...
    if any(brace in literal for literal in parts[::2] for brace in "{}"):
        raise PlanError(
            "its braces are unbalanced or one set is inside another; write a set as {q,k,v}_proj"
        )
    patterns = [parts[0]]
    for alternatives, literal in zip(parts[1::2], parts[2::2], strict=True):
        choices = [choice.strip() for choice in alternatives.split(",")]
        if not all(choices):
            raise PlanError(f"the set {{{alternatives}}} has an empty alternative")
        patterns = [f"{head}{choice}{literal}" for head in patterns for choice in choices]
    return list(dict.fromkeys(patterns))


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern without brace sets matches a path, segment by segment: ``*`` any characters within
    one segment, ``?`` one character and ``[...]`` one of a set. ``""`` is the root."""
    if pattern == "" or name == "":
        return pattern == name
    # fnmatch's wildcards match dots too; with as many dots in both, none does.
    return pattern.count(".") == name.count(".") and fnmatchcase(name, pattern)


def is_in(path: str, outer: str) -> bool:
    """Whether ``path`` is ``outer`` or a path inside it; ``""`` is the root."""
    return outer in ("", path) or path.startswith(f"{outer}.")


def has_wildcard(pattern: str) -> bool:
    return bool(_WILDCARDS.search(pattern))


def specificity(pattern: str) -> tuple[int, int]:
    """Returns a sort key, larger for more specific patterns (more segments without wildcards)."""
    literal = [segment for segment in pattern.split(".") if not has_wildcard(segment)]
    return len(literal), len(_WILDCARDS.sub("", pattern))


def numberless(path: str, most: int = 0) -> str:
    """Returns the path with each segment that is a number (or only the first ``most`` of these) replaced by
    ``*``, so that all layers have the same path."""
    return _NUMBER.sub("*", path, count=most)


def nearest(pattern: str, paths: Iterable[str], count: int = 3) -> list[str]:
    """Returns up to ``count`` paths similar to ``pattern``, for errors; equal layers count once."""
    names = dict.fromkeys(numberless(path) for path in paths if path)
    return difflib.get_close_matches(numberless(pattern), names, count, 0.4)


Rule = str | Style | ParallelStyle
"""A style, its name, or one of torch's styles."""

Plan = Mapping[str, Rule] | Literal["auto"]
"""A user's plan: pattern -> rule, or ``"auto"``."""


@dataclass(frozen=True)
class PlanSource:
    """A plan's rules, pattern -> style or style name, and their origin.

    Attributes:
        why: pattern -> the reason for the rule, for the report; patterns from the user have none.
        notes: messages for a reader of the rules.
        origin: where the rules come from; ``""``: from the user.
        unproven: messages about layers that could not be checked.
    """

    rules: Mapping[str, Rule]
    why: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    origin: str = ""
    unproven: tuple[str, ...] = ()


def check_plan_type(plan: Any) -> None:
    """Raises PlanError if ``plan`` is neither a dict nor ``"auto"``."""
    if plan == "auto" or isinstance(plan, Mapping):
        return
    raise PlanError(
        f"the plan is {plan!r}; it must be a dict from module-name patterns to styles, such as "
        '{"layers.*.wq": "colwise"}, or "auto", which takes the model\'s own plan or derives one'
    )


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
"""The names of styles in plans, those of Hugging Face's plans among them, old and new."""

_EXPERT_PARALLEL = ("grouped_gemm", "ep_", "moe_ep")


def parse_style(value: Any) -> Style:
    """Returns the style for a rule's ``value``: a style, the name of one, or one of torch's ``ParallelStyle``
    objects.

    Raises:
        PlanError: ``value`` is an unknown name, or of another type.
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


# In inference these read the weights of modules inside them instead of calling the modules.
_HAS_FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class RuledModule:
    """A module and the style that a rule of the plan gives it.

    Attributes:
        name: the module's path.
        pattern: the rule's pattern.
        why: the reason for the rule, if it isn't the user's.

    For a rule on a parameter, ``module`` is the one that owns the parameter, ``style`` and ``name`` (its
    path) are the parameter's.
    """

    name: str
    pattern: str
    style: Style
    module: nn.Module
    why: str = ""


Role = Literal["query", "key", "value", "fused", "latent", "other"]


@dataclass(frozen=True)
class Projection:
    """A linear layer of an attention layer, split by the plan.

    Attributes:
        role: what it computes; ``"fused"``: several of query, key and value; ``"latent"``: keys and values
            for each query head, as DeepSeek's kv_b_proj; ``"other"``: else, such as a gate or the output
            projection.
        size: number of features that the plan splits.
        dim: the weight's dim that has this size.
    """

    ruled: RuledModule
    role: Role
    size: int
    dim: int


@dataclass(frozen=True)
class Attention:
    """An attention layer whose heads the plan splits: the module that holds the projections.

    Attributes:
        inputs: projections split by output features: query, key, value and others, such as gates.
        outputs: projections split by input features.
        heads, kv_heads: the numbers of heads; None: unknown, ``why`` gives the reason.
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
        """The number of query heads that attend to the same key and value head."""
        assert self.heads is not None and self.kv_heads is not None
        return self.heads // self.kv_heads

    def heads_of(self, projection: Projection) -> int:
        """Returns the number of heads in a projection: ``kv_heads`` for keys and values, else ``heads``."""
        assert self.heads is not None and self.kv_heads is not None
        return self.kv_heads if projection.role in ("key", "value", "fused") else self.heads


class Resolution:
    """A plan being resolved against a model. Problems are collected, so that all are raised at once.

    Attributes:
        modules: path -> module; a module with several paths is there under each.
        ruled: id of a module -> the module with its style.
        rules: id of a module -> parameter's name -> its rule; set by ``finish``.
        problems: messages about errors in the plan.
        notes: messages about what was changed or added beyond the plan's rules.
        attributes: attributes of modules whose value on a rank differs.
        attentions: the attention layers that the plan splits, as ``auto/heads.py`` found them.
        local_sizes: paths of the modules to which the plan gives ``LocalSizes``.
    """

    def __init__(self, model: nn.Module, tp: int) -> None:
        self.tp = tp
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.ruled: dict[int, RuledModule] = {}
        self.rules: dict[int, dict[str, ParamRule]] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.attributes: list[PlannedAttribute] = []
        self.attentions: list[Attention] = []
        self.local_sizes: set[str] = set()
        self._is_empty = True
        self._params = dict(model.named_parameters(remove_duplicate=False))
        self._first_path = {id(module): name for name, module in reversed(self.modules.items())}

    # ---- patterns -> modules and parameters ----

    def add_plan(self, plan_source: PlanSource, *, strict: bool) -> None:
        """Gives modules and parameters the styles of the plan's rules. A rule that matches nothing is a
        problem if ``strict``, else a note."""
        self._is_empty = not plan_source.rules
        by_owner: dict[str, dict[str, RuledModule]] = {}  # rules of parameters
        for pattern, value in plan_source.rules.items():
            try:
                style, simple = parse_style(value), expand(pattern)
            except PlanError as error:
                self.problems.append(f"rule {pattern!r}: {error}")
                continue
            why = plan_source.why.get(pattern, plan_source.origin)
            for one in simple:
                modules = [name for name in self.modules if matches(one, name)]
                # "mlp.*" means modules, not parameters beside them.
                params = [path for path in self._params if matches(one, path)]
                params = [] if has_wildcard(one.rpartition(".")[2]) else params
                if not modules and not params:
                    which = f"rule {pattern!r}" + (f": {one!r}" if one != pattern else "")
                    message = f"{which} matches no module and no parameter; {self._nearest(one)}"
                    (self.problems if strict else self.notes).append(message)
                for name in modules:
                    self._rule_module(name, pattern, style, why)
                for path in params:
                    parent, _, own = path.rpartition(".")
                    made = RuledModule(path, pattern, style, self.modules[parent], why)
                    rule = by_owner.setdefault(parent, {}).setdefault(own, made)
                    self._check_one_rule("parameter", path, rule, pattern, style)
        for parent, rules in by_owner.items():
            try:
                self._rule_params(parent, rules)
            except PlanError as error:
                patterns = ", ".join(repr(rule.pattern) for rule in rules.values())
                self.problems.append(f"rule {patterns} on {parent or 'the root'!r}: {error}")

    def _rule_module(self, name: str, pattern: str, style: Style, why: str) -> None:
        module = self.modules[name]
        if is_wrapper(module):
            try:
                check_wrapper(module)
            except PlanError as error:
                self.problems.append(f"module {name!r} as {style}: {error}")
                return
            name, module = f"{name}.base_layer", module.get_submodule("base_layer")
        if (ruled := self.ruled.get(id(module))) is not None:
            self._check_one_rule("module", name, ruled, pattern, style)
            return
        kinds = [packed_kind(param) for param in module.parameters(recurse=False)]
        if any(kinds) and self.tp > 1:
            self.problems.append(
                f"module {name!r} as {style}: its weight is a {max(kinds)}, whose values are packed in "
                "blocks, which can't be split over tp; leave the rule out, or use tp=1, shard more"
            )
            return
        style = style.for_module(module).in_model(self.modules[""], name)
        self.ruled[id(module)] = RuledModule(name, pattern, style, module, why)
        if isinstance(style, LocalSizes):
            self.local_sizes.add(name)
        for inner, inner_style in style.inside(module).items():
            path, child = f"{name}.{inner}".lstrip("."), module.get_submodule(inner)
            self.ruled[id(child)] = RuledModule(path, pattern, inner_style, child, why)

    def _check_one_rule(
        self, what: str, name: str, first: RuledModule, pattern: str, style: Style
    ) -> None:
        if first.pattern != pattern:
            self.problems.append(
                f"{what} {name!r} has two rules: {first.pattern!r} ({first.style}) and "
                f"{pattern!r} ({style}); keep one"
            )

    def _rule_params(self, owner: str, rules: dict[str, RuledModule]) -> None:
        """Gives the module at ``owner`` the rules of its parameters, by parameter's name: its style takes
        them, or the style of a linear layer or embedding without one is taken from them. Raises PlanError if
        the module needs a style for that."""
        module = self.modules[owner]
        ruled = self.ruled.get(id(module))
        styles = {name: rule.style for name, rule in rules.items()}
        first = next(iter(rules.values()))
        if ruled is not None:
            self.ruled[id(module)] = replace(ruled, style=ruled.style.with_params(styles))
        elif is_plain(module, nn.Linear) or is_embedding(module):
            # As in transformers: "lm_head.weight" means the module.
            if len(set(styles.values())) > 1:
                raise PlanError("its parameters have different rules; give the module one")
            style = first.style.for_module(module)
            self.ruled[id(module)] = RuledModule(owner, first.pattern, style, module, first.why)
        else:
            raise PlanError(
                f"{owner or 'the root'!r}, a {type(module).__name__}, has no style, so its forward "
                f"would be the plain one on parts of {', '.join(styles)}. Give it one too: "
                "'local_params' where each rank's part is used with that rank's heads or features"
            )

    def _nearest(self, pattern: str) -> str:
        if near := nearest(pattern, [*self.modules, *self._params]):
            return f"nearest: {', '.join(map(repr, near))}"
        children = dict.fromkeys(name.split(".")[0] for name in self.modules if name)
        return f"the model has {'the modules ' if children else 'no modules'}{', '.join(map(repr, children))}"

    # ---- shared parameters ----

    def _owners(self) -> Iterator[tuple[str, list[tuple[nn.Module, str]]]]:
        """Yields the path of each parameter, and a list of (module that holds it, its name there)."""
        owners: dict[int, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
        paths: dict[int, str] = {}
        for path, param in self._params.items():
            parent, _, name = path.rpartition(".")
            module = self.modules[parent]
            paths.setdefault(id(param), path)
            owners.setdefault(id(param), {})[id(module), name] = (module, name)
        for key, modules in owners.items():
            yield paths[key], list(modules.values())

    def add_tied_embeddings(self) -> None:
        """Gives a style to embeddings and heads without a rule that share their weight with a module whose
        vocabulary is split: one that splits the weight in the same way."""
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
                name, why = self._first_path[id(module)], f"tied to {partner.name!r}"
                self.ruled[id(module)] = RuledModule(name, name, style, module, why)
                self.notes.append(
                    f"{name!r} shares its weight with {partner.name!r} ({partner.style}) and has no "
                    f"rule: it gets {style}, so that they stay tied"
                )

    def _style_tied_to(self, partner: Style, module: nn.Module) -> Style | None:
        if isinstance(module, nn.Embedding):
            if isinstance(partner, VocabParallel):
                return partner
            # "sequence" if the head reads parts of a sequence that no other module splits first.
            entered = any(
                isinstance(ruled.style, SequenceParallel) and ruled.style.splits_sequence
                for ruled in self.ruled.values()
            )
            parts = partner.takes_parts and not entered
            return VocabParallel(output="sequence" if parts else "replicate")
        # A head tied to an embedding that puts out parts may read them, or the whole.
        whole = isinstance(partner, VocabParallel) and partner.output == "replicate"
        return Colwise(output="replicate") if whole and is_plain(module, nn.Linear) else None

    def add_adapters(self) -> None:
        """Gives the LoRA adapters of each split layer the styles that fit their layer's."""
        for name, module in self.modules.items():
            base = self.modules.get(f"{name}.base_layer".lstrip("."))
            ruled = self.ruled.get(id(base))
            if ruled is None or not is_wrapper(module):
                continue
            try:
                check_wrapper(module)
                for inner, style in adapter_styles(ruled.style, module):
                    path, child = f"{name}.{inner}", module.get_submodule(inner)
                    made = RuledModule(path, ruled.pattern, style, child, ruled.why)
                    self.ruled.setdefault(id(child), made)
            except PlanError as error:
                self.problems.append(f"module {ruled.name!r} as {ruled.style}: {error}")

    def ruled_in_order(self) -> list[RuledModule]:
        """Returns the modules with a style, in the model's order, whatever the order of the rules."""
        place = {name: i for i, name in enumerate(self.modules)}
        return sorted(self.ruled.values(), key=lambda ruled: place[ruled.name])

    # ---- rules of parameters, and checks ----

    def finish(self) -> None:
        """Computes ``rules`` and ``attributes`` from the styles, and adds problems that concern several
        modules: shared parameters split in two ways, inputs in a layout that nothing makes."""
        for key, ruled in self.ruled.items():
            try:
                self.rules[key] = ruled.style.plan(ruled.module, self.tp)
                values = ruled.style.attributes(ruled.module, self.tp)
                self.attributes += local_attributes(ruled.name, ruled.module, values)
                hook = hooks_on_parts(ruled.module, *ruled.style.parts) if self.tp > 1 else ""
                if hook:
                    raise PlanError(refused_hook(hook, ruled.name))
            except PlanError as error:
                self.problems.append(f"module {ruled.name!r} as {ruled.style}: {error}")
        if self._is_empty and self.tp > 1:
            self.problems.append(
                f"the plan is empty: with tp={self.tp} every rank would compute the same. Give "
                "rules or use tp=1"
            )
        self._check_shared()
        self._check_inputs()
        self._check_fast_paths()

    def _check_shared(self) -> None:
        for _, owners in self._owners():
            if len(owners) == 1:
                continue
            by_path, free = {}, []
            for module, name in owners:
                path = f"{self._first_path[id(module)]}.{name}"
                if name in self.rules.get(id(module), {}):
                    by_path[path] = self.rules[id(module)][name]
                elif id(module) not in self.ruled:
                    free.append(path)
            if len(set(by_path.values())) > 1:
                how = ", ".join(f"{path} as {rule.describe()}" for path, rule in by_path.items())
                self.problems.append(f"one parameter can't be held in two ways: {how}")
            elif free and any(rule != ParamRule(Replicate()) for rule in by_path.values()):
                by, rule = next(iter(by_path.items()))
                self.problems.append(
                    f"{', '.join(free)} shares its parameter with {by}, which a rule makes "
                    f"{rule.describe()}; give its module a rule that does the same"
                )

    def _check_inputs(self) -> None:
        prepared = [r.name for r in self.ruled.values() if isinstance(r.style, PrepareInput)]
        for ruled in self.ruled.values():
            around = any(is_in(ruled.name, name) for name in prepared)
            if getattr(ruled.style, "input", None) == "gathered" and not around:
                self.problems.append(
                    f"module {ruled.name!r} as {ruled.style}: no module around it has the style "
                    'PrepareInput, which prepares a "gathered" input'
                )
        taking = [ruled for ruled in self.ruled.values() if ruled.style.takes_parts]
        if taking and not any(ruled.style.splits_sequence for ruled in self.ruled.values()):
            self.problems.append(
                f"module {taking[0].name!r} as {taking[0].style} takes a part of the sequence, "
                'but no style of the plan splits it; start with VocabParallel(output="sequence"), '
                'Rowwise(output="sequence") or SequenceParallel(input="replicate")'
            )

    def _check_fast_paths(self) -> None:
        for name, module in self.modules.items():
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
        """Returns the paths of the modules inside ``name`` whose style splits features."""
        inside = (r for r in self.ruled.values() if r.name != name and is_in(r.name, name))
        return [r.name for r in inside if isinstance(r.style, (Colwise, Rowwise, SplitHeads))]

    def leave_fast_paths(self) -> None:
        """Gives torch's transformer encoders around split modules a style that disables their fast path for
        inference, which would read weights without calling the modules."""
        for name, module in self.modules.items():
            free = isinstance(module, _HAS_FAST_PATH) and id(module) not in self.ruled
            if free and self._split_inside(name):
                why = "calls the modules inside it in inference too"
                self.ruled[id(module)] = RuledModule(name, name, NoFastPath(), module, why)

    def unplanned(self) -> Iterator[str]:
        """Yields the paths of the parameters without a style."""
        for path, owners in self._owners():
            if not any(name in self.rules.get(id(module), {}) for module, name in owners):
                yield path


def _splits_vocabulary(ruled: RuledModule) -> bool:
    head = isinstance(ruled.style, Colwise) and isinstance(ruled.module, nn.Linear)
    return head or isinstance(ruled.style, VocabParallel)
