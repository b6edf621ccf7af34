"""`tinylm COMMAND`: what is done with a run besides training it. A command imports what it needs when it is called."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def tinylm() -> None:
    """Look at small language models and at the runs that made them."""


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a run that was started with --record_audit true.")],
) -> None:
    """Show whether every record was trained on as often as it should: exit code 1 if one was missed or repeated."""
    from tinylm.inspection.audit import audit_run

    epochs = audit_run(run)
    for epoch in epochs:
        for line in epoch.lines():
            typer.echo(line)
    if not all(epoch.is_clean for epoch in epochs):
        raise typer.Exit(1)


def main() -> None:
    """The console script: wrong input becomes one paragraph and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        typer.echo(" ".join(str(error).split()), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
