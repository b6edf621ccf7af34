"""What reaches the trackers: see also the launch with W&B and TensorBoard in tests/recipes/test_pretrain_tlm.py."""

import json
import os
import sys
from pathlib import Path

import pytest

from tinylm.training import trackers
from tinylm.training.trackers import prepare_trackers, send_results


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TENSORBOARD_LOGGING_DIR", "WANDB_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(trackers, "_folders_set_here", {})
    (tmp_path / "run.json").write_text(json.dumps({"world_size": 1}))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    (tmp_path / "README.md").write_text("# A card")
    return tmp_path


def test_two_runs_of_one_process_log_into_their_own_folders_unless_the_user_names_one(run_folder, monkeypatch):
    for name in ("first", "second"):
        prepare_trackers(["tensorboard"], str(run_folder / name))
        assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(run_folder / name / "tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "mine")
    prepare_trackers(["tensorboard"], str(run_folder / "third"))
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == "mine"


def test_texts_reach_tensorboard_as_they_are(run_folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    prepare_trackers(["tensorboard"], str(run_folder))
    send_results(["tensorboard"], str(run_folder), [{"prompt": "", "text": "a\n# b"}])
    events = EventAccumulator(str(run_folder / "tensorboard"))
    events.Reload()
    texts = {tag: events.Tensors(tag)[0] for tag in events.Tags()["tensors"]}
    assert {text.step for text in texts.values()} == {7}
    said = {tag: text.tensor_proto.string_val[0].decode() for tag, text in texts.items()}
    assert said["card/text_summary"] == "# A card"
    assert "    (empty)" in said["samples/1/text_summary"] and "    a\n    # b" in said["samples/1/text_summary"]
    assert '"world_size": 1' in said["run/text_summary"]


def test_a_tracker_that_fails_is_warned_of_and_others_are_not_loaded(run_folder, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    send_results([], str(run_folder), [])
    assert caplog.text == ""
    send_results(["wandb"], str(run_folder), [])
    assert "Samples and card did not reach wandb" in caplog.text
