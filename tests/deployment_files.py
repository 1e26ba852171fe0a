"""The Dockerfile and the manifests as tests read them: parsed by libraries, with what they say of the service."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import typer
import yaml
from dockerfile_parse import DockerfileParser

from moelet.service.cli import app
from moelet.service.settings import ENV_PREFIX, OTHER_VARIABLES, Settings
from source_tree import ROOT

DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = ROOT / "compose.yaml"
KUBERNETES = ROOT / "deploy" / "kubernetes.yaml"


@dataclass(frozen=True)
class Instruction:
    """One instruction of the Dockerfile: its name, its text with continuations joined, and its lines as written."""

    name: str
    value: str
    written: str

    @property
    def words(self) -> list[str]:
        """The words of the JSON (exec) form; empty for the shell form."""
        text = self.value[max(self.value.find("["), 0) :]
        return list(json.loads(text)) if text.startswith("[") else []


def stages() -> list[list[Instruction]]:
    """The Dockerfile's stages, each beginning with its FROM; what stands before the first is stage 0."""
    parsed = DockerfileParser(fileobj=BytesIO(DOCKERFILE.read_bytes()))
    found: list[list[Instruction]] = [[]]
    for one in parsed.structure:
        if one["instruction"] == "FROM":
            found.append([])
        if one["instruction"] != "COMMENT":
            found[-1].append(Instruction(one["instruction"], one["value"], one["content"]))
    return found


BEFORE, *STAGES = stages()


def named(stage: list[Instruction], name: str) -> list[Instruction]:
    """The instructions called ``name``."""
    return [one for one in stage if one.name == name]


def variables(stage: list[Instruction]) -> dict[str, str]:
    """What a stage's ENV instructions set."""
    pairs = [word.partition("=") for one in named(stage, "ENV") for word in shlex.split(one.value)]
    return {name: value for name, _, value in pairs}


def compose_services() -> dict[str, dict[str, Any]]:
    """The services of compose.yaml, with what they merge."""
    services: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE.read_text())["services"]
    return services


def kubernetes() -> dict[str, dict[str, Any]]:
    """The objects of the manifest by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(KUBERNETES.read_text())}


def pod() -> dict[str, Any]:
    """The specification of the Deployment's pods."""
    found: dict[str, Any] = kubernetes()["Deployment"]["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    """The pod's one container."""
    (found,) = pod()["containers"]
    return dict(found)


def read_variables() -> set[str]:
    """Every ``MOELET_…`` variable that something reads."""
    return {ENV_PREFIX + name.upper() for name in Settings.model_fields} | OTHER_VARIABLES


def parsed_command(arguments: list[str]) -> dict[str, Any]:
    """The parameters that ``moelet`` makes of a command line. Raises click's ``UsageError`` for one it has not."""
    group: Any = typer.main.get_command(app)
    _, command, rest = group.resolve_command(group.make_context("moelet", arguments, resilient_parsing=True), arguments)
    parameters: dict[str, Any] = command.make_context("serve", rest).params
    return parameters


def seconds(text: str) -> float:
    """A duration as compose and Dockerfiles write it, ``10m`` or ``90s``."""
    return float(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def options_of(value: str) -> Iterator[tuple[str, str]]:
    """The ``--name=value`` options that an instruction begins with."""
    for word in value.split():
        if not word.startswith("--"):
            return
        name, _, setting = word.removeprefix("--").partition("=")
        yield name, setting
