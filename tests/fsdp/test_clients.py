"""Ways in which programs written for torch's ``fully_shard`` come to ours."""

import io
import pickle
import pickletools
import threading
import zipfile
from collections.abc import Callable

import pytest
import torch
from _support.fsdp.wrapped import at_rest, build, cpu_mesh, shard_blocks
from _support.models import Lm, lm_loss, tokens
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from parallel3d import Parallel3dError, StateError, fully_shard, materialize, parallelize
from parallel3d.fsdp.placement import kept_with
from parallel3d.testing import fake_world, local_world, record_collectives


def named_mesh(ranks: int = 2):
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))


class TestFunctionReplaced:
    """``torch.distributed.fsdp.fully_shard = parallel3d.fully_shard``: how accelerate is reached."""

    def test_by_assignment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_fsdp, "fully_shard", fully_shard)
        with fake_world(0, 2):
            model = Lm(layers=2)
            for layer in model.layers:
                torch_fsdp.fully_shard(layer, mesh=named_mesh())
            torch_fsdp.fully_shard(model, mesh=named_mesh())
            assert torch_fsdp.fully_shard.state(model) is model._get_fsdp_state()
            assert isinstance(model, torch_fsdp.FSDPModule)
            lm_loss(model, tokens(0)).backward()
            assert at_rest(model)

    def test_by_another_function(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Such as a client's own wrapper around ours, without ``functools.wraps``."""
        monkeypatch.setattr(torch_fsdp, "fully_shard", lambda *a, **k: fully_shard(*a, **k))
        with fake_world(0, 2):
            model = torch_fsdp.fully_shard(nn.Linear(4, 4), mesh=named_mesh())
            model(torch.ones(2, 4)).sum().backward()


def on_threads(body: Callable[[], None], ranks: int) -> list[BaseException]:
    """Runs ``body`` as every rank of torch's threaded process group, which is written in Python."""
    errors: list[BaseException] = []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store = dist.HashStore()

    def rank_of(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        try:
            body()
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    try:
        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    return errors


def test_a_process_group_without_backends_inside() -> None:
    """One that a third party's backend creates may be a ``ProcessGroup`` and have no c10d backend."""
    weight = torch.arange(16.0).view(4, 4)

    def body() -> None:
        plain, model = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        for each in (plain, model):
            each.weight.data = weight.clone()
        fully_shard(model)
        x = torch.ones(2, 4)
        torch.testing.assert_close(model(x), plain(x))
        for each in (model, plain):
            each(x).square().sum().backward()
        mine = plain.weight.grad.chunk(2)[dist.get_rank()]
        torch.testing.assert_close(model.weight.grad.to_local(), mine)

    assert on_threads(body, 2) == []


class TestMeta:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_forward_names_parameters_and_the_remedy(self, ranks) -> None:
        with fake_world(0, ranks):
            with torch.device("meta"):
                model = Lm(layers=2)
            shard_blocks(model, named_mesh(ranks))
            for _ in range(2):
                with pytest.raises(
                    StateError, match=r"meta device.*embed\.weight.*and \d+ more.*materialize\("
                ):
                    model(tokens(0))
            with pytest.raises(StateError, match=r"layers\.0\.up\.weight.*materialize"):
                model.layers[0].unshard()
            materialize(model)
            lm_loss(model, tokens(0)).backward()
            assert at_rest(model)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_a_forward_of_inputs_on_meta_has_shapes_and_collectives(self, ranks) -> None:
        with fake_world(0, ranks):
            mesh = named_mesh(ranks)
            with torch.device("meta"):
                model = Lm(layers=2)
            shard_blocks(model, mesh)
            for _ in range(2):
                with record_collectives(mesh) as recorder:
                    lm_loss(model, tokens(0).to("meta")).backward()
                assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())
                assert bool(recorder.calls) is (ranks > 1)
                assert at_rest(model)
            with pytest.raises(StateError, match=r"meta device.*embed\.weight.*materialize\("):
                model(tokens(0))
            model.zero_grad()
            materialize(model)
            lm_loss(model, tokens(0)).backward()
            assert at_rest(model)

    def test_half_of_a_unit(self) -> None:
        with fake_world(0, 2):
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 6))
            fully_shard([model[1], model[2]], mesh=named_mesh())
            fully_shard(model, mesh=named_mesh())
            model[1].load_state_dict(nn.LayerNorm(4).state_dict(), assign=True)
            model[0].load_state_dict(nn.Linear(4, 4).state_dict(), assign=True)
            with pytest.raises(Parallel3dError, match=r"2\.weight, 2\.bias.*materialize"):
                model(torch.ones(1, 4))
            model[2].load_state_dict(nn.Linear(4, 6).state_dict(), assign=True)
            model(torch.ones(1, 4)).sum().backward()

    @pytest.mark.parametrize("how", ["list", "parallelize"])
    def test_assign_to_a_unit_of_several_modules(self, how) -> None:
        """accelerate's cpu_ram_efficient_loading. Twice: the second time they are not on meta."""
        torch.manual_seed(0)
        plain = Lm(layers=2).double()
        with local_world(2) as world:
            with torch.device("meta"):
                model = Lm(layers=2).double()
            if how == "list":
                fully_shard([model.norm, model.head], mesh=named_mesh())
                shard_blocks(model, named_mesh())
            else:
                parallelize(model, cpu_mesh())
            objects = [id(p) for p in model.parameters()]
            for times in (1, 2):
                state = {
                    name: distribute_tensor(value * times, p.device_mesh, p.placements)
                    for (name, value), p in zip(
                        plain.state_dict().items(), model.state_dict().values(), strict=True
                    )
                }
                model.load_state_dict(state, assign=True)
                assert [id(p) for p in model.parameters()] == objects
                for name, p in model.named_parameters():
                    for value in world.per_rank(p.full_tensor()):
                        assert torch.equal(value, plain.state_dict()[name] * times), name
            lm_loss(model, world.map(lambda _: tokens(0))).backward()

    def test_materialize_names_parameter_and_class(self) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(4))
                self.up = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.up(x) * self.scale

        with fake_world(0, 2):
            with torch.device("meta"):
                model = nn.Sequential(Scaled(), Scaled())
            for each in (*model, model):
                fully_shard(each, mesh=named_mesh())
            with pytest.raises(Parallel3dError) as error:
                materialize(model)
        text = str(error.value)
        assert "initialises 0.scale, 1.scale (Scaled)" in text
        assert "Give Scaled a method reset_parameters()" in text and "FSDP" not in text


