"""What a fine-tuning run can be told beside `RunArguments`: the base model, the adapter, the conversations."""

from dataclasses import dataclass, field

from .arguments import RunArguments, _help


@dataclass
class FinetuneArguments(RunArguments):
    """`RunArguments` with the defaults of an adapter."""

    learning_rate: float = field(default=2e-4, metadata=_help("Peak learning rate of AdamW."))


@dataclass
class LoraArguments:
    """The base model and what is trained of it."""

    model_name_or_path: str = field(
        metadata=_help("Base model: a Hub id, a folder, a .gguf file, or package:name/file in a Python package.")
    )
    base_model_id: str | None = field(
        default=None,
        metadata=_help("Hub id of a base model that was loaded from elsewhere; adapter and card name it."),
    )
    tokenizer_name_or_path: str | None = field(default=None, metadata=_help("Unset: the base model's own."))
    attn_implementation: str | None = field(default=None, metadata=_help("eager, sdpa, flash_attention_2, ..."))
    quantization: str | None = field(
        default=None, metadata=_help("4bit or 8bit: the frozen base through bitsandbytes, on an NVIDIA GPU.")
    )
    full: bool = field(default=False, metadata=_help("Train all weights instead of an adapter."))
    adapter_name_or_path: str | None = field(
        default=None, metadata=_help("Go on with an adapter, which keeps its own rank, alpha and targets.")
    )
    lora_rank: int = field(default=8, metadata=_help("Rank of the adapter's matrices."))
    lora_alpha: int = field(default=16, metadata=_help("The adapter is scaled by alpha / rank."))
    lora_dropout: float = field(default=0.05, metadata=_help("Dropout on what goes into the adapter."))
    target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "v_proj"],
        metadata=_help("Linear layers that get an adapter, by the ends of their names; all-linear for all of them."),
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata=_help("Modules that are trained whole and saved with the adapter, such as lm_head.")
    )
    use_dora: bool = field(default=False, metadata=_help("Train the lengths of the columns apart (DoRA)."))
    use_rslora: bool = field(default=False, metadata=_help("Scale by alpha / sqrt(rank) instead (rsLoRA)."))


@dataclass
class ChatArguments:
    """Where conversations come from and how they become batches."""

    dataset_name: str | None = field(default=None, metadata=_help("A dataset on the Hub."))
    dataset_config_name: str | None = field(default=None, metadata=_help("Its configuration."))
    dataset_split: str = field(default="train", metadata=_help("Its split."))
    data_files: list[str] | None = field(
        default=None, metadata=_help("Local files, globs or folders (jsonl, json, parquet, csv).")
    )
    eval_data_files: list[str] | None = field(
        default=None, metadata=_help("Local files that are held out; unset: one conversation in ten, by a hash of it.")
    )
    data_shape: str | None = field(
        default=None,
        metadata=_help("messages, conversations, prompt_completion, instruction or text; unset: as the columns say."),
    )
    max_examples: int | None = field(default=None, metadata=_help("Use the first this many rows."))
    max_eval_examples: int = field(default=500, metadata=_help("Held-out conversations at most."))
    streaming: bool = field(default=False, metadata=_help("Read the rows while training; needs --max_steps."))
    shuffle_window: int = field(default=1000, metadata=_help("Examples held back to shuffle a stream."))
    skip_bad_rows: bool = field(default=False, metadata=_help("Drop and count rows that are no conversation."))
    chat_template: str | None = field(
        default=None, metadata=_help("A file with the chat template to use instead of the tokenizer's.")
    )
    train_on: str = field(
        default="answers", metadata=_help("The answers, the last_answer of each conversation, or all tokens.")
    )
    max_length: int | None = field(
        default=None, metadata=_help("Tokens of an example at most; unset: 1024, or the model's context if less.")
    )
    packing: bool = field(
        default=True, metadata=_help("Join examples into rows, without padding; false pads each to the longest.")
    )
    row_tokens: int | None = field(default=None, metadata=_help("Tokens of a packed row at most; max_length if unset."))
