"""Safetensors files that lie are refused before anything is believed; honest ones read as the library reads them."""

import json
import os
import struct
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moelet.layer.adapter_tensors import MOST_TENSORS, WEIGHTS, TensorFile
from moelet.layer.errors import AdapterRefusedError


def entry(begin: int, end: int, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    if isinstance(header, dict):
        header = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def refused(path: Path) -> AdapterRefusedError:
    with pytest.raises(AdapterRefusedError) as caught:
        TensorFile(FileIO(str(path)))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
    return caught.value


def test_tensors_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    seeded = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5, generator=seeded),
        "b": torch.randn(2, 3, 4, generator=seeded).half(),
        "c": torch.randn(7, generator=seeded).bfloat16(),
        "indices": torch.arange(4),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    with TensorFile(FileIO(str(path))) as file:
        assert {key: stored.shape for key, stored in file.tensors.items()} == {
            k: tuple(t.shape) for k, t in tensors.items()
        }
        stored = load_file(path)
        for key in "abc":
            assert torch.equal(file.read(file.tensors[key]), stored[key].bfloat16())
        with pytest.raises(AdapterRefusedError, match="indices: expected dtype F32, F16 or BF16, found 'I64'"):
            file.read(file.tensors["indices"])


def test_a_read_tensor_does_not_hang_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(1000.0)}, path)
    with TensorFile(FileIO(str(path))) as file:
        tensor = file.read(file.tensors["a"])
        os.truncate(path, 0)
    assert torch.equal(tensor, torch.arange(1000.0).bfloat16())


def test_a_file_truncated_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(1000.0)}, path)
    with TensorFile(FileIO(str(path))) as file:
        os.truncate(path, 3000)
        with pytest.raises(AdapterRefusedError, match="truncated while it was read"):
            file.read(file.tensors["a"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.4e38])
def test_values_that_are_not_finite_in_bf16_are_refused(tmp_path: Path, value: float) -> None:
    path = tmp_path / "x.safetensors"
    tensor = torch.ones(4, 5)
    tensor[2, 3] = value
    save_file({"good": torch.ones(2), "bad": tensor}, path)
    with TensorFile(FileIO(str(path))) as file:
        assert file.read(file.tensors["good"]).all()
        with pytest.raises(AdapterRefusedError) as caught:
            file.read(file.tensors["bad"])
    assert (caught.value.key, caught.value.expected) == ("bad", "finite numbers")


@pytest.mark.parametrize(
    ("header", "data", "key"),
    [
        ({"a": entry(0, 4)}, b"", WEIGHTS),
        ({"a": entry(0, 4)}, b"\0" * 9, WEIGHTS),
        ({"a": entry(0, 4), "b": entry(0, 4)}, b"\0" * 4, "b"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"\0" * 6, "b"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, b"\0" * 12, "b"),
        ({"a": entry(4, 8)}, b"\0" * 8, "a"),
        ({"a": entry(0, 4), "b": entry(4, 2, dtype="I8")}, b"\0" * 2, "b"),
        ({"a": entry(4, 0)}, b"\0" * 4, "a"),
        ({"a": entry(-4, 0)}, b"\0" * 4, "a"),
        ({"a": entry(0, 2**63)}, b"\0" * 4, "a"),
        ({"a": entry(0, 0, [0, 2**63])}, b"", "a"),
        ({f"t{i}": 0 for i in range(MOST_TENSORS + 1)}, b"", WEIGHTS),
        (b'{"__metadata__": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", WEIGHTS),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, ' + b"9" * 5000 + b"]}}", b"\0" * 4, WEIGHTS),
        ({"a": entry(0, 2**62, [2**60])}, b"\0" * 4, WEIGHTS),
        ({"a": entry(0, 4, [2])}, b"\0" * 4, "a"),
        ({"a": entry(0, 4, [2**62, 2**62])}, b"\0" * 4, "a"),
        ({"a": entry(0, 4, [-1, -1])}, b"\0" * 4, "a"),
        ({"a": entry(0, 4, [1.0])}, b"\0" * 4, "a"),
        ({"a": entry(0, 4, [True])}, b"\0" * 4, "a"),
        ({"a": entry(0, 4, [1] * 9)}, b"\0" * 4, "a"),
        ({"a": entry(0, 4, dtype=3)}, b"\0" * 4, "a"),
        ({"a": entry(0, 4) | {"more": 1}}, b"\0" * 4, "a"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"\0" * 4, "a"),
        ({"a": 3}, b"", "a"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}', b"\0" * 4, WEIGHTS),
        (b"[1]", b"", WEIGHTS),
        (b"\xff\xfe", b"", WEIGHTS),
        (b"", b"", WEIGHTS),
        (b'{"a": ' * 50_000, b"", WEIGHTS),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, header: Any, data: bytes, key: str) -> None:
    assert refused(write(tmp_path / "x", header, data)).key == key


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2**40)])
def test_tensors_without_elements_are_refused_when_they_are_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = write(tmp_path / "x", {"a": entry(0, 0, shape)})
    with TensorFile(FileIO(str(path))) as file, pytest.raises(AdapterRefusedError, match="a tensor with elements"):
        file.read(file.tensors["a"])


def test_metadata_may_be_long_and_means_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(1)}, path, metadata={"a": "x" * 1_000_000, "dtype": "F32", "__class__": "os.system"})
    with TensorFile(FileIO(str(path))) as file:
        assert list(file.tensors) == ["a"]


def test_a_key_given_twice_is_refused_though_the_library_takes_it(tmp_path: Path) -> None:
    one = json.dumps(entry(0, 4))
    path = write(tmp_path / "x.safetensors", f'{{"a": {one}, "a": {one}}}'.encode(), b"\0" * 4)
    assert list(load_file(path)) == ["a"]
    assert "'a' twice" in refused(path).found


@pytest.mark.parametrize("length", [0, 1, 5, 10**6, 10**8 + 1, 2**63, 2**64 - 1])
def test_a_header_of_another_length_than_it_claims_is_refused(tmp_path: Path, length: int) -> None:
    assert refused(write(tmp_path / "x", {"a": entry(0, 4)}, b"\0" * 4, length=length)).key == WEIGHTS


@pytest.mark.parametrize("size", [0, 7, 8])
def test_files_too_short_for_a_header_are_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\1" * size)
    assert refused(path).key == WEIGHTS


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10_000))
def test_a_file_cut_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "x"
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % len(whole)])
    assert refused(path).key == WEIGHTS


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255))
@example(place=211, byte=0x7F)  # in the name of a dtype
def test_a_byte_changed_anywhere_never_reads_beyond_the_file(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    path = tmp_path_factory.mktemp("changed") / "x"
    save_file({"a": torch.ones(3, 4), "b": torch.ones(5)}, path)
    content = bytearray(path.read_bytes())
    content[place % len(content)] = byte
    path.write_bytes(content)
    try:
        with TensorFile(FileIO(str(path))) as file:
            for stored in file.tensors.values():
                assert tuple(file.read(stored).shape) == stored.shape
    except AdapterRefusedError as error:
        message = str(error)
        assert message.isprintable(), message
