"""What Nsight Compute says: its tables, units, lists of metrics and complaints, each as it was seen to print them."""

import pytest
from benchmarks import ncu

from moelet.layer.errors import ConfigurationError
from ncu_logs import ALL, HEADER, MLP, PEAK, READ, SECTORS, TIME, lines_of, log_of


def test_counters_are_read_in_bytes_microseconds_and_per_cent() -> None:
    found = ncu.kernels(log_of(lines_of(0, "sort", {READ: ("byte", "0")}, "(1, 1, 1)"), lines_of(1, "expert_mlp", MLP)))
    assert [(one.function, one.grid, one.block) for one in found] == [
        ("sort", [1, 1, 1], [320, 1, 1]),
        ("expert_mlp", [132, 1, 1], [320, 1, 1]),
    ]
    assert found[1].counters(ALL) == {
        "time_us": 275.264,
        "dram_read_bytes": 1_180_403_712,
        "dram_write_bytes": 655_360,
        "l2_read_bytes": 56_875_000 * 32,
        "to_sm_bytes": None,
        "dram_pct": 89.46,
        "l2_hit_pct": None,
        "tensor_pct": None,
    }
    assert found[0].counters(ALL)["dram_read_bytes"] == 0, "nothing read is not nothing known"
    assert found[1].counters({"time_us": TIME})["dram_read_bytes"] is None


@pytest.mark.parametrize(
    ("metric", "unit", "value", "expected"),
    [
        (TIME, "ns", "1,500", 1.5),
        (TIME, "us", "275.26", 275.26),
        (TIME, "usecond", "275.26", 275.26),
        (TIME, "msecond", "1.5", 1500.0),
        (TIME, "second", "0.002", 2000.0),
        (READ, "Gbyte", "1.18", 1_180_000_000),
        (READ, "Kbyte", "2.5", 2500),
        (SECTORS, "Ksector", "2", 64_000),
        (SECTORS, "", "3", 96),
        (READ, "byte", "nan", None),
        (READ, "byte", "inf", None),
        (READ, "byte", "(!) n/a", None),
        (READ, "byte", "", None),
    ],
)
def test_units_and_values(metric: str, unit: str, value: str, expected: float | None) -> None:
    (kernel,) = ncu.kernels(log_of(lines_of(0, "sort", {metric: (unit, value)})))
    name = next(name for name, each in ALL.items() if each == metric)
    assert kernel.counters(ALL)[name] == pytest.approx(expected)


def test_what_is_no_unit_or_no_table_is_said() -> None:
    for unit in ("furlong", "byte", ""):
        (kernel,) = ncu.kernels(log_of(lines_of(0, "sort", {TIME: (unit, "1")})))
        with pytest.raises(ConfigurationError, match=f"gpu__time_duration.sum in '{unit}'"):
            kernel.counters(ALL)
    with pytest.raises(ConfigurationError, match="no table"):
        ncu.kernels("==PROF== Connected to process 1\n==WARNING== No kernels were profiled.\n")
    with pytest.raises(ConfigurationError, match="Metric Value"):
        ncu.kernels(HEADER.replace(',"Metric Value"', "") + "\n")


def test_lines_of_ncus_own_between_and_behind_are_no_kernels() -> None:
    kernel = lines_of(0, "void gate<4, (int)2>(const float *, int)", {READ: ("byte", "8")})
    text = log_of(kernel, [HEADER, "==PROF== Disconnected", ""], lines_of(10, "sort", {READ: ("byte", "9")}))
    assert [(one.function, one.metrics[READ][0]) for one in ncu.kernels(text)] == [("gate", 8.0), ("sort", 9.0)]


def test_counters_that_ncu_does_not_know_are_left_out_and_named() -> None:
    plain = "Device NVIDIA GH100 (GH100)\n----\nMetric Name  Metric Type  Metric Unit  Metric Description\n"
    rows = [
        f"{name}   Counter  byte  # of bytes, see l1tex__m_xbar2l1tex_read_bytes" for name in ("dram__bytes_op_read",)
    ]
    rows += ["gpu__time_duration  Counter  nsecond  time", '"dram__throughput","Throughput","%","all of it"']
    known = ncu.listed(plain + "\n".join(rows))
    assert known == {"dram__bytes_op_read", "gpu__time_duration", "dram__throughput"}
    chosen, absent = ncu.choose(known)
    assert chosen == {"time_us": TIME, "dram_read_bytes": "dram__bytes_op_read.sum", "dram_pct": PEAK}
    assert absent == [ALL[name] for name in ALL if name not in chosen]
    assert ncu.choose({metric.split(".")[0] for metric in ALL.values()}) == (ALL, [])
    assert ncu.choose(set())[0] == {"time_us": TIME, "dram_read_bytes": READ}


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access", 1, "NVreg_RestrictProfiling"),
        ("==ERROR== Failed to find metric regex:^x$\n", 1, "Failed to find metric"),
        ("moelet bench: no GPU can be used\n==ERROR== The application returned an error code (2).", 2, "no GPU can be"),
        ("Traceback\nKeyError: 'x'\n", 1, "KeyError: 'x'"),
        ("", -9, "ended with -9"),
        ("==WARNING== No kernels were profiled.\n", 0, "profiled no kernel"),
    ],
)
def test_what_goes_wrong_under_ncu_is_one_sentence(said: str, code: int, words: str) -> None:
    complaint = ncu.wrong(said, code)
    assert complaint is not None
    assert words in complaint
    assert "\n" not in complaint
    assert ncu.wrong("==PROF== Connected\n==WARNING== caches\n1,2\n", 0) is None
