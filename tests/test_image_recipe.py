"""The Dockerfile keeps what docs/deployment.md promises of the image; no container engine is needed."""

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

from deployment_files import BEFORE, STAGES, Instruction, named, options_of, parsed_command, read_variables, variables
from moelet.graphs.compiler import DEFAULT_ARCH
from moelet.service.settings import Settings
from source_tree import ROOMS, ROOT, tree_files

FINAL = STAGES[-1]


def only(stage: list[Instruction], name: str) -> Instruction:
    (found,) = named(stage, name)
    return found


def test_every_stage_begins_with_the_base_that_the_builder_chooses() -> None:
    names = {"${BASE}"}
    assert [one.name for one in BEFORE] == ["ARG"]
    assert re.fullmatch(r"BASE=python:3\.\d+-slim-\w+", BEFORE[0].value)
    for stage in STAGES:
        base, *alias = re.split(r"\s+as\s+", stage[0].value, flags=re.IGNORECASE)
        assert base in names
        names |= set(alias)


def test_nothing_is_used_that_older_builders_do_not_know() -> None:
    for one in (one for stage in STAGES for one in stage):
        assert "<<" not in one.written, "a heredoc"
        assert "--link" not in one.written
        assert "--mount" not in one.written
    assert not (ROOT / "Dockerfile").read_text().startswith("# syntax="), "a frontend would have to be pulled"


def test_the_image_runs_as_a_numbered_user_that_is_not_root() -> None:
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", named(FINAL, "USER")[-1].value)
    assert [one for one in FINAL[FINAL.index(named(FINAL, "USER")[-1]) :] if one.name in {"RUN", "COPY", "ADD"}] == []


def test_signals_reach_the_process() -> None:
    assert only(FINAL, "ENTRYPOINT").words == ["moelet"]
    assert only(FINAL, "STOPSIGNAL").value == "SIGTERM"


def test_with_no_arguments_the_demo_is_served() -> None:
    assert parsed_command(only(FINAL, "CMD").words)["demo"] is True


def test_the_last_stage_only_copies_what_the_others_made() -> None:
    """So nothing that builds is left in it: no layer of it ever held a compiler, pip, a cache or a key."""
    assert named(FINAL, "RUN") == []
    copies = [dict(options_of(one.value)) for one in named(FINAL, "COPY")]
    aliases = {re.split(r"\s+as\s+", stage[0].value, flags=re.IGNORECASE)[-1] for stage in STAGES[:-1]}
    assert [one["from"] for one in copies if one["from"] not in aliases] == []
    assert len(copies) == 2, "one layer of dependencies and one of the service's own, so that code changes are small"


def test_dependencies_are_installed_before_any_source_is_copied() -> None:
    stage = STAGES[0]
    (copied,) = named(stage, "COPY")
    assert shlex.split(copied.value)[:-1] == ["pyproject.toml", "constraints.txt*"]
    assert "${TORCH}" in " ".join(one.value for one in named(stage, "RUN"))


def test_pip_keeps_no_cache_and_the_runtime_gets_no_pip() -> None:
    assert variables(STAGES[0])["PIP_NO_CACHE_DIR"] == "1"
    assert "venv --without-pip /opt/moelet" in " ".join(one.value for one in named(STAGES[0], "RUN"))


def test_kernels_are_compiled_into_the_folder_that_the_image_names() -> None:
    runs = " ".join(one.value for stage in STAGES[:-1] for one in named(stage, "RUN"))
    folder = variables(FINAL)["MOELET_CUBIN_DIR"]
    assert f'-m moelet.graphs.ahead /package{folder} "${{ARCH}}"' in runs
    assert f"ARCH={DEFAULT_ARCH}" in [one.value for stage in STAGES for one in named(stage, "ARG")]


def test_the_image_sets_only_variables_that_are_read() -> None:
    ours = {name: value for name, value in variables(FINAL).items() if name.startswith("MOELET_")}
    assert ours.keys() <= read_variables()
    assert ours["MOELET_HOST"] == "0.0.0.0"
    assert Settings(demo=True, host=ours["MOELET_HOST"], port=int(ours["MOELET_PORT"])).port == 8000


def test_the_port_is_that_of_the_settings() -> None:
    assert only(FINAL, "EXPOSE").value == variables(FINAL)["MOELET_PORT"] == str(Settings.model_fields["port"].default)


def test_what_is_written_lies_below_the_one_temporary_folder() -> None:
    set_to = variables(FINAL)
    assert Path(set_to["MOELET_CACHE_DIR"]).is_relative_to("/tmp")
    assert set_to["HOME"] == only(FINAL, "WORKDIR").value == "/tmp"


def test_no_variable_or_argument_holds_a_secret() -> None:
    kept = {*variables(FINAL), *(one.value.partition("=")[0] for one in named(FINAL, "ARG"))}
    assert [name for name in kept if re.search(r"KEY|TOKEN|SECRET|PASSWORD|INDEX", name)] == []


def test_labels_say_what_it_is() -> None:
    labels = only(FINAL, "LABEL").value
    for name in ("title", "description", "licenses", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels


def test_the_build_sees_the_package_and_nothing_else() -> None:
    first, *allowed = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
    ]
    assert first == "*"
    names = {line.removeprefix("!") for line in allowed if line.startswith("!")}
    assert names == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "src", *ROOMS}
    assert [line for line in allowed if not line.startswith("!")] == ["**/__pycache__", "**/*.egg-info"]
    shipped = [str(path) for path in tree_files() if path.parts[0] in names]
    assert [path for path in shipped if fnmatch(path, "*secret*") or fnmatch(path, "*.key")] == []
