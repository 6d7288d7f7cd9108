"""Every causal-LM family of transformers with a tensor-parallel plan: ``tp_plan="auto"`` computes what the
plain model does. A sample in the ordinary run; ``-m full`` runs all, on all meshes, with both variants.

``python tests/_support/hf/families_table.py`` makes the same runs and writes ``docs/families.md``.
"""

import functools
import re
from math import prod
from pathlib import Path

import pytest

from parallel3d.tp.auto import check

pytest.importorskip("transformers", minversion="5.20")

pytestmark = pytest.mark.ci

PARTS = 14  # of the full run

# Kinds that differ most, and what each has that others don't; test_hf_uneven_heads.py has some more, -m full
# all.
SAMPLE = [
    ("llama", "odd"),  # one key-value head, 67 ids, tied
    ("apertus", "base"),  # an activation with parameters
    ("deepseek_v3", "base"),  # latent attention, groups of experts
    ("mixtral", "odd"),  # grouped matmul of experts
    ("llama4_text", "base"),  # experts' weights the other way round
    ("granite_swa", "base"),  # attention sinks
    ("gemma3n_text", "odd"),  # layers that borrow keys; a cut-off by a whole row's deviation
]
SAMPLE_ON_FOUR = [
    ("qwen3_next", "base", (1, 2, 2)),  # linear attention
]


def run(gloo_pool, cases, plan="auto", **options):
    """The cases' outcomes; all on meshes of one size. ``options``: of ``parallelize``."""
    from _support.hf.side_by_side_hf import merged

    (size,) = {prod(sizes[:4]) for _, _, sizes in cases}  # a fifth is ep's, a view of these
    found = gloo_pool.run(compare_with, options, cases, plan, world_size=size, timeout=900.0)
    return merged(found)


def compare_with(options, cases, plan):
    """Runs on every rank."""
    from _support.hf import side_by_side_hf

    with pytest.MonkeyPatch.context() as patch:
        plain = side_by_side_hf.parallelize
        patch.setattr(side_by_side_hf, "parallelize", functools.partial(plain, **options))
        return side_by_side_hf.compare_cases(cases, plan)


@pytest.mark.slow
def test_a_family_of_each_kind(gloo_pool) -> None:
    cases = [(name, variant, (1, 1, 2)) for name, variant in SAMPLE]
    outcomes = [*run(gloo_pool, cases), *run(gloo_pool, SAMPLE_ON_FOUR)]
    wrong = [
        f"{case}: {outcome.verdict}, {outcome.note}"
        for case, outcome in zip([*cases, *SAMPLE_ON_FOUR], outcomes, strict=True)
        if outcome.verdict != "equal"
    ]
    assert not wrong, "\n".join(wrong)
    assert sum(outcome.held < 0.7 for outcome in outcomes) >= 6  # really split


def compare_untried(cases, plan):
    """The cases' outcomes, where ``parallelize`` believes what the plan says."""
    from _support.hf.side_by_side_hf import compare_cases

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "check_groups", lambda *_: [])
        return compare_cases(cases, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rule", "instead", "differs"),
    [
        ("qwen3", "model.layers.*.self_attn.q_norm", "replicate", "q_norm"),
        ("minicpm3", "model.layers.*.self_attn.kv_a_proj_with_mqa", "drop", "kv_a_proj"),
    ],
)
def test_a_wrong_plan_is_noticed(gloo_pool, family, rule, instead, differs) -> None:
    """One rule of a right plan is spoilt: it is refused; and untried the comparison finds it."""
    from _support.hf.side_by_side_hf import merged
    from _support.hf.tiny import tiny_model

    from parallel3d.tp import auto_plan

    plan = auto_plan(tiny_model(family), 2)
    assert rule in plan
    plan = {**plan, rule: instead} if instead != "drop" else {k: plan[k] for k in plan if k != rule}
    cases = [(family, "base", (1, 1, 2))]
    (outcome,) = run(gloo_pool, cases, plan)
    assert outcome.verdict == "refused"
    assert "self_attn" in outcome.note
    (outcome,) = merged(gloo_pool.run(compare_untried, cases, plan, world_size=2))
    assert outcome.verdict == "unequal"
    assert differs in outcome.note


def test_the_page_says_what_the_tests_find() -> None:
    """``docs/families.md`` has the families of ``refused.txt`` as refused, and all others as equal; in the
    columns of cp and ep those of their files."""
    from _support.hf.side_by_side_hf import CASES, refused_families

    page = (Path(__file__).resolve().parents[2] / "docs" / "families.md").read_text()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if "|" in line
    ]
    verdicts = {row[0]: set(row[2 : 2 + len(CASES)]) for row in rows[2:]}
    assert len(verdicts) > 90
    assert {
        name for name, found in verdicts.items() if found != {"equal"}
    } == refused_families().keys()
    for place, axis in enumerate(("cp", "ep"), 2 + len(CASES)):
        column = {row[0]: row[place] for row in rows[2:] if row[place] != "-"}
        assert set(column.values()) == {"equal", "refused"}
        assert len(column) > (90 if axis == "cp" else 50)
        refused = {name for name, verdict in column.items() if verdict == "refused"}
        assert refused == refused_families(f"refused_{axis}.txt").keys()


