"""The path policy of adapters: nothing outside the roots is read, told apart, or reached by a link."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelet.layer.errors import (
    AdapterForbiddenError,
    AdapterNotFoundError,
    AdapterRefusedError,
    ConfigurationError,
    RequestError,
)
from moelet.service import adapter_roots
from moelet.service.adapter_roots import LONGEST_PATH, AdapterRoots


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("roots") / "root"
    (root / "team" / "a").mkdir(parents=True)
    (root / "team" / "a" / "adapter_config.json").write_text("{}")
    (root / "file").write_text("")
    (root / "inner").symlink_to(root / "team" / "a")
    (root / "loop").symlink_to(root / "loop")
    outside = root.parent / "root-but-not"
    (outside / "a").mkdir(parents=True)
    (root / "outer").symlink_to(outside)
    (root / "absent").symlink_to(outside / "absent")
    return root


def test_what_lies_below_a_root_is_found(root: Path) -> None:
    roots = AdapterRoots([root])
    folder = root / "team" / "a"
    for sent in ("team/a", "./team/../team/a", "team/a/", "inner", str(folder), "outer/../root/team/a"):
        assert roots.resolve(sent, "path") == (folder, root)


def test_a_link_that_changes_while_it_is_followed_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(path: object, **_: object) -> str:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    roots = AdapterRoots([root])
    monkeypatch.setattr(os, "readlink", changed)
    with pytest.raises(AdapterRefusedError, match="inner: expected a folder that can be read, found Invalid argument"):
        roots.resolve("inner", "path")


def test_a_link_that_comes_once_its_path_was_followed_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late, is_folder = root / "late", adapter_roots._is_folder

    def comes(path: Path) -> bool:
        late.symlink_to(root.parent / "root-but-not")
        return is_folder(path)

    roots = AdapterRoots([root])
    monkeypatch.setattr(adapter_roots, "_is_folder", comes)
    with pytest.raises(AdapterRefusedError, match="late/a: expected a folder that can be read, found Invalid argument"):
        roots.resolve("late/a", "path")
    late.unlink()


@pytest.mark.parametrize(
    "sent",
    [
        "..",
        "../root-but-not/a",
        "/",
        "/etc/passwd",
        "outer",
        "outer/a",
        "absent",
        "team/../../root-but-not",
        "outer/./a",
    ],
)
def test_what_lies_outside_is_forbidden_whether_or_not_it_is_there(root: Path, sent: str) -> None:
    with pytest.raises(AdapterForbiddenError) as caught:
        AdapterRoots([root]).resolve(sent, "path")
    assert str(caught.value) == f"{sent} lies outside every adapter root of this service"


@pytest.mark.parametrize("sent", ["x", "a/", "team/a/../", "/"])
def test_a_path_longer_than_any_is_refused_unfollowed(root: Path, sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = AdapterRoots([root])
    with monkeypatch.context() as patched:
        patched.delattr(os.path, "realpath")
        with pytest.raises(RequestError, match="path should be a path of at most 32768 bytes, got 32769") as refused:
            roots.resolve((sent * (LONGEST_PATH + 1))[: LONGEST_PATH + 1], "path")
    assert refused.value.param == "path"
    with pytest.raises((AdapterForbiddenError, AdapterNotFoundError)):
        roots.resolve("x" * LONGEST_PATH, "path")


@pytest.mark.parametrize("sent", ["nothing", "team/b", "file", "file/a", "loop", "x" * 5000, "é", "~/x"])
def test_what_is_not_there_is_not_found(root: Path, sent: str) -> None:
    with pytest.raises(AdapterNotFoundError):
        AdapterRoots([root]).resolve(sent, "path")


@pytest.mark.parametrize("sent", ["", "a\0b", "\ud800"])
def test_what_is_no_path_is_the_request_s_fault(root: Path, sent: str) -> None:
    with pytest.raises(RequestError) as caught:
        AdapterRoots([root]).resolve(sent, "lora_path")
    assert caught.value.param == "lora_path"


@pytest.mark.parametrize("sent", ["loop/../outer", "loop/../outer/a", "loop/x/../../outer", "loop/../loop/../outer"])
def test_a_loop_of_links_hides_no_link_behind_it(root: Path, sent: str) -> None:
    for path in (sent, f"{root}/{sent}"):
        with pytest.raises(AdapterForbiddenError):
            AdapterRoots([root]).resolve(path, "path")


def test_a_root_may_itself_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    roots = AdapterRoots([tmp_path / "link"])
    for path in (tmp_path / "link" / "team" / "a", root / "team" / "a"):
        assert roots.resolve(str(path), "path") == (root / "team" / "a", root)


def test_an_adapter_file_that_leads_out_is_forbidden(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    (root / "a").mkdir(parents=True)
    secret.write_text("")
    (root / "a" / "adapter_model.safetensors").symlink_to(secret)
    with pytest.raises(AdapterForbiddenError, match=r"adapter_model\.safetensors"):
        AdapterRoots([root]).resolve("a", "path")


def test_a_root_that_is_no_folder_stops_the_start(root: Path) -> None:
    for path in (root / "file", root / "nothing"):
        with pytest.raises(ConfigurationError, match="--adapter-root"):
            AdapterRoots([path])


def test_without_a_root_everything_is_forbidden() -> None:
    with pytest.raises(AdapterForbiddenError, match="--adapter-root"):
        AdapterRoots([]).resolve("/etc", "path")


PARTS = st.sampled_from(
    ["..", ".", "", "team", "a", "inner", "outer", "loop", "absent", "file", "root-but-not", "root"]
)


@given(parts=st.lists(PARTS, max_size=8), absolute=st.booleans())
def test_whatever_is_found_lies_below_the_root(root: Path, parts: list[str], absolute: bool) -> None:
    sent = "/".join([str(root), *parts] if absolute else parts)
    try:
        found, _ = AdapterRoots([root]).resolve(sent, "path")
    except (AdapterForbiddenError, AdapterNotFoundError, RequestError):
        return
    assert os.path.realpath(found) == str(found)
    assert os.path.commonpath([found, root]) == str(root)
