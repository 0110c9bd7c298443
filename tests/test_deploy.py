"""The files of deploy/: manifests fit the published schemas, and every command in them is one that Roundelay accepts."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from roundelay.cli import build_parser

yaml = pytest.importorskip("yaml", reason="needs pyyaml")

DEPLOY = Path(__file__).parents[1] / "deploy"
KUBERNETES = "1.33"
SKY_KEYS = {"name", "workdir", "resources", "envs", "secrets", "setup", "run", "num_nodes", "file_mounts"}
SKY_RESOURCES = {"accelerators", "cpus", "memory", "use_spot", "job_recovery", "infra", "ports", "disk_size"}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (each for each in documents("kubernetes/elastic.yaml") if each["kind"] == kind)
    return found


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    pod = document["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def accept(words: list[str]) -> Any:
    """Parse a command as `roundelay` does; raises UsageError for one that it would refuse."""
    assert words[0] == "roundelay"
    return build_parser((words[1],)).parse_args(words[1:])


# Kubernetes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Service", "Deployment", "Job", "NetworkPolicy"])
def test_the_manifests_fit_the_published_schema_strictly(kind):
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate").validate
    document = of_kind(kind)
    assert validate(document, KUBERNETES, strict=True).startswith(KUBERNETES)
    wrong = copy.deepcopy(document)
    wrong["spec"]["unheardOf"] = 1
    with pytest.raises(Exception, match="unheardOf"):
        validate(wrong, KUBERNETES, strict=True)


def test_the_service_and_the_policy_select_the_pods_of_the_run():
    service, deployment, job, policy = (of_kind(kind) for kind in ("Service", "Deployment", "Job", "NetworkPolicy"))
    rendezvous, learner = (each["spec"]["template"]["metadata"]["labels"] for each in (deployment, job))
    assert service["spec"]["selector"].items() <= rendezvous.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= rendezvous.items()
    allowed = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    for selector in (policy["spec"]["podSelector"]["matchLabels"], allowed):
        assert selector.items() <= rendezvous.items() & learner.items()
    assert not service["spec"]["selector"].items() <= learner.items()


def test_the_number_of_learners_and_the_address_are_the_same_everywhere():
    job, service = of_kind("Job"), of_kind("Service")
    (learner,) = job["spec"]["template"]["spec"]["containers"]
    args = accept([*learner["command"], *learner["args"]])
    number = args.learners
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == number
    assert job["spec"]["successPolicy"]["rules"][0]["succeededCount"] == number - 1
    assert job["spec"]["maxFailedIndexes"] == number - args.min_learners
    port = service["spec"]["ports"][0]["port"]
    assert args.rendezvous == f"{service['metadata']['name']}:{port}"
    (rendezvous,) = containers(of_kind("Deployment"))
    assert accept(rendezvous["command"]).port == rendezvous["ports"][0]["containerPort"] == port
    assert f"/dev/tcp/{service['metadata']['name']}/{port}" in containers(job)[0]["command"][-1]
    assert (DEPLOY.parent / args.script).is_file()


def test_a_lost_spot_machine_is_no_failure_and_the_rendezvous_avoids_such_machines():
    job = of_kind("Job")["spec"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # Kubernetes refuses a podFailurePolicy otherwise
    assert job["podFailurePolicy"]["rules"][0] == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    tolerated = {each["key"] for each in pod["tolerations"]}
    affinity = of_kind("Deployment")["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    avoided = {each["key"] for each in preferred["preference"]["matchExpressions"]}
    assert tolerated - {"nvidia.com/gpu"} <= avoided


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_no_container_has_rights_and_the_secret_comes_from_the_secret(kind):
    pod = of_kind(kind)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in containers(of_kind(kind)):
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    secrets = [env for env in pod["containers"][0]["env"] if env["name"] == "ROUNDELAY_SECRET"]
    assert secrets == [
        {"name": "ROUNDELAY_SECRET", "valueFrom": {"secretKeyRef": {"name": "roundelay", "key": "secret"}}}
    ]


@pytest.mark.parametrize("kind", ["ClusterTrainingRuntime", "TrainJob"])
def test_the_kubeflow_documents_fit_the_models_of_its_api(kind):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    model = getattr(models, f"TrainerV1alpha1{kind}")
    (document,) = (each for each in documents("kubernetes/trainjob.yaml") if each["kind"] == kind)
    assert model.from_dict(document).to_dict() == document  # a field that the API does not know would be left out
    wrong = copy.deepcopy(document)
    wrong["spec"]["unheardOf"] = 1
    assert model.from_dict(wrong).to_dict() != wrong


def test_the_job_of_kubeflow_names_its_runtime():
    runtime, job = documents("kubernetes/trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["command"][0] == "torchrun"


# The image -------------------------------------------------------------------------------------------------------------------


def test_the_image_copies_what_the_wheel_is_made_of_and_what_the_manifests_run():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert all((DEPLOY.parent / name).exists() for name in copied)
    assert {"pyproject.toml", "README.md", "LICENSE", "src", "recipes", "examples"} <= set(copied)
    (user,) = (line.split()[1] for line in lines if line.startswith("USER "))
    for kind in ("Deployment", "Job"):
        assert str(of_kind(kind)["spec"]["template"]["spec"]["securityContext"]["runAsUser"]) == user


# SkyPilot --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rendezvous", "learner"])
def test_the_tasks_of_skypilot_are_yaml_with_its_keys_and_their_commands_are_accepted(name):
    (task,) = documents(f"skypilot/{name}.yaml")
    assert set(task) <= SKY_KEYS
    assert set(task["resources"]) <= SKY_RESOURCES
    assert task["secrets"] == {"ROUNDELAY_SECRET": None}
    variables = {key: str(value) for key, value in task.get("envs", {}).items()} | {"RENDEZVOUS": "10.0.0.1"}
    line = re.sub(r"\$\(.*?\)", "10.0.0.1", task["run"].strip())
    line = re.sub(r"\$(\w+)", lambda found: variables[found[1]], line)
    accept(shlex.split(line))
    assert task["resources"]["use_spot"] is (name == "learner")


# Slurm -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((DEPLOY / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_the_batch_scripts_are_valid_bash_with_options_only_before_the_first_command(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
