"""What verify and assert_parity take as inputs, and what they say of those that they can't take."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import MeshLayout, Parallel3dError
from parallel3d.testing import assert_parity, verify
from parallel3d.testing.samples import Samples

IDS = torch.arange(24).view(4, 6) % 11


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, ids: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.out(self.embed(ids))
        return y if scale is None else y * scale[:, None, None]


def of_a_number(sample: int) -> Tensor:
    return (IDS + sample) % 11


def of_nothing() -> Tensor:
    return torch.randint(0, 11, (4, 6))


@pytest.mark.parametrize(
    "batch",
    [
        IDS,
        (IDS, torch.ones(4)),
        {"ids": IDS, "scale": torch.ones(4)},
        of_a_number,
        of_nothing,
        lambda sample: {"scale": torch.ones(4), "ids": IDS},
        None,
    ],
    ids=["tensor", "tuple", "dict", "number", "nothing", "dicts", "none"],
)
@pytest.mark.parametrize("check", [assert_parity, verify])
def test_what_a_batch_may_be(batch: Any, check: Any) -> None:
    found = check(Net, batch, MeshLayout(1, 2, 1), steps=1, fp32=False)
    assert getattr(found, "difference", None) is None


def test_the_rows_of_a_batch_are_divided() -> None:
    samples = Samples((IDS, torch.tensor(3.0)), Net, 2)
    (first, scale), (second, _), (again, _) = map(samples, range(3))
    assert torch.equal(torch.cat([first, second]), IDS) and torch.equal(first, again)
    assert scale.item() == 3.0


def test_a_batch_that_a_function_makes_is_the_same_on_all_ranks() -> None:
    state = torch.random.get_rng_state()
    (a,), (b,) = (Samples(of_nothing, Net)(0) for _ in range(2))
    assert torch.equal(a, b) and torch.equal(state, torch.random.get_rng_state())


def test_inputs_are_made_if_the_model_says_which() -> None:
    found = verify(Net, None, MeshLayout(2, 1, 1), steps=1)
    assert found.made == "token ids of shape (2, 8) below 11, as embed (Embedding) reads"
    linear = Samples(None, lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)))
    assert linear(0)[0].shape == (2, 8, 3) and not torch.equal(linear(0)[0], linear(1)[0])
    net = Net()
    net.main_input_name, net.config = "input_ids", SimpleNamespace(vocab_size=11)
    net.forward = lambda input_ids: Net.forward(net, input_ids)  # as Hugging Face's
    named = Samples(None, lambda: net)
    assert named(0)[0].max() < 11 and named.names == ["input_ids"]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) + y


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 2, 2))


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (IDS[:1], "the batch has 1 row .* for 4 data ranks and micro-batches: give 4 rows or more"),
        ((IDS, torch.ones(3)), "have 3 and 4 rows"),
        (3, "the batch is int: a tensor, a tuple of tensors or a dict"),
        ((), "the batch is tuple: a tensor"),
        (lambda a, b: None, r"\(a, b\) must take the number of a sample, or nothing"),
        (lambda: of_nothing, "making the batch returned"),
        (lambda sample: (IDS, 3), "of the inputs of sample 0, number 1 is int"),
        (lambda sample: {"ids": IDS, "mask": None}, "of sample 0, mask is NoneType"),
        (lambda sample: {}, "are an empty dict"),
        (lambda sample: 3, "are int"),
    ],
)
def test_what_a_batch_can_not_be(batch: Any, says: str) -> None:
    for check in (assert_parity, verify):
        with pytest.raises(Parallel3dError, match=says):
            check(Net, batch, MeshLayout(2, 2, 1), steps=1)


@pytest.mark.parametrize("build", [Two, Images])
def test_what_is_not_known_is_asked_for(build: Any) -> None:
    with pytest.raises(Parallel3dError, match=r"doesn't say which inputs it takes.*give a batch"):
        verify(build, None, MeshLayout(2, 1, 1))


def test_an_error_names_line_and_module() -> None:
    def wrong(sample: int) -> Tensor:
        return torch.ones(2, 3)[5]  # the line

    line = wrong.__code__.co_firstlineno + 1
    with pytest.raises(Parallel3dError, match=rf"IndexError.*, at {__file__}:{line}, in wrong"):
        verify(Net, wrong, MeshLayout(2, 1, 1))
    inside = r"the plain model's loss, of the model and \d input, raised .*, at "
    inside += rf"{__file__}:\d+, in forward, module embed \(Embed"
    with pytest.raises(Parallel3dError, match=inside + r"ding\) with input int64 \(2, 2\)"):
        verify(Net, lambda sample: torch.full((2, 2), 99), MeshLayout(2, 1, 1))
