"""Before anything is loaded: is this process part of the group, the engine and the threads that were asked for?

Launchers fail quietly: a launch file can start one process where two were meant, or two that do not know each other,
and exit with 0. `start` compares what was asked for with what is there and refuses to go on with less.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import transformers
import yaml

from .launch_files import check_launch_in_use, launch_file_of, launch_in_use
from .network import choose_interface
from .stopping import die_with_launcher

logger = logging.getLogger(__name__)


class RunStopped(RuntimeError):  # noqa: N818
    """A run ended itself for a reason that its message tells in full."""


NOT_FINISHED = 85
"""Exit code of a recipe whose run was stopped on purpose and can be gone on with (launchers turn it into 1)."""


class RunInterrupted(RuntimeError):  # noqa: N818
    """A run was stopped on purpose, and saved; its message tells how to go on.

    Args:
        because: `max_time`, `STOP` (the file), the name of a signal, `another rank` (was asked), or not known.
    """

    def __init__(self, message: str, because: str = "") -> None:
        super().__init__(message)
        self.because = because


@dataclass(frozen=True)
class Launch:
    """The group that this process is in: `backend` is None for one process, `engine` one of none, ddp, fsdp2, ..."""

    rank: int
    world_size: int
    backend: str | None
    engine: str
    device: str
    threads: int

    def describe(self) -> str:
        ranks = "one process" if self.world_size == 1 else f"{self.world_size} ranks ({self.backend}, {self.engine})"
        return f"{ranks} on {self.device}, {self.threads} thread{'s' if self.threads > 1 else ''} a rank"


def start(device: torch.device, num_threads: int | None = None) -> Launch:
    """Checks the process group against the launcher's wish and takes all the threads; `device` is this rank's.

    Raises:
        RunStopped: fewer ranks, or another engine, than were asked for; both values are named.
    """
    show_progress_of_rank_zero()
    asked = _ranks_asked_for()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if asked != world_size:
        raise RunStopped(
            f"The launcher was asked for {asked} processes, and this one is in a group of {world_size}: each would"
            " train a model of its own. On CPUs take `accelerate_configs/cpu_gloo.yaml`, whose `distributed_type:"
            " MULTI_GPU` with `use_cpu: true` starts one process a rank (`MULTI_CPU` and `--cpu` start a single one)."
        )
    engine = engine_asked_for(world_size)
    check_engine(engine, _engine_possible(engine, world_size))
    threads = _take_threads(num_threads)
    return Launch(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        world_size=world_size,
        backend=dist.get_backend() if dist.is_initialized() else None,
        engine=engine,
        device=device.type,
        threads=threads,
    )


def check_engine(asked: str, got: str) -> None:
    """Raises RunStopped where the engine in use is not the one that the launch file asked for."""
    if asked != got:
        raise RunStopped(
            f"The launch file asks for the engine `{asked}` and this run would use `{got}`. Take a launch file of"
            " `accelerate_configs/` that suits the machine (its README.md says which when)."
        )


def engine_asked_for(world_size: int) -> str:
    """The engine that the launcher's environment names: none, ddp, fsdp (1), fsdp2 or deepspeed."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return "fsdp2" if os.environ.get("FSDP_VERSION", "1") == "2" else "fsdp"
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return "deepspeed"
    return "ddp" if world_size > 1 else "none"


def _engine_possible(asked: str, world_size: int) -> str:
    """What this kit can run of it: FSDP in its second version, where there are ranks to share the weights."""
    if asked in ("fsdp", "fsdp2"):
        return "fsdp2" if world_size > 1 else "none"
    return asked


def _ranks_asked_for() -> int:
    """WORLD_SIZE; without one, what the command line of a parent `accelerate launch` asked for, else 1.

    accelerate's launcher for one process drops a larger `num_processes` and leaves only MASTER_ADDR as a trace.
    """
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    launch = launch_in_use()
    if launch is None:
        return 1
    if launch.num_processes is not None:
        return max(1, launch.num_processes)
    path = launch_file_of(launch)
    values = yaml.safe_load(path.read_text(encoding="utf-8")) if path else None
    return max(1, int((values or {}).get("num_processes") or 1))


