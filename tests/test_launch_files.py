"""Launch files: the kit's own are valid, and one that means something else is refused before a model is loaded."""

import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.distributed import ROOT
from tests.recipes.running import launch
from tinylm.training import launch_files
from tinylm.training.launch_files import check_launch_in_use, read_launch_file

FOLDER = ROOT / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
NAMES = {"cpu", "cpu_gloo", "cpu_gloo_multinode", "ddp_nccl", "ddp_nccl_multinode", "deepspeed_zero2"}
NAMES |= {"deepspeed_zero3", "fsdp2", "mps"}


@pytest.fixture
def every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_files, "find_spec", lambda name: object())


def test_the_files_of_the_design_are_there_and_in_the_table() -> None:
    assert {path.stem for path in FILES} == NAMES
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {name for name in NAMES if f"`{name}.yaml`" in table} == NAMES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_valid_for_accelerate_and_for_us(path: Path, every_engine: None) -> None:
    load_config_from_file(str(path))
    values = read_launch_file(path)
    assert values["distributed_type"] in ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert not re.search("precision|accumulation|clipping|learning|batch|offload|seed", text)
    assert path.stem not in {"fsdp2", "deepspeed_zero2", "deepspeed_zero3"} or f"accelerate_configs/{path.name}" in text


FAULTS = {
    "no rule": ("num_process: 3", "accelerate knows no `num_process` among its keys. Did you mean `num_processes`?"),
    "no kind": ("distributed_type: MULTI_GPUS", "`distributed_type` is one of NO, MULTI_CPU, MULTI_GPU"),
    "kind without quotation marks": ("distributed_type: NO", "here it is False (NO needs quotation marks)"),
    "not here": ("compute_environment: AMAZON_SAGEMAKER", "`compute_environment` is LOCAL_MACHINE"),
    "no ranks": ("num_processes: 0", "`num_processes` is a whole number from 1 on, and here it is 0"),
    "ranks unsaid": ("num_processes: -1", "here it is -1"),
    "half a rank": ("num_processes: 1.5", "here it is 1.5"),
    "ranks that machines cannot share": (
        "{num_machines: 2, num_processes: 3}",
        "3 ranks (`num_processes`, of all machines) cannot be shared alike by 2 machines",
    ),
    "a machine too many": ("{num_machines: 2, machine_rank: 2}", "`machine_rank` is 0 to 1 with 2 machines"),
    "a port of one's own": ("{num_machines: 2, main_process_port: 0}", "give the same one to all"),
    "a key of no engine": (
        "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_foward: true}",
        "no `fsdp_reshard_after_foward` among its `fsdp_config`. Did you mean `fsdp_reshard_after_forward`?",
    ),
    "the old FSDP": ("distributed_type: FSDP", "`fsdp_version` in `fsdp_config` is 2, and here it is 1"),
    "a list for an engine": ("fsdp_config: [2]", "`fsdp_config` is a mapping, and here it is [2]"),
    "a key of no DeepSpeed": ("deepspeed_config: {zero_stages: 2}", "Did you mean `zero_stage`?"),
    "no sharding": ("{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 0}}", "`zero_stage` is 2 or 3"),
    "accumulation": (
        "deepspeed_config: {gradient_accumulation_steps: 4}",
        "`gradient_accumulation_steps: 4` belongs to the run file (`--gradient_accumulation_steps`)",
    ),
    "clipping": ("deepspeed_config: {gradient_clipping: 1.0}", "belongs to the run file (`--max_grad_norm`)"),
}


def write(path: Path, change: str) -> Path:
    values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2}
    path.write_text(yaml.safe_dump({**values, "num_machines": 1, **yaml.safe_load(change)}))
    return path


@pytest.mark.parametrize(("change", "text"), FAULTS.values(), ids=FAULTS.keys())
def test_a_file_that_does_not_mean_what_it_says_is_refused(
    tmp_path: Path, every_engine: None, change: str, text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        read_launch_file(write(tmp_path / "launch.yaml", change))
    read_launch_file(write(tmp_path / "launch.yaml", "{}"))


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no `x` among its keys.*`num_processes` is a whole number"):
        read_launch_file(write(tmp_path / "launch.yaml", "{x: 1, num_processes: 0}"))


def test_an_engine_that_is_not_installed_is_named_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_files, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'tinylm\[deepspeed\]'"):
        read_launch_file(FOLDER / "deepspeed_zero2.yaml")


def test_more_ranks_than_gpus_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--config_file", str(FOLDER / "ddp_nccl.yaml"), "recipe.py"]
    monkeypatch.setattr(launch_files, "launch_in_use", lambda: launch_files._parse(words))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_launch_in_use()
    monkeypatch.setattr(launch_files.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="started 2 ranks here, and torch sees 1 GPUs"):
        check_launch_in_use()


def test_a_command_line_that_the_file_cannot_be_used_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--config_file", str(FOLDER / "cpu_gloo_multinode.yaml"), "--num_processes", "3", "recipe.py"]
    monkeypatch.setattr(launch_files, "launch_in_use", lambda: launch_files._parse(words))
    with pytest.raises(ValueError, match=r"3 ranks .* cannot be shared alike by 2 machines"):
        check_launch_in_use()


def test_a_launch_with_such_a_file_ends_before_a_model_is_loaded(tmp_path: Path) -> None:
    """accelerate refuses an unknown key of the file itself, and passes over one inside a part: that one is ours."""
    inside = write(tmp_path / "inside.yaml", "fsdp_config: {fsdp_reshard: true}")
    outside = write(tmp_path / "outside.yaml", "num_process: 2")
    recipe = [ROOT / "recipes" / "pretrain_tlm.py", "--output_dir", tmp_path / "run"]
    processes = [launch("--config_file", path, *recipe) for path in (inside, outside)]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert all(process.returncode != 0 for process in processes)
    assert "accelerate knows no `fsdp_reshard` among its `fsdp_config`" in printed[0]
    assert "unknown keys (['num_process'])" in printed[1]
    assert not (tmp_path / "run").exists() and "parameters" not in printed[0]
