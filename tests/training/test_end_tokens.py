"""Cases T7 and E6: where answers end, and a generation config that could not be saved."""

import json

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.data.chats import CHATML, chat_tokenizer
from tests.models.gguf_files import tiny_base
from tests.training.tiny import UnevenRows, run_arguments, trainer_for
from tinylm.data.chat_format import chat_format
from tinylm.training.end_tokens import align_end_tokens, mend_generation_config
from tinylm.training.finetune_arguments import LoraArguments
from tinylm.training.lora import trainable_model

IM_END, ENDOFTEXT = 262, 264


def tokenizer_with(eos_token: str | None, template: str | None = CHATML, **specials: str | None):
    """The same ids whatever ends a text."""
    tokenizer = chat_tokenizer(template)
    for name, token in {"eos_token": eos_token, **specials}.items():
        setattr(tokenizer, name, token)
    return tokenizer


def aligned(model, tokenizer):
    align_end_tokens(model, tokenizer, chat_format(tokenizer).end_of_turn)
    return tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id


def test_ends_that_differ_are_one_after_saving(tmp_path, caplog):
    """The tokenizer says one token, the configuration another and generation two."""
    model, tokenizer = tiny_base(), tokenizer_with("<|endoftext|>", pad_token=None)
    model.config.eos_token_id = ENDOFTEXT
    model.generation_config.eos_token_id = [IM_END, ENDOFTEXT]
    assert aligned(model, tokenizer) == (IM_END, IM_END, [IM_END, ENDOFTEXT])
    assert not caplog.records
    model = trainable_model(model, LoraArguments(model_name_or_path="our/base"))
    args = run_arguments(tmp_path, max_steps=1)
    trainer = trainer_for(model, UnevenRows(), args, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [IM_END, ENDOFTEXT]


def test_a_base_model_without_an_end_of_answers_is_warned_of(caplog):
    model, tokenizer = tiny_base(), tokenizer_with("<|endoftext|>")
    model.config.eos_token_id = model.generation_config.eos_token_id = ENDOFTEXT
    assert aligned(model, tokenizer) == (IM_END, IM_END, [IM_END, ENDOFTEXT])
    assert "does not end answers with '<|im_end|>', as the chat template does" in caplog.text
    assert "beside '<|endoftext|>'" in caplog.text


def test_an_end_that_is_no_token_is_warned_of(caplog):
    template = CHATML.replace("<|im_end|>", "[END]")
    model, tokenizer = tiny_base(), tokenizer_with("<|endoftext|>", template)
    assert aligned(model, tokenizer) == (ENDOFTEXT, ENDOFTEXT, [ENDOFTEXT, IM_END])
    assert "ends answers with '[END]', which is no single token" in caplog.text


def test_without_a_template_the_tokenizers_eos_is_the_end():
    model, tokenizer = tiny_base(), tokenizer_with("<|endoftext|>", None)
    assert aligned(model, tokenizer) == (ENDOFTEXT, ENDOFTEXT, [ENDOFTEXT, IM_END])


def test_a_tokenizer_in_which_nothing_can_end_is_refused():
    tokenizer = tokenizer_with(None, CHATML.replace("<|im_end|>", "[END]"))
    with pytest.raises(ValueError, match=r"the tokenizer `our/tokenizer` has no eos token"):
        align_end_tokens(tiny_base(), tokenizer, "[END]")


def test_sampling_settings_without_sampling_are_mended_before_they_stop_a_checkpoint(tmp_path, caplog):
    """Case E6."""
    model = tiny_base()
    model.generation_config.temperature = 0.6
    model.generation_config.top_p = 0.9
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.save_pretrained(tmp_path)
    mend_generation_config(model)
    assert "saved with `do_sample: true`" in caplog.text
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert (saved["do_sample"], saved["temperature"], saved["top_p"]) == (True, 0.6, 0.9)


def test_a_generation_config_that_cannot_be_mended_is_refused():
    model = tiny_base()
    model.generation_config.num_return_sequences = 3
    model.generation_config.num_beams = 2
    with pytest.raises(ValueError, match=r"cannot be saved again: .*Mend its `generation_config.json`"):
        mend_generation_config(model)


def test_a_good_generation_config_stays_as_it_is(caplog):
    model = tiny_base()
    before = model.generation_config.to_dict()
    mend_generation_config(model)
    assert model.generation_config.to_dict() == before and not caplog.records
