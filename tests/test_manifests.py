"""compose.yaml and the Kubernetes manifest: valid by others' schemas, hardened, and true of the service they start."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

import moelet
from deployment_files import (
    COMPOSE,
    STAGES,
    compose_services,
    container,
    kubernetes,
    named,
    parsed_command,
    pod,
    read_variables,
    seconds,
    variables,
)
from moelet.layer.engine import Engine
from moelet.layer.errors import EngineFailedError
from moelet.layer.reference import ReferenceEngine
from moelet.layer.spec import ModelSpec
from moelet.layer.weights import LayerWeights
from moelet.service.server import Server
from moelet.service.settings import Settings
from running_service import RunningService, running
from source_tree import ROOT

USER = int(named(STAGES[-1], "USER")[0].value.split(":")[0])
PORT = Settings.model_fields["port"].default
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
LONGEST_REQUEST_S = getattr(Settings.model_fields.get("request_timeout_s"), "default", 30.0)
HEALTH_CHECKS = {
    "image": named(STAGES[-1], "HEALTHCHECK")[0].words,
    **{name: service["healthcheck"]["test"][1:] for name, service in compose_services().items()},
}


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    def opened(model: ModelSpec, weights: Mapping[int, LayerWeights], max_loras: int, max_lora_rank: int) -> Engine:
        return ReferenceEngine(model, weights, max_loras=max_loras, max_lora_rank=max_lora_rank)

    with running(opened, None) as service:
        yield service


def compose(name: str) -> dict[str, Any]:
    return compose_services()[name]


both = pytest.mark.parametrize("name", ["gpu", "cpu"])


def test_compose_is_valid_by_its_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("version", ["1.33", kubernetes_validate.latest_version()])
def test_the_manifest_is_valid_for_kubernetes(version: str) -> None:
    for one in kubernetes().values():
        kubernetes_validate.validate(one, version, strict=True)


def test_a_misspelt_field_is_found() -> None:
    deployment = kubernetes()["Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)


@both
def test_a_compose_service_can_do_nothing_but_serve(name: str) -> None:
    service = compose(name)
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"/tmp:.*\bnoexec\b.*", *service["tmpfs"])
    assert all(volume.endswith(":ro") for volume in service["volumes"])
    assert not service.keys() & {"privileged", "user", "pid", "ipc", "network_mode", "cap_add", "devices"}


@both
def test_compose_publishes_on_loopback_unless_told_otherwise(name: str) -> None:
    (published,) = compose(name)["ports"]
    assert published.startswith("${ADDRESS:-127.0.0.1}:")
    assert published.endswith(f":{PORT}")


def test_only_the_gpu_service_reserves_a_gpu() -> None:
    (device,) = compose("gpu")["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert "deploy" not in compose("cpu")
    assert [compose(name)["profiles"] for name in ("gpu", "cpu")] == [["gpu"], ["cpu"]]


@both
def test_compose_takes_variables_that_are_read_and_keys_from_outside(name: str) -> None:
    passed = compose(name)["environment"]
    assert [one for one in passed if "=" in one] == [], "values belong in the shell or in .env"
    assert set(passed) <= read_variables()


@both
@pytest.mark.parametrize("checkpoint", ["--demo", "/models/some"])
def test_the_command_of_compose_is_one_that_moelet_knows(name: str, checkpoint: str) -> None:
    words = [checkpoint if word == "${CHECKPOINT:---demo}" else word for word in compose(name)["command"]]
    parsed = parsed_command(words)
    assert (parsed["demo"], parsed["checkpoint"]) == (
        (True, None) if checkpoint == "--demo" else (None, Path(checkpoint))
    )
    assert [str(path) for path in parsed["adapter_root"]] == [compose(name)["volumes"][1].split(":")[-2]]


def test_images_bear_the_version_of_the_package() -> None:
    tag = f"moelet:{moelet.__version__}"
    assert container()["image"] == tag
    assert {one["image"] for one in compose_services().values()} == {f"${{IMAGE:-{tag}}}"}


@both
def test_compose_builds_with_the_torch_that_the_image_has_by_default(name: str) -> None:
    (torch,) = [one.value for one in named(STAGES[0], "ARG") if one.value.startswith("TORCH=")]
    assert compose(name)["build"]["args"] == {"TORCH": "${TORCH:-" + torch.partition("=")[2].strip('"') + "}"}


def test_there_is_time_to_finish_what_runs() -> None:
    needed = LONGEST_REQUEST_S + Server.client_grace_s
    assert all(seconds(one["stop_grace_period"]) >= needed + 5 for one in compose_services().values())
    pause = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod()["terminationGracePeriodSeconds"] >= pause + needed + 5


def test_a_pod_can_do_nothing_but_serve() -> None:
    of_pod, of_container = pod()["securityContext"], container()["securityContext"]
    assert of_pod == {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert of_container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod()["automountServiceAccountToken"] is False
    assert not pod().keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}


def test_no_variable_of_a_kubernetes_service_is_taken_for_an_option() -> None:
    assert pod()["enableServiceLinks"] is False


def test_a_pod_has_one_gpu_and_room_to_write_only_in_its_temporary_folder() -> None:
    assert container()["resources"]["limits"]["nvidia.com/gpu"] == 1
    mounts = {one["mountPath"]: one.get("readOnly", False) for one in container()["volumeMounts"]}
    assert [path for path, read_only in mounts.items() if not read_only] == ["/tmp"]
    (writable,) = [one for one in pod()["volumes"] if "emptyDir" in one]
    assert writable["emptyDir"]["sizeLimit"]
    assert {one["name"] for one in pod()["volumes"]} == {one["name"] for one in container()["volumeMounts"]}


def test_keys_come_from_a_secret_that_must_be_there() -> None:
    for one in container()["env"]:
        assert one["name"] in read_variables()
        assert one["valueFrom"]["secretKeyRef"].get("optional", False) is False, "without it the service would be open"


def test_the_command_of_the_pod_is_one_that_moelet_knows() -> None:
    parsed = parsed_command(container()["args"])
    paths = [parsed["checkpoint"], *parsed["adapter_root"]]
    mounts = [one["mountPath"] for one in container()["volumeMounts"]]
    assert all(any(Path(path).is_relative_to(mount) for mount in mounts) for path in paths)
    assert "command" not in container(), "the image's entry point is moelet"


def test_the_service_finds_the_pods() -> None:
    labels = kubernetes()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        kubernetes()["Deployment"]["spec"]["selector"]["matchLabels"],
        kubernetes()["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        kubernetes()["Service"]["spec"]["selector"],
    ]
    assert selectors == [labels] * 3
    (port,) = container()["ports"]
    assert port == {"name": kubernetes()["Service"]["spec"]["ports"][0]["targetPort"], "containerPort": PORT}
    assert {container()[probe]["httpGet"]["port"] for probe in PROBES} == {port["name"]}


@pytest.mark.parametrize("probe", PROBES)
def test_probes_ask_what_the_service_answers_to_anybody(probe: str, service: RunningService) -> None:
    path = container()[probe]["httpGet"]["path"]
    assert service.client.get(path).status_code == 200
    assert path == {"readinessProbe": "/ready"}.get(probe, "/health"), "a pod that drains is alive and not ready"


@pytest.mark.parametrize("command", HEALTH_CHECKS.values(), ids=HEALTH_CHECKS)
def test_the_health_check_tells_a_service_from_none(
    command: list[str], service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command[0] == "python3", "the one interpreter that the image has"
    assert [word for word in command if " " in word] == [], "some engines split words at spaces"
    port = service.client.base_url.port
    assert checked(command, port) == 0
    assert checked(command, 1) != 0, "nobody listens there"
    monkeypatch.setattr(service.service.lifecycle, "failure", EngineFailedError("the device fell off the bus"))
    assert checked(command, port) != 0


def checked(command: list[str], port: int | None) -> int:
    """The exit code of a health check against ``port``."""
    environment = os.environ | {"MOELET_PORT": str(port), "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True).returncode


def test_the_image_leaves_its_port_to_the_manifests() -> None:
    assert variables(STAGES[-1])["MOELET_PORT"] == str(PORT)
