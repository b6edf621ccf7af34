"""What a benchmark found, as JSON with all numbers and as a table for people; each part says how and when it was made.

Parts are measured one by one and kept until they are measured again, so every part carries its own stamp.
"""

import json
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from ..launch import Launch
from ..run_record import current_commit, describe_hardware, write_atomically

Number = float | int | str | bool | list[float]

_PACKAGES = ("torch", "transformers", "accelerate")
_OWN_FILES = {"finetuning": ("bench_finetuning", ("peft", "trl"))}  # a part: its files, packages it depends on too


@dataclass(frozen=True)
class Measurement:
    """A row of the table: `value` in words, the `numbers` behind it, and whether it `met` a `target` if it has one."""

    what: str
    value: str
    numbers: dict[str, Number] = field(default_factory=dict)
    target: str = ""
    met: bool | None = None


def write_results(output_dir: str, part: str, measurements: list[Measurement], launch: Launch) -> str:
    """Puts a part into the `.json` and `.md` of the folder that it belongs to (`bench_training`, or one of its own);
    the table as it is now."""
    stem, packages = _OWN_FILES.get(part, ("bench_training", ()))
    path = Path(output_dir, f"{stem}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    made = {
        "hardware": describe_hardware(launch.device),
        "threads": launch.threads,
        "commit": current_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in (*_PACKAGES, *packages)}},
    }
    results[part] = {"made": made, "measurements": [asdict(measurement) for measurement in measurements]}
    write_atomically(path, json.dumps(results, indent=2) + "\n")
    table = markdown(results)
    write_atomically(path.with_suffix(".md"), table)
    return table


def markdown(results: dict[str, dict]) -> str:
    """The table of all parts, and below it a line for each set of circumstances that parts were measured in."""
    lines = ["| what | measured | target | met |", "|---|---|---|---|"]
    circumstances: dict[str, list[str]] = {}
    for part, result in results.items():
        for row in result["measurements"]:
            met = "" if row["met"] is None else "yes" if row["met"] else "no"
            lines.append(f"| {row['what']} | {row['value']} | {row['target']} | {met} |")
        made = result["made"]
        packages = ", ".join(f"{name} {number}" for name, number in made["versions"].items() if name != "python")
        circumstance = f"{made['hardware']}, {made['threads']} threads; commit {made['commit']}; {packages}"
        circumstances.setdefault(f"{made['date']}; {circumstance}", []).append(part)
    lines.append("")
    lines += [f"{', '.join(parts)}: {circumstance}." for circumstance, parts in circumstances.items()]
    return "\n".join(lines) + "\n"
