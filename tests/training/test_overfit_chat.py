"""A conversation learned by heart: the model then says it, and stops by itself."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.data.chats import answer, chat_tokenizer, question
from tests.training.tiny import run_arguments, trainer_for
from tinylm.data.chat_encoder import ChatEncoder
from tinylm.data.rows import join_rows, joined_examples
from tinylm.training.end_tokens import align_end_tokens

CONVERSATION = [question("Who keeps the lamp?"), answer("I do."), question("And by day?"), answer("It sleeps.")]


def tiny_qwen2(vocab_size: int) -> Qwen2ForCausalLM:
    torch.manual_seed(2)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    )


def all_linear(model: PreTrainedModel) -> nn.Module:
    """Adapters on every linear layer, the head's too: a random model knows nothing that could be bent a little."""
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", modules_to_save=["lm_head"])
    return get_peft_model(model, lora)


@pytest.mark.parametrize(
    "dress",
    [
        pytest.param(lambda model: model, id="all weights"),
        pytest.param(all_linear, id="adapters", marks=pytest.mark.slow),
    ],
)
def test_an_overfitted_answer_is_written_and_generation_stops_by_itself(tmp_path: object, dress: object) -> None:
    """Case T3: pad is eos here, and the mask comes from the conversation, so the end of a turn is learned."""
    tokenizer = chat_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    encoder = ChatEncoder(tokenizer, max_length=300)
    encoded = encoder.encode(CONVERSATION)
    example = {name: torch.tensor(encoded[name]) for name in ("input_ids", "labels")}
    row = joined_examples([example])
    model = tiny_qwen2(len(tokenizer))
    align_end_tokens(model, tokenizer, "<|im_end|>")
    settings = {"per_device_train_batch_size": 1, "max_steps": 50, "learning_rate": 1e-2}
    settings |= {"lr_scheduler_type": "constant", "logging_steps": 50}
    trainer = trainer_for(dress(model), [row], run_arguments(tmp_path, **settings), data_collator=join_rows)
    trainer.train()

    for turn in (0, 2):
        prompt = encoder.prompt_ids(CONVERSATION[: turn + 1])
        written = trainer.model.eval().generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=60
        )[0, len(prompt) :]
        assert tokenizer.decode(written) == CONVERSATION[turn + 1]["content"] + "<|im_end|>"
