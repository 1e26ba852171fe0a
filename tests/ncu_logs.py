"""What Nsight Compute prints, line by line as it was seen to, for kernels and values of a test's choosing."""

from benchmarks import ncu

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)
READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
SECTORS, TO_SM = "lts__t_sectors_op_read.sum", "l1tex__m_xbar2l1tex_read_bytes.sum"
PEAK = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
ALL = {counter.name: counter.metrics[0] for counter in ncu.COUNTERS}


def lines_of(number: int, kernel: str, values: dict[str, tuple[str, str]], grid: str = "(132, 1, 1)") -> list[str]:
    """A kernel's lines as ncu prints them."""
    place = f'"{number}","4711","python3.12","127.0.0.1","{kernel}","1","13","(320, 1, 1)","{grid}","0","9.0"'
    section = "Command line profiler metrics"
    return [f'{place},"{section}","{name}","{unit}","{value}"' for name, (unit, value) in values.items()]


def log_of(*kernels: list[str]) -> str:
    return "\n".join(
        [
            "==PROF== Connected to process 4711 (/usr/bin/python3.12)",
            '==PROF== Profiling "sort" - 0: 0%....50%....100% - 5 passes',
            "==PROF== Disconnected from process 4711",
            HEADER,
            *(line for kernel in kernels for line in kernel),
            "",
        ]
    )


MLP = {
    READ: ("byte", "1,180,403,712"),
    WRITTEN: ("byte", "655,360"),
    TIME: ("nsecond", "275,264"),
    SECTORS: ("sector", "56,875,000"),
    TO_SM: ("", "n/a"),
    PEAK: ("%", "89.46"),
}
