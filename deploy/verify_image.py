"""Builds the container image and tries it out: prints a table, exit code 0 when every check holds. Needs root."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import image_checks as checks
from image_store import ImageError, Store, check_tools
from served_image import HARDENED, LIMITS, served

TAG, AGAIN = "localhost/moelet:check", "localhost/moelet:again"
TEMPORARY = ("--tmpfs", "/tmp:rw,noexec,nosuid,nodev,size=256m")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--base", default="python:3.12-slim-bookworm", help="base image; a stand-in where it cannot be had"
    )
    parser.add_argument("--torch", default="", help="the torch requirement (the Dockerfile's own)")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/moelet-image"), help="where images are kept")
    parser.add_argument("--anew", action="store_true", help="take no layer from an earlier build")
    parser.add_argument("--twice", action="store_true", help="build a second time from nothing, and compare every file")
    return parser.parse_args()


class Table:
    """The lines printed: what was tried, whether it holds, and what was seen."""

    def __init__(self) -> None:
        self.failed = 0

    def line(self, name: str, verdict: str, seen: str) -> None:
        """Print one line."""
        print(f"{name:<22} {verdict:<6} {seen}", flush=True)

    def check(self, name: str, tried: Callable[[], str]) -> None:
        """Try one check and print what it says."""
        try:
            self.line(name, "ok", tried())
        except (checks.CheckError, ImageError, OSError) as error:
            self.failed += 1
            self.line(name, "FAILED", str(error))


def built(store: Store, wanted: argparse.Namespace, table: Table) -> str:
    """Build the image; its base."""
    base = store.base(wanted.base)
    table.line("base", "ok", base)
    arguments = {"BASE": base, **({"TORCH": wanted.torch} if wanted.torch else {})}
    began = time.monotonic()
    store.build(TAG, arguments, store.folder / "build.log", anew=wanted.anew)
    seconds, megabytes = time.monotonic() - began, store.inspect(TAG)["Size"] / 1e6
    table.line("build", "ok", f"{seconds:.0f} s, image of {megabytes:.0f} MB, log in {store.folder / 'build.log'}")
    if wanted.twice:
        store.build(AGAIN, arguments, store.folder / "again.log", anew=True)
        table.check("the same again", partial(checks.same_files, store, TAG, AGAIN))
    return base


def check_files(store: Store, base: str, table: Table) -> None:
    """What the image is, without running it."""
    table.check("configuration", lambda: checks.configuration(store.inspect(TAG)))
    table.check("contents", partial(checks.contents, store, TAG, base))
    table.check("kernels", partial(checks.kernels, store, TAG))


def check_demo(store: Store, table: Table) -> None:
    """The image with no arguments: the demo, below a temporary folder, on the CPU."""
    with served(store, TAG, TEMPORARY, ()) as container:
        table.check("health", partial(checks.health, container))
        table.check("rights", partial(checks.rights, container))
        table.check("adapter", partial(checks.adapters, container, "fresh", "moelet-demo/demo-a"))
        table.check("read-only root", partial(checks.read_only, container))
        table.check("drain", partial(checks.drain, container))


def check_own_files(store: Store, table: Table) -> None:
    """A checkpoint and adapters of the host's, mounted read-only, with nowhere to write at all."""
    models = store.folder / "models"
    models.mkdir(exist_ok=True)
    os.chown(models, checks.USER_ID, checks.USER_ID)
    store.run("podman", "run", "--rm", *HARDENED, *LIMITS, "--volume", f"{models}:/out", TAG, "demo", "/out/demo")
    arguments = ("serve", "/models/demo", "--adapter-root", "/models/demo")
    with served(store, TAG, ("--volume", f"{models}:/models:ro"), arguments) as container:
        table.check("own files: health", partial(checks.health, container))
        table.check("own files: adapter", partial(checks.adapters, container, "own", "demo-b"))
        table.check("own files: read-only", partial(checks.read_only, container))


def main() -> int:
    """The exit code: 0 when every check holds, else 1; 2 when the build or a start fails."""
    wanted, table = options(), Table()
    try:
        if os.geteuid() != 0:
            raise ImageError("building and looking into containers needs root: run it with sudo")
        check_tools()
        wanted.folder.mkdir(parents=True, exist_ok=True)
        store = Store(wanted.folder)
        base = built(store, wanted, table)
        check_files(store, base, table)
        check_demo(store, table)
        check_own_files(store, table)
    except ImageError as error:
        print(f"verify_image: {error}", file=sys.stderr)
        return 2
    print(f"{table.failed} checks failed" if table.failed else "every check holds")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
