"""run.json, STATUS and the lines that a run prints."""

import doctest
import json
import subprocess

import pytest

from tests.training.tiny import UnevenRows, run_arguments, tiny_model, trainer_for
from tinylm.training import callbacks, run_record
from tinylm.training.launch import Launch
from tinylm.training.run_record import current_commit, redact, write_run_json, write_status
from tinylm.training.trackers import one_wandb_run, prepare_trackers

LAUNCH = Launch(rank=0, world_size=2, backend="gloo", engine="ddp", device="cpu", threads=1)


@pytest.mark.parametrize("module", [run_record, callbacks])
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--hub_token=hf_abcdefghij"], ["--hub_token=***"]),
        (["--hub_token", "abc", "--seed", "1"], ["--hub_token", "***", "--seed", "1"]),
        (["--run_name", "sk-proj-abcdefgh", "github_pat_abcdefgh"], ["--run_name", "***", "***"]),
        (["--run_name", "see hf_abcdefghij"], ["--run_name", "see ***"]),
        (
            ["--max_tokens", "5", "--tokenizer_name_or_path", "x"],
            ["--max_tokens", "5", "--tokenizer_name_or_path", "x"],
        ),
    ],
)
def test_secrets_do_not_reach_the_recorded_command(words, shown):
    assert redact(words) == shown


def test_run_json_says_how_the_run_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pretrain.py", "--hub_token", "hf_abcdefghij"])
    parameters = {"total": 17, "trainable": 5}
    training = {"learning_rate": 0.002}
    base = {"base_model": "/somewhere/base", "base_model_id": "our/base"}
    settings = {"precision": "bf16", "seed": 3, "data_source": "a text", "parameters": parameters, "training": training}
    write_run_json(str(tmp_path), LAUNCH, **settings, base_model=base)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["command"] == ["pretrain.py", "--hub_token", "***"]
    expected = {"world_size": 2, "backend": "gloo", "engine": "ddp", "device": "cpu", "threads": 1}
    assert expected.items() <= record.items()
    assert (record["precision"], record["seed"], record["data_source"]) == ("bf16", 3, "a text")
    assert (record["parameters"], record["training"]) == (parameters, training)
    assert base.items() <= record.items()
    assert "torch" in record["versions"]
    assert {path.name for path in tmp_path.iterdir()} == {"run.json"}


def test_status_is_one_json_object(tmp_path):
    write_status(str(tmp_path), "interrupted", 7, "go on like this", "STOP")
    assert json.loads((tmp_path / "STATUS").read_text()) == {
        "status": "interrupted",
        "step": 7,
        "because": "STOP",
        "how_to_go_on": "go on like this",
        "launch": None,
    }


def test_results_of_a_benchmark_do_not_make_a_commit_a_changed_one(tmp_path, monkeypatch):
    def git(*words):
        name = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        return subprocess.run(["git", "-C", tmp_path, *name, *words], check=True, capture_output=True, text=True).stdout

    package, results = tmp_path / "tinylm" / "module.py", tmp_path / "recipes" / "results" / "some.csv"
    for path in (package, results):
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setattr(run_record, "__file__", str(package))
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    commit = git("rev-parse", "--short=12", "HEAD").strip()
    results.write_text("a row")
    assert current_commit() == commit
    package.write_text("a line")
    assert current_commit() == f"{commit}-dirty"
    monkeypatch.setattr(run_record, "__file__", "/module.py")
    assert current_commit() is None


@pytest.fixture
def wandb_environment(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_SILENT", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_RUN_ID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_wandb_without_a_key_logs_offline_and_says_so(wandb_environment, caplog, tmp_path):
    """Case E11."""
    caplog.set_level("INFO", logger="tinylm")
    prepare_trackers(["wandb"], str(tmp_path))
    assert run_record.os.environ["WANDB_MODE"] == "offline"
    assert "logs offline" in caplog.text


def test_wandb_with_a_key_stays_online(wandb_environment, tmp_path):
    wandb_environment.setenv("WANDB_API_KEY", "0" * 40)
    prepare_trackers(["wandb"], str(tmp_path))
    assert "WANDB_MODE" not in run_record.os.environ


def test_a_tracker_that_is_not_installed_is_named(tmp_path):
    with pytest.raises(ImportError, match="pip install trackio"):
        prepare_trackers(["trackio"], str(tmp_path))


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run_of_wandb(wandb_environment, tmp_path):
    """Case S16, offline: the second process is played by finishing the first one's run."""
    import wandb

    settings = {"report_to": ["wandb"], "save_strategy": "steps", "save_steps": 2}
    folder = tmp_path / "run"
    trainer_for(tiny_model(), UnevenRows(), run_arguments(folder, max_steps=2, **settings)).train()
    first = wandb.run.id
    wandb.finish()
    args = run_arguments(folder, **settings)
    trainer = trainer_for(tiny_model(), UnevenRows(), args)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert wandb.run.id == first == (folder / "wandb_run_id").read_text().strip()
    wandb.finish()
    assert {path.name.rpartition("-")[2] for path in (folder / "wandb").glob("offline-run-*")} == {first}
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4]
    assert "WANDB_RUN_ID" not in run_record.os.environ
    with one_wandb_run(str(tmp_path / "other"), goes_on=False):
        assert run_record.os.environ["WANDB_RUN_ID"] not in (first, "")


def test_a_file_has_its_name_only_when_its_text_is_on_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(run_record.os, "fsync", lambda file: flushed.append(run_record.os.fstat(file).st_size))
    monkeypatch.setattr(run_record.os, "replace", lambda *_: flushed.append("renamed"))
    run_record.write_atomically(tmp_path / "STATUS", "running\n")
    assert flushed == [8, "renamed"]
