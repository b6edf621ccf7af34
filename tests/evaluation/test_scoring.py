"""Case numbers (L3, L4, L8, L9, D5) are those of the traps that other projects fell into."""

import logging
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.distributed import run_on_ranks
from tinylm.evaluation import scoring
from tinylm.evaluation.scoring import ScoringRows, encode_documents, pad_rows, score, scoring_rows, scoring_start_id

from .tiny import PAD, START, byte_tokenizer, tiny_gpt2, tiny_llama, tiny_tlm

CPU = torch.device("cpu")
Rows = list[dict[str, torch.Tensor]]


def uneven_rows() -> Rows:
    """8 rows of alternately 2 and 31 targets, as in case L4."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number in range(8):
        ids = torch.randint(0, 257, (3 if number % 2 else 32,), generator=generator)
        rows.append({"input_ids": ids, "labels": ids.clone()})
    return rows


def nats_by_hand(model: nn.Module, row: dict[str, torch.Tensor]) -> tuple[float, int]:
    """Sum over the row's targets and their number, one row at a time and one position at a time."""
    with torch.no_grad():
        log_probabilities = model(input_ids=row["input_ids"][None]).logits[0].log_softmax(-1)
    targets = [(t, int(label)) for t, label in enumerate(row["labels"][1:]) if label != -100]
    return -sum(log_probabilities[t, label].item() for t, label in targets), len(targets)


# Rows


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_every_token_is_a_target_exactly_once(data: st.DataObject) -> None:
    context = data.draw(st.integers(2, 17), label="context")
    stride = data.draw(st.none() | st.integers(1, context), label="stride")
    start_id = data.draw(st.none() | st.just(9999), label="start_id")
    lengths = data.draw(st.lists(st.integers(0, 61), min_size=1, max_size=5).filter(lambda x: max(x) > 1), "lengths")
    first_ids = [sum(lengths[:i]) for i in range(len(lengths))]  # all tokens of all documents are different
    documents = [(range(first, first + length), 7) for first, length in zip(first_ids, lengths, strict=True)]

    rows = scoring_rows(documents, context=context, start_id=start_id, stride=stride)

    targets = []
    for index in range(len(rows)):
        input_ids, labels = rows[index]["input_ids"], rows[index]["labels"]
        assert 2 <= len(input_ids) == len(labels) <= context
        assert labels[0] == -100, "a target needs something before it"
        real = labels != -100
        assert torch.equal(labels[real], input_ids[real])
        assert (input_ids[1:] != 9999).all()
        targets += labels[real].tolist()
    skipped = set() if start_id is not None else {ids[0] for ids, _ in documents if ids}
    assert targets == [token for ids, _ in documents for token in ids if token not in skipped]
    assert (rows.num_tokens, rows.num_bytes) == (len(targets), 7 * len(documents))
    assert rows.num_documents == len(documents)


def test_windows_overlap_by_one_token_and_by_more_with_a_stride() -> None:
    def cut(stride: int | None) -> list[tuple[list[int], list[int]]]:
        rows = scoring_rows([(range(1, 8), 7)], context=4, start_id=0, stride=stride)
        return [tuple(rows[i][name].tolist() for name in ("input_ids", "labels")) for i in range(len(rows))]

    apart = [([0, 1, 2, 3], [-100, 1, 2, 3]), ([3, 4, 5, 6], [-100, 4, 5, 6]), ([6, 7], [-100, 7])]
    assert cut(None) == cut(4) == cut(3) == apart
    assert cut(2) == [
        ([0, 1, 2, 3], [-100, 1, 2, 3]),
        ([2, 3, 4, 5], [-100, -100, 4, 5]),
        ([4, 5, 6, 7], [-100, -100, 6, 7]),
    ]


@pytest.mark.parametrize("stride", [0, -3, 12])
def test_a_stride_beyond_the_context_is_refused_with_both_values(stride: int) -> None:
    with pytest.raises(ValueError, match=rf"context of 11 tokens, not {stride}\. Set `--stride 5`"):
        scoring_rows([([1, 2], 2)], context=11, start_id=0, stride=stride)