def _take_threads(num_threads: int | None) -> int:
    """Gives torch `num_threads`, or this rank's share of the cores: launchers leave a process with one."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # no macOS call
    threads = num_threads or max(1, cores // local_ranks)
    torch.set_num_threads(threads)
    if torch.get_num_threads() != threads:
        raise RunStopped(f"torch uses {torch.get_num_threads()} threads where {threads} were asked for.")
    return threads


def is_restarted() -> bool:
    """Whether torchrun, or `accelerate launch --max_restarts`, has started the ranks again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def name_of_launch() -> str | None:
    """The same before and after a restart of the ranks; None where nothing restarts them."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if run is None else f"{run}:{os.getppid()}"


@contextmanager
def rank_zero_first(name: str) -> Iterator[bool]:
    """Rank 0 runs the block (and gets True) before the others enter it, however long it takes.

    The others wait for a key in the group's store, not in a collective, so no collective times out (case D9).
    """
    if not dist.is_initialized():
        yield True
        return
    store, key = dist.distributed_c10d._get_default_store(), f"tinylm/{name}"
    if dist.get_rank() == 0:
        try:
            yield True
        finally:
            store.set(key, "done")
    else:
        store.wait([key], timedelta(days=7))
        yield False


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """The element-wise sum of every rank's `values` (float64); every rank has to call it."""
    if not dist.is_initialized():
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(sums)
    return sums.tolist()


def gather_over_ranks(values: Sequence[float]) -> list[list[float]]:
    """Every rank's `values` (float64, equally many), in the order of the ranks; every rank has to call it."""
    if not dist.is_initialized():
        return [list(values)]
    width, mine, world_size = len(values), dist.get_rank(), dist.get_world_size()
    flat = sum_over_ranks([0.0] * width * mine + list(values) + [0.0] * width * (world_size - mine - 1))
    return [flat[rank * width : (rank + 1) * width] for rank in range(world_size)]


def lists_of_ranks(values: list[int]) -> list[int]:
    """Every rank's `values` behind one another, however many each has; every rank has to call it."""
    if not dist.is_initialized():
        return values
    lists: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(lists, values)
    return [value for each in lists for value in each]


def decided_by_rank_zero(value: str | None) -> str | None:
    """What rank 0 passed, on every rank; every rank has to call it."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def show_progress_of_rank_zero() -> None:
    """`tinylm`'s log records go to the terminal: all of them from rank 0, warnings from the others."""
    rank = int(os.environ.get("RANK", "0"))
    package = logging.getLogger("tinylm")
    package.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if not package.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
        package.addHandler(handler)
        package.propagate = False


def _meet_anew_after_restart() -> None:
    """Gives restarted ranks a store of their own: in the launcher's, which `accelerate launch` keeps, they would find
    the addresses of the ranks that died."""
    if not is_restarted() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    host, key = os.environ["MASTER_ADDR"], f"tinylm/port-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    store = dist.TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "0":
        with socket.socket() as free:
            free.bind(("", 0))
            store.set(key, str(free.getsockname()[1]))
    os.environ |= {"MASTER_PORT": store.get(key).decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _end_launcher_that_would_restart() -> None:
    """A launcher with restarts left takes any exit code but 0 for a failure: it is told to stop, as if by hand."""
    restarts_left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) - int(
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    )
    if restarts_left > 0 and os.environ["LOCAL_RANK"] == "0":
        os.kill(os.getppid(), signal.SIGTERM)


def _leave_together() -> None:
    if dist.is_initialized():
        dist.barrier()  # rank 0 writes last: no launcher ends the others, or the group, before it is done
        dist.destroy_process_group()


def run_recipe(main: Callable[[], None]) -> None:
    """Runs a recipe's `main`; wrong input becomes one paragraph and exit code 2, unless `--traceback` is given.

    A run that was stopped on purpose ends with exit code 85, `NOT_FINISHED`.
    """
    die_with_launcher()
    _meet_anew_after_restart()
    show_progress_of_rank_zero()
    transformers.utils.logging.disable_progress_bar()  # a bar a saved file says nothing, and fills log files
    with_traceback = "--traceback" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--traceback"]
    try:
        check_launch_in_use()
        choose_interface()
        main()
        _leave_together()
    except RunInterrupted as interrupted:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher sends it as soon as one rank has left
        logging.getLogger("tinylm").info("%s", interrupted)
        _leave_together()
        _end_launcher_that_would_restart()
        sys.exit(NOT_FINISHED)
    except (ValueError, OSError, ImportError, RunStopped) as error:
        if with_traceback:
            raise
        rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
        message = " ".join(str(error).split())
        print(f"{rank}{message}\n(`--traceback` shows where this came from.)", file=sys.stderr, flush=True)
        sys.exit(1 if isinstance(error, RunStopped) else 2)
