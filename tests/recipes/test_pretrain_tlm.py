"""The pretraining recipe: through the launcher on two ranks, and in this process for everything that can be wrong."""

import json
import random
import shlex
import sys

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

import tinylm.models  # noqa: F401
from tests.distributed import ROOT
from tests.recipes.running import CPU_GLOO, launch, output_of, run_here
from tests.training.wandb_file import read_offline_run
from tinylm.data.sources import open_source
from tinylm.tokenizers.sentencepiece_bpe import train_sentencepiece
from tinylm.training import checkpoints
from tinylm.training.arguments import DataArguments, ModelArguments, RunArguments, parse_arguments

RECIPE = ROOT / "recipes" / "pretrain_tlm.py"
RUN_FILES = sorted((ROOT / "recipes" / "configs" / "pretrain_tlm").glob("*.yaml"))
DEMO = ROOT / "recipes" / "configs" / "pretrain_tlm" / "demo.yaml"
VOCAB = 300
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "another", "dog", "ran", "after", "it", "while", "birds"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny architecture, 40 short documents, and a tokenizer for them."""
    folder = tmp_path_factory.mktemp("pretrain")
    config = json.loads((ROOT / "recipes" / "configs" / "models" / "tlm-20m" / "config.json").read_text())
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 64, "vocab_size": VOCAB}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({**config, **sizes}))
    draw = random.Random(5)
    documents = [" ".join(draw.choices(WORDS, k=60)) for _ in range(40)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    train_sentencepiece(documents, folder / "tokenizer", vocab_size=VOCAB)
    (folder / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "config_name": str(folder / "model"),
                "data_files": [str(folder / "text.jsonl")],
                "tokenizer_name_or_path": str(folder / "tokenizer"),
                "per_device_train_batch_size": 2,
                "max_steps": 4,
                "learning_rate": "1e-2",
                "logging_steps": 1,
                "save_strategy": "steps",
                "save_steps": 2,
                "shuffle_window": 10,
                "use_cpu": True,
                "precision": "fp32",
            }
        )
    )
    return folder


@pytest.fixture(scope="module")
def launches(folder):
    """Case D7: two launches at once on one machine, one streamed with W&B, one prepared by the run itself."""
    common = ["--config_file", CPU_GLOO, RECIPE, "--config", folder / "run.yaml"]
    dead = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    no_key = {"HOME": str(folder)}
    started = [
        launch(*common, "--output_dir", folder / "streamed", "--report_to", "wandb", **dead, **no_key),
        launch(
            *common,
            *("--output_dir", folder / "prepared", "--data_files", folder / "text.jsonl"),
            *("--prepared_corpus", folder / "corpus", "--document_mask", "true", "--report_to", "tensorboard"),
        ),
    ]
    return [output_of(process) for process in started]


def test_two_launches_at_once_are_two_runs_of_two_ranks(folder, launches):
    """Cases D1 and D7; case E8: the Hub offline and the proxy dead."""
    for name in ("streamed", "prepared"):
        record = json.loads((folder / name / "run.json").read_text())
        expected = {"world_size": 2, "backend": "gloo", "engine": "ddp", "device": "cpu", "precision": "fp32"}
        assert expected.items() <= record.items()
        assert json.loads((folder / name / "STATUS").read_text())["status"] == "finished"


def test_the_runs_folder_holds_all_that_the_run_made(folder, launches):
    names = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer.model", "README.md", "all_results.json"}
    names |= {"trainer_state.json", "loss.png", "run.json", "STATUS", "checkpoint-4"}
    for name in ("streamed", "prepared"):
        assert names <= {path.name for path in (folder / name).iterdir()}
        results = json.loads((folder / name / "all_results.json").read_text())
        assert {"eval_bits_per_byte", "eval_nats_per_token", "eval_perplexity", "train_loss"} <= results.keys()
        assert results["num_tokens_read"] == 2 * 2 * 4 * 64
        state = json.loads((folder / name / "trainer_state.json").read_text())
        assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2, 3, 4]


def test_a_run_prints_its_progress_and_three_samples(launches):
    for printed in launches:
        assert printed.count("--- sample") == 3
        assert "step 4/4  loss " in printed
        assert "2 ranks (gloo, ddp) on cpu, 1 thread a rank, fp32" in printed


def test_two_ranks_are_one_run_of_the_tracker(folder, launches):
    """Cases D12 and E11: no key, standard input closed."""
    [place] = (folder / "streamed" / "wandb").glob("offline-run-*")
    assert "W&B has no API key here" in launches[0]
    run = read_offline_run(place)
    assert run.config["max_steps"] == 4 and run.config["vocab_size"] == VOCAB and run.config["run"]["world_size"] == 2
    losses = {row["train/global_step"]: row["train/loss"] for row in run.history if "train/loss" in row}
    state = json.loads((folder / "streamed" / "trainer_state.json").read_text())
    assert losses == {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}
    assert any("eval/bits_per_byte" in row for row in run.history)
    [table] = (place / "files").glob("media/table/samples_*.table.json")
    samples = json.loads(table.read_text())
    assert samples["columns"] == ["prompt", "text"] and len(samples["data"]) == 3
    assert all(f"--- sample\n{text}\n" in launches[0] for _, text in samples["data"])
    card = (folder / "streamed" / "README.md").read_text()
    assert "## How it went" in card and "README.md" in run.files and (place / "files" / "README.md").read_text() == card


def test_tensorboard_has_settings_metrics_samples_and_card_of_one_rank(folder, launches):
    events = EventAccumulator(str(folder / "prepared" / "tensorboard"))
    events.Reload()
    said = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert said["card/text_summary"] == (folder / "prepared" / "README.md").read_text()
    assert (
        "    The history of" in said["samples/2/text_summary"]
        and f'"vocab_size": {VOCAB}' in said["model_config/text_summary"]
    )
    assert '"world_size": 2' in said["run/text_summary"]
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]


def test_the_model_of_a_run_loads_and_writes(folder, launches):
    model = AutoModelForCausalLM.from_pretrained(folder / "streamed")
    tokenizer = AutoTokenizer.from_pretrained(folder / "streamed")
    output = model.generate(**tokenizer("the cat", return_tensors="pt"), max_new_tokens=5)
    assert output.shape[1] > 2
    fresh = AutoModelForCausalLM.from_config(model.config)
    assert not torch.equal(fresh.lm_head.weight, model.lm_head.weight)


def test_a_finished_run_is_not_started_again_and_auto_goes_on(folder, launches, monkeypatch, capsys):
    """Case S12: `resume_from_checkpoint` in the run file is honoured."""
    before = (folder / "streamed" / "model.safetensors").read_bytes()
    flags = ["--config", folder / "run.yaml", "--output_dir", folder / "streamed"]
    assert run_here(monkeypatch, "pretrain_tlm", *flags) == 2
    assert "holds another run" in capsys.readouterr().err
    assert (folder / "streamed" / "model.safetensors").read_bytes() == before
    again = folder / "again.yaml"
    again.write_text((folder / "run.yaml").read_text() + "resume_from_checkpoint: auto\n")
    flags = ["--config", again, "--output_dir", folder / "prepared", "--prepared_corpus", folder / "corpus"]
    flags += ["--document_mask", "true"]
    record = (folder / "prepared" / "run.json").read_text()
    assert run_here(monkeypatch, "pretrain_tlm", *flags, "--max_steps", 6) == 2, "one rank now: half the global batch"
    assert "global batch size was 4 and is 2 now" in capsys.readouterr().err
    assert (folder / "prepared" / "run.json").read_text() == record
    flags += ["--gradient_accumulation_steps", "2"]
    assert run_here(monkeypatch, "pretrain_tlm", *flags, "--max_steps", 6, "--document_mask", "true") == 0
    state = json.loads((folder / "prepared" / "trainer_state.json").read_text())
    logged = [entry for entry in state["log_history"] if "loss" in entry]
    assert [entry["step"] for entry in logged] == [1, 2, 3, 4, 5, 6]
    assert [entry["num_tokens_read"] for entry in logged] == [256, 512, 768, 1024, 1280, 1536]
    assert "Going on from" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in (folder / "prepared").glob("*.*")}
    assert run_here(monkeypatch, "pretrain_tlm", *flags, "--max_steps", 6, "--document_mask", "true") == 0
    assert "is finished" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in (folder / "prepared").glob("*.*")}


def test_one_process_trains_its_own_tokenizer_and_pads_records(folder, tmp_path, monkeypatch, capsys):
    run_file = yaml.safe_load((folder / "run.yaml").read_text())
    del run_file["tokenizer_name_or_path"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run_file))
    flags = ["--config", tmp_path / "run.yaml", "--output_dir", tmp_path / "run", "--packing", "false"]
    assert run_here(monkeypatch, "pretrain_tlm", *flags) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["world_size"], record["backend"], record["engine"]) == (1, None, "none")
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert results["num_tokens_trained"] < results["num_tokens_not_padding"] <= results["num_tokens_read"]
    assert (tmp_path / "run" / "tokenizer.model").is_file()
    assert "wandb" not in capsys.readouterr().out


def test_any_architecture_is_a_folder_not_code(folder, tmp_path, monkeypatch):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 64, "vocab_size": VOCAB, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    flags = ["--config", folder / "run.yaml", "--config_name", tmp_path / "config.json"]
    assert run_here(monkeypatch, "pretrain_tlm", *flags, "--output_dir", tmp_path / "run") == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model_type"] == "llama"


def broken_inputs(folder, tmp_path):
    """Flags that spoil a run, and a word of the message that each must give."""
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "corrupt.xml.bz2").write_bytes(b"BZh91AY&SY no bzip2")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "content.jsonl").write_text('{"content": "a text"}\n' * 30)
    (tmp_path / "small.json").write_text(
        (folder / "model" / "config.json").read_text().replace(f'"vocab_size": {VOCAB}', f'"vocab_size": {VOCAB - 5}')
    )
    return {
        "a missing file": (["--data_files", tmp_path / "none.txt"], "none.txt"),
        "an empty file": (["--data_files", tmp_path / "empty.txt"], "empty.txt"),
        "a file that is not UTF-8": (["--data_files", tmp_path / "latin.txt"], "offset 3"),
        "a corrupt bz2": (["--data_files", tmp_path / "corrupt.xml.bz2"], "corrupt.xml.bz2"),
        "a folder without files": (["--data_files", tmp_path / "nothing"], "nothing"),
        "no such column (case S10)": (["--data_files", tmp_path / "content.jsonl"], "--text_column"),
        "a stream without an end (case S8)": (["--max_steps", -1], "--max_steps"),
        "a block over the context": (["--block_size", 65], "context of 64"),
        "vocabularies that differ (case S9)": (["--config_name", tmp_path / "small.json"], str(VOCAB - 5)),
        "the Hub out of reach": (["--dataset_name", "someone/something"], "demo.yaml"),
        "no such architecture": (["--config_name", tmp_path / "none.json"], "--config_name"),
        "no such tokenizer": (["--tokenizer_name_or_path", tmp_path / "none"], "--tokenizer_name_or_path"),
        "no such run file": (["--config", tmp_path / "none.yaml"], "none.yaml"),
        "an unknown flag": (["--learning_rat", 1], "--learning_rate"),
        "a prepared corpus that is not there": (["--prepared_corpus", tmp_path / "none"], "prepare_corpus.py"),
    }


def test_wrong_input_ends_before_a_model_is_built_and_nothing_is_written(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", only_on_meta(AutoModelForCausalLM.from_config))
    for name, (flags, word) in broken_inputs(folder, tmp_path).items():
        all_flags = ["--config", folder / "run.yaml", "--output_dir", tmp_path / "run", *flags]
        print(name)
        assert run_here(monkeypatch, "pretrain_tlm", *all_flags) == 2, name
        message = capsys.readouterr().err
        assert word in message, f"{name}: {message}"
        assert "Traceback" not in message
        assert not (tmp_path / "run").exists(), name


def only_on_meta(from_config):
    def build(*args, **kwargs):
        assert torch.get_default_device().type == "meta", "a model was built"
        return from_config(*args, **kwargs)

    return build


def test_a_full_disk_is_seen_before_a_model_is_built(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    assert run_here(monkeypatch, "pretrain_tlm", "--config", folder / "run.yaml", "--output_dir", tmp_path / "run") == 2
    assert "space left" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_the_hub_the_default_run_names_the_demo(tmp_path, monkeypatch, capsys):
    assert run_here(monkeypatch, "pretrain_tlm", "--output_dir", tmp_path / "run") == 2
    assert "--config recipes/configs/pretrain_tlm/demo.yaml" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_launcher_for_one_process_where_two_were_meant_is_refused(tmp_path, folder):
    """Case D1 as users meet it: MULTI_CPU starts one process and exits with 0."""
    (tmp_path / "multi.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\n"
        "num_machines: 1\nnum_processes: 2\nuse_cpu: true\n"
    )
    flags = ["--config", folder / "run.yaml", "--output_dir", tmp_path / "run"]
    process = launch("--config_file", tmp_path / "multi.yaml", RECIPE, *flags)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "asked for 2 processes, and this one is in a group of 1" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_every_run_file_parses_and_its_first_line_starts_it(path):
    command = shlex.split(path.read_text().splitlines()[0].removeprefix("# "))
    assert command == ["accelerate", "launch", "recipes/pretrain_tlm.py", "--config", str(path.relative_to(ROOT))]
    run, data, model = parse_arguments((RunArguments, DataArguments, ModelArguments), ["--config", str(path)])
    assert (ROOT / model.config_name).is_file()
    assert run.max_steps > 0 or not data.packing, "a stream has no end of its own"
    assert bool(data.dataset_name) or bool(data.prepared_corpus)


def test_the_default_run_is_full_wikipedia_for_100000_steps():
    run, data, _ = parse_arguments(
        (RunArguments, DataArguments, ModelArguments), ["--config", str(DEMO.with_name("wikipedia.yaml"))]
    )
    assert (run.max_steps, data.dataset_name, data.dataset_config_name) == (
        100_000,
        "wikimedia/wikipedia",
        "20231101.en",
    )


def test_the_demo_needs_no_network():
    data = parse_arguments((RunArguments, DataArguments, ModelArguments), ["--config", str(DEMO)])[1]
    assert data.dataset_name == "sample"
    assert len(open_source(dataset_name="sample").shards) == 1
    assert "wandb" not in sys.modules
