"""Adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) through PEFT, on a base model that stays as it is.

Choices:
- What is asked for is tried on an empty model of the same architecture, which takes no memory, before data or weights
  are loaded: layers that are not there, or an adapter of another base, end the run at once.
- The frozen base is held in the run's precision (bf16 halves its memory and its reading), what is trained in fp32.
- An adapter says what it belongs to: `--base_model_id`, else the base's id or path.
"""

import json
import logging
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModelForCausalLM, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tinylm.evaluation.model_and_tokenizer import check_adapters_file
from tinylm.models.loading import cut_off, hub_answers, resolve_name

from .finetune_arguments import LoraArguments

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
_FROZEN_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Adapter(PeftModelForCausalLM):
    """An adapter on its base model; saves itself without asking the Hub, and without a card of PEFT's."""

    def __init__(self, model: PreTrainedModel, settings: LoraConfig) -> None:
        with warnings.catch_warnings():  # PEFT asks for an attribute that transformers is about to rename
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(model, settings)

    def save_pretrained(self, save_directory: str, is_main_process: bool = True, **kwargs) -> None:
        """The adapter, its configuration, and how the base model generates."""
        # PEFT looks on the Hub whether the vocabulary has grown: this kit never lets it grow.
        kwargs = {"save_embedding_layers": False, **kwargs}
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            self.get_base_model().generation_config.save_pretrained(save_directory)

    def create_or_update_model_card(self, output_dir: str) -> None:
        """Nothing: PEFT's would name paths of this machine; the run writes its own."""

    def own_weights(self) -> dict[str, Tensor]:
        """What is saved."""
        return get_peft_model_state_dict(self, save_embedding_layers=False)


def base_dtype(lora: LoraArguments, precision: str) -> torch.dtype:
    """What the base model is held in: half where it is frozen and the run computes in half."""
    return torch.float32 if lora.full else _FROZEN_DTYPES.get(precision, torch.float32)


def base_name(lora: LoraArguments) -> str:
    """What an adapter and its card say that they belong to."""
    return lora.base_model_id or base_place(lora)


def base_place(lora: LoraArguments) -> str:
    """Where the base model is found again: its name, or the whole path of a local one."""
    name = lora.model_name_or_path
    is_local = not name.startswith("package:") and Path(name).expanduser().exists()
    return str(Path(name).expanduser().resolve()) if is_local else name


def warn_of_local_base(lora: LoraArguments) -> None:
    """Says once that a path of this machine is going to be in what the run saves (case E3)."""
    if Path(base_name(lora)).exists():
        logger.warning(
            "What this run saves names its base model as `%s`, a path of this machine: it cannot be published like"
            " that. Set `--base_model_id` to the base model's id on the Hub.",
            base_name(lora),
        )


def plan_training(config: PreTrainedConfig, lora: LoraArguments) -> int:
    """How many weights the run will train; reads no weights of the base model.

    Raises:
        ValueError: settings that contradict each other or make no adapter, layers that the model lacks (those that it
            has are listed), an adapter of another base, or one whose weights are pickled, missing or cut off.
        FileNotFoundError: no such adapter.
    """
    with torch.device("meta"):
        model = untrained_model(config, lora)
    if lora.adapter_name_or_path:
        _check_weights_fit(model, lora)
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def untrained_model(
    config: PreTrainedConfig, lora: LoraArguments, dtype: torch.dtype = torch.float32
) -> PreTrainedModel | Adapter:
    """What will be trained, with weights of `dtype` (those of the adapter in fp32) that mean nothing.

    Raises:
        ValueError, FileNotFoundError: as `plan_training`.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if lora.full:
        _check_full(lora)
        return model
    return Adapter(model, _settings(model, lora))


def trainable_model(model: PreTrainedModel, lora: LoraArguments) -> PreTrainedModel | Adapter:
    """The base model with an adapter to be trained on it, in training mode; `full`: the model itself."""
    if not lora.full:
        model = Adapter(model, _settings(model, lora))
        if lora.adapter_name_or_path:
            set_peft_model_state_dict(model, _weights_of(lora))
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    total = sum(weight.numel() for weight in model.parameters())
    logger.info("Trained: %s of %s parameters (%s)", f"{trained:,}", f"{total:,}", _in_words(model))
    return model.train()


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the layers that an adapter can be put on.

    Those inside torch's own attention are none: it reads their weights and never calls them.
    """
    blocks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention))
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and not name.startswith(blocks)
    ]


def _check_full(lora: LoraArguments) -> None:
    if lora.adapter_name_or_path or lora.quantization:
        flag = "adapter_name_or_path" if lora.adapter_name_or_path else "quantization"
        raise ValueError(
            f"`--full` trains the weights of the model itself, which `--{flag} {getattr(lora, flag)}` leaves frozen."
            " Leave one of them out."
        )


def _settings(model: PreTrainedModel, lora: LoraArguments) -> LoraConfig:
    if lora.adapter_name_or_path:
        settings = _config_of(lora.adapter_name_or_path)
        _check_same_base(settings, lora)
        _check_targets(model, sorted(settings.target_modules), f"The adapter `{lora.adapter_name_or_path}` is")
        settings.inference_mode = False
        settings.base_model_name_or_path = base_name(lora)
        return settings
    _check_numbers(lora)
    targets = lora.target_modules
    if targets == [ALL_LINEAR]:
        head = model.get_output_embeddings()
        names = [name for name in linear_layers(model) if model.get_submodule(name) is not head]
        targets = sorted({name.rpartition(".")[2] for name in names})
    _check_targets(model, targets, "`--target_modules` is")
    _check_modules_to_save(model, lora.modules_to_save or [])
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name(lora),
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        modules_to_save=lora.modules_to_save,
        use_dora=lora.use_dora,
        use_rslora=lora.use_rslora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )


