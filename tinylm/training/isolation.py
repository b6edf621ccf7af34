"""Do the examples of a packed row see each other? Asked of the model itself, before the first step.

`position_ids` that restart at each example keep them apart in the library's attention models (without an attention mask
and without a cache). A model that swallows the argument, as Bloom does, or one that carries a state along the row,
would let every example read its neighbour, and nothing would say so.

Shapes: T tokens of the probe.
"""

import torch
from transformers import PreTrainedModel

from tinylm.evaluation.scoring import evaluation_mode
from tinylm.evaluation.targets import bare_model

_LENGTH = 6  # tokens of each of the two examples
_LEAK = 0.01  # of what an example's own token does


def check_examples_are_kept_apart(model: PreTrainedModel, remedy: str) -> None:
    """Refuses a model in which changing one example of a row moves the logits of the next one.

    Args:
        remedy: the flag to set instead.

    Raises:
        ValueError: it does, by more than a hundredth of what changing a token of its own does.
    """
    bare = bare_model(model)
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(bare.config.get_text_config().vocab_size, (1, 2 * _LENGTH), generator=generator)
    position_ids = torch.arange(_LENGTH).repeat(2)[None]

    def last_logits(changed_at: int | None = None) -> torch.Tensor:
        input_ids = row.clone()
        if changed_at is not None:
            input_ids[0, changed_at] = (input_ids[0, changed_at] + 1) % bare.config.get_text_config().vocab_size
        placed = {"input_ids": input_ids.to(bare.device), "position_ids": position_ids.to(bare.device)}
        return bare(**placed, use_cache=False).logits[0, -1].float()

    with evaluation_mode(bare):
        before = last_logits()
        leak = (last_logits(changed_at=_LENGTH - 1) - before).abs().max()
        own = (last_logits(changed_at=2 * _LENGTH - 2) - before).abs().max()
    if not leak <= _LEAK * own:
        raise ValueError(
            f"Examples that share a row must not see each other, and in a {type(bare).__name__} they do: it does not go"
            f" by `position_ids`. {remedy}"
        )
