"""Splitting the vocabulary: of the embedding that reads the model's input, and of heads over it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel3d.errors import PlanError
from parallel3d.tp.derive.paths import join
from parallel3d.tp.derive.trace import INPUT, OUTPUT, Flow, Layer
from parallel3d.tp.styles import Colwise, LocalParams, Style, VocabParallel

__all__ = ["Findings", "split_vocabulary"]


@dataclass
class Findings:
    """What a derivation has found, by module.

    Attributes:
        styles: of modules that are split.
        why: the reasons for these.
        refused: the reasons why others are left whole.
    """

    styles: dict[str, Style] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def split_vocabulary(
    modules: Mapping[str, Any], layers: Mapping[str, Layer], flow: Flow, tp: int, found: Findings
) -> None:
    """Adds to ``found`` the styles of the embedding, of what is tied to it, and of heads.

    They need no proof: they take whole tensors and give whole tensors, so that it matters only that they
    are called and that nobody else reads their parameters.
    """
    _Vocabulary(modules, layers, flow, tp, found).run()


@dataclass
class _Vocabulary:
    modules: Mapping[str, Any]
    layers: Mapping[str, Layer]
    flow: Flow
    tp: int
    found: Findings

    def run(self) -> None:
        """Gives the embedding, what is tied to it, and heads over its vocabulary their styles."""
        table = self._vocabulary_embedding()
        if table is None:
            return
        size = self.modules[table].num_embeddings
        try:
            VocabParallel().plan(self.modules[table], self.tp)
        except PlanError as error:
            self.found.refused[table] = str(error)
            return
        if f"{table}.weight" in self.flow.read_directly and not self._tied_modules(table):
            op = self.flow.read_directly[f"{table}.weight"]
            self.found.refused[table] = f"its weight is read by {op} outside its module"
            return
        heads = [name for name in self._heads(size) if self._share_out(name)]
        tied = [n for n in self._tied_modules(table) if n not in heads]
        other = [n for n in tied if n not in self.layers or self.layers[n].kind != "embedding"]
        if other:
            self.found.refused[table] = f"its weight is also {other[0]}'s, which can't be split so"
            return
        for name in (table, *tied):
            self.found.styles[name] = VocabParallel()
            self.found.why[name] = f"looks up the model's input in a vocabulary of {size}"
        for head in heads:
            self.found.styles[head] = Colwise(output="replicate")
            shared = ", tied to the embedding" if head in self._tied_modules(table) else ""
            self.found.why[head] = (
                f"puts out the model's output over the vocabulary of {size}{shared}"
            )
            self.found.refused.pop(head, None)

    def _vocabulary_embedding(self) -> str | None:
        """The largest table in which the model's own input is looked up."""
        tables = [
            name
            for name, layer in self.layers.items()
            if layer.kind == "embedding" and INPUT in self.flow.reads.get(name, ())
        ]
        return max(tables, key=lambda name: self.modules[name].num_embeddings, default=None)

    def _heads(self, size: int) -> list[str]:
        heads = []
        for name, layer in self.layers.items():
            if layer.kind != "linear" or layer.features != size or name in self.found.styles:
                continue
            if self.flow.readers(name) != [OUTPUT]:
                continue
            try:
                Colwise(output="replicate").plan(self.modules[name], self.tp)
            except PlanError as error:
                self.found.refused[name] = str(error)
                continue
            heads.append(name)
        return heads

    def _share_out(self, head: str) -> bool:
        """Whether the head's parameters can be split where other modules have them as their own too; gives
        such modules, which don't read them, rules that split them alike."""
        own = {id(p): n for n, p in self.modules[head]._parameters.items() if p is not None}
        for name, module in self.modules.items():
            layer = self.layers.get(name)
            if name == head or (layer is not None and layer.kind == "embedding"):
                continue
            shared = [n for n, p in module._parameters.items() if id(p) in own]
            if not shared:
                continue
            read = [n for n in shared if join(name, n) in self.flow.read_directly]
            others = [n for n, p in module._parameters.items() if p is not None and n not in shared]
            if layer is not None or read or others or any(n != "bias" for n in shared):
                self.found.refused[head] = (
                    f"its {shared[0]} is also {name}'s, which can't be split so"
                )
                return False
            self.found.styles[name] = LocalParams((("bias", Colwise()),))
            self.found.why[name] = f"has the bias of {head}, which is split, and doesn't read it"
        return True

    def _tied_modules(self, table: str) -> list[str]:
        weight = self.modules[table].weight
        return [
            name
            for name, module in self.modules.items()
            if name != table and any(p is weight for p in module.parameters(recurse=False))
        ]
