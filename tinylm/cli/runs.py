"""`tinylm doctor|preview|audit|report`: what a run would do, can still do, and did."""

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from .application import answers, app, print_table, quieten, say


@app.command(
    epilog="Example: tinylm doctor --config recipes/configs/pretrain_tlm/demo.yaml",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def doctor(
    flags: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="A run file; more flags of its recipe may follow.")
    ] = None,
    launch_config: Annotated[
        Path | None, typer.Option("--launch_config", help="A launch file, such as accelerate_configs/cpu_gloo.yaml.")
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Instead: the folder of a run that was started.")] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Of --run: with how many to go on.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of the table.")] = False,
) -> None:
    """Would a run start here and last? Can one be gone on with?

    Exit code 1 if there is a problem.
    """
    quieten()
    logging.getLogger("tinylm").setLevel(logging.ERROR)  # what is said on the way is in the table
    from dataclasses import asdict

    from tinylm.inspection.doctor import examine_run, table
    from tinylm.inspection.doctor_checks import examine_plan

    if run is not None and (config or launch_config or flags.args):
        raise ValueError("`tinylm doctor` looks at a run that was started (`--run`) or at one to be (`--config`).")
    findings = examine_run(run, ranks) if run else examine_plan(config, launch_config, flags.args)
    if as_json:
        say(json.dumps([asdict(finding) for finding in findings]))
    elif answers().isatty():
        print_table([tuple(asdict(finding).values()) for finding in findings])
    else:
        say("\n".join(table(findings)))
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


@app.command(
    epilog="Example: tinylm preview --config recipes/configs/finetune_qwen/smollm2_demo.yaml --max_length 256",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def preview(
    flags: typer.Context,
    config: Annotated[Path, typer.Option("--config", help="A run file; more flags of its recipe may follow.")],
    measure: Annotated[bool, typer.Option("--measure", help="Take a few real steps, for time and memory.")] = False,
) -> None:
    """Show what a run would train on, its steps and its memory.

    Examples are decoded, the trained part marked. Nothing is written.
    """
    quieten()
    from tinylm.inspection.preview_run import preview_run

    say(preview_run(config, flags.args, measure=measure, in_colour=answers().isatty()))


@app.command(epilog="Example: tinylm audit runs/tlm")
def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run that was started with --record_audit true.")],
) -> None:
    """Was every record trained on as often as it should?

    Exit code 1 if one was missed or repeated.
    """
    from tinylm.inspection.audit import audit_run

    epochs = audit_run(run)
    for epoch in epochs:
        for line in epoch.lines():
            say(line)
    if not all(epoch.is_clean for epoch in epochs):
        raise typer.Exit(1)


@app.command(epilog="Example: tinylm report runs/demo/tlm runs/wikipedia/streamed --output_dir report")
def report(
    runs: Annotated[list[Path], typer.Argument(help="The folders of one or more runs, finished or not.")],
    output_dir: Annotated[
        Path | None, typer.Option("--output_dir", help="By default the folder `report` of the first run.")
    ] = None,
) -> None:
    """Draw the losses and the speed of runs; no tracker is needed.

    One PNG each for losses, learning rate, gradient norm and throughput, and a table in report.md.
    """
    from tinylm.inspection.report import write_report

    say(f"Written to {write_report(runs, output_dir)}")
