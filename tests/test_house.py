"""The rules of the house: which room imports what, what files look like, and what no file may hold."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import moelet
from source_tree import ROOMS, ROOT, tree_files

LAYER_MAY_IMPORT = {"torch", "numpy", "safetensors", "moelet.layer"}
GRAPHS_MAY_IMPORT = LAYER_MAY_IMPORT | {"moelet.graphs", "cuda"}
HTTP_LIBRARIES = {"fastapi", "starlette", "uvicorn"}
MOST_DRIVER_FILES = 3
LONGEST_FILE = 300
LONGEST_FUNCTION = 60


def python_files(*folders: str) -> list[Path]:
    return [path for path in tree_files() if path.suffix == ".py" and path.parts[0] in folders]


def package_files() -> list[Path]:
    return python_files("src", *ROOMS)


def text(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def parse(path: Path) -> ast.Module:
    return ast.parse(text(path), filename=str(path))


def imports(path: Path) -> Iterator[str]:
    """The absolute dotted names that a file of a room imports, wherever in the file it does."""
    folders = path.parent.parts
    package = folders[1:] if folders[0] == "src" else ("moelet", *folders)
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, node.module) if node.module else base
            yield from (".".join((*module, alias.name)) for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("cuda.bindings."):
            yield str(node.value)


def origin(name: str) -> str:
    """What an imported name belongs to: ``moelet.<room>`` (or ``moelet``), else its top package."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "moelet" and len(parts) > 1 and parts[1] in ROOMS else parts[0]


def origins(path: Path) -> set[str]:
    return {origin(name) for name in imports(path)} - set(sys.stdlib_module_names)


def foreign(room: str, allowed: set[str]) -> dict[str, set[str]]:
    """Per file of the room, what it imports that it may not; the package's version is free to all."""
    found = {str(path): origins(path) - allowed - {"moelet"} for path in python_files(room)}
    return {path: names for path, names in found.items() if names}


def test_layer_imports_only_tensors() -> None:
    assert foreign("layer", LAYER_MAY_IMPORT) == {}


def test_graphs_import_layer_and_the_driver_but_no_service() -> None:
    assert foreign("graphs", GRAPHS_MAY_IMPORT) == {}


def test_service_leaves_the_driver_to_graphs() -> None:
    assert [str(path) for path in python_files("service") if origins(path) & {"cuda", "moelet.cuda"}] == []


def test_package_does_not_import_tests_or_benchmarks() -> None:
    assert [str(path) for path in package_files() if origins(path) & {"tests", "benchmarks", "oracle"}] == []


def test_the_driver_is_called_from_few_files() -> None:
    callers = [path for path in package_files() if "cuda" in origins(path)]
    assert {path.parts[0] for path in callers} == {"graphs"}, [str(path) for path in callers]
    assert len(callers) <= MOST_DRIVER_FILES, [str(path) for path in callers]


def test_http_stays_in_service() -> None:
    speakers = [path for path in package_files() if origins(path) & HTTP_LIBRARIES]
    assert {path.parts[0] for path in speakers} == {"service"}, [str(path) for path in speakers]


EXTRAS = {"service/client/without_experts.py": "transformers"}
"""Files that import an optional dependency, and the extra that brings it."""


def test_every_import_of_the_package_is_a_declared_dependency() -> None:
    project = tomllib.loads(text(Path("pyproject.toml")))["project"]

    def named(lines: list[str]) -> set[str]:
        return {re.split(r"[^A-Za-z0-9_-]", line)[0].replace("_", "-").lower() for line in lines}

    def declared(path: Path) -> set[str]:
        extra = EXTRAS.get(str(path))
        return named(project["dependencies"] + (project["optional-dependencies"][extra] if extra else []))

    distributions = importlib.metadata.packages_distributions() | {"cuda": ["cuda-python"]}
    undeclared = {
        f"{path} imports {name}"
        for path in package_files()
        for name in origins(path)
        if not name.startswith("moelet")
        and not declared(path) & {dist.replace("_", "-").lower() for dist in distributions.get(name, [])}
    }
    assert undeclared == set()


def test_cuda_room_holds_no_python() -> None:
    assert list((ROOT / "cuda").rglob("*.py")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="cuda-python is installed on Linux only")
def test_cuda_room_does_not_hide_cuda_python() -> None:
    subprocess.run([sys.executable, "-c", "from cuda.bindings import driver"], cwd=ROOT, check=True)


def test_the_package_is_four_relative_links_to_the_rooms() -> None:
    links = {path.name: path.readlink() for path in (ROOT / "src" / "moelet").iterdir() if path.is_symlink()}
    assert links == {room: Path("..", "..", room) for room in ROOMS}
    assert all((ROOT / "src" / "moelet" / room).resolve() == ROOT / room for room in ROOMS)


