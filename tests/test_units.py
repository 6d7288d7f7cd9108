"""Which modules parallelize makes units of."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel3d._util.units import find_units, of_one_unit
from parallel3d.errors import Parallel3dError, StateError
from parallel3d.mesh import MeshLayout, build_mesh
from parallel3d.parallelize import parallelize
from parallel3d.testing import GlooPool, assert_parity
from parallel3d.testing.worlds import fake_world


class ReadsWeights(nn.Module):
    """Looks its tokens up, and slices its table of positions and its head without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.positions = nn.Embedding(5, 6)
        nn.init.normal_(self.tokens.weight)  # no reading
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x).relu()
        return self.norm(x) @ self.head.weight.t()


def test_modules_whose_weight_is_read_directly_stay_with_the_root() -> None:
    found = find_units(ReadsWeights())
    assert [name for name, _ in found.embeddings] == ["tokens"]
    assert [name for name, _ in found.final_norm_and_head] == ["norm"]


def test_decorated_forwards_are_read_too() -> None:
    class Decorated(ReadsWeights):
        @functools.wraps(ReadsWeights.forward)
        def forward(self, *args: Tensor) -> Tensor:
            return super().forward(*args)

    found = find_units(Decorated())
    assert [name for name, _ in found.final_norm_and_head] == ["norm"]


def test_a_model_that_reads_weights_directly_trains_as_the_plain_one() -> None:
    ids = torch.arange(8).view(2, 4) % 7
    assert_parity(ReadsWeights, lambda i: (ids + i) % 7, MeshLayout(1, 2, 1), fp32=False)


class Source:
    """No module."""

    def __init__(self, source: nn.Module) -> None:
        self.source = source

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.source.weight)


class SourceModule(nn.Module):
    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.inner = source

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Hides(nn.Module):
    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.hidden = [source]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.hidden[0].weight.t()


class InTwoSteps(nn.Module):
    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.table = source

    def forward(self, x: Tensor) -> Tensor:
        table = self.table
        return x @ table.weight.t()


class Inherits(InTwoSteps):
    pass


def made_in_init(source: nn.Module) -> nn.Module:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = lambda x: x @ source.weight.t()

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(x)

    return Head()


def of_an_object(source: nn.Module) -> object:
    return functools.partial(Source(source).__call__)


HEADS = [Source, SourceModule, Hides, InTwoSteps, Inherits, made_in_init, of_an_object]


class Tied(nn.Module):
    """A model whose head reads the weight of its table in one way or another."""

    def __init__(self, head: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.output = head(self.tokens)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return self.output(x)


@pytest.mark.parametrize("head", HEADS)
def test_a_table_that_a_head_reads_stays_with_the_root(head: Callable[[nn.Module], Any]) -> None:
    for units in (None, ["layers.*"]):
        assert not find_units(Tied(head), units).embeddings
    other = Tied(lambda table: head(nn.Embedding(7, 6)))  # its own table
    assert [name for name, _ in find_units(other).embeddings] == ["tokens"]


@pytest.mark.parametrize("head", [Source, SourceModule, Hides, InTwoSteps, of_an_object])
def test_a_model_with_a_tied_head_trains_as_the_plain_one(head: Callable[[nn.Module], Any]) -> None:
    ids = torch.arange(8).view(2, 4) % 7
    layout = MeshLayout(1, 2, 1)
    assert_parity(lambda: Tied(head), lambda i: (ids + i) % 7, layout, steps=1, fp32=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x).relu())


