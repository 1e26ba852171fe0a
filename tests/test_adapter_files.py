"""The adapter's folder: what is missing, links that lead out of it, pickles, and things that are no files."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from adapters import LAYERS, PREFIX, moe_model, refusal, write_layout
from moelet.layer.adapter_loading import load_adapter
from moelet.layer.errors import AdapterNotFoundError

MODEL = moe_model()
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_layout(tmp_path / "root" / "adapter", "stacked", MODEL)
    return tmp_path / "root" / "adapter"


def loads(folder: Path, root: Path | None = None) -> bool:
    return tuple(load_adapter(folder, MODEL, max_rank=8, root=root).layers) == LAYERS


@pytest.mark.parametrize("name", ["absent", "absent/deeper", "x" * 5000, "nul\0", f"adapter/{CONFIG}"])
def test_no_folder_is_not_found(folder: Path, name: str) -> None:
    with pytest.raises(AdapterNotFoundError, match="no such folder"):
        load_adapter(folder.parent / name, MODEL, max_rank=8)


def test_no_configuration_is_not_found(folder: Path) -> None:
    (folder / CONFIG).unlink()
    with pytest.raises(AdapterNotFoundError, match=f"has no {CONFIG}"):
        load_adapter(folder, MODEL, max_rank=8)


def test_no_weights_are_refused(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    error = refusal(folder, MODEL)
    assert (error.key, error.found) == (WEIGHTS, "no such file")


def test_a_pickle_alone_is_refused_with_the_way_to_convert_it(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({f"{PREFIX}x": torch.ones(1)}, folder / "adapter_model.bin")
    error = refusal(folder, MODEL)
    assert error.key == WEIGHTS
    assert "save_file(torch.load('adapter_model.bin', weights_only=True)" in error.found


def test_safetensors_are_used_where_a_pickle_lies_beside_them(folder: Path) -> None:
    (folder / "adapter_model.bin").write_bytes(b"not read")
    assert loads(folder)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_out_of_the_folder_is_refused_alike_whether_or_not_it_ends(
    folder: Path, name: str, exists: bool
) -> None:
    outside = folder.parent / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to("../outside")
    if not exists:
        outside.unlink()
    error = refusal(folder, MODEL)
    assert (error.key, error.found) == (name, "a link that leads out of it")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_root_lets_links_lead_as_far_as_itself(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "blob")
    (folder / name).symlink_to("../blob")
    assert loads(folder, root=folder.parent)
    assert refusal(folder, MODEL, root=folder).key == name
    (folder.parent / "blob").rename(folder.parent.parent / "blob")
    (folder.parent / "blob").symlink_to("../blob")
    assert refusal(folder, MODEL, root=folder.parent).key == name


def test_a_link_within_the_folder_and_a_link_to_it_are_followed(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "blob")
    (folder / WEIGHTS).symlink_to("blob")
    (folder.parent / "link").symlink_to(folder)
    assert loads(folder.parent / "link")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_loop_of_links_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    assert refusal(folder, MODEL).key == name


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize(("target", "below"), [(".", False), ("..", True), (".", True)])
def test_a_link_to_a_folder_is_refused_and_so_is_one_to_the_root(
    folder: Path, name: str, target: str, below: bool
) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(target)
    error = refusal(folder, MODEL, root=folder.parent if below else folder)
    assert (error.key, error.found) == (name, "a folder, pipe or device")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_what_is_no_file_is_refused_without_waiting_for_it(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert refusal(folder, MODEL).key == name
    (folder / name).unlink()
    (folder / name).mkdir()
    assert refusal(folder, MODEL).key == name


def test_a_huge_configuration_is_refused_unread(folder: Path) -> None:
    os.truncate(folder / CONFIG, 1 << 40)
    assert refusal(folder, MODEL).key == CONFIG


@pytest.mark.parametrize("swapped", ["adapter", "adapter/deep", "adapter/deep/file"])
def test_a_link_put_in_place_behind_the_check_is_not_followed(
    folder: Path, swapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write below the root swaps a part of the path for a link once it has been looked at."""
    root = folder.parent
    (folder / "deep").mkdir()
    (folder / WEIGHTS).rename(folder / "deep" / "file")
    (folder / WEIGHTS).symlink_to("deep/file")
    assert loads(folder, root=root)
    secret = root.parent / "secret"
    shutil.copytree(root, secret)
    resolve = os.path.realpath

    def looked_at(path: Path) -> str:
        found = resolve(path)
        place = root / swapped
        if found.endswith("deep/file") and not place.is_symlink():
            place.rename(root / "moved")
            place.symlink_to(secret / swapped)
        return found

    monkeypatch.setattr(os.path, "realpath", looked_at)
    assert refusal(folder, MODEL, root=root).key == WEIGHTS


def test_no_descriptor_is_left_open(folder: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    assert loads(folder)
    (folder / WEIGHTS).write_bytes(b"broken file")
    refusal(folder, MODEL)
    after = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    assert after == before
