"""Options, their environment variables and defaults, and the sentence that a wrong value gets."""

import inspect
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from moelet.graphs.program import Plan
from moelet.layer.errors import ConfigurationError
from moelet.service import cli
from moelet.service.settings import Plan as PlanOption
from moelet.service.settings import Settings, unknown_variables


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*(f"MOELET_{field.upper()}" for field in Settings.model_fields), *unknown_variables()):
        monkeypatch.delenv(name, raising=False)


def read(**options: Any) -> Settings:
    return Settings.read(**{"checkpoint": "ckpt", **options})


def test_defaults_are_those_of_the_contract() -> None:
    settings = read()
    told = settings.model_dump(exclude={"checkpoint"})
    assert told == {
        "demo": False,
        "host": "127.0.0.1",
        "port": 8000,
        "uds": None,
        "device": "auto",
        "layers": None,
        "served_model_name": None,
        "adapter": (),
        "adapter_root": (),
        "max_loras": 8,
        "max_cpu_loras": 32,
        "max_lora_rank": 64,
        "max_decode_tokens": 256,
        "decode_shapes": None,
        "plan": "auto",
        "api_key": (),
        "admin_api_key": None,
        "max_batch_tokens": None,
        "max_queue": 1024,
        "max_queue_mb": 512.0,
        "max_queue_delay_us": 0,
        "request_timeout_s": 60.0,
        "max_body_mb": 64.0,
        "body_timeout_s": 20.0,
        "log_format": "text",
        "log_level": "info",
    }


def test_every_setting_is_an_option_whose_help_tells_its_default() -> None:
    parameters = inspect.signature(cli.serve).parameters
    assert set(parameters) == set(Settings.model_fields)
    hints = get_type_hints(cli.serve, include_extras=True)
    for name, field in Settings.model_fields.items():
        text = get_args(hints[name])[1].help
        if field.default not in (None, (), False):
            assert f"({field.default:g})" in text if isinstance(field.default, float) else f"({field.default})" in text


def test_the_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELET_PORT", "1234")
    monkeypatch.setenv("MOELET_MAX_LORAS", "2")
    monkeypatch.setenv("MOELET_HOST", "")
    settings = read(port=4321, host=None)
    assert (settings.port, settings.max_loras, settings.host) == (4321, 2, "127.0.0.1")


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        ({"demo": "true"}, {"checkpoint": "ckpt"}, {"checkpoint": Path("ckpt"), "demo": False}),
        ({"demo": "neither"}, {"checkpoint": "ckpt"}, {"checkpoint": Path("ckpt"), "demo": False}),
        ({"checkpoint": "other", "demo": "1"}, {"checkpoint": "ckpt"}, {"checkpoint": Path("ckpt"), "demo": False}),
        ({"checkpoint": "other"}, {"demo": True}, {"checkpoint": None, "demo": True}),
        ({"checkpoint": "other"}, {"demo": False}, {"checkpoint": Path("other"), "demo": False}),
        ({"demo": "true", "uds": "/s"}, {"port": 0}, {"port": 0, "uds": None, "demo": True}),
        ({"demo": "true", "uds": "/s"}, {"host": "::1"}, {"host": "::1", "uds": None}),
        ({"demo": "true", "uds": "/s", "port": "1"}, {"uds": "/t"}, {"port": 1, "uds": Path("/t")}),
        ({"demo": "true", "uds": "/s"}, {"host": "::1", "uds": "/t"}, {"host": "::1", "uds": Path("/t")}),
        ({"demo": "true", "uds": "/s", "port": "1"}, {}, {"port": 1, "uds": Path("/s")}),
    ],
)
def test_an_option_wins_over_the_variable_of_what_it_replaces(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"MOELET_{name.upper()}", value)
    settings = Settings.read(**options)
    assert {name: getattr(settings, name) for name in expected} == expected


def test_two_variables_are_still_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELET_DEMO", "true")
    monkeypatch.setenv("MOELET_CHECKPOINT", "ckpt")
    with pytest.raises(ConfigurationError, match=r"MOELET_CHECKPOINT .*MOELET_DEMO.* not both"):
        Settings.read(port=1)


