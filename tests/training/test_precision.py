"""Precision: the run file decides, the hardware limits, a launcher that disagrees is refused."""

import pytest

from tinylm.training import precision
from tinylm.training.arguments import RunArguments
from tinylm.training.precision import check_against_launcher, resolve_precision


@pytest.fixture
def cpu(monkeypatch):
    """Sets whether the CPU computes in bf16, and a launcher's word for the precision."""

    def setup(has_bf16, launcher=None):
        monkeypatch.setattr(precision, "_cpu_has_bf16", lambda: has_bf16)
        if launcher is None:
            monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
        else:
            monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)

    return setup


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp32")])
def test_auto_takes_bf16_where_the_cpu_computes_in_it(cpu, has_bf16, expected):
    cpu(has_bf16)
    assert resolve_precision("auto", use_cpu=True) == expected


@pytest.mark.parametrize("asked", ["bf16", "fp16"])
def test_a_format_that_the_hardware_lacks_becomes_fp32_and_one_line(cpu, caplog, asked):
    cpu(has_bf16=False)
    assert resolve_precision(asked, use_cpu=True) == "fp32"
    assert [record.message for record in caplog.records] == [
        f"This hardware does not compute in {asked}: the run uses fp32."
    ]


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match=r"one of auto, fp32, bf16, fp16; it was 'int8'"):
        resolve_precision("int8", use_cpu=True)


def test_a_launcher_that_says_otherwise_is_an_error_with_both_values():
    """Case D8."""
    with pytest.raises(ValueError, match=r"`mixed_precision: bf16` and the run says `precision: fp32`"):
        check_against_launcher("fp32", "bf16")
    for asked, launcher in (("fp32", "no"), ("fp32", None), ("bf16", "bf16"), ("auto", "fp16")):
        check_against_launcher(asked, launcher)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"precision": "fp32"}, "no"), ({"precision": "bf16"}, "bf16"), ({"bf16": True}, "bf16"), ({}, "bf16")],
)
def test_the_trainer_computes_in_what_the_run_says(cpu, tmp_path, settings, expected):
    cpu(has_bf16=True)
    run = RunArguments(output_dir=str(tmp_path), use_cpu=True, **settings)
    assert run.mixed_precision == expected


@pytest.mark.parametrize("older", ["bf16", "tf32"])
def test_a_run_file_for_a_gpu_runs_on_a_cpu_without_its_formats(cpu, tmp_path, caplog, older):
    """Case E9: one line and fp32, no stack trace."""
    cpu(has_bf16=False)
    run = RunArguments(output_dir=str(tmp_path), use_cpu=True, **{older: True})
    assert (run.precision, run.mixed_precision) == ("fp32", "no")
    assert len([record for record in caplog.records if record.name.startswith("tinylm")]) == 1


def test_two_spellings_of_precision_that_contradict_are_refused(tmp_path):
    with pytest.raises(ValueError, match="contradict each other"):
        RunArguments(output_dir=str(tmp_path), use_cpu=True, precision="fp32", bf16=True)