# Parameters without a gradient: what chooses (experts by bias, keys by an index), another modality, a state
# that nothing reads.
UNUSED = re.compile(r"indexer|expert_bias|e_score_correction_bias|embed_tokens_extend|z_L_init")


def check_all_trains(name: str) -> None:
    """The tiny plain model puts every parameter to use, so that the comparison says something."""
    from _support.hf.side_by_side_hf import plain_step
    from _support.hf.tiny import VARIANTS, tiny_model

    for variant in VARIANTS:
        model = tiny_model(name, variant)
        assert plain_step(model, variant).isfinite()
        grads = {path: p.grad for path, p in model.named_parameters()}
        without = [path for path, grad in grads.items() if grad is None or not grad.any()]
        assert not [path for path in without if not UNUSED.search(path)], (name, variant)


WITH_CP = [("mixtral", "equal"), ("gemma3_text", "equal"), ("jamba", "refused")]


@pytest.mark.slow
def test_families_with_context_parallelism(gloo_pool) -> None:
    from _support.hf.side_by_side_hf import CP_CASE

    outcomes = run(gloo_pool, [(name, *CP_CASE) for name, _ in WITH_CP])
    found = [(name, o.verdict) for (name, _), o in zip(WITH_CP, outcomes, strict=True)]
    assert found == WITH_CP, [o.note for o in outcomes]


# Grouped matmul of experts; a router with a correction bias, groups and shared experts; dense experts.
WITH_EP = [("mixtral", "equal"), ("deepseek_v3", "equal"), ("llama4_text", "refused")]


@pytest.mark.slow
def test_families_with_expert_parallelism(gloo_pool) -> None:
    from _support.hf.side_by_side_hf import ep_cases, refused_families

    cases = [case for name, _ in WITH_EP for case in ep_cases(name)]
    wanted = dict(WITH_EP)
    for case, outcome in zip(cases, run(gloo_pool, cases), strict=True):
        assert outcome.verdict == wanted[case[0]], (case, outcome.note)
        assert refused_families("refused_ep.txt").get(case[0], "") in outcome.note


def check_all(gloo_pool, cases, file: str) -> None:
    """Equal, or refused with the reason that ``file`` has of the family."""
    from _support.hf.side_by_side_hf import refused_families
    from _support.hf.tiny import families

    refused = refused_families(file)
    assert refused.keys() <= set(families())
    wrong = []
    for size in {prod(sizes[:4]) for _, _, sizes in cases}:
        of_size = [case for case in cases if prod(case[2][:4]) == size]
        for case, outcome in zip(of_size, run(gloo_pool, of_size), strict=True):
            verdict = "refused" if case[0] in refused else "equal"
            if outcome.verdict != verdict or refused.get(case[0], "") not in outcome.note:
                wrong.append(f"{case}: {outcome.verdict}, {outcome.note}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_with_expert_parallelism(gloo_pool, part: int) -> None:
    from _support.hf.side_by_side_hf import ep_cases
    from _support.hf.tiny import families, is_moe

    names = [name for name in families() if is_moe(name)][part::PARTS]
    check_all(gloo_pool, [case for name in names for case in ep_cases(name)], "refused_ep.txt")


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_with_context_parallelism(gloo_pool, part: int) -> None:
    from _support.hf.side_by_side_hf import CP_CASE
    from _support.hf.tiny import families

    check_all(gloo_pool, [(name, *CP_CASE) for name in families()[part::PARTS]], "refused_cp.txt")


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family(gloo_pool, part: int) -> None:
    """In both variants and on all meshes."""
    from _support.hf.side_by_side_hf import CASES
    from _support.hf.tiny import families

    names = families()[part::PARTS]
    for name in names:
        check_all_trains(name)
    check_all(gloo_pool, [(name, *case) for case in CASES for name in names], "refused.txt")


NO_SPLIT_HEAD = {"inkling_text", "inkling2_text", "nemotron_h"}
"""Their plans split the head's input, or nothing."""


def check_loss_parallel(gloo_pool, names, mode) -> None:
    """What each family does to its logits before its loss."""
    from _support.hf.side_by_side_hf import refused_families

    cases = [(name, "odd", (1, 1, 2)) for name in names if name not in refused_families()]
    outcomes = run(gloo_pool, cases, loss_parallel=mode)
    wrong = [
        f"{name}: {outcome.verdict}, {outcome.note}"
        for (name, _, _), outcome in zip(cases, outcomes, strict=True)
        if outcome.verdict != ("refused" if name in NO_SPLIT_HEAD else "equal")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_logits_that_are_scaled_and_capped(gloo_pool) -> None:
    check_loss_parallel(gloo_pool, ["cohere", "gemma2"], "chunked")


@pytest.mark.full
@pytest.mark.parametrize("mode", [True, "chunked"])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_with_loss_parallel(gloo_pool, part, mode) -> None:
    from _support.hf.tiny import families

    check_loss_parallel(gloo_pool, families()[part::PARTS], mode)
