"""Run a function on N real ranks of a Gloo group, started by torch's own launcher.

    results = run_on_ranks("tests.training.test_trainer", "two_rank_checks", world_size=2, payload={"steps": 3})

The function takes `(rank: int, world_size: int, payload: dict)`, runs inside an initialised group, and returns
something that pickles; `results[rank]` is what it returned. An exception on any rank fails the call with that
rank's output.
Starting ranks costs 5 to 8 seconds: let one function check several things.
"""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def rank_environment() -> dict[str, str]:
    """The environment for a launched process: no accelerator, one thread a rank, nothing left over from a launcher."""
    drop = (
        "ACCELERATE_",
        "FSDP_",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_",
        "TORCHELASTIC_",
        "GROUP_",
        "ROLE_",
        "WANDB_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def run_on_ranks(
    module: str, function: str, world_size: int, payload: dict[str, Any] | None = None, timeout: float = 180
) -> list[Any]:
    """What `module.function(rank, world_size, payload)` returned on each rank, in the order of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "payload").write_bytes(pickle.dumps(payload or {}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
        command += ["--module", "tests.distributed", module, function, folder]  # as a file, tests/ would lead sys.path
        environment = {**rank_environment(), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"{module}.{function} failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _main(module: str, function: str, folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert world_size == int(os.environ["WORLD_SIZE"])
    payload = pickle.loads(Path(folder, "payload").read_bytes())
    result = getattr(importlib.import_module(module), function)(rank, world_size, payload)
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
