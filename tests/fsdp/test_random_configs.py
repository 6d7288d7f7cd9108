"""Random models, meshes, policies and training runs compute what the plain model does.

A failure shows the configuration and how to run it again; ``run(Config(...))`` of what hypothesis prints
as the falsifying example is the same without hypothesis.
"""

import warnings
from dataclasses import replace

import hypothesis
import pytest
import torch
from _support.fsdp.random_models import Block, Leaf, RandomModel, Unit
from _support.fsdp.random_programs import Config, Micro, Step, configs, odd_configs, run, tally
from _support.sweeps import SETTINGS
from hypothesis import given, settings

# A list: docs/parity.md names these tests, so that any run imports the file.
pytestmark = [pytest.mark.ci]


def check(config: Config) -> None:
    with warnings.catch_warnings():
        # Of reentrant checkpointing, where no input has a gradient: then nothing inside has.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        run(config)


RECOMPUTED = Block((Leaf("mlp"),), checkpoint="around, reentrant")
FOUND = {
    "a parameter alone in its unit, cut unevenly by tp and then by shard": Config(
        RandomModel((Leaf("lone", size=3, unit=Unit()),)), (1, 2, 2), (Step(),)
    ),
    "a partly frozen unit runs in inference mode before it trains": Config(
        RandomModel((Leaf("mlp"),)), (1, 2, 1), (Step((Micro(before=("inference",)),)),), (0,)
    ),
    "a unit of two buckets is prefetched, and first used in inference mode": Config(
        RandomModel((Leaf("bytes"),)),
        (1, 2, 1),
        (Step((Micro(before=("prefetch 0", "inference")),)),),
        (1,),
    ),
    "the first module of a list unit runs without grad, as reentrant checkpointing does": Config(
        RandomModel((Block((RECOMPUTED, Leaf("mlp")), as_list=True),)),
        (1, 2, 1),
        (Step(),),
        input_grad=True,
    ),
    "a parameter is unfrozen in a list unit that reentrant checkpointing runs": Config(
        RandomModel((Leaf("mlp"), replace(RECOMPUTED, unit=Unit(), as_list=True))),
        (1, 2, 1),
        (Step(), Step(flips=(4,))),
        (4,),
    ),
}


@pytest.mark.parity("reliability: random configurations")
@pytest.mark.parametrize("config", FOUND.values(), ids=FOUND)
def test_found(config: Config) -> None:
    """What the tests below have found."""
    check(config)


@pytest.mark.slow
@pytest.mark.parity("reliability: random configurations")
@settings(SETTINGS, max_examples=6, derandomize=True)
@given(configs)
def test_few(config: Config) -> None:
    check(config)


@pytest.mark.full
@pytest.mark.parity("reliability: random configurations")
@pytest.mark.parametrize("seed", range(12))
def test_many(seed: int) -> None:
    """300 in all, 25 for each seed."""

    @hypothesis.seed(seed)
    @settings(SETTINGS, max_examples=25)
    @given(configs)
    def examples(config: Config) -> None:
        check(config)

    examples()


@pytest.mark.slow
@settings(SETTINGS, max_examples=6, derandomize=True)
@given(odd_configs)
def test_odd_few(config: Config) -> None:
    check(config)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_odd_many(seed: int, capsys) -> None:
    """300 programs in all whose models and users do odd things, 25 for each seed.

    What is refused is expected where it is, see ``random_programs``, and the program goes on after it.
    """
    tally.clear()

    @hypothesis.seed(seed)
    @settings(SETTINGS, max_examples=25)
    @given(odd_configs)
    def examples(config: Config) -> None:
        check(config)

    examples()
    with capsys.disabled():
        print(f"\nseed {seed}: {dict(sorted(tally.items()))}")
    assert tally["programs equal"] > 25 // 2


# ---- memory="static" ----


def check_bits(config: Config) -> None:
    """Those with ``memory="static"`` and without; ``run`` compares both with the plain model."""
    found, wanted = (run(replace(config, static=static)) for static in (True, False))
    assert [what for what, _ in found] == [what for what, _ in wanted]
    for (what, got), (_, want) in zip(found, wanted, strict=True):
        assert torch.equal(got, want), f"{what}\n{config}"


@pytest.mark.slow
@settings(SETTINGS, max_examples=6, derandomize=True)
@given(configs)
def test_random_bits_few(config: Config) -> None:
    check_bits(config)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["even", "odd"])
def test_random_bits(seed: int, kind: str) -> None:
    """300 programs in all, each with static memory and without."""

    @hypothesis.seed(seed)
    @settings(SETTINGS, max_examples=25)
    @given(configs if kind == "even" else odd_configs)
    def examples(config: Config) -> None:
        check_bits(config)

    examples()
