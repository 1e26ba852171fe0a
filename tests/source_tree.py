"""The files of the working tree, as the tests of the house and of the wheel see them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("cuda", "graphs", "layer", "service")


def tree_files() -> list[Path]:
    """Every file that git tracks or would track, relative to ``ROOT``; links left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = sorted(set(listed.stdout.split("\0")) - {""})
    return [Path(name) for name in names if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]
