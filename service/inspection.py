"""What ``moelet inspect`` prints: a report of a checkpoint or an adapter, as tables or as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..graphs.options import GraphOptions
from ..graphs.planning import MemoryPlan, plan_memory
from ..layer.adapter_loading import load_adapter
from ..layer.checkpoint import open_checkpoint
from ..layer.errors import AdapterNotFoundError, CheckpointNotFoundError, ConfigurationError
from ..layer.report import AdapterReport, CheckpointReport, ProjectionReport, adapter_report, checkpoint_report
from ..layer.shards import is_file
from ..layer.spec import ranges
from .adapter_reading import ANYWHERE

Report = CheckpointReport | AdapterReport


@dataclass(frozen=True, slots=True)
class Inspected:
    """A report, and for a checkpoint what a GPU would hold of it."""

    report: Report
    gpu_memory: MemoryPlan | None = None


def inspect(path: Path, base: Path | None, *, max_loras: int, max_lora_rank: int) -> Inspected:
    """The report of the checkpoint or adapter at ``path``; an adapter is read against ``base``, by default
    ``default_base`` of it. Raises ``MoeletError``."""
    if not is_file(path / "adapter_config.json"):
        opened = open_checkpoint(path)
        nbytes = {index: opened.layer_nbytes(index) for index in opened.model.layers}
        report = checkpoint_report(opened.model, nbytes, opened.notes)
        options = GraphOptions(max_loras=max_loras, max_lora_rank=max_lora_rank)
        return Inspected(report, plan_memory(opened.model, options))
    model = open_checkpoint(base or default_base(path)).model
    return Inspected(adapter_report(load_adapter(path, model, max_rank=max_lora_rank, root=ANYWHERE), model))


def default_base(adapter: Path) -> Path:
    """The checkpoint that an adapter names as its base, or in whose folder it lies, whichever is here.
    Raises ``ConfigurationError`` where neither is."""
    try:
        config = orjson.loads((adapter / "adapter_config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterNotFoundError(f"adapter_config.json in {adapter} cannot be read: {error}") from None
    named = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    for folder in ([Path(named)] if named and isinstance(named, str) else []) + [adapter.resolve().parent]:
        with suppress(CheckpointNotFoundError):  # a name of the hub need not be one of a file
            if is_file(folder / "config.json"):
                return folder
    raise ConfigurationError(
        f"an adapter is inspected against its checkpoint, and {named!r} is no checkpoint folder here: "
        "pass its folder with --base"
    )


def as_json(inspected: Inspected) -> str:
    """The report as indented JSON, with ``gpu_memory`` where there is a plan of it."""
    facts = asdict(inspected.report)
    if inspected.gpu_memory is not None:
        facts["gpu_memory"] = asdict(inspected.gpu_memory)
        facts["gpu_memory"]["buffers"] = [row._asdict() for row in inspected.gpu_memory.buffers]
    return json.dumps(facts, indent=2, default=str)


def show(inspected: Inspected) -> None:
    """Print the report as tables, and what a GPU would hold."""
    console = Console()
    report, plan = inspected.report, inspected.gpu_memory
    _show_facts(console, report)
    for title, rows in sections(report).items():
        if rows:
            console.print(table(title, rows))
    if plan is not None:
        console.print("[bold]on a GPU[/bold]")
        _show_facts(console, plan)
        console.print(table("arenas, which share one allocation", [asdict(shape) for shape in plan.shapes]))
        console.print(table("buffers of the largest shape", [row._asdict() for row in plan.buffers]))


def _show_facts(console: Console, facts: Report | MemoryPlan) -> None:
    named = {field.name: getattr(facts, field.name) for field in fields(facts)}
    console.print(pairs({name: value for name, value in named.items() if value not in (None, "")}))


def sections(report: Report) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table by its title; layers that are alike share their rows."""
    if isinstance(report, CheckpointReport):
        groups = alike_layers((layer.index, asdict(layer)) for layer in report.layers)
        alike = {f"layers {layers}, each": fact_rows(facts) for layers, facts in groups}
        return alike | {
            "not served": [asdict(skipped) for skipped in report.skipped],
            "notes": [{"note": note} for note in report.notes],
        }
    changed = [(layer.index, projection_row(part)) for layer in report.layers for part in layer.projections]
    return {
        "projections": [{"layers": layers, **row} for layers, row in alike_layers(changed)],
        "ignored keys": [asdict(ignored) for ignored in report.ignored],
        "does not fit the base": [{"reason": reason} for reason in report.refused],
    }


def fact_rows(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each fact, under headings that are blank."""
    return [{"": words(name), " ": told(name, value)} for name, value in facts.items()]


def alike_layers(rows: Iterable[tuple[int, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """``(layer, facts)`` with the layers of equal facts brought together as ``"0-3,7"``."""
    groups: list[tuple[list[int], dict[str, Any]]] = []
    for index, facts in rows:
        facts = {name: value for name, value in facts.items() if name != "index"}
        found = next((layers for layers, known in groups if known == facts), None)
        if found is None:
            groups.append(([index], facts))
        else:
            found.append(index)
    return [(ranges(layers), facts) for layers, facts in groups]


def projection_row(part: ProjectionReport) -> dict[str, Any]:
    """One projection in few columns."""
    return {
        "projection": part.name,
        "out x in": f"{part.out_features} x {part.in_features}",
        "experts": f"{part.num_experts} of {part.of_experts}",
        "rank": span(part.min_rank, part.max_rank),
        "scaling": span(part.min_scaling, part.max_scaling),
        "shared": part.shared,
        "bytes": part.bytes,
    }


def span(low: float, high: float) -> str:
    """``"8"``, or ``"3 to 8"``."""
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def pairs(facts: Mapping[str, Any]) -> Table:
    """The facts that are single values, a line each."""
    shown = Table(show_header=False, box=None)
    for name, value in facts.items():
        if value != () and not (isinstance(value, tuple) and (is_dataclass(value[0]) or isinstance(value[0], tuple))):
            shown.add_row(words(name), told(name, value))
    return shown


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """``rows``, all of the same keys."""
    heading = any(name.strip() for name in rows[0])
    shown = Table(title=title, title_justify="left", box=SIMPLE, show_header=heading, collapse_padding=True)
    for name in rows[0]:
        shown.add_column(words(name), overflow="fold")
    for row in rows:
        shown.add_row(*(told(name, value) for name, value in row.items()))
    return shown


def words(name: str) -> str:
    """A field's name for people."""
    return name.replace("_", " ")


def told(name: str, value: Any) -> str:
    """A value for people: bytes in binary units, lists joined, yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "bytes" or name.endswith("_bytes"):
        return human_bytes(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def human_bytes(count: int) -> str:
    """``1536`` as ``1.5 KiB``."""
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and (larger := next(units, None)):
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
