"""Builds images with buildah and runs them with podman, in a store of their own: no daemon and no registry needed."""

import configparser
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
NEEDED = ("buildah", "podman", "runc")
STAND_IN = "localhost/moelet-base:stand-in"
PIP_OPTIONS = ("index-url", "extra-index-url", "find-links", "cert", "constraint", "proxy", "trusted-host", "timeout")
"""What a build takes over from the pip configuration of whoever starts it."""


class ImageError(Exception):
    """Something stands in the way of a build or a run; its text is one sentence."""


@dataclass(frozen=True)
class Store:
    """Images and containers below one folder, apart from those of the machine."""

    folder: Path

    def command(self, tool: str, *arguments: str) -> list[str]:
        """``tool`` (buildah or podman) over this store."""
        places = ("--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run"))
        runtime = ("--runtime", "runc", "--cgroup-manager", "cgroupfs") if tool == "podman" else ()
        return [tool, *places, "--storage-driver", "overlay", *runtime, *arguments]

    def run(self, tool: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``tool`` to its end. Raises ``ImageError`` with the end of what it said when it fails and ``check``."""
        done = subprocess.run(self.command(tool, *arguments), capture_output=True, text=True)
        if check and done.returncode:
            said = " ".join((done.stderr or done.stdout).split())
            raise ImageError(f"{tool} {arguments[0]} ended with {done.returncode}: {said[-1500:]}")
        return done

    def inspect(self, image: str) -> dict[str, Any]:
        """What podman knows of an image."""
        found: dict[str, Any] = json.loads(self.run("podman", "image", "inspect", image).stdout)[0]
        return found

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """The files of an image, in a folder to look at."""
        yield Path(self.run("podman", "image", "mount", image).stdout.strip())
        self.run("podman", "image", "unmount", image)

    def base(self, wanted: str) -> str:
        """``wanted`` where it can be had, else a stand-in made of Debian's packages."""
        pulled = self.run("podman", "pull", "--quiet", wanted, check=False)
        return wanted if pulled.returncode == 0 else self.stand_in()

    def stand_in(self) -> str:
        """A slim Debian with Python and venv, by debootstrap from the mirror that this machine's apt uses."""
        if self.run("podman", "image", "exists", STAND_IN, check=False).returncode == 0:
            return STAND_IN
        if shutil.which("debootstrap") is None:
            raise ImageError("the base image cannot be pulled, and debootstrap is not installed to make one instead")
        suite, mirror = debian_mirror()
        root = self.folder / "stand-in"
        shutil.rmtree(root, ignore_errors=True)
        packages = "--include=ca-certificates,python3,python3-venv"
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", packages, suite, str(root / "files"), mirror],
            capture_output=True,
            text=True,
        )
        if made.returncode:
            raise ImageError(f"debootstrap ended with {made.returncode}: {made.stdout.strip()[-500:]}")
        for unneeded in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(root / "files" / unneeded, ignore_errors=True)
        subprocess.run(["tar", "-C", str(root / "files"), "-cf", str(root / "files.tar"), "."], check=True)
        self.run("podman", "import", str(root / "files.tar"), STAND_IN)
        shutil.rmtree(root)
        return STAND_IN

    def build(self, tag: str, arguments: dict[str, str], log: Path, *, anew: bool) -> None:
        """Build the repository's Dockerfile as ``tag``; ``anew``: take no layer from an earlier build."""
        options, mounts = pip_configuration(self.folder / "pip.conf")
        command = self.command("buildah", "bud", "--isolation", "chroot", "--format", "docker", "--pull=never")
        command += ["--network", "host", "--layers", f"--no-cache={str(anew).lower()}", "--tag", tag]
        for source, target in {**mounts, options: Path("/etc/pip.conf")}.items():
            command += ["--volume", f"{source}:{target}:ro"]
        for name, value in arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        with log.open("w") as said:
            done = subprocess.run([*command, str(REPOSITORY)], stdout=said, stderr=subprocess.STDOUT)
        if done.returncode:
            raise ImageError(f"the build ended with {done.returncode}: {' '.join(log.read_text().split())[-1500:]}")


def check_tools() -> None:
    """Raise ``ImageError`` unless all that a build needs is installed."""
    missing = [tool for tool in NEEDED if shutil.which(tool) is None]
    if missing:
        raise ImageError(f"{', '.join(missing)} must be installed: apt-get install {' '.join(NEEDED)} debootstrap")


def debian_mirror() -> tuple[str, str]:
    """The suite and address that apt of this machine gets Debian from. Raises ``ImageError`` if it gets none."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CREATED_BY) $(ORIGIN) $(CODENAME) $(SUITE) $(REPO_URI)"],
        capture_output=True,
        text=True,
    ).stdout
    found = re.search(r"^Packages Debian (\w+) (?!\S*-)\S+ (\S+)$", listed, re.MULTILINE)
    if found is None:
        raise ImageError("apt of this machine knows no Debian mirror to make a base image from: pass --base")
    return found[1], found[2]


def pip_configuration(file: Path) -> tuple[Path, dict[Path, Path]]:
    """The caller's pip options in ``file``, and the local files and folders they speak of, each at its own path."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    options = {}
    found = re.findall(r"^(\w+|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE)
    for _, name, value in sorted(found, key=lambda option: option[0] == ":env:"):  # the environment wins
        name = name.removeprefix("default-")
        if name in PIP_OPTIONS:
            options[name] = value.replace(r"\n", " ")
    written = configparser.RawConfigParser()
    written["global"] = options
    with file.open("w") as target:
        written.write(target)
    return file, {path: path for path in local_paths(options.values())}


def local_paths(values: Iterable[str]) -> list[Path]:
    """The paths among the words of ``values`` that are there: of an index, ``file:///path/simple``, all of
    ``/path``, where its files lie."""
    words = [word for value in values for word in value.split()]
    paths = [Path(word) for word in words] + [Path(word[7:]).parent for word in words if word.startswith("file:///")]
    return sorted({path for path in paths if path.is_absolute() and path.exists()})
