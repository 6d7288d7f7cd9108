"""Values that nobody knows, devices that are not there: what a dry run answers, or why it can not."""

import math
import statistics

import pytest
import torch
from torch import nn

import parallel3d as p3d
from parallel3d.errors import DryRunError
from parallel3d.tools.dryrun import Unknown, active, assume, real, record, warnings_of

HERE = __file__


def one() -> torch.Tensor:
    return torch.randn(3, 3).sum()


def many() -> torch.Tensor:
    return torch.randn(3, 3)


READS = {
    "item": lambda: f"{one().item():.3f}",
    "__float__": lambda: str(float(one())),
    "format": lambda: f"{one():.2f}",
    "tolist": lambda: str(many().tolist()[1][2]),
}


@pytest.mark.parametrize("what", READS)
def test_a_read_gives_no_number_and_is_reported_with_its_line(what):
    found = []
    run = record(lambda: found.append(READS[what]()), 2)
    assert found == ["nan" if what == "__float__" else "unknown"]
    line = READS[what].__code__.co_firstlineno
    assert [each.where for each in run.unknown] == [f"{HERE}:{line}, in <lambda>"]


def test_reads_at_one_line_are_counted():
    run = record(lambda: [one().item() for _ in range(5)], 2)
    assert [each.count for each in run.unknown] == [5]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_what_is_read_once_is_not_read_every_step(steps):
    def program():
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            one().item()
        for _ in range(9):
            loss = model(torch.randn(2, 4)).sum()
            loss.backward()
            optimizer.step()
            loss.item()

    run = record(program, 2, steps=steps)
    counts = [(each.count, each.last) for each in run.unknown]
    assert counts == [(5, 0), (steps - 1, 1)][: min(steps, 2)]
    found = [each.text for each in warnings_of(run) if each.kind == "values read every step"]
    assert len(found) == (steps > 1) and all(
        "reads tensors' values once a step" in x for x in found
    )


def test_what_is_calculated_from_a_read_is_unknown():
    def program():
        x = one().item()
        for value in (x + 1, 2 * x, -x, x**2, round(x, 3), abs(x) / 3, sum([x, x])):
            assert isinstance(value, Unknown)
        assert assume(x, 3.0) == 3.0 and assume(4.0, 3.0) == 4.0

    record(program, 2)
    assert assume(4.0, 3.0) == 4.0


def test_plain_numbers_of_tensors_can_be_assumed():
    def program():
        assert assume(float(one()), 3.0) == 3.0
        assert assume(1 - 2 * float(one()), 3.0) == 3.0
        assert math.isnan(assume(float("nan"), 3.0)) and not math.isnan(2)

    record(program, 2)


@pytest.mark.parametrize(
    "program", [lambda: int("x"), lambda: int(float("nan") if many is None else float("inf"))]
)
def test_errors_of_the_program_stay_its_own(program):
    with pytest.raises((ValueError, OverflowError)) as error:
        record(program, 2)
    assert not isinstance(error.value, DryRunError)


def test_tensors_made_of_unknown_numbers_are_unknown():
    def program():
        made = torch.tensor([one().item(), 1.0])
        assert isinstance(made.sum().item(), Unknown)
        counts = torch.tensor([many().argmax(), torch.tensor(3)])
        assert counts.dtype == torch.int64 and counts.shape == (2,)
        assert isinstance(counts[1].item(), Unknown)
        assert torch.as_tensor([one().double(), one()]).dtype == torch.float64
        assert torch.tensor([1.0, 2.0]).tolist() == [1.0, 2.0]

    record(program, 2)


DECISIONS = [
    lambda: one() > 3 and None,
    lambda: one().item() > 3,
    lambda: one().item() == 3.0,
    lambda: int(one()),
    lambda: int(one().item()),
    lambda: bool(one()),
    lambda: max(one(), one()),
    lambda: max(0.0, one().item()),
    lambda: sorted([one().item(), 1.0]),
    lambda: next(iter(()), None) if one().item() else None,
    lambda: [1, 2, 3][many().argmax()],
    lambda: [1, 2, 3][many().argmax().item()],
    lambda: range(many().argmax()),
    lambda: many()[one().long()],
    lambda: torch.isnan(many()).any() and None,
    lambda: not torch.isfinite(one()),
    lambda: math.isnan(one().item()),
    lambda: math.isfinite(one()),
    lambda: math.isnan(float(one()) * 2),
    lambda: statistics.mean([one().item(), 1.0]),
    lambda: int(float(one())),
    lambda: round(float(one())),
    lambda: math.floor(one().item()),
    lambda: round(one().item()),
    lambda: torch.equal(many(), many()),
    lambda: torch.allclose(many(), many()),
    lambda: one() in [1, 2],
    lambda: many().numpy(),
    lambda: many().detach().cpu().numpy(),
    lambda: torch.split(many(), many().long()[0].tolist()),
    lambda: torch.zeros(int(many().argmax())),
    lambda: torch.nonzero(many()),
    lambda: torch.masked_select(many(), many() > 0),
    lambda: many()[many() > 0],
    lambda: torch.where(many() > 0),
    lambda: torch.unique(many()),
]


@pytest.mark.parametrize("number", range(len(DECISIONS)))
def test_to_decide_by_a_value_is_an_error_with_the_line(number):
    decision = DECISIONS[number]
    with pytest.raises(DryRunError) as error:
        record(decision, 2)
    assert f"{HERE}:{decision.__code__.co_firstlineno}, in " in str(error.value)


