"""A Slurm of one machine: `srun` and `scontrol` as small scripts, and the environment of a job.

`srun` runs its command once for each node, here, all at the same time. `scontrol` names every node 127.0.0.1, and notes
that a job is to be put into the queue again.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.distributed import ROOT, rank_environment

SCRIPT = ROOT / "recipes" / "slurm" / "train.sbatch"
JOB = 4711

_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
tasks=()
for ((node = 0; node < SLURM_NNODES; node++)); do
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" &
    tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""

_SCONTROL = """#!/bin/bash
case "$1 $2" in
"show hostnames") for ((node = 0; node < SLURM_NNODES; node++)); do echo 127.0.0.1; done ;;
"requeue $SLURM_JOB_ID") echo again >>"$FAKE_SLURM/requeued" ;;
*) echo "scontrol $*: no such thing" >&2; exit 1 ;;
esac
"""


class SlurmMachine:
    """Runs the batch script as Slurm would, with `nodes` nodes.

    Args:
        folder: for the two commands and the nodes' caches.
    """

    def __init__(self, folder: Path, nodes: int = 1) -> None:
        self.folder, self.nodes, self.tries = folder, nodes, 0
        self.add("srun", _SRUN)
        self.add("scontrol", _SCONTROL)

    def add(self, name: str, script: str) -> None:
        """A command that the job finds before all others."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def start(self, *words: object, cwd: Path = ROOT, **environment: str) -> subprocess.Popen:
        """One try of the job."""
        job = {
            "SLURM_JOB_ID": str(JOB),
            "SLURM_NNODES": str(self.nodes),
            "SLURM_JOB_NODELIST": f"node[1-{self.nodes}]",
            "SLURM_RESTART_COUNT": str(self.tries),
            "FAKE_SLURM": str(self.folder),
            "NODE_CACHE": str(self.folder / "disk-of-the-node"),
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self.tries += 1
        return subprocess.Popen(
            ["bash", str(SCRIPT), *map(str, words)],
            env={**rank_environment(), **job, **environment},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def num_requeued(self) -> int:
        path = self.folder / "requeued"
        return len(path.read_text().splitlines()) if path.exists() else 0