def test_documents_without_a_target_are_refused_with_their_number() -> None:
    with pytest.raises(ValueError, match="Nothing to score: 2 documents"):
        scoring_rows([([], 0), ([], 3)], context=11, start_id=0)
    with pytest.raises(ValueError, match="the context is 1"):
        scoring_rows([([1, 2], 2)], context=1, start_id=0)


# Tokenizers


def test_a_document_starts_after_what_its_tokenizer_starts_a_text_with() -> None:
    with_bos = byte_tokenizer(bos_token=PAD, eos_token=START)
    bos, eos = with_bos.bos_token_id, with_bos.eos_token_id
    assert scoring_start_id(with_bos) == eos  # it has a bos and puts none
    with_bos.backend_tokenizer.post_processor = _template(f"{PAD} $A", PAD, bos)
    assert scoring_start_id(with_bos) == bos
    with_bos.backend_tokenizer.post_processor = _template(f"$A {START}", START, eos)
    assert scoring_start_id(with_bos) == eos  # eos behind the text is not what it starts with
    assert scoring_start_id(byte_tokenizer(bos_token=PAD)) == 256
    assert scoring_start_id(byte_tokenizer()) is None


def _template(single: str, token: str, token_id: int) -> object:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single=single, special_tokens=[(token, token_id)])


def test_reserved_strings_in_a_document_are_text_and_no_special_is_a_target() -> None:
    tokenizer = byte_tokenizer(eos_token=START)
    text = f"before {START} after"
    assert tokenizer.eos_token_id in tokenizer(text)["input_ids"]  # what it would do by itself
    [(token_ids, num_bytes)] = encode_documents(tokenizer, [text])
    assert tokenizer.eos_token_id not in token_ids
    assert tokenizer.decode(token_ids) == text and num_bytes == len(text) == len(token_ids)


def test_without_a_start_token_the_first_token_and_its_bytes_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer()
    documents = list(encode_documents(tokenizer, ["añb", "", "c"]))
    assert [num_bytes for _, num_bytes in documents] == [3, 0, 0]
    with caplog.at_level(logging.WARNING, logger="tinylm"):
        rows = scoring_rows(documents, context=17, start_id=None)
    assert "first token of each document and its bytes are left out" in caplog.text
    assert (rows.num_tokens, rows.num_bytes, len(rows)) == (3, 3, 1)


def test_bits_per_byte_of_spaces_emoji_and_tabs_are_those_of_the_raw_text() -> None:
    """Case L8, by hand: a block is 50 spaces, 10 tabs, 10 emoji of 4 bytes: 100 bytes; 200 blocks are 20,000.

    Spaces come in tokens of 4 and 2, everything else byte by byte: 12 + 1 + 10 + 40 = 63 tokens a block. A model that
    finds 512 tokens equally likely spends 9 bits on each: 9 x 63 / 100 bits per byte.
    """
    tokenizer = byte_tokenizer(merges=[("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")], eos_token=START)
    text = (" " * 50 + "\t" * 10 + "🙂" * 10) * 200
    model = tiny_llama(vocab_size=512)
    nn.init.zeros_(model.lm_head.weight)
    documents = list(encode_documents(tokenizer, [text]))
    result = score(
        model,
        scoring_rows(documents, context=37, start_id=scoring_start_id(tokenizer)),
        batch_size=64,
        device=CPU,
    )
    assert (result["num_tokens"], result["num_bytes"], result["num_documents"]) == (12_600, 20_000, 1)
    assert result["nats_per_token"] == pytest.approx(math.log(512), rel=1e-6)
    assert result["perplexity"] == pytest.approx(512, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(5.67, rel=1e-6)
    of_pieces = sum(len(piece.encode()) for piece in tokenizer.convert_ids_to_tokens(documents[0][0]))
    assert of_pieces > 1.3 * result["num_bytes"]  # what it must not be


# Scores


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2, tiny_tlm])
def test_the_score_is_the_models_own_loss_and_that_worked_out_by_hand(build: object) -> None:
    """Case L3."""
    model, rows = build(), uneven_rows()
    for row in rows:
        result = score(model, [row], batch_size=1, device=CPU)
        own = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.item()
        nats, count = nats_by_hand(model, row)
        assert result["nats_per_token"] == pytest.approx(own, rel=1e-5)
        assert result["nats_per_token"] == pytest.approx(nats / count, rel=1e-5)
        assert result["num_tokens"] == count


