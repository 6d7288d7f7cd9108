"""All-gather extensions: what torch's engine can't do with them, and other features beside them."""

import copy
import weakref

import pytest
import torch
from _support.extended import Aliased, Bf16, Int8, Wrapped, curious, extend, mlp, plain_twin
from _support.fsdp.counted_collectives import Gather
from _support.fsdp.lifetimes import collector_off
from _support.fsdp.noted_streams import Device, find, happens_before, note
from _support.fsdp.wrapped import at_rest, cpu_mesh, equal_grads, held_bytes
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel3d import MixedPrecisionPolicy, materialize
from parallel3d.errors import MeshError, Parallel3dError, RefusedError
from parallel3d.fsdp import DataParallelMeshDims, fully_shard
from parallel3d.fsdp.inspect import ExtensionBucket, unit_of
from parallel3d.testing import LocalWorld, fake_world, local_world, record_collectives


def wrap(model: nn.Module, shape=(1, 2, 1), **options) -> nn.Module:
    return fully_shard(model, mesh=cpu_mesh(*shape), **options)


def step(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    model(torch.ones(3, 6, dtype=dtype)).square().sum().backward()


class TestRefusals:
    @pytest.mark.parametrize("lacking", ["fsdp_pre_all_gather", "fsdp_post_all_gather"])
    def test_one_of_the_methods(self, lacking) -> None:
        other = ({"fsdp_pre_all_gather", "fsdp_post_all_gather"} - {lacking}).pop()
        half = type("Half", (Wrapped,), {other: getattr(Bf16, other)})
        with fake_world(0, 2):
            model = extend(mlp(8), half)
            before = model[0].weight
            with pytest.raises(RefusedError, match=rf"0\.weight.*Half.*but not {lacking}"):
                wrap(model)
            assert model[0].weight is before and type(model) is nn.Sequential

    def test_signature(self) -> None:
        class Odd(Bf16):
            def fsdp_pre_all_gather(self, mesh, outer_size):
                raise AssertionError

        with fake_world(0, 2), pytest.raises(Parallel3dError, match="takes 2 arguments"):
            wrap(extend(mlp(8), Odd))

    @pytest.mark.parametrize(
        ("given", "shown"),
        [
            (lambda t: t, "returned Tensor"),
            (lambda t: (t, None), r"returned \(Tensor, NoneType\)"),
            (lambda t: ((), None), r"returned \(\(\), NoneType\)"),
        ],
    )
    def test_what_pre_returns(self, given, shown) -> None:
        class Wrong(Bf16):
            def fsdp_pre_all_gather(self, mesh):
                return given(self.held)

        with fake_world(0, 2):
            model = wrap(extend(mlp(8), Wrong))
            with pytest.raises(Parallel3dError, match=shown):
                step(model)

    def test_what_post_returns(self) -> None:
        class Wrong(Bf16):
            def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
                return self.result(outputs[0])

        with fake_world(0, 2):
            model = wrap(extend(mlp(8), Wrong))
            Wrong.result = lambda self, whole: whole
            with pytest.raises(Parallel3dError, match="returned Tensor; without out="):
                model.unshard()
        with fake_world(0, 2):
            model = wrap(extend(mlp(8), Wrong))
            Wrong.result = lambda self, whole: (whole[:4].float(), ())
            with pytest.raises(Parallel3dError, match=r"shape \(4, 6\).*has shape \(8, 6\)"):
                model.unshard()

    def test_wrapper_among_the_tensors_to_free(self) -> None:
        class Wrong(Aliased):
            def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
                whole = Aliased(outputs[0])
                return whole, (whole,)

        with fake_world(0, 2):
            model = wrap(extend(mlp(8), Wrong))
            with pytest.raises(Parallel3dError, match="Aliased among the tensors to free"):
                model.unshard()

    def test_sizes_that_change(self) -> None:
        class Changing(Bf16):
            dtype_now = torch.bfloat16

            def fsdp_pre_all_gather(self, mesh):
                return (self.held.to(self.dtype_now),), "metadata"

        with fake_world(0, 2):
            model = wrap(extend(mlp(8), Changing))
            step(model)
            Changing.dtype_now = torch.float16
            with pytest.raises(
                Parallel3dError, match=r"\(4, 6\) torch.float16.*bfloat16 the first"
            ):
                step(model)

    def test_scalar(self) -> None:
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(Bf16(torch.ones(())))

        with fake_world(0, 2), pytest.raises(Parallel3dError, match=r"scale.*\(\) can't be cut"):
            wrap(Scale())

    def test_no_shard_axis(self) -> None:
        with fake_world(0, 2):
            mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
            with pytest.raises(MeshError, match="needs the shard axis"):
                fully_shard(extend(mlp(8), Bf16), mesh=mesh)

    def test_conversion_that_loses_the_subclass(self) -> None:
        with fake_world(0, 2):
            model = wrap(extend(mlp(8), losing("empty_like", "_to_copy")))
            with pytest.raises(Parallel3dError, match=r"0\.weight.*Losing, into a Tensor"):
                model.double()


def losing(*operations: str) -> type[Wrapped]:
    """A subclass that doesn't keep its type under some operations."""
    lost = {getattr(torch.ops.aten, name).default for name in operations}

    class Losing(Bf16):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            return out.held if func in lost else out

    return Losing


def give(rows: slice) -> type[Bf16]:
    """A subclass that gives these of its rows to be gathered, without padding."""

    class Unpadded(Bf16):
        def padded(self, outer_size, mesh):
            return self.held[rows]

    return Unpadded


def forget_to_pad() -> bool:
    """Runs on every rank: 7 rows on two ranks, each given as they are."""
    x = torch.randn(3, 6)
    models = [wrap(extend(mlp(7), kind)) for kind in (Bf16, give(slice(None)))]
    models[1].load_state_dict(models[0].state_dict())
    return torch.equal(*(model(x) for model in models))


def leave_one_out() -> str:
    """Runs on every rank: a row is missing on each."""
    model = wrap(extend(mlp(7), give(slice(1, None))))
    with pytest.raises(Parallel3dError) as error:
        step(model)
    return str(error.value)


@pytest.mark.parity("behaviour: uneven sharding")
def test_unpadded_inputs_are_padded_and_others_raise_on_every_rank(gloo_pool) -> None:
    """torch raises on the ranks that are wrong only, and the others wait for them."""
    assert all(gloo_pool.run(forget_to_pad, world_size=2, timeout=30.0))
    for message in gloo_pool.run(leave_one_out, world_size=2, timeout=30.0):
        assert "0.weight" in message and "(7, 6)" in message
        assert "36, 24 bytes" in message and "(4, 6)" in message


class TestSimulatedRanks:
    @pytest.mark.parametrize("kind", [Bf16, Int8], ids=lambda kind: kind.__name__)
    @pytest.mark.parametrize("shape", [(1, 3, 1), (2, 2, 1), (2, 1, 1), (1, 2, 2)], ids=str)
    def test_gradients(self, kind, shape) -> None:
        """7 and 4 rows; inputs of another shape than the shard's are padded likewise."""
        plain = plain_twin(mlp(7), kind)
        samples = [torch.randn(3, 6) for _ in range(shape[0] * shape[1])]
        for sample in samples:
            (plain(sample).square().mean() / len(samples)).backward()
        with local_world(shape[0] * shape[1] * shape[2]) as world:
            model = wrap(extend(mlp(7), kind), shape)
            mine = world.map(lambda rank: samples[rank // shape[2]])
            model(mine).square().mean().backward()
            for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
                for whole in world.per_rank(param.grad.full_tensor()):
                    assert (whole - twin.grad).abs().max() <= 1e-6 * twin.grad.abs().max()
            assert at_rest(model)

    def test_accumulation(self) -> None:
        """Sums that wait for their reduction, and one that is reduced."""
        with local_world(2) as world:
            grads = []
            for defer in (False, True):
                model = wrap(extend(mlp(8), Int8))
                for index in range(3):
                    model.set_requires_gradient_sync(index == 2 or not defer)
                    step(model)
                grads.append([p.grad for p in model.parameters()])
            for one, other in zip(*grads, strict=True):
                pairs = zip(world.per_rank(one), world.per_rank(other), strict=True)
                assert all(torch.allclose(a, b, rtol=1e-5) for a, b in pairs)


class TestMemory:
    def test_nothing_of_the_whole_weight_stays(self) -> None:
        """The subclass keeps it as an attribute; the user's own attributes do stay."""
        with fake_world(0, 2):
            model = extend(mlp(8), Bf16)
            model[0].weight.mine = "kept"
            whole = weakref.ref(model[0].weight.held)
            with collector_off():
                wrap(model)
                assert whole() is None
            assert model[0].weight.mine == "kept" and not hasattr(model[0].weight, "held")
            assert model[0].weight.to_local().held.untyped_storage().nbytes() == 4 * 6 * 4

    def test_lone_input_is_gathered_in_place(self) -> None:
        with fake_world(0, 2):
            model = wrap(extend(nn.Sequential(nn.Linear(6, 8, bias=False)), Bf16))
            (bucket,) = unit_of(model).group.buckets
            with torch.no_grad():
                model.unshard()
            (extension,) = bucket.precision.extensions
            assert bucket.precision.gathered.data_ptr() == extension.rows[0].data_ptr()
            model.reshard()
            assert at_rest(model)

    @pytest.mark.parity("reliability: everything freed at once")
    @pytest.mark.parametrize("kind", [Bf16, Int8], ids=lambda kind: kind.__name__)
    def test_freed_at_once(self, kind) -> None:
        with fake_world(0, 2):
            model = wrap(extend(mlp(8), kind))
            step(model)
            (bucket,) = (b for b in unit_of(model).group.buckets if type(b) is ExtensionBucket)
            parts = [
                bucket,
                model[0].weight,
                bucket.precision.extensions[0].compute,
                bucket.precision.rows[0],
            ]
            gone = [weakref.ref(part) for part in parts]
            with collector_off():
                del model, bucket, parts
                assert [ref() for ref in gone] == [None] * 4

    def test_frozen(self) -> None:
        with fake_world(0, 2):
            model = extend(mlp(8), Int8)
            model[0].weight.requires_grad_(False)
            wrap(model)
            step(model)
            assert model[0].weight.grad is None and model[2].weight.grad is not None
            model[0].weight.requires_grad_()
            step(model)
            assert model[0].weight.grad is not None


class Careless(Bf16):
    """Writes to ``out`` without hiding it from autograd."""

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        if out is None:
            return super().fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype)
        return out.copy_(all_gather_outputs[0])


def test_writes_to_out_are_no_changes() -> None:
    """torch's backward finds that the saved weight was modified in place."""
    with fake_world(0, 2):
        model = wrap(extend(mlp(8), Careless), reshard_after_forward=True)
        step(model)
        step(model)


def test_first_gather_in_inference_mode() -> None:
    with fake_world(0, 2):
        for kind, policy in ((Bf16, {}), (Aliased, {"param_dtype": torch.bfloat16})):
            model = wrap(extend(mlp(8), kind), mp_policy=MixedPrecisionPolicy(**policy))
            with torch.inference_mode():
                model(torch.ones(3, 6))
            assert at_rest(model)
            step(model)
            assert model[0].weight.grad is not None


def _of_three(inner, size, stride):
    return inner["held"]


def _not_written(cls, inner, meta, outer_size, outer_stride):
    raise NotImplementedError


@pytest.mark.parametrize(
    "methods",
    [
        {"__tensor_unflatten__": staticmethod(_of_three)},
        {"__tensor_unflatten__": classmethod(_not_written)},
        {"__tensor_flatten__": lambda self: (["another"], None)},
    ],
    ids=["three arguments", "raises", "names no attribute"],
)
def test_flattening_that_only_a_compiler_would_call(methods) -> None:
    """9 rows: the last of 4 ranks has none."""
    kind = type("Odd", (Bf16,), methods)
    for rank in range(4):
        with fake_world(rank, 4):
            net = mlp(9)
            weight = net[0].weight.detach().clone()
            model = wrap(extend(net, kind), (1, 4, 1))
            local = model[0].weight.to_local()
            assert type(local) is kind
            assert torch.equal(local.held, weight[3 * rank : 3 * rank + 3])
            step(model)


def test_module_and_mesh_are_the_parameters() -> None:
    seen = []

    def note(mesh, outer_size, outer_stride, module, mp_policy):
        assert isinstance(mp_policy, torch_fsdp.MixedPrecisionPolicy)
        seen.append((mesh.mesh_dim_names, outer_size, outer_stride, module, mp_policy))

    policy = MixedPrecisionPolicy(torch.bfloat16)
    with fake_world(0, 4):
        model = wrap(extend(mlp(8), curious(note)), (2, 2, 1), mp_policy=policy)
        model(torch.ones(3, 6))
        assert seen == [
            (("shard",), torch.Size([8, 6]), (6, 1), model[0], policy),
            (("shard",), torch.Size([4, 8]), (8, 1), model[2], policy),
        ]


class TestOnLocalTensors:
    """Methods set on the sharded Parameters' local tensors, of no subclass, as torch takes them too."""

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_it_is_called(self, ranks) -> None:
        seen: list[str] = []

        def pre(self, mesh, outer_size, outer_stride, module, mp_policy):
            seen.append("pre")
            return (self.to(torch.bfloat16),), None

        def post(self, outputs, metadata, param_dtype, *, out=None):
            seen.append("post")
            (gathered,) = outputs
            if out is not None:
                with torch.no_grad():
                    return out.copy_(gathered)
            whole = gathered.to(param_dtype)
            return whole, (whole,)

        with fake_world(0, ranks):
            model = wrap(mlp(8), (1, ranks, 1))
            weight = model[0].weight
            local = weight.to_local()
            values = local.clone()
            local = weight._local_tensor
            local.fsdp_pre_all_gather = pre.__get__(local)
            local.fsdp_post_all_gather = post.__get__(local)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                step(model)
                assert model[0].weight is weight and weight.grad is not None
                optimizer.step()
                optimizer.zero_grad()
            assert seen.count("pre") >= 2 and seen.count("post") >= 2
            assert not torch.equal(weight.to_local(), values) and at_rest(model)
            kinds = [type(bucket) for bucket in unit_of(model).group.buckets]
            assert kinds.count(ExtensionBucket) == 1 and len(kinds) == 2

    def test_one_method_alone(self) -> None:
        with fake_world(0, 2):
            model = wrap(mlp(8))
            model[0].weight._local_tensor.fsdp_pre_all_gather = lambda mesh: None
            with pytest.raises(Parallel3dError, match="not fsdp_post_all_gather"):
                step(model)


class TestAtRest:
    def test_load_state_dict(self) -> None:
        """Copied, assigned as shards, and assigned whole."""
        with fake_world(1, 2):
            model = wrap(extend(mlp(8), Bf16))
            weight = model[0].weight
            step(model)
            shards = {k: v.clone() + 1 for k, v in model.state_dict().items()}
            whole = {k: v + 2 for k, v in mlp(8).state_dict().items()}
            expected = mlp(8)[0].weight.detach()[4:]
            for state, assign, plus in ((shards, False, 1), (shards, True, 1), (whole, True, 2)):
                model.load_state_dict(state, assign=assign)
                assert model[0].weight is weight
                local = weight.to_local()
                assert type(local) is Bf16 and torch.equal(local.held, expected + plus)
                step(model)

    def test_conversions(self) -> None:
        with fake_world(0, 2):
            model = wrap(extend(mlp(8), Bf16))
            step(model)
            first = model[0].weight
            model.zero_grad()
            model.double()
            assert model[0].weight is first and type(first.to_local()) is Bf16
            step(model, torch.float64)
            assert first.grad.dtype == first.dtype == torch.float64
            model.zero_grad()
            model.to_empty(device="cpu")
            step(model, torch.float64)
            assert first.grad is not None and at_rest(model)

    def test_type_is_found_again(self) -> None:
        with fake_world(0, 2):
            model = wrap(extend(mlp(8), losing("_to_copy")))
            values = model[0].weight.to_local().held.double()
            model.double()
            local = model[0].weight.to_local()
            assert isinstance(local, Bf16) and torch.equal(local.held, values)
            step(model, torch.float64)

    def test_plain_values_over_meta(self) -> None:
        with torch.device("meta"):
            model = extend(mlp(8), Bf16)
        with fake_world(1, 2):
            wrap(model)
            model.load_state_dict(mlp(8).state_dict(), assign=True)
            local = model[0].weight.to_local()
            assert type(local) is Bf16 and torch.equal(local.held, mlp(8)[0].weight[4:])
            step(model)

    def test_meta(self) -> None:
        with torch.device("meta"):
            model = extend(mlp(8), Bf16)
        with fake_world(0, 2):
            wrap(model)
            materialize(model, device="cpu", seed=0)
            local = model[0].weight.to_local()
            assert type(local) is Bf16 and not local.is_meta and local.held.abs().sum() > 0
            step(model)
            assert isinstance(model[0].weight.grad, DTensor)


# -- beside the engine's other features, most of which torch refuses for them --------------------------


def mean_step(model: nn.Module) -> None:
    model(torch.ones(3, 6)).square().mean().backward()


def check_gradients(world: LocalWorld, model: nn.Module, kind: type[Wrapped], hidden: int) -> None:
    with world.paused():
        plain = plain_twin(mlp(hidden), kind)
        mean_step(plain)
    equal_grads(model, plain, rtol=1e-5, atol=1e-7)


class Columns(Wrapped):
    """Gathers bfloat16 and float32 columns: what is gathered is put together along the sharded dim."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        whole = self.held.new_zeros(outer_size[0], -(-outer_size[1] // mesh.size()))
        whole.narrow(1, 0, self.held.shape[1]).copy_(self.held)
        half = whole.to(torch.bfloat16)
        return (half, whole - half, torch.ones(5)), outer_size

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        half, rest, ones = all_gather_outputs
        assert half.shape[0] == rest.shape[0] == metadata[0] and ones.shape == (10,)
        whole = half + rest
        if out is None:
            return whole, (whole, half, rest)
        return out.copy_(whole[:, : out.shape[1]])

    @staticmethod
    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return weight


@pytest.mark.parity("argument: shard_placement_fn: dim", "behaviour: uneven Shard(1)")
@pytest.mark.parametrize("hidden", [8, 7])
def test_cut_along_columns(hidden) -> None:
    """torch makes other shapes of what it gathers there, and refuses an uneven cut."""
    with local_world(2) as world:
        model = extend(mlp(hidden), Columns)
        fully_shard(
            model,
            mesh=cpu_mesh(),
            shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim > 1 else None,
        )
        mean_step(model)
        check_gradients(world, model, Columns, hidden)
        assert model[2].weight.placements[1] == Shard(1)


def test_uneven_and_alone_in_its_unit() -> None:
    """Its one gather input is sent without a copy; its gradient needs padding all the same."""
    with local_world(3) as world:
        model = extend(mlp(7), Bf16)
        for linear in (model[0], model[2]):
            fully_shard(linear, mesh=cpu_mesh(1, 3))
        mean_step(model)
        check_gradients(world, model, Bf16, 7)


@pytest.mark.parity("argument: reshard_after_forward=int")
@pytest.mark.parametrize("kind", [Bf16, Int8], ids=lambda kind: kind.__name__)
def test_reshard_to_fewer_ranks(kind) -> None:
    """torch: NotImplementedError. Backward gathers what forward has gathered, over two ranks."""
    with local_world(4) as world:
        model = extend(mlp(7), kind)
        mesh = cpu_mesh(1, 4)
        fully_shard(model, mesh=mesh, reshard_after_forward=2)
        for _ in range(2):
            model.zero_grad()
            Wrapped.calls.clear()
            with record_collectives(mesh) as recorder:
                mean_step(model)
            assert [c.group_size for c in recorder.select("all_gather")] == [4, 4, 2, 2]
            assert [name for name, _ in Wrapped.calls] == ["pre"] * 2 + ["post"] * 4
            check_gradients(world, model, kind, 7)
        (bucket,) = (b for b in unit_of(model).group.buckets if isinstance(b, ExtensionBucket))
        assert bucket.post_forward_shard is None and at_rest(model)


@pytest.mark.parity("method: set_custom_all_gather")
@pytest.mark.parametrize("kind", [Bf16, Int8], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("reshard", [True, 2])
def test_custom_all_gather(kind, reshard) -> None:
    with local_world(4) as world:
        model = extend(mlp(8), kind)
        fully_shard(model, mesh=cpu_mesh(1, 4), reshard_after_forward=reshard)
        gather = Gather()
        model.set_custom_all_gather(gather)
        mean_step(model)
        assert [made.dtype for made in gather.made].count(torch.uint8) == 2
        check_gradients(world, model, kind, 8)
        assert at_rest(model)


@pytest.mark.parity("argument: dp_mesh_dims: tuple of axes")
def test_joined_shard_axes() -> None:
    """Parameters on a whole mesh; the subclass is given the joined axes as one mesh."""
    sizes = []

    with fake_world(0, 8):
        names = ("dp", "cp", "other")
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        model = extend(mlp(8), curious(lambda mesh, *_: sizes.append((mesh.ndim, mesh.size()))))
        for module in (model[0], model[2]):
            for name, param in list(module.named_parameters()):
                whole = DTensor.from_local(param.detach(), mesh, [Replicate()] * 3, run_check=False)
                setattr(module, name, nn.Parameter(whole))
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))
        model.unshard()
        assert sizes == [(1, 4), (1, 4)]
        assert model[0].weight.device_mesh == mesh and model[0].weight.shape == (8, 6)
        model.reshard()
        assert isinstance(model[0].weight.to_local(), Bf16) and at_rest(model)


@pytest.mark.parity("fault n: copy.deepcopy")
def test_deepcopy_gathers_for_itself() -> None:
    modules = []
    kind = curious(lambda mesh, size, stride, module, policy: modules.append(module))
    with local_world(2) as world:
        model = fully_shard(extend(mlp(8), kind), mesh=cpu_mesh())
        mean_step(model)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            model[0].weight.zero_()
        modules.clear()
        twin.zero_grad()
        mean_step(twin)
        assert modules[:2] == [twin[0], twin[2]]
        assert type(twin[0].weight.to_local()) is kind
        check_gradients(world, twin, kind, 8)


@pytest.mark.parity("fault n: tied parameters across units", "behaviour: shared parameters")
def test_tied_across_units() -> None:
    with local_world(2) as world:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        extend(model, Bf16)
        model[2].weight = model[0].weight
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=cpu_mesh())
        fully_shard(model, mesh=cpu_mesh())
        Wrapped.calls.clear()
        mean_step(model)
        assert model[0].weight is model[2].weight
        assert Wrapped.calls.count(("post", False)) == 1
        (twice,) = (b for b in unit_of(model[0]).group.buckets if isinstance(b, ExtensionBucket))
        assert len(twice.params) == 1 and world.per_rank(model[0].weight.grad)[0].abs().sum() > 0


class Failing(Bf16):
    """Raises where it is told to."""

    fails: str | None = None

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        if Failing.fails == "pre":
            raise ZeroDivisionError
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    def fsdp_post_all_gather(self, *given, out=None):
        if Failing.fails == "post":
            raise ZeroDivisionError
        return super().fsdp_post_all_gather(*given, out=out)


@pytest.mark.parity("reliability: exceptions at every hook")
@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("method", ["pre", "post"])
def test_exceptions_in_the_methods(method, backward, reset) -> None:
    with local_world(2) as world:
        model = fully_shard(extend(mlp(8), Failing), mesh=cpu_mesh(), reshard_after_forward=True)
        Failing.fails = None if backward else method
        with pytest.raises(ZeroDivisionError):
            loss = model(torch.ones(3, 6)).sum()
            Failing.fails = method
            loss.backward()
        Failing.fails = None
        if reset:
            model.reset_iter_state()
        model.zero_grad()
        mean_step(model)
        check_gradients(world, model, Bf16, 8)
        assert at_rest(model)


class Noting(Bf16):
    """Notes the stream its methods run on."""

    noted: Device

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        self.noted.now.put("pre")
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    def fsdp_post_all_gather(self, *given, out=None):
        self.noted.now.put("post")
        return super().fsdp_post_all_gather(*given, out=out)


def test_streams(monkeypatch) -> None:
    """What is gathered is made beside the computation, after the optimizer; and used after the gather."""
    device = Noting.noted = Device()
    note(device, monkeypatch)
    with fake_world(0, 2):
        model = fully_shard(extend(mlp(8), Noting), mesh=cpu_mesh())
        mean_step(model)
        device.compute.put("optimizer")
        (optimizer,) = find(device.log, "optimizer")
        device.log.clear()
        mean_step(model)
    before, after = find(device.log, "pre"), find(device.log, "post")
    gathers = [entry for entry in device.log if entry[0].startswith("all_gather")]
    assert {stream for _, stream, _ in before} == {"gather"}
    assert {stream for _, stream, _ in after} == {"compute"}
    assert happens_before(optimizer, before[0])
    assert happens_before(before[1], gathers[0]) and happens_before(gathers[0], after[0])


@pytest.mark.parity("argument: offload_policy=CPUOffloadPolicy(pin_memory=False)")
@pytest.mark.parametrize("shard", [2, 1])
def test_offload(monkeypatch, shard) -> None:
    """The shard is taken to the device, which is the CPU under another name, before its method is called."""
    storage_device, device = torch.device("cpu"), torch.device("cpu", 0)
    monkeypatch.setattr(
        "parallel3d.fsdp.options.memory.CpuOffload.places",
        lambda *_: (device, storage_device, False),
    )
    with local_world(2) as world:
        model = fully_shard(
            extend(mlp(8), Int8),
            mesh=cpu_mesh(2 // shard, shard),
            offload_policy=CPUOffloadPolicy(pin_memory=False),
        )
        (bucket,) = (b for b in unit_of(model).group.buckets if isinstance(b, ExtensionBucket))
        assert bucket.reads_host
        mean_step(model)
        check_gradients(world, model, Int8, 8)


@pytest.mark.parity("method: set_reduce_scatter_unused_params")
def test_unused() -> None:
    with local_world(2) as world:

        class Half(nn.ModuleDict):
            def forward(self, x):
                return self["used"](x)

        model = extend(Half({"used": nn.Linear(6, 4), "other": nn.Linear(6, 4)}), Int8)
        fully_shard(model, mesh=cpu_mesh())
        model.set_reduce_scatter_unused_params(True)
        mean_step(model)
        for grad in world.per_rank(model["other"].weight.grad):
            assert not grad.any()
        for grad in world.per_rank(model["used"].weight.grad):
            assert grad.any()


def test_kept_bytes() -> None:
    """Between forward and backward a quarter of the ranks' bytes are kept: n/k of one rank's."""
    with fake_world(0, 4):
        model = fully_shard(extend(mlp(8), Int8), mesh=cpu_mesh(1, 4), reshard_after_forward=2)
        model(torch.ones(3, 6))
        (bucket,) = (b for b in unit_of(model).group.buckets if isinstance(b, ExtensionBucket))
        one_rank = 12 + 8 + 2 * 4 + 4  # two rows of 6 and one of 8, and a scale for each
        assert held_bytes(bucket.post_forward_shard) == 2 * one_rank
        assert not any(held_bytes(rows) for rows in bucket.precision.rows)


class Strict(Bf16):
    """Dispatches no operation that it doesn't know, as torchao's classes."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.is_set_to.default:
            raise NotImplementedError(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("loaded", [True, False], ids=["load_state_dict", "attribute"])
def test_a_parameter_of_a_strict_class_is_assigned(loaded: bool) -> None:
    with fake_world(0, 2):
        model = wrap(extend(mlp(8), Strict))
        weight = model[0].weight
        local = Strict(torch.full_like(weight.to_local().held, 2.0))
        given = DTensor.from_local(
            local,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
        if loaded:
            model.load_state_dict({"0.weight": given}, assign=True, strict=False)
        else:
            model[0].weight = nn.Parameter(given)
        assert model[0].weight.to_local().held.unique().tolist() == [2.0]
