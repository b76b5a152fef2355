"""The files to copy for clusters are what Ray, KubeRay and AWS Batch take, and fit their recipes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardkit.units import parse_bytes
from shardkit.writers.recipe.recipe import load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CLUSTERS = RECIPES / "clusters"
SHARE = 0.7  # of a node's memory, Ray offers to tasks


def have_commands(folder: Path, *names: str) -> dict[str, str]:
    """An environment in which each of these commands only notes how it was called, in `calls`."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f'#!/bin/bash\nprintf "%s\\n" "{name} $*" >> {folder}/calls\n')
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def called(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("script", sorted(CLUSTERS.glob("*.s*")), ids=lambda path: path.name)
def test_a_script_is_right_by_its_syntax(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


def test_the_file_of_the_ray_launcher_is_what_it_takes_and_its_nodes_fit_the_recipe() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    ray = importlib.util.find_spec("ray")
    if ray is None or ray.origin is None:
        pytest.skip("ray is not installed")
    cluster = yaml.safe_load((CLUSTERS / "ray-aws.yaml").read_text())
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)
    recipe = load_recipe(RECIPES / "ray-cluster.yaml")
    assert recipe.memory * 32 < SHARE * (128 << 30)
    assert recipe.scratch is not None
    mounted = recipe.scratch.rpartition("/")[0]
    assert any(f"mount /dev/nvme1n1 {mounted}" in line for line in cluster["worker_setup_commands"])
    assert set(cluster["available_node_types"]) == {"head", "worker"}


# As documented for ray.io/v1: fields that are required, and those that this file uses.
_POD = {"type": "object", "required": ["spec"], "properties": {"spec": {"required": ["containers"]}}}
_GROUP = {
    "type": "object",
    "required": ["template"],
    "properties": {
        "template": _POD,
        "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
        "groupName": {"type": "string"},
        **{name: {"type": "integer"} for name in ("replicas", "minReplicas", "maxReplicas")},
    },
    "additionalProperties": False,
}
_RAY_JOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {"required": ["name"]},
        "spec": {
            "required": ["entrypoint", "rayClusterSpec"],
            "properties": {
                "entrypoint": {"type": "string"},
                "backoffLimit": {"type": "integer"},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "ttlSecondsAfterFinished": {"type": "integer"},
                "rayClusterSpec": {
                    "required": ["headGroupSpec"],
                    "properties": {
                        "rayVersion": {"type": "string"},
                        "enableInTreeAutoscaling": {"type": "boolean"},
                        "autoscalerOptions": {
                            "properties": {
                                "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
                                "idleTimeoutSeconds": {"type": "integer"},
                            },
                            "additionalProperties": False,
                        },
                        "headGroupSpec": _GROUP,
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": _GROUP
                            | {"required": ["groupName", "minReplicas", "maxReplicas", "template"]},
                        },
                    },
                    "additionalProperties": False,
                },
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}


def test_the_ray_job_is_what_kuberay_takes_and_its_pods_fit_the_recipe() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    job = yaml.safe_load((CLUSTERS / "rayjob.yaml").read_text())
    jsonschema.validate(job, _RAY_JOB)
    cluster = job["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    recipe = load_recipe(RECIPES / "ray-cluster.yaml")
    assert recipe.memory * int(limits["cpu"]) < SHARE * parse_bytes(limits["memory"] + "B")
    assert f"{container['volumeMounts'][0]['mountPath']}/shardkit" == recipe.scratch
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    assert job["spec"]["entrypoint"].split()[-4:] == ["--engine", "ray", "--ray-address", "auto"]


def test_the_job_definition_is_what_aws_batch_takes() -> None:
    loaders = pytest.importorskip("botocore.loaders", reason="pip install 'shardkit[s3]'")
    from botocore.model import ServiceModel
    from botocore.validate import ParamValidator

    definition = json.loads((CLUSTERS / "aws-batch.json").read_text())
    service: Any = ServiceModel(loaders.Loader().load_service_model("batch", "service-2"))
    shape = service.operation_model("RegisterJobDefinition").input_shape
    report = ParamValidator().validate(definition, shape)
    assert not report.has_errors(), report.generate_report()
    assert definition["type"] in service.shape_for("JobDefinitionType").enum
    [nodes] = definition["nodeProperties"]["nodeRangeProperties"]
    needs = {each["type"]: int(each["value"]) for each in nodes["container"]["resourceRequirements"]}
    recipe = load_recipe(RECIPES / "ray-cluster.yaml")
    assert recipe.memory * needs["VCPU"] < SHARE * (needs["MEMORY"] << 20)
    assert nodes["container"]["command"][1] == "/build/ray-on-batch.sh"


def test_the_main_node_of_a_batch_job_builds_and_the_others_join_it(tmp_path: Path) -> None:
    environment = have_commands(tmp_path / "bin", "ray", "shardkit") | {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
    command = ["bash", str(CLUSTERS / "ray-on-batch.sh"), "web.yaml", "--quiet"]
    subprocess.run(command, env=environment | {"AWS_BATCH_JOB_NODE_INDEX": "0"}, check=True)
    head, build = called(tmp_path / "bin")
    assert head.startswith("ray start --head --port=6379")
    assert build == "shardkit build web.yaml --quiet --engine ray --ray-address auto"
    place = {"AWS_BATCH_JOB_NODE_INDEX": "3", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7"}
    subprocess.run(command, env=environment | place, check=True)
    assert called(tmp_path / "bin")[2].startswith("ray start --block --address=10.0.0.7:6379")


def test_a_job_is_submitted_with_its_folder_and_with_options_that_ray_has(tmp_path: Path) -> None:
    submit = pytest.importorskip("ray.dashboard.modules.job.cli", reason="pip install 'shardkit[ray]'").submit
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ray").write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (tmp_path / "bin" / "ray").chmod(0o755)
    done = subprocess.run(
        ["bash", str(CLUSTERS / "ray-job-submit.sh"), "recipes/ray-cluster.yaml", "--set", "seed=5"],
        env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.rstrip("\0").split("\0")
    assert words[:2] == ["job", "submit"]
    found = submit.make_context("submit", words[2:]).params
    assert (found["working_dir"], found["no_wait"]) == ("recipes", True)
    assert json.loads(found["runtime_env_json"]).keys() == {"env_vars"}
    build = "shardkit build ray-cluster.yaml --engine ray --ray-address auto --set seed=5"
    assert " ".join(found["entrypoint"]) == build