class Holds(nn.Module):
    """Modules by name, called in order."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            for part in module.values() if isinstance(module, nn.ModuleDict) else [module]:
                x = part(x)
        return x


def blocks(model: nn.Module) -> list[str]:
    return [name for name, _ in find_units(model).blocks]


def test_blocks_of_a_module_dict() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.ModuleDict({str(i): Block() for i in range(3)})
        return Holds(inp=nn.Linear(6, 6), layers=layers, norm=nn.LayerNorm(6))

    found = find_units(model())
    assert [name for name, _ in found.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert [name for name, _ in found.final_norm_and_head] == ["norm"]
    linears = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(4)})
    assert len(blocks(Holds(layers=linears))) == 4
    assert_parity(model, lambda i: torch.ones(2, 6) * (i + 1), MeshLayout(1, 2, 1), fp32=False)


class Nested(nn.Module):
    """Its blocks are lists, as in vit-pytorch and x-transformers."""

    def __init__(self, kind: Callable[[dict[str, nn.Module]], nn.Module]) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.layers = nn.ModuleList(
            kind({"norm": nn.LayerNorm(6), "attn": Block(), "mlp": nn.Linear(6, 6)})
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            norm, attn, mlp = layer.values() if isinstance(layer, nn.ModuleDict) else layer
            x = x + mlp(attn(norm(x)))
        return self.norm(x)


NESTED = {
    "lists": lambda named: nn.ModuleList(named.values()),
    "dicts": nn.ModuleDict,
}


@pytest.mark.parametrize("kind", ["lists", "dicts"])
def test_blocks_in_lists_of_lists(kind: str) -> None:
    found = find_units(Nested(NESTED[kind]))
    inner = {"lists": ("1", "2"), "dicts": ("attn", "mlp")}[kind]
    assert names(found.blocks) == [f"layers.{i}.{name}" for i in (0, 1) for name in inner]
    # The norms are the root's, not of one unit with the last norm.
    assert names(found.final_norm_and_head) == ["norm"]
    assert_parity(
        lambda: Nested(NESTED[kind]),
        torch.linspace(-1, 1, 12).view(2, 6),
        MeshLayout(1, 2, 1),
        steps=1,
        fp32=False,
        activation_checkpointing=True,
    )


def test_parameters_in_a_list_are_no_block() -> None:
    model = Holds(
        prompts=nn.ModuleList([nn.ParameterList([torch.ones(3, 6)])]),
        layers=nn.ModuleList([Block()]),
    )
    assert blocks(model) == ["layers.0"]


def test_a_module_dict_as_a_namespace() -> None:
    """nanoGPT's: tables, a list of blocks and a norm; and what peft puts beside a linear layer."""
    names = {
        "wte": nn.Embedding(7, 6),
        "wpe": nn.Embedding(5, 6),
        "h": nn.ModuleList(Block() for _ in range(2)),
        "ln_f": nn.LayerNorm(6),
    }
    assert blocks(Holds(transformer=nn.ModuleDict(names))) == ["transformer.h.0", "transformer.h.1"]
    assert not blocks(Holds(lora_A=nn.ModuleDict({"default": nn.Linear(6, 6)})))
    towers = {"image": nn.ModuleList([Block()]), "text": nn.ModuleList([Block()])}
    assert blocks(nn.ModuleDict(towers)) == ["image.0", "text.0"]


def test_blocks_in_plain_attributes() -> None:
    plain = Holds(inp=nn.Linear(6, 6), block0=Block(), block1=Block(), norm=nn.LayerNorm(6))
    assert blocks(plain) == ["block0", "block1"]
    assert blocks(nn.Sequential(nn.Linear(6, 6), Block(), Block())) == ["1", "2"]
    # Layers are no blocks, nor is one of a kind.
    assert not blocks(Holds(fc1=nn.Linear(6, 6), fc2=nn.Linear(6, 6), block0=Block()))
    # Stages of lists: their blocks.
    stages = {f"stage{i}": Holds(blocks=nn.ModuleList([Block()])) for i in range(2)}
    assert blocks(Holds(**stages)) == ["stage0.blocks.0", "stage1.blocks.0"]


def test_a_large_model_of_one_unit() -> None:
    with torch.device("meta"):
        model = Holds(encoder=nn.Sequential(nn.Linear(9000, 9000), nn.Linear(9000, 9000)))
        said = of_one_unit(model, find_units(model))
        assert "162 M" in said and 'units=["encoder.*"]' in said
        assert not of_one_unit(model, find_units(model, ["encoder.*"]))
        small = nn.Linear(9000, 9000)
        assert not of_one_unit(small, find_units(small))


