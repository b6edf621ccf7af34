"""What DeepSpeed and transformers have to be told about each other before a model is built."""

import os


def is_deepspeed_asked_for() -> bool:
    """Whether the launcher's environment names DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def use_cpu_in_deepspeed() -> None:
    """Keeps DeepSpeed on the CPU; it looks for accelerators by itself. To be called before it is imported."""
    os.environ["DS_ACCELERATOR"] = "cpu"


def compile_nothing_in_deepspeed() -> None:
    """Keeps DeepSpeed on CPUs from compiling its all-reduce through shared memory, which takes a compiler and a minute
    on the first run, and which inference alone would call."""
    if is_deepspeed_asked_for() and os.environ.get("DS_ACCELERATOR") == "cpu":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def build_models_whole() -> None:
    """Lets transformers build and load models as in one process, under ZeRO-3 too: they are cut when training begins.

    It would cut each weight as soon as it is made, and then no weight could be counted, initialised by a seed or saved
    on trial. The price is the memory of one whole model a rank, on the CPU, at the start.
    """
    if is_deepspeed_asked_for():
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
