import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.evaluation.tiny import byte_tokenizer, tiny_llama
from tinylm.data.chat_format import ChatFormat, Message
from tinylm.generation.chat import Chat, answer, converse

TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LESSON: list[Message] = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ahoi\n→ sea"}]


def chat_tokenizer() -> PreTrainedTokenizerBase:
    """Bytes and ChatML with a system message of its own; its eos is another token than the one that ends a turn."""
    tokenizer = byte_tokenizer(eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def trained() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model that knows one conversation by heart."""
    model, tokenizer = tiny_llama(context=181), chat_tokenizer()
    pieces = ChatFormat(tokenizer).pieces(LESSON, only_last=False)
    input_ids = torch.tensor([[token_id for piece in pieces for token_id in piece.ids]])
    labels = torch.tensor([[token_id if piece.is_answer else -100 for piece in pieces for token_id in piece.ids]])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
    return model, tokenizer


def test_an_answer_ends_with_the_token_that_the_template_writes_behind_answers(trained: tuple) -> None:
    """Case T7: neither the tokenizer nor the generation config names it."""
    model, tokenizer = trained
    assert model.generation_config.eos_token_id is None and tokenizer.eos_token == "<|endoftext|>"
    written: list[str] = []
    assert answer(model, tokenizer, LESSON[:1], max_new_tokens=40, write=written.append) == "Ahoi\n→ sea"
    assert "".join(written) == "Ahoi\n→ sea"
    other = chat_tokenizer()
    other.chat_template = TEMPLATE.replace("}}<|im_end|>", "}}<|endoftext|>")
    assert len(answer(model, other, LESSON[:1], max_new_tokens=40)) > 10  # goes on: the end was known from the template


def test_the_model_is_given_the_very_ids_that_it_is_trained_on() -> None:
    """Case T6: also the system message that the template writes by itself."""
    model, tokenizer = tiny_llama(context=400), chat_tokenizer()
    chat = Chat(model, tokenizer, max_new_tokens=5)
    chat.ask("Who?")
    seen: list[list[int]] = []
    with model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].tolist())):
        chat.ask("And what is <|im_end|>?")
    pieces = ChatFormat(tokenizer).pieces(chat.messages, only_last=False)
    assert [piece.is_answer for piece in pieces] == [False, True, False, True, False]
    assert seen[0] == [token_id for piece in pieces[:3] for token_id in piece.ids]
    assert tokenizer.decode(seen[0]).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWho?")


def test_a_conversation_longer_than_the_context_loses_its_oldest_turns(caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = tiny_llama(context=151), chat_tokenizer()
    chat = Chat(model, tokenizer, system="Sing.", max_new_tokens=3)
    chat.ask("first " * 5)
    chat.ask("second " * 5)
    assert not caplog.text
    seen: list[list[int]] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].tolist()))
    with hook, caplog.at_level(logging.WARNING, logger="tinylm"):
        chat.ask("third " * 5)
    assert "The context is full: the oldest 1 turns are left out" in caplog.text
    prompt = tokenizer.decode(seen[0])
    assert prompt.startswith("<|im_start|>system\nSing.<|im_end|>\n<|im_start|>user\nsecond") and "third" in prompt
    assert len(seen[0]) <= 148 and len(chat.messages) == 7  # the history still holds it all
    with pytest.raises(ValueError, match=r"The question has \d+ tokens .* leaves 148 beside the answer"):
        chat.ask("long " * 40)
    assert len(chat.messages) == 7


def test_a_tokenizer_without_a_chat_template_is_refused_with_both_ways_out() -> None:
    with pytest.raises(ValueError, match=r"has none.*`--chat_template`.*`tinylm generate`"):
        answer(tiny_llama(), byte_tokenizer(), LESSON[:1])


def test_a_template_that_refuses_the_conversation_is_quoted() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system message here') }}{% endif %}" + TEMPLATE
    )
    with pytest.raises(ValueError, match="refuses the conversation: No system message here"):
        Chat(tiny_llama(context=300), tokenizer, system="Sing.", max_new_tokens=3).ask("Who?")


def test_a_conversation_is_saved_as_a_row_to_train_on_and_goes_on_after_a_fault(trained: tuple, tmp_path: Path) -> None:
    written: list[str] = []
    chat = Chat(*trained, max_new_tokens=40)
    saved = tmp_path / "chats.jsonl"
    lines = [
        f"/save {saved}",
        "",
        "Hi?",
        f"/save {saved}",
        "/nonsense",
        "x" * 200,
        "/save",
        f"/save {tmp_path}/no/file",
    ]
    converse(chat, [*lines, "/reset", "Hi?", f"/save {saved}", "/quit", "Hi?"], written.append)
    said = "".join(written)
    assert said.count("Ahoi\n→ sea\n") == 2
    assert "nothing to save" in said and "`/nonsense` is no command: `/reset`" in said and "No such file" in said
    assert "leaves 141 beside the answer" in said and "begins anew" in said
    assert [json.loads(line) for line in saved.read_text(encoding="utf-8").splitlines()] == [{"messages": LESSON}] * 2