@pytest.mark.parametrize(("shard", "warns"), [(2, True), (1, False)])
def test_parallelize_warns_of_one_unit(shard: int, warns: bool) -> None:
    with fake_world(0, 2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(9000, 9000), nn.Linear(9000, 9000))
        mesh = build_mesh(MeshLayout(1, shard, 2 // shard), device_type="cpu")
        parallelize(model, mesh, tp_plan=None if shard == 2 else {"0": "colwise", "1": "rowwise"})
    assert any("units=[" in str(w.message) for w in caught) is warns


class Gate(nn.Module):
    """Two layers, nine rows of which no mesh here gets equal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.emb, self.mlp = nn.LayerNorm(6), Gate(), Gate()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) * self.emb(t)


class CallsByVariable(nn.Module):
    """Calls modules inside its blocks after these."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Gated() for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        t = x = self.inp(x)
        for block in self.blocks:
            x = block(x, t)
        for block in self.blocks:
            x = x * block.emb(t)
        return self.head(x)


class CallsInside(CallsByVariable):
    """Calls a module inside its first block after all blocks, as diffusers' DiT does."""

    def forward(self, x: Tensor) -> Tensor:
        t = x = self.inp(x)
        for block in self.blocks:
            x = block(x, t)
        return self.head(x * self.blocks[0].emb(t))


def names(modules: list[tuple[str, nn.Module]]) -> list[str]:
    return [name for name, _ in modules]


def test_two_levels_of_units() -> None:
    found = find_units(CallsByVariable(), ["blocks.*", "blocks.*.emb.up", "blocks.1.emb"])
    assert names(found.blocks) == ["blocks.0", "blocks.1"]
    # The innermost first, whatever the order of the patterns.
    assert names(found.inner) == ["blocks.0.emb.up", "blocks.1.emb.up", "blocks.1.emb"]
    assert names(found.final_norm_and_head) == ["head"]
    only = find_units(CallsByVariable(), ["blocks.*.emb"])
    assert names(only.blocks) == ["blocks.0.emb", "blocks.1.emb"] and not only.inner


def test_a_model_that_calls_inside_a_block_trains_as_the_plain_one() -> None:
    batch = torch.linspace(-1, 1, 24).view(4, 6)
    assert_parity(CallsInside, batch, MeshLayout(1, 2, 1), steps=1, fp32=False)


def test_what_is_called_without_its_block_is_a_unit() -> None:
    for patterns in (None, ["blocks.*"], ["blocks.*", "blocks.0.emb"]):
        found = find_units(CallsInside(), patterns)
        assert (names(found.blocks), names(found.inner)) == (
            ["blocks.0", "blocks.1"],
            ["blocks.0.emb"],
        )
    assert not find_units(CallsByVariable()).inner  # it can't be seen


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("shape", [(1, 3, 1), (2, 2, 1)])
def test_units_inside_blocks_train_as_the_plain_model(
    shape: tuple[int, int, int], reshard: bool, checkpointing: bool
) -> None:
    two_levels = CallsByVariable, ["blocks.*", "blocks.*.emb", "blocks.*.mlp.up"]
    for build, units in ((CallsInside, None), two_levels):
        assert_parity(
            build,
            lambda i: torch.linspace(-1, 1, 12).view(2, 6) * (i + 1),
            MeshLayout(*shape),
            steps=2,
            fp32=False,
            units=units,
            reshard_after_forward=reshard,
            activation_checkpointing=checkpointing,
        )


@pytest.mark.slow
def test_units_inside_blocks_with_tensor_parallelism() -> None:
    plan = {"blocks.*.*.up": "colwise", "blocks.*.*.down": "rowwise"}
    assert_parity(
        CallsInside,
        lambda i: torch.linspace(-1, 1, 12).view(2, 6) * (i + 1),
        MeshLayout(1, 3, 2),
        steps=2,
        fp32=False,
        tp_plan=plan,
        units=["blocks.*", "blocks.*.emb"],
    )


def test_a_call_without_the_block_that_could_not_be_seen_is_an_error_that_names_the_units() -> None:
    with pytest.raises(StateError) as raised:
        assert_parity(CallsByVariable, torch.ones(2, 6), MeshLayout(1, 2, 1), fp32=False)
    said = str(raised.value)
    assert said.startswith("emb of unit blocks.0 was called outside the unit's forward")
    assert 'units=["blocks.*", "blocks.*.emb"]' in said


def compiled(checkpointing: bool) -> float:
    """The largest difference of a weight after steps of a model whose compiled blocks have units inside."""
    torch.manual_seed(0)
    plain = CallsByVariable().double()
    parallel = parallelize(
        copy.deepcopy(plain),
        build_mesh(MeshLayout(1, 2, 1), device_type="cpu"),
        units=["blocks.*", "blocks.*.emb"],
        compile="aot_eager",
        activation_checkpointing=checkpointing,
    )
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    for model in (plain, parallel):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(plain.parameters(), parallel.parameters(), strict=True)
    return max(float((p - q.full_tensor()).abs().max()) for p, q in pairs)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_units_inside_compiled_blocks(gloo_pool: GlooPool, checkpointing: bool) -> None:
    assert max(gloo_pool.run(compiled, checkpointing, world_size=2)) < 1e-12


class ReadsUnseen(nn.Module):
    """A tied head in whose code nothing shows which table it reads."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.inner = source

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.inner.get_parameter("weight"))


def test_a_pattern_leaves_modules_in_the_root() -> None:
    def names(units: list[str] | None) -> list[list[str]]:
        found = find_units(ReadsWeights(), units)
        return [[name for name, _ in each] for each in found]

    blocks = ["layers.0", "layers.1"]
    assert names(["!tokens"]) == [blocks, [], [], ["norm"]]
    assert names(["layers.*", "!tokens", "!norm"]) == [blocks, [], [], []]
    assert names(["!layers.1"]) == [blocks[:1], [], ["tokens"], ["norm"]]
    assert names(["!layers"]) == [[], [], ["tokens"], []]
    with pytest.raises(Parallel3dError, match=r"'!token' matches no module; there are tokens"):
        names(["!token"])


@pytest.mark.parametrize("units", [["!tokens"], ["layers.*", "!t*"]])
def test_a_tied_head_that_reads_a_table_of_the_root_trains_as_the_plain_one(
    units: list[str],
) -> None:
    ids = torch.arange(8).view(2, 4) % 7

    build = functools.partial(Tied, ReadsUnseen)
    layout = MeshLayout(1, 2, 1)
    assert_parity(build, lambda i: (ids + i) % 7, layout, steps=1, fp32=False, units=units)


def test_the_error_of_a_table_read_outside_its_unit_names_the_units_to_write() -> None:
    with fake_world(0, 2):
        model = parallelize(Tied(ReadsUnseen), build_mesh(MeshLayout(1, 2, 1)))
        with pytest.raises(StateError, match=r'units=\["!tokens"\]'):
            model(torch.arange(8).view(2, 4) % 7)
