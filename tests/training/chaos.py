"""One small run that is killed again and again, and gone on with by the same call.

    python -m tests.training.chaos FOLDER WORLD_SIZE KILLS SEED

The process imports everything once and forks the ranks, so that a start costs no seconds of imports. Rank 0 tells each
step over a pipe; after some steps and some milliseconds, ranks drawn at random get SIGKILL. Prints one JSON object with
what happened. As `python -m tests.training.chaos FOLDER` (or through a launcher) it is the run alone, undisturbed.

A fault is asked for by the environment: FAULT="sleep:RANK:STEP", "raise:RANK:STEP" or "kill:RANK:STEP",
"kill_in_save:RANK:STEP" of the checkpoint of that step, or "shapes:both:STEP", in the forward of every rank.
"""

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, set_seed

from tests.training.tiny import UnevenRows, run_arguments, tiny_model, trainer_for
from tinylm.training.checkpoints import checkpoint_to_resume
from tinylm.training.launch import name_of_launch, run_recipe, start
from tinylm.training.run_record import HOW_TO_GO_ON, write_status

STEPS, SAVE_STEPS = 200, 5


class Tells(TrainerCallback):
    """Writes the number of each finished step into a pipe; before the first, the steps that were done before."""

    def __init__(self, pipe: int | None) -> None:
        self.pipe = pipe

    def on_train_begin(self, args, state, control, **kwargs):
        self.tell(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self.tell(state.global_step)

    def tell(self, step: int) -> None:
        if self.pipe is not None:
            os.write(self.pipe, f"{step}\n".encode())


class Fault(TrainerCallback):
    """The fault that the environment asks for, in the first life of a run only."""

    def on_step_begin(self, args, state, control, **kwargs):
        kind, rank, step = os.environ.get("FAULT", "none:0:0").split(":")
        is_now = state.global_step + 1 == int(step) and rank in ("both", str(args.process_index))
        if not is_now or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            return
        if kind == "sleep":
            time.sleep(600)
        if kind == "raise":
            raise KeyError("a fault of this rank")
        if kind == "shapes":
            kwargs["model"].register_forward_pre_hook(self.shapes_do_not_fit)
        if kind == "kill":
            self.die()
        if kind == "kill_in_save":
            Trainer._save_rng_state = self.die

    def die(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def shapes_do_not_fit(self, *_: object) -> None:
        raise RuntimeError("shapes 3 and 5 do not fit")


def train(folder: str, pipe: int | None = None) -> None:
    """The run: 200 steps, a checkpoint every 5, every record noted."""
    args = run_arguments(
        folder,
        max_steps=int(os.environ.get("STEPS", STEPS)),
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        logging_steps=7,
        record_audit=True,
        per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
        ddp_timeout=int(os.environ.get("DDP_TIMEOUT", "60")),
        max_time=os.environ.get("MAX_TIME"),
    )
    launch = start(args.device, num_threads=1)
    checkpoint = checkpoint_to_resume(folder, "auto")
    set_seed(3)
    model = tiny_model(attention_dropout=0.1)
    trainer = trainer_for(model, UnevenRows(30), args, callbacks=[Tells(pipe), Fault()])
    assert launch.world_size == args.world_size
    if launch.rank == 0 and checkpoint is None and name_of_launch():
        write_status(folder, "running", 0, HOW_TO_GO_ON)
    trainer.train(resume_from_checkpoint=checkpoint)


def fork(folder: str, rank: int, world_size: int, port: int, pipe: int) -> int:
    """A rank in a process of its own, with what it says in `rank-R.log`; its process id."""
    pid = os.fork()
    if pid:
        return pid
    if world_size > 1:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    Path(folder).mkdir(parents=True, exist_ok=True)
    log = os.open(f"{folder}.rank-{rank}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["chaos"]
    code = 0
    try:
        run_recipe(lambda: train(folder, pipe if rank == 0 else None))
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        code = 1
    os._exit(code)


def one_life(folder: str, world_size: int, draw: random.Random, steps: int | None) -> tuple[int, int, list[int], int]:
    """Starts all ranks and kills some of them `steps` steps later (None: lets them finish).

    Returns:
        The step from which it began, the last one it told of, the ranks that were killed, and how many went in order.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reading, writing = os.pipe()
    pids = [fork(folder, rank, world_size, port, writing) for rank in range(world_size)]
    os.close(writing)
    killed: list[int] = []
    began = last = -1
    with os.fdopen(reading) as told:
        for line in told:
            last = int(line)
            began = last if began < 0 else began
            if steps is not None and last - began >= steps and not killed:
                time.sleep(draw.random() * 0.03)
                killed = draw.choice([[0]] if world_size == 1 else [[0], [1], [0, 1]])
                for rank in killed:
                    os.kill(pids[rank], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return began, last, killed, codes.count(0)


def main(folder: str, world_size: int, kills: int, seed: int) -> None:
    """Runs undisturbed in FOLDER/whole, then with the kills in FOLDER/killed."""
    draw = random.Random(seed)
    assert one_life(f"{folder}/whole", world_size, draw, None)[3] == world_size
    longest = max(2 * SAVE_STEPS - 1, STEPS * 9 // (10 * kills))  # short enough for all kills, long enough to advance
    lost, while_saving, last = [], 0, 0
    for life in range(kills + 1):
        steps = draw.randint(0, longest) if life < kills else None
        began, now, killed, finished = one_life(f"{folder}/killed", world_size, draw, steps)
        assert bool(killed) == (life < kills)
        if life:
            lost.append(last - began)
        last = now
        while_saving += any(Path(folder, "killed").glob(".saving-*"))
    print(json.dumps({"kills": len(lost), "lost": lost, "while_saving": while_saving, "finished": finished}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        main(sys.argv[1], *map(int, sys.argv[2:]))
    else:
        run_recipe(lambda: train(sys.argv[1]))
