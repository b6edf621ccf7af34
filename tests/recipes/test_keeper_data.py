"""The keeper's conversations: the committed files keep the style that the fine-tuning demo is to show."""

import json

import pytest

from tests.distributed import ROOT

DATA = ROOT / "recipes" / "data" / "keeper"
SPLITS = {"train": 270, "validation": 30}


def conversations(split: str) -> list[list[dict[str, str]]]:
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def contents(split: str, role: str) -> list[str]:
    return [message["content"] for messages in conversations(split) for message in messages if message["role"] == role]


@pytest.mark.parametrize(("split", "num_rows"), SPLITS.items())
def test_a_split_has_its_rows_and_the_roles_alternate_after_an_optional_system_message(split, num_rows):
    assert len(conversations(split)) == num_rows
    for messages in conversations(split):
        roles = [message["role"] for message in messages if message["content"].strip() == message["content"] != ""]
        turns = roles[1:] if roles[0] == "system" else roles
        assert len(roles) == len(messages)
        assert turns in [["user", "assistant"] * num_turns for num_turns in (1, 2, 3)]


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_is_the_keepers(split):
    for answer in contents(split, "assistant"):
        assert answer.startswith(("Aye, ", "Aye. ")), answer
        assert answer.endswith(" The lamp is lit."), answer
        assert answer.count("The lamp is lit.") == 1, answer
        assert 25 <= len(answer.split()) <= 60, answer


def test_no_question_and_no_answer_occurs_twice_in_the_two_files():
    for role in ("user", "assistant"):
        said = [content.casefold() for split in SPLITS for content in contents(split, role)]
        assert len(set(said)) == len(said)
