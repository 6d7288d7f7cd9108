"""torchtitan: the sharding that a model family declares in its ``sharding.py``, as a plan for
``parallelize``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from parallel3d.errors import Parallel3dError, PlanError
from parallel3d.tp import (
    Colwise,
    Experts,
    LocalSizes,
    PrepareInput,
    PrepareInputOutput,
    PrepareOutput,
    Replicated,
    Rowwise,
    SequenceParallel,
    Style,
    VocabParallel,
)
from parallel3d.tp.collectives import SequenceLength, TpAxis
from parallel3d.tp.forwards import TpState, bind_forward
from parallel3d.tp.resolve import numberless
from parallel3d.tp.styles.base import ParamRule, fit_rules, refuse_lookup_options

try:
    import spmd_types as spmd
    from torchtitan.distributed.parallel_dims import MeshAxisName, SpmdLayout
    from torchtitan.models.common.attention import (
        FlexAttention,
        FusedQKVLinear,
        GQAttention,
        QKVLinear,
        ScaledDotProductAttention,
        VarlenAttention,
    )
    from torchtitan.models.common.embedding import Embedding
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError(
        f"parallel3d.integrations.torchtitan needs torchtitan ({error}): pip install 'torchtitan>=0.3,<0.4'"
    ) from error

_TP = MeshAxisName.TP
_WITHOUT_PARAMETERS = {
    ComplexRoPE,
    CosSinRoPE,
    FeedForward,
    FlexAttention,
    GQAttention,
    RoutedExperts,
    ScaledDotProductAttention,
    VarlenAttention,
}
"""What may lie between the modules with rules: code that is right on whole inputs and on parts of heads."""


def plan(model: nn.Module) -> dict[str, str | Style]:
    """Returns the plan for ``parallelize`` that does what the model's own sharding says of ``tp``::

        config.update_from_config(config=trainer_config)  # or set_llama3_sharding_config(config, ...)
        model = config.build()
        p3d.parallelize(model, mesh, tp_plan=p3d.integrations.torchtitan.plan(model))

    Sequence parallelism stays as configured. The head's logits become whole, unless ``parallelize`` is given
    ``loss_parallel``. Modules that torchtitan keeps whole have no rule.

    Args:
        model: one of torchtitan's, with dense attention of grouped queries, built from a configuration with
            ``sharding_config``: Llama 3 and Qwen3, dense or with experts. It is not changed.

    Raises:
        Parallel3dError: ``model`` has no sharding.
        PlanError: the sharding has no translation, as for expert parallelism or latent attention.
    """
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    configs = {
        name: config
        for name, module in modules.items()
        if isinstance(module, Module) and (config := module._sharding_config) is not None
    }
    if not configs:
        raise Parallel3dError(
            f"{type(model).__name__} has no sharding; give a model of torchtitan, built after "
            "config.update_from_config(config=trainer_config), or after its set_..._sharding_config(config)"
        )
    rules: dict[str, str | Style] = {}
    for name, config in configs.items():
        try:
            rule = _rule(name, modules, _Sharding(name, config, configs))
        except PlanError as error:
            kind = type(modules[name]).__name__
            raise PlanError(
                f"torchtitan's sharding of {name} ({kind}) can't be translated: {error}"
            ) from None
        rules |= {f"{name}.{path}" if path else name: style for path, style in rule.items()}
    for name, module in modules.items():
        if isinstance(module, (FusedQKVLinear, QKVLinear)):
            rules[name] = LocalSizes()  # none: it counts heads in its projections' outputs
    return _for_all_layers(rules, [*modules, *(name for name, _ in model.named_parameters())])


def _for_all_layers(rules: dict[str, str | Style], paths: list[str]) -> dict[str, str | Style]:
    """Returns the rules with one pattern, such as ``layers.*.wq``, for modules alike in all layers."""
    number = Counter(map(numberless, paths))
    alike: dict[str, list[str]] = {}
    for path in rules:
        alike.setdefault(numberless(path), []).append(path)
    result: dict[str, str | Style] = {}
    for pattern, found in alike.items():
        same = len(found) == number[pattern] and all(rules[p] == rules[found[0]] for p in found)
        result |= {pattern: rules[found[0]]} if same else {path: rules[path] for path in found}
    return result


class _Sharding:
    """What a module's ``ShardingConfig`` says of ``tp``: its layouts as words, see ``_word``."""

    def __init__(self, name: str, config: Any, configs: dict[str, Any]) -> None:
        self.params = {n: _word(layout) for n, layout in config.state_shardings.items()}
        self.given = _first(config.in_src_shardings)
        self.wanted = _first(config.in_dst_shardings) or self.given
        self.output = _word(config.out_dst_shardings) or _word(config.out_src_shardings)
        # The nearest module around it that says how its input comes, which is this one's too.
        self.at, self.boundary = name, self.given
        while not self.boundary and "." in self.at:
            self.at = self.at.rpartition(".")[0]
            if self.at in configs:
                self.boundary = _first(configs[self.at].in_src_shardings)


