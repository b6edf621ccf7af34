"""A run file and flags become dataclasses."""

import pytest

from tinylm.training.arguments import DataArguments, ModelArguments, RunArguments, parse_arguments


def run_file(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def parse(tmp_path, text, *flags):
    config = run_file(tmp_path, f"output_dir: {tmp_path / 'run'}\nuse_cpu: true\n{text}")
    return parse_arguments((RunArguments, DataArguments, ModelArguments), ["--config", config, *flags])


def test_values_are_cast_by_the_type_of_their_field(tmp_path):
    text = "learning_rate: 2e-4\npacking: false\nmax_steps: 7\nsample_prompts: ['', 'a b']\nmax_tokens: null\n"
    run, data, _ = parse(tmp_path, text + "lr_scheduler_type: constant\naccelerator_config: {even_batches: false}\n")
    assert (run.learning_rate, run.max_steps, run.sample_prompts) == (2e-4, 7, ["", "a b"])
    assert (data.packing, data.max_tokens) == (False, None)
    assert run.accelerator_config.even_batches is False


def test_flags_win_over_the_run_file(tmp_path):
    run, data, _ = parse(tmp_path, "max_steps: 7\nblock_size: 64\n", "--max_steps", "3", "--block-size=32")
    assert (run.max_steps, data.block_size) == (3, 32)


def test_a_source_given_by_hand_replaces_the_run_files_source_as_a_whole(tmp_path):
    text = "dataset_name: wikimedia/wikipedia\ndataset_config_name: 20231101.en\nprepared_corpus: there\n"
    _, data, _ = parse(tmp_path, text, "--data_files", "a.txt", "b.txt")
    assert data.data_files == ["a.txt", "b.txt"]
    assert (data.dataset_name, data.dataset_config_name, data.prepared_corpus) == (None, None, None)


def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path):
    with pytest.raises(ValueError, match=r"unknown key `learning_rat`. Did you mean `learning_rate`"):
        parse(tmp_path, "learning_rat: 1\n")


def test_an_unknown_or_shortened_flag_is_refused_with_the_nearest_known_one(tmp_path):
    with pytest.raises(ValueError, match=r"no flag `--max_step`. Did you mean `--max_steps`"):
        parse(tmp_path, "", "--max_step", "3")


@pytest.mark.parametrize(
    ("text", "words"), [("- a\n", "holds a list"), ("a: [\n", "is not YAML"), ("just words", "holds a str")]
)
def test_a_run_file_that_is_no_mapping_is_refused(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        parse_arguments((DataArguments,), ["--config", run_file(tmp_path, text)])


def test_a_missing_run_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"`none.yaml` does not exist"):
        parse_arguments((DataArguments,), ["--config=none.yaml"])


def test_best_model_tracking_that_cannot_work_is_refused_at_parsing(tmp_path):
    """Case S13."""
    text = "load_best_model_at_end: true\neval_strategy: steps\neval_steps: 4\nsave_strategy: steps\nsave_steps: 6\n"
    with pytest.raises(ValueError, match="round multiple"):
        parse(tmp_path, text)


def test_resume_from_the_run_file_reaches_the_arguments(tmp_path):
    """Case S12, with the recipe's part in tests/recipes."""
    assert parse(tmp_path, "resume_from_checkpoint: auto\n")[0].resume_from_checkpoint == "auto"


def test_a_run_without_a_folder_is_refused():
    with pytest.raises(ValueError, match="Set `--output_dir`"):
        RunArguments()