def test_one_number_at_every_batch_size_and_a_mean_of_batch_means_is_not_it() -> None:
    """Case L4 in one process."""
    model, rows = tiny_llama(), uneven_rows()
    by_hand = [nats_by_hand(model, row) for row in rows]
    expected = sum(nats for nats, _ in by_hand) / sum(count for _, count in by_hand)
    for batch_size in (1, 2, 4, 8):
        result = score(model, rows, batch_size=batch_size, device=CPU)
        assert result["nats_per_token"] == pytest.approx(expected, rel=1e-6)
        assert result["num_tokens"] == 4 * 2 + 4 * 31
    mean_of_means = sum(nats / count for nats, count in by_hand) / len(by_hand)
    assert mean_of_means != pytest.approx(expected, rel=0.005)


def test_padding_repeats_the_last_column_and_adds_no_target() -> None:
    batch = pad_rows([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, 9, -100]]


@pytest.mark.parametrize("build", [tiny_llama, tiny_tlm])
def test_documents_packed_into_a_row_stay_apart_by_their_positions_also_when_padded(build: object) -> None:
    first, second, longer = list(range(3, 10)), list(range(20, 33)), list(range(40, 70))
    model = build()

    def row(*documents: list[int]) -> dict[str, list[int]]:
        labels = [label for ids in documents for label in [-100, *ids[1:]]]
        positions = [position for ids in documents for position in range(len(ids))]
        return {"input_ids": [token for ids in documents for token in ids], "labels": labels, "position_ids": positions}

    def nats_per_token(*rows: dict[str, list[int]]) -> float:
        return score(model, rows, batch_size=len(rows), device=CPU)["nats_per_token"]

    apart = nats_per_token(row(first), row(second), row(longer))
    packed = [row(first, second), row(longer)]
    assert nats_per_token(*packed) == pytest.approx(apart, rel=1e-6)
    for one in packed:
        del one["position_ids"]
    assert nats_per_token(*packed) != pytest.approx(apart, rel=1e-3)  # without positions they run into each other


def test_rows_without_bytes_have_no_bits_per_byte_and_only_their_labels_count() -> None:
    """Fine-tuning rows: plain lists, the prompt masked."""
    row = {"input_ids": [3, 5, 7, 11], "labels": [-100, -100, 7, 11]}
    model = tiny_llama()
    result = score(model, [row, row], batch_size=2, device=CPU)
    nats, count = nats_by_hand(model, {name: torch.tensor(column) for name, column in row.items()})
    assert result.keys() == {"nats_per_token", "perplexity", "num_tokens", "num_documents"}
    assert (result["num_tokens"], result["num_documents"], count) == (4, 2, 2)
    assert result["nats_per_token"] == pytest.approx(nats / 2, rel=1e-5)


def test_rows_without_any_target_are_refused() -> None:
    with pytest.raises(ValueError, match="None of the 1 rows has a target"):
        score(tiny_llama(), [{"input_ids": [3, 5], "labels": [3, -100]}], batch_size=1, device=CPU)


def test_a_loss_that_is_not_finite_is_shown_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[200] = math.nan
    rows = [{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3], [1, 200, 3, 4])]
    with caplog.at_level(logging.WARNING, logger="tinylm"):
        result = score(model, rows, batch_size=2, device=CPU)
    assert math.isnan(result["nats_per_token"]) and math.isnan(result["perplexity"])
    assert "not finite on 3 of 5 targets" in caplog.text  # all of the second row: a hidden value of 0 x NaN is NaN