def test_lists_from_the_environment_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELET_ADAPTER", "a=/x/a, b=/x=y/b")
    monkeypatch.setenv("MOELET_ADAPTER_ROOT", "/x,/y")
    monkeypatch.setenv("MOELET_LAYERS", "7,0-2,1")
    monkeypatch.setenv("MOELET_DECODE_SHAPES", "1,2,4")
    settings = read()
    assert settings.adapter == (("a", Path("/x/a")), ("b", Path("/x=y/b")))
    assert settings.adapter_root == (Path("/x"), Path("/y"))
    assert settings.layers == (0, 1, 2, 7)
    assert settings.decode_shapes == (1, 2, 4)


def test_levels_may_be_written_as_python_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELET_LOG_LEVEL", "WARNING")
    assert read().log_level == "warning"
    assert read(log_level="Debug").log_level == "debug"


def test_lists_from_options() -> None:
    settings = read(adapter=["a=/x,y"], adapter_root=[Path("/r,s")], layers="3")
    assert settings.adapter == (("a", Path("/x,y")),)
    assert settings.adapter_root == (Path("/r,s"),)
    assert settings.layers == (3,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 65536}, ("--port", "65535", "65536")),
        ({"port": "x"}, ("--port", "integer", "'x'")),
        ({"device": "gpu"}, ("--device", "cuda", "'gpu'")),
        ({"layers": "3-1"}, ("--layers", "0-3,7", "'3-1'")),
        ({"layers": ""}, ("--layers", "0-3,7")),
        ({"layers": "0;1"}, ("--layers", "0-3,7")),
        ({"adapter": ["a"]}, ("--adapter", "NAME=PATH")),
        ({"adapter": ["a=/x", "a=/y"]}, ("--adapter", "a twice")),
        ({"max_loras": 0}, ("--max-loras", "1", "0")),
        ({"max_batch_tokens": 0}, ("--max-batch-tokens", "1", "0")),
        ({"max_queue": 0}, ("--max-queue", "1", "0")),
        ({"max_queue_mb": -1}, ("--max-queue-mb", "greater than 0")),
        ({"max_queue_delay_us": -1}, ("--max-queue-delay-us", "-1")),
        ({"request_timeout_s": 0}, ("--request-timeout-s", "greater than 0")),
        ({"request_timeout_s": "inf"}, ("--request-timeout-s", "86400")),
        ({"max_body_mb": 0}, ("--max-body-mb", "greater than 0")),
        ({"max_body_mb": "nan"}, ("--max-body-mb", "nan")),
        ({"max_body_mb": "inf"}, ("--max-body-mb", "1048576")),
        ({"max_body_mb": 1e300}, ("--max-body-mb", "1048576")),
        ({"max_queue_mb": 1e308}, ("--max-queue-mb", "1048576")),
        ({"body_timeout_s": 0}, ("--body-timeout-s", "greater than 0")),
        ({"body_timeout_s": "inf"}, ("--body-timeout-s", "less than or equal to 86400")),
        ({"body_timeout_s": "nan"}, ("--body-timeout-s", "nan")),
        ({"plan": "fast"}, ("--plan", "two_stream", "'fast'")),
        ({"log_level": "loud"}, ("--log-level", "debug")),
        ({"decode_shapes": "1,x"}, ("--decode-shapes", "integer")),
        ({"decode_shapes": "1,0"}, ("--decode-shapes", "greater than 0", "got '1,0'")),
        ({"adapter": ["a=b", "c"]}, ("--adapter", "NAME=PATH", "got 'a=b, c'")),
        ({"adapter_root": "/x,"}, ("--adapter-root", "none of them empty", "'/x,'")),
        ({"checkpoint": None}, ("CHECKPOINT", "--demo")),
        ({"demo": True}, ("CHECKPOINT", "--demo", "not both")),
    ],
)
def test_a_wrong_value_is_told_in_one_sentence(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(**options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert all(word in sentence for word in words), sentence


def test_the_sentence_names_the_variable_where_the_value_came_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELET_MAX_LORA_RANK", "many")
    with pytest.raises(ConfigurationError, match=r"^MOELET_MAX_LORA_RANK: .* got 'many'$"):
        read()


def test_the_port_that_kubernetes_sets_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOELET_PORT", "tcp://10.0.0.7:8000")
    with pytest.raises(ConfigurationError, match="Kubernetes"):
        read()
    assert read(port=1).port == 1


def test_keys_from_options_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [key.get_secret_value() for key in read(api_key=["a,b", "c"]).api_key] == ["a,b", "c"]
    monkeypatch.setenv("MOELET_API_KEY", "k1,")
    with pytest.raises(ConfigurationError, match="MOELET_API_KEY"):
        read()
    monkeypatch.setenv("MOELET_API_KEY", "k1, k2\n")
    monkeypatch.setenv("MOELET_ADMIN_API_KEY", "k3\n")
    settings = read()
    assert [key.get_secret_value() for key in settings.api_key] == ["k1", "k2"]
    assert settings.admin_api_key is not None
    assert settings.admin_api_key.get_secret_value() == "k3"
    assert not {"k1", "k2", "k3"} & set(re.findall(r"\w+", repr(settings) + str(settings.model_dump_json())))


SPELLINGS = ["MOELET_API_KEY", "MOELET_ADMIN_API_KEY", "moelet_api_key", "moelet_admin_api_key", "Moelet_Api_Key"]


@pytest.mark.parametrize("variable", SPELLINGS)
@pytest.mark.parametrize("value", ["", " ", "secret key", "secret-\u00e9", "secret" * 100, "secret\nsecret"])
def test_a_key_that_is_none_stops_the_start_and_is_not_told(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """An empty one above all, as that of a secret that was not found: without it everything would be open."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=f"^{variable}") as caught:
        read()
    assert "secret" not in str(caught.value)
    monkeypatch.delenv(variable)
    option = variable.lower().removeprefix("moelet_")
    with pytest.raises(ConfigurationError, match=f"^--{option.replace('_', '-')}: should be a key") as caught:
        read(**{option: value if "admin" in option else ["good", value]})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("value", ["k1", ""])
def test_an_empty_key_beside_another_spelling_of_it_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("MOELET_API_KEY", value)
    monkeypatch.setenv("moelet_api_key", "")
    with pytest.raises(ConfigurationError, match=r"^(MOELET_API_KEY|moelet_api_key) is empty"):
        read()
    assert [key.get_secret_value() for key in read(api_key=["k2"]).api_key] == ["k2"]


def test_the_case_of_a_variable_does_not_matter_and_there_is_one_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("moelet_api_key", "k1")
    monkeypatch.setenv("Moelet_Port", "many")
    with pytest.raises(ConfigurationError, match=r"^Moelet_Port: .* got 'many'$"):
        read()
    monkeypatch.setenv("Moelet_Port", "1")
    assert (read().port, [key.get_secret_value() for key in read().api_key]) == (1, ["k1"])
    monkeypatch.setenv("MOELET_PORT", "")
    assert read().port == 1
    monkeypatch.setenv("MOELET_PORT", "2")
    with pytest.raises(ConfigurationError, match=r"^MOELET_PORT and Moelet_Port are one option: unset"):
        read()
    assert read(port=3).port == 3
    monkeypatch.setenv("MOELET_API_KEY", "secret-2")
    with pytest.raises(ConfigurationError, match=r"^MOELET_API_KEY and moelet_api_key are one option") as caught:
        read(port=3)
    assert "secret-" not in str(caught.value)


def test_the_admin_key_is_a_key_of_its_own() -> None:
    with pytest.raises(ConfigurationError, match="--admin-api-key is one of the keys of --api-key") as caught:
        read(api_key=["secret-1", "secret-2"], admin_api_key="secret-2")
    assert "secret-" not in str(caught.value)


def test_unknown_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOELET_MAX_LORAZ", "MOELET_CACHE_DIR", "MOELET_SERVICE_HOST", "MOELET_PORT_8000_TCP", "MOELET_PORT"):
        monkeypatch.setenv(name, "1")
    for name in ("moelet_api_kye", "MOELET_max_loras", "moelet_cubin_dir"):
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == ("MOELET_MAX_LORAZ", "moelet_api_kye", "moelet_cubin_dir")


def test_changed_gpu_options_are_named() -> None:
    assert read().changed_gpu_options == ()
    assert read(plan="two_stream", decode_shapes="1").changed_gpu_options == ("--decode-shapes", "--plan")[::-1]


def test_plans_are_those_of_the_engine() -> None:
    plans = set(get_args(PlanOption))
    assert plans == {"auto", *Plan}
    assert all(read(plan=plan).plan == plan for plan in plans)


def test_settings_do_not_change() -> None:
    settings = read()
    with pytest.raises(ValueError, match=re.compile("frozen", re.IGNORECASE)):
        settings.port = 1  # type: ignore[misc]
