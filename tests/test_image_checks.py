"""What verifies an image, tried on made-up images and services that are wrong in one way each; no engine is needed."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import image_checks
import image_store
import pytest
from image_checks import CheckError
from served_image import Reply

GOOD = {
    "Config": {
        "User": "10001:10001",
        "Entrypoint": ["moelet"],
        "ExposedPorts": {"8000/tcp": {}},
        "Healthcheck": {"Test": ["CMD", "python3"]},
        "Env": ["PATH=/bin", "MOELET_HOST=0.0.0.0"],
    }
}
CUBIN = b"\x7fELF" + bytes(8)


class Folders:
    """Stands for a store: an image is a folder."""

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        yield Path(image)


class Images:
    """A base and an image over it, as folders that a test spoils."""

    def __init__(self, folder: Path) -> None:
        self.base, self.image = folder / "base", folder / "image"
        for root in (self.base, self.image):
            self.write(root, "usr/bin/python3", b"")
        for number in range(20):
            self.write(self.image, f"opt/moelet/lib/{number}.py", b"")
        for number in range(12):
            self.write(self.image, f"opt/moelet/cubins/{number}.cubin", CUBIN)

    def write(self, root: Path, name: str, data: bytes, mode: int = 0o644) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(mode)

    def contents(self) -> str:
        return image_checks.contents(Folders(), str(self.image), str(self.base))  # type: ignore[arg-type]

    def kernels(self) -> str:
        return image_checks.kernels(Folders(), str(self.image))  # type: ignore[arg-type]


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    monkeypatch.setattr(image_checks, "OWNER_ID", os.getuid())
    monkeypatch.setattr(image_checks, "FEWEST_FILES", 30)
    return Images(tmp_path)


def test_good_images_pass(images: Images) -> None:
    assert "32 files" in images.contents()
    assert images.kernels() == "12 cubins"
    assert image_checks.configuration(GOOD).startswith("user 10001")


@pytest.mark.parametrize(
    ("name", "mode", "message"),
    [
        ("etc/left", 0o644, "below /opt/moelet"),
        ("opt/moelet/open", 0o666, "writable"),
        ("opt/moelet/set", 0o4755, "writable"),
        ("opt/moelet/some-1.0-py3-none-any.whl", 0o644, "cache"),
        ("opt/moelet/lib/pip/__init__.py", 0o644, "pip"),
        ("opt/moelet/.cache/x", 0o644, "cache"),
        ("opt/moelet/bin/gcc", 0o755, "build tool"),
        ("opt/moelet/.git/HEAD", 0o644, "secret"),
        ("opt/moelet/server.key", 0o600, "secret"),
        ("opt/moelet/pip.conf", 0o644, "secret"),
    ],
)
def test_a_file_that_should_not_be_there_is_found(images: Images, name: str, mode: int, message: str) -> None:
    images.write(images.image, name, b"", mode)
    with pytest.raises(CheckError, match=message):
        images.contents()


def test_an_image_without_the_service_is_found(images: Images) -> None:
    for number in range(3):
        (images.image / f"opt/moelet/lib/{number}.py").unlink()
    with pytest.raises(CheckError, match="found 29 files"):
        images.contents()


def test_a_build_tool_of_the_base_is_found(images: Images) -> None:
    for root in (images.base, images.image):
        images.write(root, "usr/bin/make", b"", 0o755)
    with pytest.raises(CheckError, match="build tool"):
        images.contents()


def test_a_build_that_differs_is_found(images: Images) -> None:
    first, second = str(images.image), str(images.base)
    images.write(images.base, "opt/moelet/lib/0.py", b"")
    with pytest.raises(CheckError, match="differ"):
        image_checks.same_files(Folders(), first, second)  # type: ignore[arg-type]
    assert "the same bytes" in image_checks.same_files(Folders(), first, first)  # type: ignore[arg-type]


def test_missing_and_broken_kernels_are_found(images: Images) -> None:
    images.write(images.image, "opt/moelet/cubins/0.cubin", b"text")
    with pytest.raises(CheckError, match=r"0\.cubin"):
        images.kernels()
    for path in (images.image / "opt/moelet/cubins").iterdir():
        path.unlink()
    with pytest.raises(CheckError, match="found 0"):
        images.kernels()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("User", ""),
        ("User", "root"),
        ("Entrypoint", ["/bin/sh", "-c", "moelet"]),
        ("ExposedPorts", {"22/tcp": {}, "8000/tcp": {}}),
        ("Healthcheck", None),
        ("Healthcheck", {"Test": ["CMD-SHELL", "curl"]}),
        ("Env", ["PATH=/bin", "PIP_INDEX_URL=there"]),
        ("Env", ["MOELET_API_KEY=abc"]),
    ],
)
def test_a_wrong_configuration_is_found(field: str, value: Any) -> None:
    with pytest.raises(CheckError):
        image_checks.configuration({"Config": GOOD["Config"] | {field: value}})


class Fake:
    """Stands for a container: answers what a test says, and ends when told."""

    pid = os.getpid()

    def __init__(self, forward: Callable[[], Reply], ready: list[int], code: int = 0) -> None:
        self.forward, self.ready, self.code = forward, ready, code
        self.ended = threading.Event()

    def call(self, method: str, path: str, _body: bytes | None = None, _timeout_s: float = 0) -> Reply:
        if path == "/metrics":
            return Reply(200, "moelet_requests_in_flight 99.0\n")
        if method == "POST":
            assert self.ended.wait(30)
            return self.forward()
        if not self.ready:
            raise ConnectionRefusedError
        return Reply(self.ready.pop(0), "")

    def signal(self, _name: str) -> None:
        self.ended.set()

    def exit_code(self, _timeout_s: float) -> int:
        return self.code


def whole() -> Reply:
    return Reply(200, json.dumps({"hidden_states": [[0.0]] * image_checks.TOKENS}))


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (Fake(whole, [200, 503]), None),
        (Fake(whole, [200, 503], code=143), "exit code"),
        (Fake(whole, [200]), "503"),
        (Fake(lambda: Reply(200, '{"hidden_states": []}'), [503]), "whole"),
        (Fake(lambda: Reply(500, ""), [503]), "finished"),
    ],
    ids=["good", "killed", "never-503", "cut-short", "failed"],
)
def test_a_drain_that_loses_something_is_found(fake: Fake, message: str | None) -> None:
    if message is None:
        assert "exit code 0" in image_checks.drain(fake)  # type: ignore[arg-type]
        return
    with pytest.raises(CheckError, match=message):
        image_checks.drain(fake)  # type: ignore[arg-type]


def test_the_pip_configuration_goes_along_with_the_folders_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wheels", "index/simple"):
        (tmp_path / name).mkdir(parents=True)
    mine = tmp_path / "mine.conf"
    mine.write_text(f"[global]\nfind-links = /nowhere\nextra-index-url = file://{tmp_path}/index/simple\nretries = 7\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(mine))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    written, mounts = image_store.pip_configuration(tmp_path / "pip.conf")
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env={"PIP_CONFIG_FILE": str(written), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    ).stdout
    assert f"global.find-links='{tmp_path}/wheels'" in told
    assert f"global.extra-index-url='file://{tmp_path}/index/simple'" in told
    assert "retries" not in told
    assert {tmp_path / "wheels", tmp_path / "index"} <= mounts.keys()
