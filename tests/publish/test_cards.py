"""What a card says of a run's data, and which metadata never gets as far as the Hub."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.evaluation.tiny import tiny_tlm
from tinylm.publish.cards import write_card
from tinylm.publish.contents import contents_of, without_folders
from tinylm.publish.hub_card import card_for_hub, check_metadata

RUN = {
    "parameters": {"total": 1234, "trainable": 1234},
    "training": {"learning_rate": 2e-4, "lr_scheduler_type": "cosine", "global_batch_size": 6},
    "precision": "bf16",
    "engine": "none",
    "world_size": 1,
    "hardware": "a processor, 2 cores",
    "commit": "0123456789ab",
}
RESULTS = {"eval_nats_per_token": 1.5, "eval_bits_per_byte": 2.0, "eval_perplexity": 4.5, "eval_num_documents": 7}
RESULTS |= {"eval_num_tokens": 77, "eval_num_bytes": 777, "num_tokens_read": 1000}


def card_of(folder: Path, data_source: str, **settings: str) -> ModelCard:
    (folder / "config.json").write_text("{}")
    (folder / "run.json").write_text(json.dumps({**RUN, "data_source": data_source}))
    (folder / "all_results.json").write_text(json.dumps(RESULTS))
    (folder / "trainer_state.json").write_text('{"global_step": 500}')
    write_card(folder, **settings)
    return ModelCard((folder / "README.md").read_text())


SAMPLE = "`sample`, 106 articles of English Wikipedia, 2.94 MB (CC BY-SA)"
WIKIPEDIA = "`wikimedia/wikipedia, 20231101.en, split train`"


@pytest.mark.parametrize(
    ("data_source", "license", "datasets", "words"),
    [
        (f"prepared corpus `/home/me/corpus`, from {SAMPLE}", "cc-by-sa-3.0", None, f"corpus `corpus`, from {SAMPLE}."),
        (f"{WIKIPEDIA}, streamed", "cc-by-sa-3.0", ["wikimedia/wikipedia"], f"tinylm on: {WIKIPEDIA}, streamed."),
        ("`some/data, split train`, streamed", None, ["some/data"], "tinylm on: `some/data, split train`"),
        ("`/home/me/text.txt`, 3 MB", None, None, "tinylm on: `text.txt`, 3 MB."),
    ],
)
def test_the_data_its_licence_and_the_settings_are_in_the_card(
    data_source: str, license: str | None, datasets: list[str] | None, words: str, tmp_path: Path
) -> None:
    card = card_of(tmp_path, data_source)
    assert card.data.license == license and card.data.datasets == datasets
    assert words in card.text and f"| licence of the data | {license or 'not recorded'} |" in card.text
    assert "| learning rate, schedule | 0.0002, cosine |\n| steps, rows a step | 500, 6 |" in card.text
    assert "/home" not in card.text
    check_metadata(card.data.to_dict())


def test_a_licence_that_is_named_goes_before_the_known_one_and_can_be_named_later(tmp_path: Path) -> None:
    assert card_of(tmp_path, SAMPLE, data_license="cc-by-sa-4.0").data.license == "cc-by-sa-4.0"
    card_of(tmp_path, "`text.txt`, 3 MB")
    tiny_tlm().save_pretrained(tmp_path)
    sent = ModelCard(card_for_hub(contents_of(tmp_path), tmp_path.name, "me/tlm", data_license="mit"))
    assert sent.data.license == "mit" and "| licence of the data | mit |" in sent.text
    assert ModelCard((tmp_path / "README.md").read_text()).data.license is None


def test_a_card_calls_the_model_by_its_name_on_the_hub_wherever_the_folder_lies_now(tmp_path: Path) -> None:
    text = card_of(tmp_path, SAMPLE).text
    assert f'"text-generation", "{tmp_path.name}"' in text
    tiny_tlm().save_pretrained(tmp_path)
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert '"text-generation", "me/tlm"' in card_for_hub(contents_of(moved), moved.name, "me/tlm")


def test_a_folder_without_a_card_gets_a_short_one(tmp_path: Path) -> None:
    tiny_tlm().save_pretrained(tmp_path / "merged")
    card = ModelCard(card_for_hub(contents_of(tmp_path / "merged"), "merged", "me/merged"))
    assert card.data.library_name == "transformers" and "of the kind `tlm`" in card.text


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"license": "my-own"}, "no licence `my-own`"),
        ({"license": ["mit", "CC-BY"]}, "no licence `CC-BY`"),
        ({"base_model": "/some/path"}, "`base_model` in"),
        ({"datasets": ["a/b", "a/b/c"]}, "`datasets` in"),
        ({"tags": "tinylm"}, "`tags` in `README.md` is a list of words, and not `tinylm`"),
        ({"tags": ["tinylm", 3]}, "a list of words"),
        ({"library_name": ["peft"]}, "`library_name` in `README.md` is one word"),
    ],
)
def test_metadata_that_the_hub_would_refuse_is_refused(metadata: dict[str, object], said: str) -> None:
    check_metadata({"license": "cc-by-sa-4.0", "base_model": "a/b", "datasets": ["a/b", "c"], "tags": ["x"]})
    with pytest.raises(ValueError, match=said):
        check_metadata(metadata)


def test_files_are_called_by_their_names_and_data_of_the_hub_by_its_whole_name() -> None:
    assert without_folders("`/a/b/c.txt` and `x/y, split train` and `d`") == "`c.txt` and `x/y, split train` and `d`"