def _first(layouts: dict[str, SpmdLayout] | None) -> str:
    """Returns the first input's layout as a word; ``""`` if it is not declared."""
    return _word(next(iter(layouts.values()))) if layouts else ""


def _word(layout: SpmdLayout | None) -> str:
    """Returns a layout on ``tp`` as ``"whole"``, ``"partial"`` or the split dim (``"0"``); None as ``""``."""
    if layout is None:
        return ""
    types = layout.per_axis_spmd_types()
    if _TP not in types:
        raise PlanError(f"it is over {', '.join(axis.value for axis in types)}, without tp")
    on_tp = types[_TP]
    if isinstance(on_tp, spmd.Shard):
        return str(on_tp.dim)
    word = {spmd.R: "whole", spmd.I: "whole", spmd.P: "partial"}.get(on_tp, "")
    if not word:
        raise PlanError(f"it is {on_tp} on tp")
    return word


def _rule(name: str, modules: dict[str, nn.Module], sharding: _Sharding) -> dict[str, str | Style]:
    """Returns the plan's rules for the module ``name``: path within it (``""``: itself) -> style."""
    module: Any = modules[name]
    own = {n: sharding.params.get(n, "?") for n, p in module._parameters.items() if p is not None}
    is_split = any(word != "whole" for word in own.values())
    around = [modules[name[:i]] for i, letter in enumerate(name) if letter == "."]
    in_experts = any(isinstance(outer, MoE) for outer in around)
    if isinstance(module, MoE):
        # Inside it everything is whole here: torchtitan's partial outputs are summed where they arise.
        if sharding.given != "1":
            return {}
        output = PrepareOutput("replicate", "sequence")
        return {"": PrepareInputOutput("sequence", wanted="whole", output=output)}
    if isinstance(module, GroupedExperts) and is_split:
        styles = {"1": "colwise", "2": "rowwise"}
        if set(own.values()) <= styles.keys():
            return {"": Experts(), **{n: styles[word] for n, word in own.items()}}
    elif isinstance(module, Embedding) and own == {"weight": "0"}:
        sequence = sharding.output == "1"
        return {"": VocabParallelEmbedding(output="sequence" if sequence else "replicate")}
    elif isinstance(module, nn.Linear) and own["weight"] == "0" and sharding.given != "1":
        gathers = type(modules[sharding.at]) in _WITHOUT_PARAMETERS and sharding.boundary == "1"
        if not gathers and sharding.boundary != "whole":
            raise PlanError("no module around it says that it gets a whole input")
        # The loss of torchtitan takes split logits; here loss_parallel= of parallelize says so.
        whole = sharding.output == "whole" or module is getattr(modules[""], "lm_head", None)
        return {
            "": Colwise(
                input="gathered" if gathers else "replicate",
                output="replicate" if whole else "shard",
                multiple_of=_group(module, around[-1] if around else modules[""]),
            )
        }
    elif isinstance(module, nn.Linear) and own["weight"] == "1":
        sequence = sharding.output == "1" and not in_experts
        heads = getattr(around[-1], "n_kv_heads", None) if around else None
        return {
            "": Rowwise(
                output="sequence" if sequence else "replicate",
                multiple_of=module.in_features // heads if heads else 1,
            )
        }
    elif not is_split and isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
        if sharding.given == "1":
            whole = sharding.output == "whole"
            return {"": SequenceParallel(output="replicate" if whole else "sequence")}
        if sharding.given == "2":  # on the heads of this rank
            return {"": Replicated("partial")}
    elif type(module) in _WITHOUT_PARAMETERS:
        gathers = (sharding.given, sharding.wanted) == ("1", "whole")
        return {"": PrepareInput("sequence")} if gathers else {}  # once for all linears inside
    elif not own:
        raise PlanError("a module of this class is not known")
    if is_split:
        raise PlanError(f"its parameters are split along {own}")
    if own and sharding.boundary != "whole":
        split = f"split along {sharding.boundary}" if sharding.boundary else "not declared"
        raise PlanError(f"its parameters are whole, and the layout of its input is {split}")
    return {}


def _group(module: Any, around: Any) -> int:
    """Returns how many output features must stay together: those of heads with the same key and value."""
    if isinstance(around, FusedQKVLinear):
        return around.r_dim * around.head_dim
    if isinstance(around, QKVLinear):
        heads = around.wk.out_features // around.head_dim
        return module.out_features // heads
    return 1


@dataclass(frozen=True)
class VocabParallelEmbedding(VocabParallel):
    """:class:`VocabParallel` for torchtitan's Embedding; a PlanError if torchtitan itself has split it."""

    def plan(self, module: Any, tp: int) -> dict[str, ParamRule]:
        if type(module).forward is not Embedding.forward or module.tp_group is not None:
            raise PlanError(
                f"{type(module).__name__} is not torchtitan's Embedding as it was built; give "
                "parallelize a model that torchtitan has not made parallel"
            )
        refuse_lookup_options(module, scale_grad_by_freq=False)
        return fit_rules(module, weight=ParamRule(Shard(0)))

    def install(self, module: nn.Module, axis: TpAxis, sequence: SequenceLength) -> None:
        bind_forward(module, TpState(self, axis, sequence))
