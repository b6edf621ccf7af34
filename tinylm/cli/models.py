"""`tinylm score|generate|chat|merge|push`: what is done with a model."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .application import answers, app, quieten, say, typed_lines, write

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


@app.command(epilog="Example: tinylm score runs/demo/tlm runs/mine --corpus sample --corpus notes/ --split validation")
def score(
    models: Annotated[list[str], typer.Argument(help="Runs' folders, adapters, merged models, Hub ids, .gguf files.")],
    corpus: Annotated[
        list[str],
        typer.Option(
            "--corpus", help="`sample`, a file, folder or glob, or a dataset of the Hub, as name:configuration:split."
        ),
    ],
    split: Annotated[Literal["all", "validation"], typer.Option("--split", help="validation: the held-out tenth.")] = (
        "all"
    ),
    document_separator: Annotated[
        str | None,
        typer.Option(
            "--document_separator",
            help="Splits text files, e.g. '\\n\\n\\n'; as of the run: it decides what is held out.",
        ),
    ] = None,
    max_documents: Annotated[
        int | None,
        typer.Option("--max_documents", min=1, help="The first this many of each corpus; as of the run, for the same."),
    ] = None,
    text_column: Annotated[str, typer.Option("--text_column", help="The column that holds the documents.")] = "text",
    block_size: Annotated[
        int | None, typer.Option("--block_size", help="Tokens of a window; by default each model's context.")
    ] = None,
    stride: Annotated[int | None, typer.Option("--stride", help="Tokens from one window to the next.")] = None,
    batch_size: Annotated[int, typer.Option("--batch_size", min=1, help="Windows at once.")] = 8,
    output_file: Annotated[Path | None, typer.Option("--output_file", help="Write the JSON there as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of the table.")] = False,
    base_model: BaseModel = None,
    dtype: HeldIn = "float32",
) -> None:
    """Score models on texts, side by side.

    Nats per token, perplexity and bits per byte; between tokenizers only bits per byte compare.
    """
    quieten()
    import torch
    from rich.console import Console

    from tinylm.evaluation.corpora import corpora_of, open_places
    from tinylm.evaluation.score_table import check_output_file, print_scores, scores_as_json
    from tinylm.evaluation.side_by_side import contestants, score_side_by_side
    from tinylm.training.run_record import write_atomically

    if output_file is not None:
        check_output_file(output_file)
    chosen = contestants(models, base_model=base_model, block_size=block_size, stride=stride)
    places = {"text_column": text_column, "document_separator": document_separator, "max_documents": max_documents}
    texts = corpora_of(open_places(corpus, **places), split=split, tokenizer=chosen[0].tokenizer)
    settings = {"device": _device(), "batch_size": batch_size, "dtype": getattr(torch, dtype), "stride": stride}
    results = score_side_by_side(chosen, texts, **settings)
    if as_json:
        write(scores_as_json(results))
    else:
        print_scores(results, Console(file=answers()))
    if output_file is not None:  # after the answer: what took hours is not lost to a disk that is full
        write_atomically(output_file, scores_as_json(results))


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
    """Continue a text with any causal language model.

    No chat template: a text goes on as those of pretraining do.
    """
    if prompt is None:
        prompt = sys.stdin.read().removesuffix("\n")
    quieten()
    from tinylm.generation import fitting_length, generate_text

    loaded, tokenizer = _load(model, base_model, dtype)

    is_streamed = num_samples == 1 and not as_json
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "num_samples": num_samples}
    settings["max_new_tokens"] = max_new_tokens or fitting_length(loaded, 100)
    if is_streamed:
        write(prompt)
    texts = generate_text(loaded, tokenizer, [prompt], write=write if is_streamed else None, **settings)
    for number, text in enumerate(texts, start=1):
        if as_json:
            say(json.dumps({"prompt": prompt, "continuation": text[len(prompt) :]}, ensure_ascii=False))
        else:
            say("" if is_streamed else f"--- sample {number}\n{text}")


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
    """Talk to a model that has a chat template; /quit ends.

    The template writes the conversation as it did in training.
    """
    quieten()
    from tinylm.generation import COMMANDS, Chat, check_question, converse, fitting_length

    if prompt is not None:
        check_question(prompt)
    loaded, tokenizer = _load(model, base_model, dtype)

    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    settings["max_new_tokens"] = max_new_tokens or fitting_length(loaded, 512)
    conversation = Chat(loaded, tokenizer, system=system, **settings)
    if prompt is not None:
        conversation.ask(prompt, write)
        say()
        return
    if sys.stdin.isatty():
        say(COMMANDS)
    converse(conversation, typed_lines(), write)


@app.command(epilog="Example: tinylm merge runs/qwen runs/qwen-merged --dtype bfloat16")
def merge(
    adapter: Annotated[Path, typer.Argument(help="The folder of a LoRA adapter.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not exist, or be empty.")],
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="By default that of the base.")] = None,
    base_model: BaseModel = None,
) -> None:
    """Merge an adapter into its base model, and check the result.

    They are compared in fp32; what a cast to another dtype costs is said.
    """
    quieten()
    from tinylm.publish.merge import merge_adapter

    for line in merge_adapter(adapter, out, base_model=base_model, dtype=dtype).lines():
        say(line)
    say(f"Written to {out}; talk to it: tinylm chat {out}")


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
    """Send a result to the Hub, private unless told otherwise.

    The token is that of HF_TOKEN or of `hf auth login`.
    """
    quieten()
    from tinylm.publish.push import push_folder

    settings = {"private": not public, "base_model_id": base_model_id, "data_license": data_license}
    say(push_folder(folder, repo_id, overwrite=overwrite, **settings))


def _load(name: str, base_model: str | None, dtype: Dtype) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model and tokenizer, on the accelerator where there is one."""
    import torch

    from tinylm.evaluation.model_and_tokenizer import load_with_tokenizer

    model, tokenizer = load_with_tokenizer(name, base_model, dtype=getattr(torch, dtype))
    return model.to(_device()), tokenizer


def _device() -> "torch.device":
    """The accelerator that is there, else the CPU; unless asked to look, torch gives the one that it was built for."""
    import torch

    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
