"""`tinylm doctor --config`: a run that would start passes, and what can be wrong is named with its remedy."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import Qwen2Config
from typer.testing import CliRunner

from tests.data.chats import answer, chat_tokenizer, question
from tests.distributed import ROOT
from tests.training.tiny_run import write_tiny_run
from tinylm.cli import app
from tinylm.inspection import doctor_checks, machine_checks
from tinylm.inspection.doctor_checks import examine_plan
from tinylm.inspection.machine_checks import check_devices, check_launch, check_versions
from tinylm.training.manifest import write_manifest
from tinylm.training.run_record import write_status

LAUNCH_FILES = ROOT / "accelerate_configs"


@pytest.fixture(scope="module")
def pretraining(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("pretraining"))


@pytest.fixture(scope="module")
def finetuning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three conversations, one of which is too long for its answer to be kept."""
    folder = tmp_path_factory.mktemp("finetuning")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen2Config(**sizes, intermediate_size=24, vocab_size=300, max_position_embeddings=512).save_pretrained(
        folder / "base"
    )
    chat_tokenizer().save_pretrained(folder / "base")
    chats = [[question(text), answer("Hello.")] for text in ("Hi", "And?", "x" * 400)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    run = {"model_name_or_path": str(folder / "base"), "data_files": str(folder / "chats.jsonl")}
    run |= {"output_dir": str(folder / "run"), "use_cpu": True}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def found(config: Path, *flags: object, launch: Path | None = None) -> dict[str, tuple[str, str]]:
    findings = examine_plan(config, launch, [str(flag) for flag in flags])
    return {finding.subject: (finding.level, finding.detail) for finding in findings}


@pytest.mark.parametrize("kind", ["pretraining", "finetuning"])
def test_a_run_that_would_start_has_no_problem_and_nothing_is_written(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "check_versions", lambda: iter(()))
    config = request.getfixturevalue(kind)
    before = sorted(config.parent.rglob("*"))
    looked_at = found(config, launch=LAUNCH_FILES / "cpu_gloo.yaml")
    assert "problem" not in {level for level, _ in looked_at.values()}, looked_at
    subjects = {"devices", "launch file", "threads", "precision", "output folder", "model", "data", "tokenizer"}
    assert {*subjects, "memory", "disk"} <= set(looked_at)
    assert "by 2 ranks" in looked_at["memory"][1] and "2 ranks on a machine" in looked_at["launch file"][1]
    assert sorted(config.parent.rglob("*")) == before


PRETRAINING_FAULTS = {
    "an unknown flag": (["--blocksize", 9], "run file", "Did you mean `--block_size`"),
    "no architecture": (["--config_name", "no.json"], "model", "Set `--config_name`"),
    "a block beyond the context": (["--block_size", 97], "block", "at most the model's context of 96"),
    "no data": (["--data_files", "nowhere.txt"], "data", "nowhere.txt"),
    "no prepared corpus": (["--prepared_corpus", "nowhere"], "data", "write it with recipes/prepare_corpus.py"),
    "two sources": (["--dataset_name", "sample", "--data_files", "x.txt"], "data", "Set one of them"),
    "no tokenizer": (["--tokenizer_name_or_path", "nowhere"], "tokenizer", "Set `--tokenizer_name_or_path`"),
    "no such tracker": (["--report_to", "trackio"], "tracker", "pip install trackio"),
    "a push without the Hub": (["--push_to_hub", "true"], "Hub", "`HF_HUB_OFFLINE` is set"),
}


@pytest.mark.parametrize("fault", PRETRAINING_FAULTS)
def test_what_pretraining_would_refuse_is_a_problem(
    fault: str, pretraining: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "find_spec", lambda name: None)
    flags, subject, remedy = PRETRAINING_FAULTS[fault]
    level, detail = found(pretraining, *flags)[subject]
    assert level == "problem" and remedy in detail


def test_the_column_and_the_vocabulary_are_compared(pretraining: Path, tmp_path: Path) -> None:
    level, detail = found(pretraining, "--data_files", pretraining.parent / "text.jsonl", "--text_column", "body")[
        "data"
    ]
    assert level == "problem" and "['text']" in detail
    config = json.loads((pretraining.parent / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 299}))
    level, detail = found(pretraining, "--config_name", tmp_path / "config.json")["tokenizer"]
    assert level == "problem" and "299" in detail and "300" in detail


FINETUNING_FAULTS = {
    "no base": (["--model_name_or_path", "./nowhere"], "model", "`./nowhere`"),
    "no such layers": (["--target_modules", "query"], "trained layers", "o_proj, q_proj"),
    "columns of no shape": (["--data_shape", "instruction"], "data", "set `--data_shape`"),
    "no row with a target": (["--max_length", 12], "data", "None of the 3 rows"),
    "a push of a local base": (["--push_to_hub", "true"], "Hub", "Set `--base_model_id`"),
}


@pytest.mark.parametrize("fault", FINETUNING_FAULTS)
def test_what_fine_tuning_would_refuse_is_a_problem(fault: str, finetuning: Path) -> None:
    flags, subject, remedy = FINETUNING_FAULTS[fault]
    level, detail = found(finetuning, *flags)[subject]
    assert level == "problem" and remedy in detail


def test_rows_without_a_target_are_a_warning(finetuning: Path) -> None:
    level, detail = found(finetuning, "--max_length", 100)["data"]
    assert level == "warning" and "1 rows without a target" in detail and "raise `--max_length`" in detail


