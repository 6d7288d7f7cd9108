"""Kubernetes manifests in the models generated from the CRDs' schemas (PyPI: kubeflow-trainer-api)."""

from typing import Any

import pytest
from _support.tools.launch_jobs import job_for

from parallel3d.tools.launch import launch_file

yaml = pytest.importorskip("yaml")
models = pytest.importorskip("kubeflow_trainer_api.models")

pytestmark = pytest.mark.ci


def model_of(document: dict[str, Any]) -> Any:
    if document["kind"] == "TrainJob":
        return models.TrainerV1alpha1TrainJob
    return models.JobsetV1alpha2JobSet


def round_trip(document: dict[str, Any]) -> dict[str, Any]:
    """The document after the models: what they don't know is lost."""
    return model_of(document).from_dict(document).to_dict()


@pytest.mark.parametrize("target", ["kubeflow", "jobset"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("nodes", "restarts", "grace"), [(1, 0, 0), (4, 2, 120), (4, 0, 600)])
def test_manifests_are_what_the_schemas_say(
    target: str, device: str, nodes: int, restarts: int, grace: int
) -> None:
    job = job_for(target, device=device, nodes=nodes, max_restarts=restarts, grace=grace)
    document = yaml.safe_load(launch_file(target, job))
    assert round_trip(document) == document


@pytest.mark.parametrize("target", ["kubeflow", "jobset"])
def test_the_check_finds_what_is_wrong(target: str) -> None:
    """A field in the wrong place is lost on the way; a number for a text is refused."""
    document = yaml.safe_load(launch_file(target, job_for(target)))
    document["spec"]["replicas"] = 4
    assert round_trip(document) != document
    document = yaml.safe_load(launch_file(target, job_for(target, env={"A": "1"})))
    place = document["spec"].get("trainer")
    if place is None:
        template = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        (place,) = template["spec"]["containers"]
    place["env"][0]["value"] = 1
    with pytest.raises(ValueError, match="valid string"):
        round_trip(document)
