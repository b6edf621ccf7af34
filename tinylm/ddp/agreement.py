"""What all ranks must agree on, settled through the store that the group was started with: no collective is needed.

A collective between ranks that hold different tensors hangs, or returns nonsense. So the ranks compare first. Every
function here is called by all ranks, in the same order.
"""

import hashlib
import itertools

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_calls = itertools.count()


def new_key(purpose: str) -> str:
    """A key for the store that no earlier call got, the same on all ranks."""
    return f"tinylm/{purpose}/{next(_calls)}"


def from_rank_0(text: str) -> str:
    """What rank 0 passed."""
    store, key = _get_default_store(), new_key("from_rank_0")
    if dist.get_rank() == 0:
        store.set(key, text)
    return store.get(key).decode()


def check_same_on_all_ranks(description: str, what: str = "settings") -> None:
    """Ends all ranks where their descriptions (a few lines of text; only a hash is compared) are not the same.

    Raises:
        ValueError: on every rank, with the ranks that differ from rank 0 and the first line that differs.
    """
    store, key = _get_default_store(), new_key("same")
    ranks = range(dist.get_world_size())
    store.set(f"{key}/text/{dist.get_rank()}", description)
    store.set(f"{key}/hash/{dist.get_rank()}", hashlib.sha256(description.encode()).hexdigest())
    hashes = [store.get(f"{key}/hash/{rank}") for rank in ranks]
    different = [rank for rank in ranks if hashes[rank] != hashes[0]]
    if not different:
        return
    texts = [store.get(f"{key}/text/{rank}").decode().splitlines() for rank in (0, different[0])]
    lines = itertools.zip_longest(*texts, fillvalue="nothing more")
    first, other = next((pair for pair in lines if pair[0] != pair[1]), ("its line ends", "others"))
    names = ", ".join(f"rank {rank}" for rank in different)
    raise ValueError(
        f"All ranks must have the same {what}. Different from rank 0: {names}. "
        f"Rank 0 has `{first}`, rank {different[0]} has `{other}`. Start all ranks with the same flags and files."
    )