def test_a_precision_that_the_hardware_lacks_is_a_warning(
    pretraining: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tinylm.training.precision._cpu_has_bf16", lambda: False)
    level, detail = found(pretraining, "--precision", "bf16")["precision"]
    assert level == "warning" and detail == "fp32 on cpu; This hardware does not compute in bf16: the run uses fp32."
    assert found(pretraining, "--precision", "auto")["precision"] == ("ok", "fp32 on cpu")
    assert capsys.readouterr() == ("", "")


def test_a_base_whose_weights_cannot_be_read_is_a_problem(finetuning: Path, tmp_path: Path) -> None:
    base = shutil.copytree(finetuning.parent / "base", tmp_path / "base")
    (base / "model.safetensors").write_bytes(b"\x08")
    level, detail = found(finetuning, "--model_name_or_path", base)["model"]
    assert level == "problem" and "cut off" in detail
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    level, detail = found(finetuning, "--model_name_or_path", base)["model"]
    assert level == "problem" and "can run any code" in detail


def test_too_little_memory_or_disk_is_a_problem(pretraining: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks.psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    monkeypatch.setattr("tinylm.training.checkpoints.shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    looked_at = found(pretraining)
    assert looked_at["memory"][0] == looked_at["disk"][0] == "problem"
    assert "lower `--per_device_train_batch_size`" in looked_at["memory"][1] and "Free some" in looked_at["disk"][1]


def test_a_folder_that_holds_a_run_or_may_not_be_written_is_a_problem(
    pretraining: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_status(str(tmp_path), "finished", 4)
    (tmp_path / "run.json").write_text("{}")
    level, detail = found(pretraining, "--output_dir", tmp_path)["output folder"]
    assert level == "problem" and "holds another run" in detail
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    level, detail = found(pretraining)["output folder"]
    assert level == "problem" and "may not be written" in detail


def test_a_folder_in_which_a_run_replaces_a_checkpoint_is_left_as_it_is(pretraining: Path, tmp_path: Path) -> None:
    """Between the two renames: the run that is at work would not find its folder again."""
    old = tmp_path / ".old-checkpoint-3"
    old.mkdir()
    (old / "rng_state.pth").write_bytes(b"r")
    write_manifest(old, 3)
    level, detail = found(pretraining, "--output_dir", tmp_path, "--resume_from_checkpoint", "auto")["output folder"]
    assert level == "ok" and "begins anew" in detail
    assert [path.name for path in tmp_path.iterdir()] == [".old-checkpoint-3"]


def launch_findings(**values: object) -> list[tuple[str, str]]:
    return [(finding.level, finding.detail) for finding in check_launch(values)]


def test_launch_files_that_start_something_else_are_problems() -> None:
    for kind in ("MULTI_CPU", "NO"):
        [(level, detail)] = launch_findings(distributed_type=kind, num_processes=2, use_cpu=True)
        assert level == "problem" and "a single process" in detail
    [(level, detail)] = launch_findings(distributed_type="FSDP", num_processes=2, use_cpu=True)
    assert level == "ok" and "2 ranks on a machine, `FSDP`, on the CPU" in detail
    [(level, detail)] = launch_findings(distributed_type="MULTI_GPU", num_processes=2)
    assert level == "problem" and "torch sees 0 GPUs" in detail
    [(level, detail)] = launch_findings(distributed_type="MULTI_GPU", num_processes=2000, use_cpu=True)
    assert level == "warning" and "2000 ranks" in detail
    [(first, _), (level, detail)] = launch_findings(distributed_type="NO", mixed_precision="bf16")
    assert (first, level) == ("ok", "warning") and "take it out" in detail


def test_no_launch_file_of_the_kit_for_cpus_is_complained_about() -> None:
    for path in LAUNCH_FILES.glob("cpu*.yaml"):
        assert {level for level, _ in launch_findings(**yaml.safe_load(path.read_text()))} <= {"ok", "warning"}, path


def test_a_gpu_that_torch_cannot_use_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "_NVIDIA", (tmp_path / "nvidia0",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert check_devices().level == "ok"
    (tmp_path / "nvidia0").touch()
    finding = check_devices()
    assert finding.level == "warning" and "install a build of torch for CUDA" in finding.detail


def test_versions_are_compared_with_those_of_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "requires", lambda name: ["numpy>=1.26", 'pytest>=8; extra == "test"'])
    monkeypatch.setattr(machine_checks, "version", lambda name: "2.0.0+cpu")
    constraints = tmp_path / "constraints.txt"

    def level(text: str) -> list[tuple[str, str]]:
        constraints.write_text(text)
        return [(finding.level, finding.detail) for finding in check_versions(constraints)][1:]

    assert level("numpy==2.0.0\n") == [("ok", "1, in the versions tested")]
    [(kind, detail)] = level("# ours\nnumpy==2.1.0\n")
    assert kind == "warning" and "numpy 2.0.0 (tested: 2.1.0)" in detail
    constraints.unlink()
    assert [finding.level for finding in check_versions(constraints)][1:] == ["ok"]
    monkeypatch.setattr(machine_checks, "version", lambda name: "1.2")
    assert level("")[0][0] == "problem"


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Callable:
    monkeypatch.setattr("tinylm.cli.runs.quieten", lambda: None)
    return lambda *words: CliRunner().invoke(app, ["doctor", *map(str, words)])


def test_the_command_ends_with_one_where_there_is_a_problem(doctor: Callable, pretraining: Path) -> None:
    launch = ["--launch_config", LAUNCH_FILES / "cpu.yaml"]
    well = doctor("--config", pretraining, *launch, "--json")
    assert well.exit_code == 0, well.output
    assert {"level", "subject", "detail"} == set(json.loads(well.output)[0])
    ill = doctor("--config", pretraining, *launch, "--block_size", 97)
    assert ill.exit_code == 1 and "problem  block" in ill.output and "ok       launch file" in ill.output
    with pytest.raises(ValueError, match="`--run`"):
        CliRunner().invoke(app, ["doctor", "--config", "x", "--run", "y"], catch_exceptions=False)