def test_the_package_is_typed() -> None:
    assert (ROOT / "src" / "moelet" / "py.typed").is_file()


def test_the_command_says_the_version_of_the_package() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "moelet", "--version"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert said.stdout.split()[-1] == moelet.__version__


def test_modules_are_named_after_things_of_the_domain() -> None:
    vague = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|stuff)$")
    folders = ("src", *ROOMS, "tests", "benchmarks")
    names = {part for path in python_files(*folders) for part in path.with_suffix("").parts}
    assert [name for name in sorted(names) if vague.search(name)] == []


def first_line(path: Path) -> str:
    """The sentence that a source file opens with, without the marks of its comment."""
    opening = text(path).partition("\n")[0]
    marks = r'"""' if path.suffix == ".py" else r"//+|/\*+"
    match = re.match(rf"(?:{marks})\s*(.*)", opening)
    return match[1] if match else ""


def test_every_source_file_opens_with_what_it_is_for() -> None:
    sources = [path for path in tree_files() if path.suffix in {".py", ".cu", ".cuh"}]
    assert [str(path) for path in sources if len(first_line(path).split()) < 3] == []


def test_the_architecture_says_of_every_file_what_it_is_for() -> None:
    """In the words that the file opens with."""
    parts = re.split(r"^## `(\w+)/`$", text(Path("docs/architecture.md")), flags=re.MULTILINE)[1:]
    rows = {
        Path(room, file): told
        for room, part in zip(parts[::2], parts[1::2], strict=True)
        for file, told in re.findall(r"^\| `([\w/]+\.py)` \| (.+) \|$", part, flags=re.MULTILINE)
    }
    files = [path for path in python_files(*{path.parts[0] for path in rows}) if path.name != "__init__.py"]
    assert set(rows) == set(files)
    for path, told in rows.items():
        opening = " ".join((ast.get_docstring(parse(path)) or "").replace("``", "`").split())
        assert opening.startswith(told), path


def test_files_and_functions_are_short() -> None:
    long = []
    for path in (path for path in tree_files() if path.suffix in {".py", ".cu", ".cuh"}):
        lines = len(text(path).splitlines())
        long += [f"{path} has {lines} lines"] * (lines > LONGEST_FILE)
        if path.suffix != ".py":
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                long += [f"{path}: {node.name} has {length} lines"] * (length > LONGEST_FUNCTION)
    assert long == []


RUNS_DATA_AS_CODE = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
LOADS_DATA_AS_CODE = {"torch.load", "torch.serialization.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load"}
BUILT_IN = {"eval", "exec", "__import__"}


def names_of(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for: ``np`` for ``numpy``, ``load`` for ``torch.load``."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def unsafe_loads(tree: ast.Module) -> set[str]:
    """The calls in a file that would run what a data file says."""
    names = names_of(tree)
    found = {name for name in names.values() if name.split(".")[0] in RUNS_DATA_AS_CODE}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            head, dot, rest = ast.unparse(node).partition(".")
            found |= {names.get(head, head) + dot + rest} & (LOADS_DATA_AS_CODE | BUILT_IN)
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.add("allow_pickle")
    return found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\ntorch.load('x')", {"torch.load"}),
        ("from torch import load as read\nread('x')", {"torch.load"}),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", {"allow_pickle"}),
        ("def f():\n    from pickle import loads", {"pickle.loads"}),
        ("eval('1')", {"eval"}),
        ("import json\njson.loads('1')\nmodel.eval()", set()),
    ],
)
def test_unsafe_loads_are_recognised(code: str, found: set[str]) -> None:
    assert unsafe_loads(ast.parse(code)) == found


def test_nothing_in_the_package_runs_data_as_code() -> None:
    found = {str(path): unsafe_loads(parse(path)) for path in package_files()}
    assert {path: names for path, names in found.items() if names} == {}


# Written in halves, so that this file does not hold them either.
PACKAGE_HOSTS = [
    first + second
    for first, second in (
        ("py", "pi.org"),
        ("python", "hosted.org"),
        ("download.py", "torch.org"),
        ("ana", "conda.org"),
        ("registry.np", "mjs.org"),
        ("deb.deb", "ian.org"),
        ("docker", ".io"),
        ("gh", "cr.io"),
        ("nv", "cr.io"),
        ("qu", "ay.io"),
        ("crates", ".io"),
    )
]


def test_no_file_names_the_host_of_a_package_registry() -> None:
    contents = {str(path): (ROOT / path).read_bytes().decode("utf-8", "replace").lower() for path in tree_files()}
    assert [(path, host) for path, content in contents.items() for host in PACKAGE_HOSTS if host in content] == []