class TestSaved:
    """``torch.save(model.state_dict())``: each rank's file holds its shards, and nothing of ours."""

    @staticmethod
    def saved(model: nn.Module) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        return file

    @pytest.mark.parametrize("how", ["fully_shard", "parallelize"])
    def test_weights_only(self, how) -> None:
        with fake_world(1, 2):
            if how == "fully_shard":
                model, _ = build()
            else:
                model = parallelize(Lm(), cpu_mesh())
            lm_loss(model, tokens(0)).backward()
            file = self.saved(model)
            loaded = torch.load(file, weights_only=True)
            assert list(loaded) == list(model.state_dict())
            for name, p in model.state_dict().items():
                assert type(loaded[name]) is DTensor and loaded[name].placements == p.placements
                assert torch.equal(loaded[name].to_local(), p.to_local())
            twin = Lm() if how == "parallelize" else Lm(layers=2)
            fully_shard(twin, mesh=named_mesh())
            file.seek(0)
            self.saved(model)  # the mesh of a file is a mesh like others
            model.load_state_dict(torch.load(file, weights_only=True), assign=True)
            lm_loss(model, tokens(0)).backward()

    def test_needs_no_class_of_ours(self) -> None:
        with fake_world(0, 2):
            model, _ = build()
            file = zipfile.ZipFile(self.saved(model))
            (name,) = [n for n in file.namelist() if n.endswith("data.pkl")]
            names = [str(arg) for op, arg, _ in pickletools.genops(file.read(name)) if arg]
            assert not any(arg.startswith("parallel3d") for arg in names)

    def test_a_file_holds_the_shard_and_not_the_bucket(self) -> None:
        with fake_world(0, 2):
            model = fully_shard(nn.Linear(256, 256), mesh=named_mesh())
            file = io.BytesIO()
            torch.save(model.state_dict()["bias"], file)
            assert len(file.getvalue()) < 8_000

    def test_a_loaded_mesh_keeps_what_is_made_for_it(self) -> None:
        with fake_world(0, 2):
            mesh = named_mesh()
            kept_with(mesh, "group", lambda: "of the first")
            twin = pickle.loads(pickle.dumps(mesh))
            assert kept_with(twin, "group", lambda: dist.group.WORLD) is dist.group.WORLD
            assert kept_with(twin, "group", lambda: "again") is dist.group.WORLD
            pickle.dumps(twin)  # a process group can't be


def test_wrong_types_are_type_errors_too() -> None:
    with fake_world(0, 2):
        model = fully_shard(nn.Linear(4, 4), mesh=named_mesh())
        for wrong in (2.5, True, "2", None):
            with pytest.raises(TypeError, match="max_input_buffers") as error:
                model.set_reduce_scatter_max_input_buffers(wrong)
            assert isinstance(error.value, Parallel3dError)
        with pytest.raises(ValueError, match="max_input_buffers is 0") as error:
            model.set_reduce_scatter_max_input_buffers(0)
        assert not isinstance(error.value, TypeError)
        with pytest.raises(TypeError, match="requires_gradient_sync"):
            model.set_requires_gradient_sync("yes")
