"""Which number format a run computes in: the run file decides, the hardware limits, a launch file has no say."""

import logging

import torch

logger = logging.getLogger(__name__)

PRECISIONS = ("auto", "fp32", "bf16", "fp16")


def resolve_precision(asked: str, launcher: str | None = None, *, use_cpu: bool = False) -> str:
    """`fp32`, `bf16` or `fp16`: what was `asked` for if the hardware can do it, `fp32` and one line if it cannot.

    `auto` follows a launcher that names a format, else takes bf16 where the hardware computes in it (GPUs, CPUs with
    AVX-512 bf16 or AMX), fp16 with loss scaling on older GPUs, fp32 elsewhere.

    Raises:
        ValueError: a format that does not exist.
    """
    if asked not in PRECISIONS:
        raise ValueError(f"`precision` is one of {', '.join(PRECISIONS)}; it was {asked!r}.")
    if asked == "auto" and launcher in ("bf16", "fp16"):
        asked = launcher
    on_cuda = not use_cpu and torch.cuda.is_available()
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if on_cuda else use_cpu and _cpu_has_bf16()
    if asked == "auto":
        return "bf16" if has_bf16 else "fp16" if on_cuda else "fp32"
    if (asked == "bf16" and not has_bf16) or (asked == "fp16" and not on_cuda):
        logger.warning("This hardware does not compute in %s: the run uses fp32.", asked)
        return "fp32"
    return asked


def check_against_launcher(asked: str, launcher: str | None) -> None:
    """Raises ValueError where a launch file names a format (`mixed_precision`) other than the run file's.

    Accelerate hands "unset" and an explicit "no" on as the same word, so a launcher's "no" says nothing.
    """
    if asked == "auto" or launcher in (None, "no", asked):
        return
    raise ValueError(
        f"The launcher says `mixed_precision: {launcher}` and the run says `precision: {asked}`. Precision belongs to"
        " the run file alone: take `mixed_precision` out of the launch file or the command."
    )


def _cpu_has_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
