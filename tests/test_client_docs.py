"""The examples of README.md and docs/client.md, run as they stand against the demo."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moelet.layer.demo import write_demo
from moelet.service.settings import Settings
from moelet.service.startup import open_service
from running_service import listening
from source_tree import ROOT

URL = "http://127.0.0.1:8000"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The demo as both texts have it served: written to the working folder, which is the adapter root."""
    monkeypatch.chdir(tmp_path)
    demo = write_demo(tmp_path / "moelet-demo")
    adapters = {"adapter": list(demo.adapters.items())}
    settings = Settings.read(checkpoint=demo.checkpoint, adapter_root=[tmp_path], device="cpu", **adapters)
    with listening(open_service(settings)) as url:
        yield url


def examples(document: str) -> list[str]:
    """The Python blocks of a document."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    return blocks


def run(blocks: list[str], url: str) -> dict[str, Any]:
    """What the names in ``blocks`` stand for once they have run, one after another."""
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace(URL, url), names)
    return names


def test_the_six_lines_of_the_readme(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = examples("README.md")
    assert len(block.replace("\n\n", "\n").splitlines()) == 6
    run([block], url)["client"].close()
    first, swapped, second = re.fullmatch(
        r"(\[\[.*\]\])\n({.*})\n(\[\[.*\]\])\n", capsys.readouterr().out, re.DOTALL
    ).groups()
    assert "'name': 'demo-a', 'version': 2" in swapped
    assert first != second


def test_the_client_document(url: str) -> None:
    blocks = examples("docs/client.md")
    names = run(blocks, url)
    names["client"].close()
    assert names["routed_here"].dtype == names["mixed"].dtype == torch.bfloat16
    assert torch.equal(names["away"], names["without"])
    assert torch.equal(names["away"], names["at_home"])
    assert not torch.equal(names["with_adapter"], names["without"])
