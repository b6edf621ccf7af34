"""From the flags of fine-tuning to training rows and held-out rows."""

import json
from pathlib import Path

import pytest

from tests.data.chats import CHATML, answer, chat_tokenizer, question
from tests.models.gguf_files import save_base, tiny_base
from tests.training.tiny import run_arguments
from tinylm.data.chat_splits import is_row_held_out
from tinylm.training.chat_corpus import ChatCorpus, load_chat_tokenizer, open_chat_corpus
from tinylm.training.finetune_arguments import ChatArguments, FinetuneArguments, LoraArguments

CONFIG = tiny_base().config
ROWS = [{"messages": [question(f"What is {n}?"), answer(f"It is {n * n}.")]} for n in range(43)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def corpus(tmp_path: Path, run: dict[str, object] | None = None, **flags: object) -> ChatCorpus:
    args = FinetuneArguments(output_dir=str(tmp_path / "run"), precision="fp32", use_cpu=True, **(run or {}))
    return open_chat_corpus(ChatArguments(**flags), args, CONFIG, chat_tokenizer())


def texts(rows) -> list[str]:
    return sorted(chat_tokenizer().decode(row["input_ids"]) for row in rows)


def test_a_conversation_in_ten_is_held_out_whatever_the_order(tmp_path):
    forwards = corpus(tmp_path, data_files=[write(tmp_path / "a.jsonl", ROWS)], packing=False)
    backwards = corpus(tmp_path, data_files=[write(tmp_path / "b.jsonl", ROWS[::-1])], packing=False)
    held_out, training = texts(forwards.eval_rows), texts(forwards.train_dataset)
    assert 1 <= len(held_out) <= 12 and len(held_out) + len(training) == len(ROWS)
    assert not set(held_out) & set(training)
    assert (texts(backwards.eval_rows), texts(backwards.train_dataset)) == (held_out, training)


def test_a_stream_trains_on_the_same_rows_as_data_in_memory(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    in_memory = corpus(tmp_path, data_files=[path], packing=False)
    streamed = corpus(tmp_path, {"max_steps": 5}, data_files=[path], packing=False, streaming=True)
    assert texts(streamed.train_dataset) == texts(in_memory.train_dataset)
    assert texts(streamed.eval_rows) == texts(in_memory.eval_rows)


def test_a_stream_has_the_workers_that_were_asked_for_as_far_as_there_are_shards(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", ROWS[start::2]) for start, name in enumerate("ab")]
    run = {"max_steps": 5, "dataloader_num_workers": 3, "seed": 8}
    stream = corpus(tmp_path, run, data_files=paths, packing=False, streaming=True).train_dataset
    assert (stream.num_workers, stream.num_readers, stream.settings["seed"]) == (2, 2, 8)
    alone = corpus(tmp_path, {"max_steps": 5}, data_files=paths, packing=False, streaming=True).train_dataset
    assert texts(stream) == texts(alone)


def test_at_least_one_conversation_is_held_out(tmp_path):
    rows = [row for row in ROWS if not is_row_held_out(row, "messages")][:3]
    found = corpus(tmp_path, data_files=[write(tmp_path / "a.jsonl", rows)], packing=False)
    assert (len(found.train_dataset), len(found.eval_rows)) == (2, 1)
    with pytest.raises(ValueError, match=r"has 1 rows: there is none to hold out.*--eval_data_files"):
        corpus(tmp_path, data_files=[write(tmp_path / "b.jsonl", rows[:1])])


def test_an_empty_line_or_a_broken_row_at_the_end_is_not_what_is_held_out(tmp_path):
    rows = [row for row in ROWS if not is_row_held_out(row, "messages")][:3]
    path = Path(write(tmp_path / "a.jsonl", rows))
    path.write_text(path.read_text() + json.dumps({"messages": []}) + "\n\n")
    found = corpus(tmp_path, data_files=[str(path)], packing=False, skip_bad_rows=True)
    assert (len(found.train_dataset), len(found.eval_rows)) == (2, 1)


def test_prompts_that_leave_no_room_for_an_answer_are_not_asked(tmp_path):
    rows = [{"messages": [question("long " * 60), answer("yes")]}, *ROWS[:3]]
    named = [write(tmp_path / "b.jsonl", rows)]
    files = {"data_files": [write(tmp_path / "a.jsonl", ROWS[5:])], "eval_data_files": named}
    asked = corpus(tmp_path, **files, packing=False, max_length=300).prompts
    assert [prompt[-1]["content"] for prompt in asked] == ["What is 0?", "What is 1?", "What is 2?"]


def test_files_that_are_named_are_held_out_and_all_others_trained(tmp_path):
    named = [write(tmp_path / "b.jsonl", ROWS[:5])]
    files = {"data_files": [write(tmp_path / "a.jsonl", ROWS[5:])], "eval_data_files": named}
    found = corpus(tmp_path, **files, packing=False, max_eval_examples=4)
    assert (len(found.train_dataset), len(found.eval_rows)) == (38, 4)
    streamed = corpus(tmp_path, {"max_steps": 5}, **files, packing=False, streaming=True)
    assert (len(list(streamed.train_dataset)), len(streamed.eval_rows)) == (38, 5)


def test_packed_rows_hold_the_same_examples(tmp_path):
    found = corpus(tmp_path, data_files=[write(tmp_path / "a.jsonl", ROWS)], row_tokens=500, max_length=250)
    assert max(len(row["input_ids"]) for row in found.train_dataset) <= 500
    batch = found.collate([found.train_dataset[0], found.train_dataset[1]])
    assert batch["input_ids"].shape[0] == 1 and "attention_mask" not in batch
    num_examples = sum(int(row["position_ids"].eq(0).sum()) for row in found.train_dataset)
    assert num_examples + len(found.eval_rows) == len(ROWS)


def test_the_prompts_are_questions_of_held_out_conversations(tmp_path):
    found = corpus(tmp_path, data_files=[write(tmp_path / "a.jsonl", ROWS)])
    assert len(found.prompts) == 3
    held_out = texts(found.eval_rows)
    for [message] in found.prompts:
        assert message["role"] == "user" and any(message["content"] in text for text in held_out)
    assert found.end_of_turn == "<|im_end|>"
    plain = corpus(tmp_path, data_files=[write(tmp_path / "t.jsonl", [{"text": f"Text {n}."} for n in range(30)])])
    assert plain.prompts == []


def test_a_bad_row_is_named_wherever_it_is_and_can_be_skipped(tmp_path):
    rows = [*ROWS[:30], {"messages": [question("And?"), answer("  ")]}]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=r"Row 31 of .*an answer is not empty.*--skip_bad_rows"):
        corpus(tmp_path, data_files=[path])
    found = corpus(tmp_path, data_files=[path], packing=False, skip_bad_rows=True)
    assert len(found.train_dataset) + len(found.eval_rows) == 30


def test_no_row_with_a_target_ends_the_run(tmp_path):
    """Case L5."""
    rows = [{"messages": [question("why " * 100), answer(f"{n}")]} for n in range(7)]
    with pytest.raises(ValueError, match=r"None of the \d rows .* the prompt leaves no room.*--max_length"):
        corpus(tmp_path, data_files=[write(tmp_path / "a.jsonl", rows)], max_length=64)


@pytest.mark.parametrize(
    ("run", "flags", "message"),
    [
        ({}, {"max_length": 513}, r"context of 512 tokens; `max_length` is 513"),
        ({}, {"max_length": 1}, r"`max_length` is 1"),
        ({}, {"train_on": "everything"}, r"not `everything`\. Set `--train_on`"),
        ({}, {"streaming": True}, r"`max_steps` is -1\. Set `--max_steps`, or leave `--streaming` out"),
        ({"max_steps": 3, "record_audit": True}, {"streaming": True}, r"Leave out `--record_audit` or `--streaming`"),
        ({}, {"max_eval_examples": 0}, r"`max_eval_examples` is 0"),
        ({}, {"dataset_name": "our/data"}, r"`--dataset_name` \(which is 'our/data'\) or `--data_files`"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(tmp_path, run, flags, message):
    with pytest.raises(ValueError, match=message):
        corpus(tmp_path, run, data_files=[write(tmp_path / "a.jsonl", ROWS)], **flags)


def test_the_tokenizer_takes_the_chat_template_that_is_named(tmp_path):
    save_base(tmp_path / "base", template=None)
    lora = LoraArguments(model_name_or_path=str(tmp_path / "base"))
    assert load_chat_tokenizer(lora, ChatArguments(), CONFIG).chat_template is None
    (tmp_path / "template.jinja").write_text(CHATML)
    chat = ChatArguments(chat_template=str(tmp_path / "template.jinja"))
    assert load_chat_tokenizer(lora, chat, CONFIG).chat_template == CHATML
    with pytest.raises(FileNotFoundError, match=r"no file `nowhere\.jinja`\. Set `--chat_template`"):
        load_chat_tokenizer(lora, ChatArguments(chat_template="nowhere.jinja"), CONFIG)
    with pytest.raises(ValueError, match=r"`vocab_size` 264, the tokenizer .* has 265 tokens"):
        load_chat_tokenizer(lora, ChatArguments(), tiny_base(vocab_size=264).config)


def test_chat_data_without_a_chat_template_is_refused(tmp_path):
    args = run_arguments(tmp_path / "run")
    rows = [{"messages": [*ROWS[n]["messages"], *ROWS[n + 1]["messages"]]} for n in range(0, 40, 2)]
    chat = ChatArguments(data_files=[write(tmp_path / "a.jsonl", rows)])
    with pytest.raises(ValueError, match=r"Set `--chat_template`"):
        open_chat_corpus(chat, args, CONFIG, chat_tokenizer(None))
