"""The questions of benchmarks/planner_questions.py: what experts publish is among what ``plan`` knows."""

import pytest
from planner_questions import QUESTIONS, Question, in_their_software, of_expert, rows_of

pytestmark = pytest.mark.ci


def named(model: str, seq_len: int = 8192) -> Question:
    return next(q for q in QUESTIONS if (q.model, q.seq_len) == (model, seq_len))


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.text)
def test_layouts_of_experts_have_the_gpus(question: Question) -> None:
    for expert in question.experts:
        assert expert.layout.world_size * expert.pipeline.stages == 8 * question.nodes


@pytest.mark.parametrize("question", [named("llama-3.1-8b"), named("llama-3.1-405b")])
def test_layouts_without_pipelines_rank_and_are_as_published(question: Question) -> None:
    answer = question.answer()
    layouts = [each.layout for each in answer.layouts]
    for expert in question.experts:
        each = of_expert(answer, expert)
        assert each.layout == expert.layout and each.pipeline == expert.pipeline
        assert expert.micro_batch in (None, each.micro_batch)
        assert expert.checkpointing in (None, each.workload.checkpointing)
        if expert.pipeline.stages == 1:
            assert each.layout in layouts


def test_published_speeds_are_near_what_is_predicted_of_that_software() -> None:
    """405B on 512 H100 (tp 4, compiled): 152 tokens/s."""
    question = named("llama-3.1-405b")
    expert = question.experts[0]
    assert expert.measured.startswith("152 ")
    predicted = in_their_software(of_expert(question.answer(), expert), expert)
    assert predicted == pytest.approx(152, rel=0.15)


def test_rows_of_a_question() -> None:
    """Ours first, then as many as there are experts, and a pipeline at most."""
    question = named("llama-3.1-8b")
    ours, *others = rows_of(question)
    assert ours[0] == f"**{question.text}**" and ours[1] == "`plan`" and ours[6] == "1.00"
    whose = [row[1] for row in others if row[1].startswith("[")]
    assert whose == [f"[{expert.who}]({expert.url})" for expert in question.experts]
    assert len(others) - len(whose) <= 1
    assert all(len(row) == len(ours) for row in others)