def test_a_loop_names_its_line():
    def program():
        while one() > 0:
            pass

    with pytest.raises(DryRunError) as error:
        record(program, 2)
    assert f"{HERE}:{program.__code__.co_firstlineno + 1}, in program" in str(error.value)
    assert "assume" in str(error.value)


def test_masks_that_keep_the_shape_are_no_decision():
    def program():
        x = many()
        x[x > 0] = 1.0
        return torch.where(x > 0, x, 0.0).clamp(min=0)

    assert record(program, 2).unknown == ()


def under_device():
    with torch.device("cuda"):
        torch.zeros(3)


def as_default():
    torch.set_default_device("cuda")


DEVICES = [
    lambda: torch.zeros(3, device="cuda"),
    lambda: torch.zeros(3, device=torch.device("cuda:1")),
    lambda: torch.randint(3, (3,), device="cuda"),
    lambda: torch.tensor([1.0], device="cuda"),
    lambda: many().cuda(),
    lambda: torch.arange(3).cuda(),
    lambda: many().to("cuda:0"),
    lambda: many().to("cuda", torch.bfloat16),
    lambda: many().to(device="cuda"),
    lambda: many().to(torch.device("cuda", 3)),
    lambda: many().new_zeros(3, device="cuda"),
    lambda: nn.Linear(3, 3).cuda(),
    lambda: nn.Linear(3, 3).to("cuda"),
    lambda: nn.Linear(3, 3, device="cuda"),
    lambda: torch.cuda.get_device_properties(0),
    lambda: torch.zeros(3, device=0),
]


@pytest.mark.parametrize("number", range(len(DEVICES)))
def test_a_device_in_the_program_is_an_error_with_the_line(number):
    program = DEVICES[number]
    with pytest.raises(DryRunError) as error:
        record(program, 2)
    assert f"{HERE}:{program.__code__.co_firstlineno}, in " in str(error.value)
    assert "mesh.device_type" in str(error.value)


@pytest.mark.parametrize(("program", "after"), [(under_device, 2), (as_default, 1)])
def test_a_device_for_all_that_follows_is_one_too(program, after):
    with pytest.raises(DryRunError) as error:
        record(program, 2)
    assert f"{HERE}:{program.__code__.co_firstlineno + after}, in " in str(error.value)
    assert torch.get_default_device() == torch.device("cpu")


def test_what_programs_call_on_a_gpu_for_granted_does_nothing():
    def program():
        torch.cuda.set_device(3)
        torch.cuda.manual_seed_all(1)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.Stream().synchronize()
        assert not torch.cuda.is_available()
        assert torch.cuda.max_memory_allocated() == torch.cuda.current_device() == 0
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (many() @ many()).dtype == torch.bfloat16
        assert many().to("cpu", torch.float16).dtype == torch.float16

    record(program, 2)


def test_real_lines_have_values():
    def program():
        with real():
            x = torch.full((3,), 2.0)
            assert x.sum().item() == 6.0
        assert x.sum().item() == 6.0  # made for real, and still is
        assert active()

    run = record(program, 2)
    assert run.unknown == () and not active()


def test_integers_have_values_until_they_meet_unknown_ones():
    def program():
        tokens = torch.arange(12).view(3, 4)
        assert tokens.sum().item() == 66
        assert tokens[tokens > 5].numel() == 6
        mixed = tokens + many().long().sum()
        assert isinstance(mixed.sum().item(), Unknown)

    record(program, 2)


# ---- what is done for real does not count; models of fake parameters change their dtype ----


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_trials_of_an_optimizer_are_no_steps():
    """``optim.local`` makes some with real numbers, to see how the class works."""

    def program():
        mesh = p3d.build_mesh(p3d.MeshLayout(shard=4), device_type="cpu")
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        p3d.parallelize(model, mesh)
        optimizer = p3d.optim.local(torch.optim.AdamW, model.parameters())
        for _ in range(5):
            step(model, optimizer)

    run = record(program, 4, steps=2)
    assert run.steps == 2 and not run.unknown
    assert [call.op for call in run.collectives].count("reduce_scatter") == 2
    assert {operation.step for operation in run.operations} == {0, 1}


def test_a_model_that_is_trained_for_real_is_not_the_programs():
    def program():
        with real():
            other = nn.Linear(8, 64)
            step(other, torch.optim.SGD(other.parameters(), lr=0.1))
            assert other.weight.sum().item() == other.weight.sum().item()
        model = nn.Linear(8, 8)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    run = record(program, 2)
    assert run.steps == 1
    assert [each.shape for each in run.parameters] == [(8, 8), (8,)]
    assert max(each.bytes for each in run.peak.largest) == 8 * 8 * 4


def test_a_model_changes_its_dtype():
    def program():
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        model.half().double()
        model(torch.randn(2, 8).double()).sum().backward()
        model.float().to(torch.bfloat16)
        assert model[0].weight.dtype == model[0].weight.grad.dtype == torch.bfloat16
        model(torch.randn(2, 8).bfloat16())

    end = record(program, 2).memory[-1].by_kind
    size = (8 * 8 + 8 + 8 + 8) * 2
    assert (end["parameters"], end["gradients"]) == (size, size)
