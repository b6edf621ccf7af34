"""Several models on several corpora, and the words that name corpora."""

import io
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import LlamaForCausalLM, MambaConfig

from tests.evaluation.tiny import START, byte_tokenizer, tiny_gpt2, tiny_llama
from tinylm.evaluation import corpora
from tinylm.evaluation.corpora import Corpus, corpora_of, open_places
from tinylm.evaluation.score_table import print_scores, scores_as_json
from tinylm.evaluation.scoring import encode_documents, score, scoring_rows
from tinylm.evaluation.side_by_side import contestants, score_side_by_side, scoring_context

CPU = torch.device("cpu")
TEXTS = ["The cat sat on the mat, and a dog ran after it. ☃", "Another document. " * 5]
SHORT = Corpus("short", TEXTS[:1])
CORPORA = [SHORT, Corpus("long", TEXTS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model, an adapter of it without a tokenizer, and a model of another architecture and tokenizer."""
    root = tmp_path_factory.mktemp("models")
    tiny_llama().save_pretrained(root / "llama")
    byte_tokenizer(eos_token=START).save_pretrained(root / "llama")
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(LlamaForCausalLM.from_pretrained(root / "llama"), settings).save_pretrained(root / "adapter")
    tiny_gpt2().save_pretrained(root / "gpt2")
    byte_tokenizer([("t", "h"), ("o", "n")], eos_token=START).save_pretrained(root / "gpt2")
    return {path.name: str(path) for path in root.iterdir()}


def test_every_model_is_scored_on_every_corpus_as_if_it_were_alone(models: dict[str, str]) -> None:
    chosen = contestants(list(models.values()))
    results = score_side_by_side(chosen, CORPORA, device=CPU, batch_size=3)
    assert [(row["model"], row["corpus"]) for row in results] == [
        (path, corpus.name) for path in models.values() for corpus in CORPORA
    ]
    for row in results:
        [corpus] = [corpus for corpus in CORPORA if corpus.name == row["corpus"]]
        [model] = [name for name, path in models.items() if path == row["model"]]
        tokenizer = byte_tokenizer([("t", "h"), ("o", "n")] if model == "gpt2" else [], eos_token=START)
        rows = scoring_rows(
            encode_documents(tokenizer, corpus.texts), context=37, start_id=tokenizer.eos_token_id, stride=None
        )
        assert row["num_bytes"] == sum(len(text.encode()) for text in corpus.texts)
        if model != "adapter":
            alone = score({"llama": tiny_llama, "gpt2": tiny_gpt2}[model](), rows, batch_size=1, device=CPU)
            assert {name: row[name] for name in alone} == pytest.approx(alone, rel=1e-6)
    by_pair = {(Path(str(row["model"])).name, row["corpus"]): row for row in results}
    assert by_pair["adapter", "long"]["bits_per_byte"] != by_pair["llama", "long"]["bits_per_byte"]
    assert by_pair["gpt2", "long"]["num_tokens"] < by_pair["llama", "long"]["num_tokens"]


def test_the_table_says_once_what_all_rows_share_and_the_json_of_one_pair_is_its_scores_alone(
    models: dict[str, str],
) -> None:
    one = score_side_by_side(contestants([models["llama"]]), [SHORT], device=CPU, batch_size=2)
    keys = {"nats_per_token", "perplexity", "bits_per_byte", "num_tokens", "num_bytes", "num_documents"}
    assert json.loads(scores_as_json(one)).keys() == keys
    two = [*one, {**one[0], "corpus": "a [red]name[/red]", "bits_per_byte": 1234.5}]
    assert [row.keys() for row in json.loads(scores_as_json(two))] == [keys | {"model", "corpus"}] * 2
    file = io.StringIO()
    print_scores(two, Console(file=file))
    printed = file.getvalue()
    assert printed.count(models["llama"]) == 1 and "a [red]name[/red]" in printed and "1,234.5000" in printed
    assert "model " + models["llama"] in printed.splitlines()[0]


def test_what_is_wrong_with_the_last_model_is_found_before_the_first_is_loaded(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tinylm.evaluation.side_by_side.load_checked", lambda *args, **kwargs: 1 / 0)
    names = [models["llama"], models["gpt2"]]
    with pytest.raises(ValueError, match=r"`block_size` is 38. Set `--block_size`"):
        contestants(names, block_size=38)
    with pytest.raises(ValueError, match=r"not 40\. Set `--stride 18`"):
        contestants(names, stride=40)
    with pytest.raises(ValueError, match=r"263, the tokenizer .* has 274"):
        large = byte_tokenizer(eos_token=START)
        large.add_tokens([f"word{i}" for i in range(17)])
        contestants(names, tokenizer=large)
    with pytest.raises(FileNotFoundError, match="no folder"):
        contestants([*names, str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match="`--base_model` out"):
        contestants(names, base_model=models["llama"])
    [_, adapter] = contestants([models["gpt2"], models["adapter"]], base_model=models["llama"])
    assert adapter.base_model == models["llama"] and adapter.tokenizer.eos_token == START


def test_a_model_without_a_stated_context_is_scored_in_windows_that_are_named() -> None:
    config = MambaConfig(vocab_size=263, hidden_size=8, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"a `mamba` states none .* Set `--block_size`"):
        scoring_context(config)
    assert scoring_context(config, 16) == 16
    with pytest.raises(ValueError, match="at least 2 tokens"):
        scoring_context(config, 1)


def test_words_name_files_folders_the_sample_and_datasets_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr(corpora, "open_source", lambda **flags: opened.append(flags))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    local = ["folder", "nowhere.txt", "./nowhere", "a/b/c", "logs/*.gz", str(tmp_path / "x")]
    hub = ["sample", "wikimedia/wikipedia:20231101.en", "some/thing:plain:test", "some/thing::test", "thing"]
    assert list(open_places([*local, *hub], text_column="body", dataset_split="validation")) == [*local, *hub]
    assert [flags.get("data_files") for flags in opened[: len(local)]] == [[place] for place in local]
    names = [(f["dataset_name"], f["dataset_config_name"], f["dataset_split"]) for f in opened[len(local) :]]
    assert names == [
        ("sample", None, "validation"),
        ("wikimedia/wikipedia", "20231101.en", "validation"),
        ("some/thing", "plain", "test"),
        ("some/thing", None, "test"),
        ("thing", None, "validation"),
    ]
    assert all(flags["text_column"] == "body" for flags in opened)
    with pytest.raises(ValueError, match="`thing` is named twice"):
        open_places(["thing", "thing"])


def test_the_validation_part_is_bounded_by_tokens_and_the_same_for_all_models(tmp_path: Path) -> None:
    documents = [f"Document {n} tells of {n * n} things." for n in range(200)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    sources = open_places([str(tmp_path / "text.jsonl")])
    tokenizer = byte_tokenizer(eos_token=START)

    def texts(split: str, max_eval_tokens: int) -> list[str]:
        [corpus] = corpora_of(sources, split=split, tokenizer=tokenizer, max_eval_tokens=max_eval_tokens)
        return list(corpus.texts)

    held_out = texts("validation", 10**6)
    assert 5 < len(held_out) < 50 and set(held_out) < set(documents)
    few = texts("validation", 100)
    assert few == held_out[: len(few)] and sum(map(len, few)) <= 100 < sum(map(len, held_out[: len(few) + 1]))
    assert texts("validation", 1) == held_out[:1]
    assert texts("all", 1) == documents
    with pytest.raises(ValueError, match="not `test`"):
        texts("test", 1)