def _check_numbers(lora: LoraArguments) -> None:
    if lora.lora_rank < 1:
        raise ValueError(f"The rank of an adapter is at least 1; `lora_rank` is {lora.lora_rank}. Set `--lora_rank`.")
    if lora.lora_alpha <= 0:
        raise ValueError(f"An adapter is scaled by a positive number; `lora_alpha` is {lora.lora_alpha}.")
    if not 0 <= lora.lora_dropout < 1:
        raise ValueError(f"Dropout is at least 0 and less than 1; `lora_dropout` is {lora.lora_dropout}.")


def _check_targets(model: PreTrainedModel, targets: list[str], whose: str) -> None:
    linear = linear_layers(model)
    for target in targets:
        found = _named(model, target)
        if target and set(found) & set(linear):
            continue
        fault = f"`{found[0]}` is a {type(model.get_submodule(found[0])).__name__}" if found else "there is none"
        ends = sorted({name.rpartition(".")[2] for name in linear})
        raise ValueError(
            f"{whose} for linear layers that end in `{target}`; in a {type(model).__name__} {fault}. Its linear layers:"
            f" {', '.join(ends)}. Set `--target_modules` to some of them, or to `{ALL_LINEAR}`."
        )


def _check_modules_to_save(model: PreTrainedModel, names: list[str]) -> None:
    for name in names:
        if not name or not _named(model, name):
            parts = sorted({each.rpartition(".")[2] for each, _ in model.named_modules() if each} - _numbers(model))
            raise ValueError(
                f"`--modules_to_save` is for modules that end in `{name}`; a {type(model).__name__} has none. Its"
                f" modules: {', '.join(parts)}."
            )


def _named(model: nn.Module, end: str) -> list[str]:
    return [name for name, _ in model.named_modules() if name == end or name.endswith(f".{end}")]


def _numbers(model: nn.Module) -> set[str]:
    return {part for name, _ in model.named_modules() if (part := name.rpartition(".")[2]).isdigit()}


def _config_of(adapter: str) -> PeftConfig:
    place = resolve_name(adapter)
    if Path(place).exists() and not Path(place, "adapter_config.json").is_file():
        raise ValueError(f"`{adapter}` holds no adapter (`adapter_config.json`). Set `--adapter_name_or_path`.")
    settings = PeftConfig.from_pretrained(place, local_files_only=_only_here(place))
    if not isinstance(settings, LoraConfig):
        raise ValueError(f"Adapters of the kind LoRA can be gone on with; `{adapter}` is {settings.peft_type.value}.")
    return settings


def _weights_of(lora: LoraArguments) -> dict[str, Tensor]:
    check_adapters_file(lora.adapter_name_or_path)  # PEFT would take a pickle in its place
    place = resolve_name(lora.adapter_name_or_path)
    try:
        return load_peft_weights(place, device="cpu", local_files_only=_only_here(place))
    except SafetensorError as error:
        raise cut_off(lora.adapter_name_or_path, error) from error


def _only_here(place: str) -> bool:
    return Path(place).exists() or not hub_answers(place)


def _check_same_base(settings: LoraConfig, lora: LoraArguments) -> None:
    """An adapter fits another base of the same shape too, and makes nonsense of it: names are compared."""
    theirs = {settings.base_model_name_or_path}
    for path in (Path(lora.adapter_name_or_path, "run.json"), Path(lora.adapter_name_or_path).parent / "run.json"):
        if path.is_file():
            theirs.add(json.loads(path.read_text(encoding="utf-8")).get("base_model"))
    if (theirs - {None}) & {lora.base_model_id, lora.model_name_or_path, base_place(lora)}:
        return
    raise ValueError(
        f"The adapter `{lora.adapter_name_or_path}` was trained on `{settings.base_model_name_or_path}`, and the base"
        f" model is `{base_name(lora)}`. Set `--model_name_or_path` to the adapter's base; if this is the same one in"
        f" another place, say so with `--base_model_id {settings.base_model_name_or_path}`."
    )


def _check_weights_fit(adapter: Adapter, lora: LoraArguments) -> None:
    mine, theirs = adapter.own_weights(), _weights_of(lora)
    for name in sorted(mine.keys() | theirs.keys()):
        shapes = [list(weights[name].shape) if name in weights else "missing" for weights in (mine, theirs)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"The adapter `{lora.adapter_name_or_path}` belongs to a base model of another shape: `{name}` is"
                f" {shapes[1]} in it and {shapes[0]} on `{lora.model_name_or_path}`. Set `--model_name_or_path`."
            )


def _in_words(model: PreTrainedModel | Adapter) -> str:
    if not isinstance(model, Adapter):
        return "all weights"
    settings = model.peft_config["default"]
    kind = "".join(("DoRA" if settings.use_dora else "LoRA", ", rank-stabilised" if settings.use_rslora else ""))
    whole = f", whole: {', '.join(sorted(settings.modules_to_save))}" if settings.modules_to_save else ""
    targets = ", ".join(sorted(settings.target_modules))
    return f"{kind}, rank {settings.r}, alpha {settings.lora_alpha} on {targets}{whole}"
