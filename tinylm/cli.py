"""`tinylm COMMAND`: what is done with a run besides training it. A command imports what it needs when it is called."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ModelName = Annotated[str, typer.Argument(help="A run's folder, an adapter, a merged model, a Hub id or a .gguf file.")]
BaseModel = Annotated[
    str | None, typer.Option("--base_model", help="Where an adapter's base lies, if not where it says.")
]
Dtype = Literal["float32", "bfloat16", "float16"]
HeldIn = Annotated[Dtype, typer.Option("--dtype", help="What the weights are held in.")]
NewTokens = Annotated[
    int | None, typer.Option("--max_new_tokens", min=1, help="By default 100 (chat: 512), at most half of the context.")
]
Temperature = Annotated[float, typer.Option("--temperature", min=0, help="0 takes the likeliest token every time.")]
TopK = Annotated[int, typer.Option("--top_k", min=0, help="Draw among the k likeliest tokens; 0 for all.")]
TopP = Annotated[float, typer.Option("--top_p", min=0, max=1, help="Draw among the likeliest with this much together.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same text.")]


@app.callback()
def tinylm() -> None:
    """Look at small language models and at the runs that made them."""


@app.command(epilog="Example: tinylm audit runs/tlm")
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
    """Would a run start here and last, or can one be gone on with: exit code 1 if there is a problem."""
    _quieten()
    logging.getLogger("tinylm").setLevel(logging.ERROR)  # what is said on the way is in the table
    from dataclasses import asdict

    from tinylm.inspection.doctor import examine_run, table
    from tinylm.inspection.doctor_checks import examine_plan

    if run is not None and (config or launch_config or flags.args):
        raise ValueError("`tinylm doctor` looks at a run that was started (`--run`) or at one to be (`--config`).")
    findings = examine_run(run, ranks) if run else examine_plan(config, launch_config, flags.args)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    elif sys.stdout.isatty():
        _print_table([tuple(asdict(finding).values()) for finding in findings])
    else:
        typer.echo("\n".join(table(findings)))
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
    """Show what a run would train on, with its steps and memory: examples, the trained part marked. Writes nothing."""
    _quieten()
    from tinylm.inspection.preview_run import preview_run

    typer.echo(preview_run(config, flags.args, measure=measure))


@app.command(epilog="Example: tinylm report runs/demo/tlm runs/wikipedia/streamed --output_dir report")
def report(
    runs: Annotated[list[Path], typer.Argument(help="The folders of one or more runs, finished or not.")],
    output_dir: Annotated[
        Path | None, typer.Option("--output_dir", help="By default the folder `report` of the first run.")
    ] = None,
) -> None:
    """Draw losses, learning rate, gradient norm and throughput of runs, with a table in report.md. No tracker."""
    from tinylm.inspection.report import write_report

    typer.echo(f"Written to {write_report(runs, output_dir)}")


@app.command(epilog="Example: tinylm merge runs/qwen runs/qwen-merged --dtype bfloat16")
def merge(
    adapter: Annotated[Path, typer.Argument(help="The folder of a LoRA adapter.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist, or be empty.")],
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="By default that of the base.")] = None,
    base_model: BaseModel = None,
) -> None:
    """Merge an adapter into its base model, checked in fp32, and say what the cast to another dtype costs."""
    _quieten()
    from tinylm.publish.merge import merge_adapter

    for line in merge_adapter(adapter, out, base_model=base_model, dtype=dtype).lines():
        typer.echo(line)
    typer.echo(f"Written to {out}; talk to it: tinylm chat {out}")


@app.command(epilog="Example: tinylm push runs/tlm --repo_id me/tlm")
def push(
    folder: Annotated[Path, typer.Argument(help="A run, a model, an adapter, a tokenizer or a prepared corpus.")],
    repo_id: Annotated[str, typer.Option("--repo_id", help="name (your own), me/name or organisation/name.")],
    public: Annotated[bool, typer.Option("--public", help="For everybody to see; private otherwise.")] = False,
    base_model_id: Annotated[
        str | None, typer.Option("--base_model_id", help="The Hub's name of an adapter's base that was a local folder.")
    ] = None,
    data_license: Annotated[
        str | None, typer.Option("--data_license", help="Licence of the data for the card, such as cc-by-sa-4.0.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what somebody else, or another run, put there.")
    ] = False,
) -> None:
    """Send a result to the Hub, private by default, with the token of HF_TOKEN or `hf auth login`."""
    _quieten()
    from tinylm.publish.push import push_folder

    settings = {"private": not public, "base_model_id": base_model_id, "data_license": data_license}
    typer.echo(push_folder(folder, repo_id, overwrite=overwrite, **settings))


@app.command(epilog='Example: tinylm generate runs/tlm --prompt "The history of" --num_samples 3')
def generate(
    model: ModelName,
    prompt: Annotated[str | None, typer.Option("--prompt", help="By default standard input, to its end.")] = None,
    max_new_tokens: NewTokens = None,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    num_samples: Annotated[int, typer.Option("--num_samples", min=1, help="Texts from the prompt.")] = 1,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line: prompt, continuation.")] = False,
    base_model: BaseModel = None,
    dtype: HeldIn = "float32",
) -> None:
    """Continue a text, with any causal language model; without a chat template, as in pretraining."""
    if prompt is None:
        prompt = sys.stdin.read().removesuffix("\n")
    loaded, tokenizer = _load(model, base_model, dtype)
    from tinylm.generation import fitting_length, generate_text

    is_streamed = num_samples == 1 and not as_json
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "num_samples": num_samples}
    settings["max_new_tokens"] = max_new_tokens or fitting_length(loaded, 100)
    if is_streamed:
        _write(prompt)
    texts = generate_text(loaded, tokenizer, [prompt], write=_write if is_streamed else None, **settings)
    for number, text in enumerate(texts, start=1):
        if as_json:
            typer.echo(json.dumps({"prompt": prompt, "continuation": text[len(prompt) :]}, ensure_ascii=False))
        else:
            typer.echo("" if is_streamed else f"--- sample {number}\n{text}")


@app.command(epilog='Example: tinylm chat runs/keeper --prompt "Where does the sun set?"')
def chat(
    model: ModelName,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Ask this only, and print the answer.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="A message that stands before all turns.")] = None,
    max_new_tokens: NewTokens = None,
    temperature: Temperature = 0.3,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    seed: Seed = 0,
    base_model: BaseModel = None,
    dtype: HeldIn = "float32",
) -> None:
    """Talk to a model that has a chat template, which writes the conversation as in training. /quit ends."""
    loaded, tokenizer = _load(model, base_model, dtype)
    from tinylm.generation import COMMANDS, Chat, converse, fitting_length

    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    settings["max_new_tokens"] = max_new_tokens or fitting_length(loaded, 512)
    conversation = Chat(loaded, tokenizer, system=system, **settings)
    if prompt is not None:
        conversation.ask(prompt, _write)
        typer.echo()
        return
    if sys.stdin.isatty():
        typer.echo(COMMANDS)
    converse(conversation, _typed_lines(), _write)


def _load(name: str, base_model: str | None, dtype: Dtype) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model and tokenizer, on the accelerator where there is one."""
    _quieten()
    import torch

    from tinylm.evaluation.model_and_tokenizer import load_with_tokenizer

    model, tokenizer = load_with_tokenizer(name, base_model, dtype=getattr(torch, dtype))
    return model.to(torch.accelerator.current_accelerator() or "cpu"), tokenizer


def _quieten() -> None:
    """Standard output is for the answer: our log goes to standard error, and the libraries only say errors."""
    os.environ["TQDM_DISABLE"] = "1"
    from transformers.utils import logging as library

    logging.basicConfig(format="%(message)s")
    logging.getLogger("tinylm").setLevel(logging.INFO)
    library.set_verbosity_error()
    library.disable_progress_bar()
    warnings.simplefilter("ignore")


def _write(text: str) -> None:
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _print_table(rows: list[tuple[str, str, str]]) -> None:
    from rich import box, print
    from rich.table import Table

    colors = {"ok": "green", "warning": "yellow", "problem": "bold red"}
    shown = Table(box=box.SIMPLE, show_header=False)
    for level, subject, detail in rows:
        shown.add_row(f"[{colors[level]}]{level}", subject, detail.replace("[", r"\["))
    print(shown)


def _typed_lines() -> Iterator[str]:
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return


def main() -> None:
    """The console script: wrong input becomes one paragraph and exit code 2."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        typer.echo(" ".join(str(error).split()), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