def test_modes_of_all_modules_come_back_and_no_gradient_is_left() -> None:
    model = tiny_gpt2()
    model.train()
    model.transformer.h[1].eval()
    modes = [module.training for module in model.modules()]
    without_dropout = score(model, uneven_rows(), batch_size=8, device=CPU)
    assert [module.training for module in model.modules()] == modes and len(set(modes)) == 2
    assert without_dropout == score(model.eval(), uneven_rows(), batch_size=8, device=CPU)
    assert all(parameter.grad is None for parameter in model.parameters())


class BigVocabulary(nn.Module):
    """Logits over 151,936 tokens that remembers which of them somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[weakref.ref] = []
        self.most_alive = 0

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        logits = torch.zeros(*input_ids.shape, 151_936, dtype=torch.bfloat16)
        self.most_alive = max(self.most_alive, sum(reference() is not None for reference in self.given))
        self.given.append(weakref.ref(logits))
        return SimpleNamespace(logits=logits)


def test_a_vocabulary_of_152k_is_held_for_one_batch_and_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case L9."""
    elements, cross_entropy = [], scoring.functional.cross_entropy

    def watched(logits: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        assert logits.dtype == torch.float32
        elements.append(logits.numel())
        return cross_entropy(logits, *args, **kwargs)

    monkeypatch.setattr(scoring.functional, "cross_entropy", watched)
    model = BigVocabulary()
    row = {"input_ids": list(range(67)), "labels": list(range(67))}
    result = score(model, [row] * 6, batch_size=2, device=CPU)
    assert result["nats_per_token"] == pytest.approx(math.log(151_936), rel=1e-6)
    assert len(model.given) == 3 and model.most_alive == 0
    assert max(elements) <= 2**24 < 2 * 66 * 151_936 and len(elements) == 2 * 3


# Ranks


def scores_on_ranks(rank: int, world_size: int, payload: dict[str, object]) -> dict[str, object]:
    assert world_size == 2
    model, rows = tiny_llama(), uneven_rows()
    documents: ScoringRows = scoring_rows([(list(range(70)), 91), ([1], 1)], context=37, start_id=256)
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    shared = {"device": CPU, "rank": rank, "world_size": world_size}
    found: dict[str, object] = {b: score(model, rows, batch_size=b, **shared) for b in (1, 2, 4, 8)}
    found["alone"] = score(model, rows[rank::2], batch_size=8, device=CPU)
    forwards.clear()
    found["lonely row"] = score(model, rows[:1], batch_size=8, **shared)  # rank 1 has no row
    found["uneven"] = score(model, rows[:5], batch_size=1, **shared)  # 3 batches and 2
    found["forwards"] = len(forwards)
    found["documents"] = score(model, documents, batch_size=2, **shared)
    return found


def test_one_number_on_two_ranks_also_where_a_rank_has_no_row() -> None:
    """Cases L4 and D5 on two ranks."""
    model, rows = tiny_llama(), uneven_rows()
    first, second = run_on_ranks("tests.evaluation.test_scoring", "scores_on_ranks", world_size=2)
    expected = score(model, rows, batch_size=1, device=CPU)
    for batch_size in (1, 2, 4, 8):
        assert first[batch_size] == second[batch_size] == pytest.approx(expected, rel=1e-6)
    mean_of_ranks = (first["alone"]["nats_per_token"] + second["alone"]["nats_per_token"]) / 2
    assert mean_of_ranks != pytest.approx(expected["nats_per_token"], rel=0.005)  # what it must not be
    for name, some in (("lonely row", rows[:1]), ("uneven", rows[:5])):
        once = score(model, some, batch_size=1, device=CPU)
        assert first[name] == second[name] == pytest.approx(once, rel=1e-6)
    assert first["forwards"] == second["forwards"] == 1 + 3  # a sharded model needs every rank in every forward
    assert first["documents"] == second["documents"]
    assert (first["documents"]["num_tokens"], first["documents"]["num_bytes"]) == (71, 92)
