"""The wheel: all that the rooms hold, nothing of the tests, importable from where it is unpacked."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import moelet
from source_tree import ROOMS, ROOT, tree_files

SHIPPED = {".py", ".cu", ".cuh", ".json"}

IMPORT_EVERYTHING = """
import importlib, pathlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import moelet
assert pathlib.Path(moelet.__file__).is_relative_to(sys.argv[1]), moelet.__file__
for module in pkgutil.walk_packages(moelet.__path__, "moelet."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        print(module.name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, so that nothing built earlier can slip in."""
    copy, built = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for path in tree_files():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    for room in ROOMS:
        (copy / "src" / "moelet" / room).symlink_to(Path("..", "..", room))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(copy)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_wheel_holds_every_source_of_the_rooms_and_nothing_else(unpacked: Path) -> None:
    shipped = {path.relative_to(unpacked) for path in (unpacked / "moelet").rglob("*") if path.is_file()}
    rooms = {Path("moelet", path) for path in tree_files() if path.parts[0] in ROOMS and path.suffix in SHIPPED}
    own = {path.relative_to("src") for path in tree_files() if path.parts[0] == "src"}
    assert shipped == rooms | own
    assert any(path.suffix == ".cu" for path in shipped)
    assert Path("moelet", "py.typed") in shipped
    assert {path.name for path in unpacked.iterdir()} == {"moelet", f"moelet-{moelet.__version__}.dist-info"}


def test_wheel_says_what_it_is(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    assert metadata["Name"] == "moelet"
    assert metadata["Version"] == moelet.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    entry_points = (info / "entry_points.txt").read_text(encoding="utf-8").split("\n")
    assert entry_points[:2] == ["[console_scripts]", "moelet = moelet.service.cli:main"]


def test_every_module_of_the_wheel_imports_without_a_gpu(unpacked: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-c", IMPORT_EVERYTHING, str(unpacked)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    modules = {
        ".".join(("moelet", *path.with_suffix("").parts))
        for path in tree_files()
        if path.parts[0] in ROOMS and path.suffix == ".py"
    }
    assert set(result.stdout.split()) == {name.removesuffix(".__init__") for name in modules}
