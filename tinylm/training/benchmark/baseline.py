"""The plain loop that the demo has to beat: same corpus, same split, no more time.

The demo may have been trained in shorter blocks, and is validated in windows of that length. The plain loop is scored
in those windows and in windows of its own length, over the same targets, and its better score is the one to beat.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from tinylm.evaluation.scoring import ScoringRows, score

from .hand_loop import HandLoop
from .report import Measurement
from .setting import Setting, open_setting

logger = logging.getLogger(__name__)

_SETTINGS = {"learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1, "max_grad_norm": 1.0}
_WARMUP_STEPS = 20
_FINAL_LR_RATIO = 0.1
_STEPS_A_LINE = 25


@dataclass(frozen=True)
class Demo:
    """A finished demo: where it was made, its seconds of training, its score on how many bytes."""

    commit: str | None
    hardware: str
    train_seconds: float
    bits_per_byte: float
    num_bytes: int


def read_demo(demo_dir: str) -> Demo:
    """The results in a run's folder.

    Raises:
        FileNotFoundError: no finished run there.
    """
    results, record = Path(demo_dir, "all_results.json"), Path(demo_dir, "run.json")
    if not results.is_file() or not record.is_file():
        raise FileNotFoundError(
            f"The part `baseline` compares with a finished demo, and there is none in `{demo_dir}`. Run `make demo`"
            " first, set `--demo_dir`, or leave `baseline` out of `--parts`."
        )
    state = Path(demo_dir, "trainer_state.json")
    numbers, made, history = (json.loads(path.read_text(encoding="utf-8")) for path in (results, record, state))
    return Demo(
        commit=made["commit"],
        hardware=made["hardware"],
        train_seconds=numbers["train_runtime"] - _validation_seconds(history["log_history"]),
        bits_per_byte=numbers["eval_bits_per_byte"],
        num_bytes=numbers["eval_num_bytes"],
    )


def _validation_seconds(log_history: list[dict[str, float]]) -> float:
    """What the validations in the middle of a training took: the plain loop's seconds hold none."""
    end = next(place for place, entry in enumerate(log_history) if "train_runtime" in entry)
    return sum(entry.get("eval_runtime", 0.0) for entry in log_history[:end])


def measure_baseline(run_config: str, scratch: str, demo_dir: str, *, num_steps: int) -> list[Measurement]:
    """The plain loop's bits per byte and training seconds, and whether the demo is better in no more time.

    Raises:
        ValueError: the demo was validated on other text.
    """
    demo = read_demo(demo_dir)
    setting = open_setting(run_config, scratch, max_steps=num_steps, warmup_steps=_WARMUP_STEPS, **_SETTINGS)
    own_rows = setting.corpus.eval_rows
    if demo.num_bytes != own_rows.num_bytes:
        raise ValueError(
            f"Scores compare on the same text only: the demo in `{demo_dir}` was validated on {demo.num_bytes:,} bytes,"
            f" and `{run_config}` holds out {own_rows.num_bytes:,}. Train the demo again, or set `--demo_dir`."
        )
    loop = HandLoop(
        setting.model, setting.corpus.train_dataset, setting.corpus.collate, setting.run, final_lr_ratio=_FINAL_LR_RATIO
    )
    seconds = _train(loop, num_steps)
    demo_rows = open_setting(run_config, scratch, full_context=False).corpus.eval_rows
    bits = [_bits_per_byte(loop, setting, rows) for rows in (own_rows, demo_rows)]
    plain = Measurement(
        f"Plain loop, {num_steps} steps of {setting.tokens_a_step:,} tokens",
        f"{min(bits):.4f} bits per byte after {seconds:,.0f} s of training",
        {
            "bits_per_byte": min(bits),
            "bits_per_byte_in_own_windows": bits[0],
            "bits_per_byte_in_demo_windows": bits[1],
            "train_seconds": seconds,
            "losses": loop.losses,
        },
    )
    return [plain, compare_with_demo(demo, bits_per_byte=min(bits), train_seconds=seconds)]


def compare_with_demo(demo: Demo, *, bits_per_byte: float, train_seconds: float) -> Measurement:
    """Whether the demo beats a plain loop of these results."""
    return Measurement(
        "The demo, on the same text",
        f"{demo.bits_per_byte:.4f} bits per byte after {demo.train_seconds:,.0f} s of training",
        {
            "bits_per_byte": demo.bits_per_byte,
            "train_seconds": demo.train_seconds,
            "demo_commit": str(demo.commit),
            "demo_hardware": demo.hardware,
        },
        target=f"below {bits_per_byte:.4f} in at most {train_seconds:,.0f} s",
        met=demo.bits_per_byte < bits_per_byte and demo.train_seconds <= train_seconds,
    )


def _train(loop: HandLoop, num_steps: int) -> float:
    """Takes the steps; the seconds of all of them."""
    seconds = 0.0
    for step in range(1, num_steps + 1):
        seconds += loop.step()
        if step % _STEPS_A_LINE == 0 or step == num_steps:
            logger.info("plain loop, step %d/%d  loss %.4f  %.0f s", step, num_steps, loop.losses[-1], seconds)
    return seconds


def _bits_per_byte(loop: HandLoop, setting: Setting, rows: ScoringRows) -> float:
    batch_size = setting.run.per_device_eval_batch_size
    scores = score(loop.model, rows, batch_size=batch_size, device=loop.device, autocast=loop.autocast)
    return scores["bits_per_byte"]
