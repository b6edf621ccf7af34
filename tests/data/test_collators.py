import pickle

import torch

from tests.data.tiny import EOS, tokenizer_with_eos
from tinylm.data.collators import PadRecords, collate_blocks


def test_blocks_are_stacked_and_their_labels_are_the_inputs() -> None:
    rows = [torch.arange(5), torch.arange(5, 10), torch.arange(10, 15)]
    batch = collate_blocks([{"input_ids": row} for row in rows])
    assert sorted(batch) == ["input_ids", "labels"], "no mask: nothing is padded"
    assert torch.equal(batch["input_ids"], torch.arange(15).view(3, 5))
    assert torch.equal(batch["labels"], batch["input_ids"])
    batch["labels"][0, 0] = -100
    assert batch["input_ids"][0, 0] == 0, "labels are a tensor of their own"


def test_positions_travel_with_their_blocks() -> None:
    positions = torch.tensor([0, 1, 0, 1, 2])
    batch = collate_blocks([{"input_ids": torch.arange(5), "position_ids": positions}] * 2)
    assert torch.equal(batch["position_ids"], torch.stack([positions, positions]))


def test_records_are_padded_to_the_longest_and_padding_is_no_target() -> None:
    records = [torch.tensor([7, 8, 9]), torch.tensor([5]), torch.tensor([3, 0])]  # a real 0 is no padding
    batch = PadRecords(0)([{"input_ids": record} for record in records])
    assert batch["input_ids"].tolist() == [[7, 8, 9], [5, 0, 0], [3, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch["labels"].tolist() == [[7, 8, 9], [5, -100, -100], [3, 0, -100]]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_a_tokenizer_without_a_pad_token_pads_with_eos_and_still_learns_eos() -> None:
    assert PadRecords.for_tokenizer(tokenizer_with_eos(pad_token="<pad>")).pad_token_id == 257
    collate = pickle.loads(pickle.dumps(PadRecords.for_tokenizer(tokenizer_with_eos())))
    batch = collate([{"input_ids": torch.tensor([1, 2, EOS])}, {"input_ids": torch.tensor([EOS])}])
    assert batch["input_ids"].tolist() == [[1, 2, EOS], [EOS, EOS, EOS]]
    assert batch["labels"].tolist() == [[1, 2, EOS], [EOS, -100, -100]]
