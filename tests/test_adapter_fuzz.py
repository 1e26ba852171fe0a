"""Adapter folders that were valid and are not any more: an adapter or an ``AdapterError``, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters import moe_model, write_layout
from moelet.layer.adapter import Adapter
from moelet.layer.adapter_loading import load_adapter
from moelet.layer.errors import AdapterError
from mutations import changed_bytes, changed_json, little_memory

MODEL = moe_model(hidden=4, width=3, experts=2, layers=(1,))
LAYOUTS = ("per_expert", "stacked_fused", "shared_outer", "packed")
WORDS = ("F32", "F16", "BF16", "I64", "F8_E4M3", "r", "all-linear", "lora_alpha", "rank_pattern", "dtype", "shape")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    written = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    for layout, folder in written.items():
        write_layout(folder, layout, MODEL, rank=2)
    return written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed")


def check(folder: Path, config: bytes, weights: bytes) -> Adapter | None:
    """Load what is written; a refusal must be a sentence, and take no memory for what the files only claim."""
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    found: Adapter | AdapterError
    with little_memory(len(config) + len(weights)):
        try:
            found = load_adapter(folder, MODEL, max_rank=8)
        except AdapterError as error:
            found = error
    if isinstance(found, Adapter):
        return found
    assert str(found).isprintable()
    assert len(str(found)) < 1000
    return None


def contents(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "adapter_config.json").read_bytes(), (folder / "adapter_model.safetensors").read_bytes()


def split(weights: bytes) -> tuple[Any, bytes]:
    end = 8 + int.from_bytes(weights[:8], "little")
    return json.loads(weights[8:end]), weights[end:]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_fuzzers_start_from_loads(folders: dict[str, Path], folder: Path, layout: str) -> None:
    adapter = check(folder, *contents(folders[layout]))
    assert adapter is not None
    assert list(adapter.layers) == [1]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(LAYOUTS))
def test_changed_header(folders: dict[str, Path], folder: Path, data: st.DataObject, layout: str) -> None:
    config, weights = contents(folders[layout])
    header, values = split(weights)
    changed = json.dumps(data.draw(changed_json(header, (*WORDS, *header)))).encode()
    length = data.draw(st.just(len(changed)) | st.integers(0, 2**64 - 1))
    check(folder, config, length.to_bytes(8, "little") + changed + values)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(LAYOUTS))
def test_changed_bytes(folders: dict[str, Path], folder: Path, data: st.DataObject, layout: str) -> None:
    config, weights = contents(folders[layout])
    check(folder, config, data.draw(changed_bytes(weights)))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(LAYOUTS))
def test_changed_config(folders: dict[str, Path], folder: Path, data: st.DataObject, layout: str) -> None:
    config, weights = contents(folders[layout])
    changed = json.dumps(data.draw(changed_json(json.loads(config), WORDS))).encode()
    check(folder, data.draw(st.just(changed) | changed_bytes(config)), weights)
