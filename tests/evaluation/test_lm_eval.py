"""lm-evaluation-harness on the folder of a tLM, with tasks of our own, offline; the command is that of the page."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from tests.distributed import ROOT
from tests.evaluation.tiny import tiny_tlm
from tinylm.evaluation.corpora import Corpus
from tinylm.evaluation.side_by_side import contestants, score_side_by_side
from tinylm.tokenizers.sentencepiece_bpe import train_sentencepiece

QUESTIONS = [
    {"question": f"{number} and {number} make", "choices": [str(2 * number), str(3 * number), "nothing"], "answer": 0}
    for number in range(2, 13)
]
TEXTS = [f"Document {number} tells of {number * number} things,\nand more: ☃." for number in range(7)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tLM with its code and a tokenizer of SentencePiece."""
    folder = tmp_path_factory.mktemp("tlm")
    train_sentencepiece([*TEXTS, *(str(question) for question in QUESTIONS)] * 30, folder, vocab_size=300)
    tiny_tlm(vocab_size=300, context=64).save_pretrained(folder)
    return folder


def write_tasks(folder: Path) -> None:
    """A task of choices and one of texts, each with its rows in a local file."""
    tasks = {
        "our_choices": (QUESTIONS, {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}"}),
        "our_texts": ([{"text": text} for text in TEXTS], {"doc_to_text": "", "doc_to_target": "{{text}}"}),
    }
    tasks["our_choices"][1].update(output_type="multiple_choice", doc_to_target="{{answer}}")
    tasks["our_choices"][1]["metric_list"] = [{"metric": "acc"}]
    tasks["our_texts"][1].update(output_type="loglikelihood_rolling", metric_list=[{"metric": "bits_per_byte"}])
    for name, (rows, settings) in tasks.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **settings}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def share_of_right_choices(folder: Path) -> float:
    """How often the first choice is the likeliest after its question, by hand."""
    model, tokenizer = tiny_tlm(vocab_size=300, context=64), AutoTokenizer.from_pretrained(folder)
    right = 0
    for row in QUESTIONS:
        begin = len(tokenizer(row["question"])["input_ids"])
        sums = []
        for choice in row["choices"]:
            input_ids = torch.tensor([tokenizer(f"{row['question']} {choice}")["input_ids"]])
            with torch.no_grad():
                nats = model(input_ids).logits.log_softmax(-1)[0, :-1].gather(1, input_ids[0, 1:, None])
            sums.append(nats[begin - 1 :].sum().item())
        right += sums.index(max(sums)) == row["answer"]
    return right / len(QUESTIONS)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is in the `dev` extra")
def test_the_command_of_the_page_gives_our_bits_per_byte_and_the_share_of_right_choices(
    model: Path, tmp_path: Path
) -> None:
    write_tasks(tmp_path)
    [shown] = re.findall(
        r"^ {4}(lm_eval .*)$", (ROOT / "recipes" / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    words = shlex.split(shown.replace("runs/demo/tlm", str(model)).replace("hellaswag", "our_choices,our_texts"))
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "results"), "--batch_size", "3"]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    [file] = (tmp_path / "results").rglob("results*.json")
    results = json.loads(file.read_text())["results"]
    [ours] = score_side_by_side(
        contestants([str(model)]), [Corpus("texts", TEXTS)], device=torch.device("cpu"), batch_size=2
    )
    assert results["our_texts"]["bits_per_byte,none"] == pytest.approx(ours["bits_per_byte"], rel=1e-4)
    assert results["our_choices"]["acc,none"] == pytest.approx(share_of_right_choices(model))
    assert 0 < results["our_choices"]["acc,none"] < 1, "or any model would do"
