"""adapter_config.json field by field: what is honoured, what is ignored, and what is refused by name."""

import json
from typing import Any

import pytest

from moelet.layer.adapter_config import AdapterConfig, read_adapter_config
from moelet.layer.errors import AdapterRefusedError

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
MODULE = "model.layers.1.mlp.experts.3.up_proj"


def read(**fields: Any) -> AdapterConfig:
    return read_adapter_config(json.dumps(PLAIN | fields).encode())


def refused(content: bytes) -> AdapterRefusedError:
    with pytest.raises(AdapterRefusedError) as caught:
        read_adapter_config(content)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
    return caught.value


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({}, 2.0),
        ({"lora_alpha": 0}, 0.0),
        ({"lora_alpha": 2.5}, 2.5 / 8),
        ({"use_rslora": True}, 16 / 8**0.5),
        ({"use_rslora": False}, 2.0),
        ({"rank_pattern": {"up_proj": 2}}, 8.0),
        ({"alpha_pattern": {"up_proj": 4}}, 0.5),
        ({"alpha_pattern": {"up_proj": 0}}, 0.0),
        ({"rank_pattern": {r".*up_proj": 4}, "alpha_pattern": {"up_proj": 3}, "use_rslora": True}, 1.5),
        ({"rank_pattern": {"down_proj": 2}}, 2.0),
        ({"rank_pattern": None, "alpha_pattern": None}, 2.0),
    ],
)
def test_scaling_is_that_of_the_modules_own_rank_and_alpha(fields: dict[str, Any], scaling: float) -> None:
    assert read(**fields).scaling_of(MODULE) == scaling


def test_rslora_at_rank_and_alpha_16_is_four_times_the_plain_scaling() -> None:
    plain, stabilised = (read(r=16, lora_alpha=16, use_rslora=flag).scaling for flag in (False, True))
    assert stabilised == 4 * plain


@pytest.mark.parametrize(
    ("names", "targeted"),
    [
        (["experts.down_proj"], True),
        (["down_proj"], True),
        (["model.layers.1.mlp.experts.down_proj"], True),
        (["model.layers.2.mlp.experts.down_proj"], False),
        (["wn_proj"], False),
        ([], False),
        (None, False),
    ],
)
def test_target_parameters_name_the_last_parts(names: list[str] | None, targeted: bool) -> None:
    assert read(target_parameters=names).targets("model.layers.1.mlp.experts.down_proj") is targeted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task_type", "CAUSAL_LM"),
        ("inference_mode", True),
        ("lora_dropout", 0.1),
        ("revision", "main"),
        ("auto_mapping", {"base_model_class": "X"}),
        ("peft_version", "0.21.2"),
        ("base_model_name_or_path", "elsewhere"),
        ("exclude_modules", ["lm_head"]),
        ("layers_to_transform", [1]),
        ("layers_pattern", "layers"),
        ("ensure_weight_tying", True),
        ("qalora_group_size", 16),
        ("megatron_core", "megatron.core"),
        ("target_modules", "all-linear"),
        ("target_modules", None),
        ("init_lora_weights", True),
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", "eva"),
        ("init_lora_weights", "orthogonal"),
        ("modules_to_save", ["lm_head", "embed_tokens"]),
        ("lora_B_layout", "rank_major"),
        ("loftq_config", {}),
        ("a_field_of_tomorrow", False),
        ("another_field_of_tomorrow", None),
    ],
)
def test_fields_that_leave_the_maths_alone_are_accepted(field: str, value: object) -> None:
    assert read(**{field: value}).scaling_of(MODULE) == 2.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("use_dora", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("modules_to_save", ["mlp.gate"]),
        ("modules_to_save", ["lm_head", "experts"]),
        ("modules_to_save", "lm_head"),
        ("trainable_token_indices", [1]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("use_bdlora", {"x": 1}),
        ("arrow_config", {"x": 1}),
        ("kasa_config", {"x": 1}),
        ("monteclora_config", {"x": 1}),
        ("megatron_config", {"x": 1}),
        ("loftq_config", {"loftq_bits": 4}),
        ("lora_B_layout", "grouped_by_expert"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("is_3d_lora_weight", True),
        ("moe_rank_scaling", 0.5),
        ("r", 0),
        ("r", -1),
        ("r", 8.0),
        ("r", True),
        ("r", "8"),
        ("r", None),
        ("lora_alpha", None),
        ("lora_alpha", "16"),
        ("lora_alpha", True),
        ("lora_alpha", 10**400),
        ("lora_alpha", 1e300),
        ("use_rslora", 1),
        ("rank_pattern", {"up_proj": 2.5}),
        ("rank_pattern", {"up_proj": 0}),
        ("rank_pattern", ["up_proj"]),
        ("rank_pattern", {"(": 2}),
        ("rank_pattern", {"(a*)*b": 2}),
        ("alpha_pattern", {"up_proj": None}),
        ("alpha_pattern", {"up_proj": "1"}),
        ("target_parameters", "down_proj"),
        ("target_parameters", [1]),
    ],
)
def test_fields_that_change_the_maths_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(AdapterRefusedError) as caught:
        read(**{field: value}).scaling_of(MODULE)
    assert caught.value.key == field


def test_an_absent_rank_is_refused() -> None:
    assert refused(b'{"peft_type": "LORA", "lora_alpha": 1}').key == "r"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\xef\xbb\xbf" + json.dumps(PLAIN).encode(), "BOM"),
        (json.dumps(PLAIN).encode("utf-16"), "decode"),
        (b'{"peft_type": "LORA", "r": 8, "lora_alpha": NaN}', "NaN"),
        (b'{"peft_type": "LORA", "r": 8, "lora_alpha": Infinity}', "Infinity"),
        (b'{"peft_type": "LORA", "r": 8, "r": 4, "lora_alpha": 1}', "'r' twice"),
        (b'{"peft_type": "LORA", "r": 8, "lora_alpha": 1, "\\ud800": 1}', "no name"),
        (b'{"peft_type": "LORA"', "delimiter"),
        (b"[" * 100_000, "recursion"),
        (b'{"r": ' + b"1" * 5000 + b"}", "digits"),
        (b"", "Expecting value"),
        (b"[]", "[]"),
        (b"\x80\x02}q", "decode"),
    ],
)
def test_what_is_no_plain_json_object_is_refused(content: bytes, found: str) -> None:
    error = refused(content)
    assert error.key == "adapter_config.json"
    assert found in error.found


def test_numbers_beyond_floats_are_refused() -> None:
    assert refused(b'{"peft_type": "LORA", "r": 8, "lora_alpha": 1e999}').key == "lora_alpha"


def test_messages_stay_short_and_printable() -> None:
    fields = json.dumps(PLAIN | {"unknown": ["\ud800" * 100_000] * 50})
    assert refused(fields.encode()).key == "unknown"
