"""Examples of clusters under ``deploy/``: what they say is what KubeRay and girih take."""

import os
import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="needs pip install girih[cluster]")

DEPLOY = Path(__file__).parents[2] / "deploy" / "ray"
KINDS = {"rayjob": "RayJob", "raycronjob": "RayCronJob"}


def loaded(name):
    return yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())


def job_of(name):
    spec = loaded(name)["spec"]
    return spec.get("jobTemplate", spec)


@pytest.mark.parametrize("name", KINDS)
def test_a_job_trains_on_the_cluster_that_is_made_for_it_and_nobody_without_a_token_gets_in(name):
    job = job_of(name)
    assert loaded(name)["kind"] == KINDS[name]
    assert re.fullmatch(r"girih train \S+ --run \S+( --resume)? --cluster auto", job["entrypoint"])
    assert job["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert job["shutdownAfterJobFinishes"] is True


@pytest.mark.parametrize("name", KINDS)
def test_all_nodes_have_the_image_and_the_version_of_ray_that_girih_is_tested_with(name):
    pinned = re.search(
        r"^ray==(\S+)$", (DEPLOY.parents[1] / "constraints.txt").read_text(), re.MULTILINE
    ).group(1)
    cluster = job_of(name)["rayClusterSpec"]
    assert cluster["rayVersion"] == pinned
    assert f"rayproject/ray:{pinned}-py311" in (DEPLOY / "Dockerfile").read_text()
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len({group["template"]["spec"]["containers"][0]["image"] for group in groups}) == 1


@pytest.mark.parametrize("name", KINDS)
def test_every_field_is_one_of_kuberays(name):
    """``KUBERAY_CRDS`` names a folder with ``rayjobs.yaml`` and ``raycronjobs.yaml``, the custom resource definitions."""
    folder = os.environ.get("KUBERAY_CRDS")
    if folder is None:
        pytest.skip("KUBERAY_CRDS is not set: KubeRay's definitions are not part of girih")
    jsonschema = pytest.importorskip("jsonschema")
    definition = yaml.safe_load(Path(folder, f"{name}s.yaml").read_text())
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    jsonschema.validate(loaded(name), strict(version["schema"]["openAPIV3Schema"]))


def strict(schema):
    """The schema, and no fields that it does not name; numbers with units are text there, or numbers."""
    if not isinstance(schema, dict):
        return [strict(each) for each in schema] if isinstance(schema, list) else schema
    made = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        if set(schema["properties"]) == {"name"} and "metadata" not in schema:
            return made
        if schema["properties"] and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made
