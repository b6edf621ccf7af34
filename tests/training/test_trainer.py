"""The Trainer's loss, order and validation, in one process and on two ranks of a real group."""

import itertools
import json
import logging
import math

import pytest
import torch
from torch.nn import functional
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel

from tests.distributed import run_on_ranks
from tests.training.tiny import VOCAB, UnevenRows, run_arguments, stack, tiny_model, trainer_for
from tinylm.data.order import GlobalBatches
from tinylm.evaluation.scoring import scoring_rows
from tinylm.training import precision
from tinylm.training.launch import RunStopped
from tinylm.training.trainer import LanguageModelTrainer


def train(tmp_path, *, batch_size, accumulation, dtype, steps=3, rows=None, **settings):
    """The trainer after some steps of plain SGD from the same weights on the same order of data."""
    args = run_arguments(
        tmp_path,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        **settings,
    )
    trainer = trainer_for(tiny_model(dtype=dtype), rows or UnevenRows(), args)
    trainer.train()
    return trainer


def weights(trainer):
    return torch.cat([weight.detach().double().flatten() for weight in trainer.model.parameters()])


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


class UnevenStream(IterableDataset):
    """Ragged rows whose number depends on the rank; each is known by its first token."""

    def __init__(self, rank, num_rows):
        self.rows = [torch.arange(4 + rank, 4 + rank + 3 + number % 3) for number in range(num_rows)]
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return ({"input_ids": row, "labels": row} for row in self.rows)


def pad(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}


def two_rank_checks(rank, world_size, payload):
    """What the ranks of one launch find out for the tests below."""
    assert world_size == 2
    found = {}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        trainer = train(payload["folder"], batch_size=1, accumulation=2, dtype=dtype)
        found[name] = (trainer.args.world_size, weights(trainer), losses(trainer))
    rows = UnevenRows(8)
    found["scores"] = {
        size: trainer_for(
            tiny_model(), rows, run_arguments(payload["folder"], per_device_eval_batch_size=size)
        ).evaluate(rows)
        for size in (1, 3)
    }
    stream = UnevenStream(rank, num_rows=6 if rank == 0 else 4)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tinylm").addHandler(handler)
    logging.getLogger("tinylm").setLevel(logging.INFO)
    args = run_arguments(payload["folder"], per_device_train_batch_size=2, max_steps=5)
    trainer = trainer_for(tiny_model(), stream, args, data_collator=pad)
    trainer.train()
    found["stream"] = (trainer.state.global_step, stream.epochs, messages, trainer.meter.total)
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_on_ranks(
        "tests.training.test_trainer", "two_rank_checks", 2, {"folder": str(tmp_path_factory.mktemp("ranks"))}
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
def test_batch_accumulation_and_ranks_reach_the_same_weights(tmp_path, two_ranks, dtype, tolerance):
    """Case L1: rows with 2 and 31 targets by turns."""
    one = train(tmp_path, batch_size=4, accumulation=1, dtype=dtype)
    accumulated = train(tmp_path, batch_size=1, accumulation=4, dtype=dtype)
    world_size, ranked, ranked_losses = two_ranks[0][str(dtype).removeprefix("torch.")]
    assert world_size == 2
    assert distance(weights(accumulated), weights(one)) < tolerance
    assert distance(ranked, weights(one)) < tolerance
    assert torch.equal(ranked, two_ranks[1][str(dtype).removeprefix("torch.")][1])
    # The control: a mean of the rows' means is another gradient, so equal weights are no accident.
    assert distance(weights(train_on_means(tmp_path, dtype)), weights(one)) > 1e-4
    # Case L7: the logged loss is that of all ranks and micro-batches.
    assert ranked_losses == pytest.approx(losses(one), rel=1e-5)


def train_on_means(tmp_path, dtype):
    class MeanRows(UnevenRows):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            keep = torch.cat([torch.full((30,), -100), row["labels"][30:]])  # every row weighs the same
            return {**row, "labels": keep}

    return train(tmp_path, batch_size=4, accumulation=1, dtype=dtype, rows=MeanRows())


def independent_loss(model, rows):
    """Nats per target by another path: log-probabilities, shifted by hand."""
    with torch.no_grad():
        log_probabilities = functional.log_softmax(model(rows["input_ids"]).logits.double(), -1)
    targets = rows["labels"][:, 1:]
    picked = log_probabilities[:, :-1].gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (-picked * (targets != -100)).sum().item() / (targets != -100).sum().item()


def test_logged_and_evaluated_loss_equal_an_independent_cross_entropy(tmp_path):
    """Case L3."""
    rows = UnevenRows(4)
    everything = stack([rows[index] for index in range(4)])
    expected = independent_loss(tiny_model(), everything)
    trainer = trainer_for(tiny_model(), rows, run_arguments(tmp_path, per_device_train_batch_size=4, max_steps=1))
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected, rel=1e-5)
    trainer.train()
    assert losses(trainer) == pytest.approx([expected], rel=1e-5)


def test_the_logged_loss_weighs_the_steps_of_a_window_by_their_targets(tmp_path):
    """Case L7: a window of two steps, one of 31 targets a row and one of 2."""
    rows = UnevenRows(2)
    args = run_arguments(
        tmp_path, per_device_train_batch_size=1, max_steps=2, logging_steps=2, learning_rate=0.0, optim="sgd"
    )
    trainer = trainer_for(tiny_model(), rows, args)
    trainer.train()
    singly = [independent_loss(tiny_model(), stack([rows[index]])) for index in range(2)]
    assert losses(trainer) == pytest.approx([(31 * singly[0] + 2 * singly[1]) / 33], rel=1e-5)
    assert losses(trainer) != pytest.approx([sum(singly) / 2], rel=1e-3)


def test_the_score_does_not_move_with_batch_size_or_ranks(tmp_path, two_ranks):
    """Case L4, through the Trainer."""
    rows = UnevenRows(8)
    scores = [
        trainer_for(tiny_model(), rows, run_arguments(tmp_path, per_device_eval_batch_size=size)).evaluate(rows)
        for size in (1, 2, 4, 8)
    ]
    scores += [found["scores"][size] for found in two_ranks for size in (1, 3)]
    assert {score["eval_num_tokens"] for score in scores} == {4 * 31 + 4 * 2}
    assert [score["eval_loss"] for score in scores] == pytest.approx([scores[0]["eval_loss"]] * 8, rel=1e-6)


def test_ranks_with_unequal_streams_stop_together_and_say_what_is_left(two_ranks):
    """Cases D5 and D10: ragged batches; rank 0 has 3 batches an epoch, rank 1 has 2."""
    for found in two_ranks:
        step, epochs, messages, totals = found["stream"]
        assert (step, epochs) == (5, [0, 1, 2])
        assert messages.count("An epoch of the stream ends on all ranks together: 2 rows read and left over.") == 2
        assert totals == two_ranks[0]["stream"][3]


def test_tokens_are_counted_as_read_not_padding_and_trained(tmp_path):
    stream = UnevenStream(0, num_rows=4)  # 3, 4, 5, 3 tokens
    args = run_arguments(tmp_path, per_device_train_batch_size=2, max_steps=2)
    trainer = trainer_for(tiny_model(), stream, args, data_collator=pad)
    trainer.train()
    expected = {"num_tokens_read": 8 + 10, "num_tokens_not_padding": 15, "num_tokens_trained": 11}
    assert trainer.meter.total == expected
    assert expected.items() <= [entry for entry in trainer.state.log_history if "loss" in entry][-1].items()


class FailsFrom(torch.nn.Module):
    """Makes a model's loss not a number from its n-th forward on."""

    def __init__(self, model, first, count):
        super().__init__()
        self.calls, self.bad = itertools.count(1), range(first, first + count)
        self.handle = model.register_forward_hook(self.spoil, with_kwargs=True)

    def spoil(self, model, args, kwargs, output):
        if next(self.calls) in self.bad:
            output.loss = output.loss * float("nan")
        return output


def test_a_step_that_is_not_finite_is_shown_counted_and_changes_nothing(tmp_path):
    """Case L6."""
    model = tiny_model()
    FailsFrom(model, first=3, count=1)
    trainer = trainer_for(model, UnevenRows(), run_arguments(tmp_path, max_steps=3))
    before = {}

    def remember(*_, **__):
        before[trainer.state.global_step] = weights(trainer)

    trainer.optimizer = None
    trainer.callback_handler.callbacks[0].on_step_begin = remember
    trainer.train()
    assert math.isnan(losses(trainer)[-1])
    assert all(math.isfinite(loss) for loss in losses(trainer)[:2])
    assert trainer.state.log_history[2]["num_bad_steps"] == 1
    assert torch.equal(weights(trainer), before[2])
    assert not torch.equal(before[2], before[1])


def test_a_run_that_stays_not_finite_ends_with_its_step_and_keeps_its_checkpoint(tmp_path):
    """Case L6."""
    model = tiny_model()
    FailsFrom(model, first=3, count=100)
    args = run_arguments(tmp_path, max_steps=20, max_bad_steps=4, save_strategy="steps", save_steps=2)
    trainer = trainer_for(model, UnevenRows(), args)
    with pytest.raises(RunStopped, match=r"4 steps in a row, the last one step 6"):
        trainer.train()
    assert json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2
    status = json.loads((tmp_path / "STATUS").read_text())
    assert (status["status"], status["step"]) == ("failed", 5)


def test_a_loss_that_is_not_finite_beside_gradients_that_are_is_a_bad_step_and_the_records_are_named(tmp_path):
    """Case L6."""

    class LossIsNoNumber(LanguageModelTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss + float("inf") if self.state.global_step + 1 >= 3 else loss

    args = run_arguments(tmp_path, max_steps=9, max_bad_steps=2, record_audit=True, per_device_train_batch_size=2)
    trainer = LossIsNoNumber(model=tiny_model(), args=args, train_dataset=UnevenRows(8), data_collator=stack)
    batches = GlobalBatches(8, per_rank_batch_size=2, seed=42)
    ids = ", ".join(map(str, sorted(list(batches)[3])))
    with pytest.raises(RunStopped, match=rf"2 steps in a row, the last one step 4 \(records {ids}\)"):
        trainer.train()
    assert trainer.num_bad_steps == 2


def test_steps_that_fail_one_by_one_do_not_end_the_run(tmp_path):
    model = tiny_model()
    FailsFrom(model, first=2, count=1)
    FailsFrom(model, first=4, count=1)
    trainer = trainer_for(model, UnevenRows(), run_arguments(tmp_path, max_steps=5, max_bad_steps=2))
    trainer.train()
    assert (trainer.state.global_step, trainer.num_bad_steps) == (5, 2)


def test_validation_of_documents_gives_bits_per_byte(tmp_path):
    rows = scoring_rows([(list(range(4, 24)), 41)], context=16, start_id=2)
    model = tiny_model()
    metrics = trainer_for(model, UnevenRows(), run_arguments(tmp_path)).evaluate(rows)
    assert (metrics["eval_num_tokens"], metrics["eval_num_bytes"]) == (20, 41)
    assert metrics["eval_bits_per_byte"] == pytest.approx(metrics["eval_loss"] * 20 / math.log(2) / 41)
    assert model.config.vocab_size == VOCAB


def test_a_checkpoint_holds_no_pickled_arguments(tmp_path):
    args = run_arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, hub_token="hf_secretsecret")
    trainer_for(tiny_model(), UnevenRows(), args).train()
    for path in (tmp_path / "checkpoint-1").iterdir():
        assert b"hf_secretsecret" not in path.read_bytes(), path
    assert not (tmp_path / "checkpoint-1" / "training_args.bin").exists()


def test_bf16_logits_are_not_copied_to_fp32_and_the_loss_is_fp32(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "_cpu_has_bf16", lambda: True)
    trainer = trainer_for(tiny_model(), UnevenRows(), run_arguments(tmp_path, max_steps=1, precision="bf16"))
    seen = []
    trainer.model.register_forward_hook(
        lambda model, args, output: seen.append((output.logits.dtype, output.loss.dtype))
    )
    trainer.train()
    assert seen == [(torch.bfloat16, torch.float32)]


def test_position_zero_is_no_target_for_a_class_that_names_no_loss(tmp_path):
    """GPT-2's config says nothing of its loss, and the stock Trainer would count 32 targets a row."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2, n_positions=32))
    trainer = trainer_for(model, UnevenRows(), run_arguments(tmp_path))
    batch = stack([UnevenRows()[0]])
    assert trainer._get_num_items_in_batch([batch], torch.device("cpu")) == 31


def test_a_loss_of_each_ranks_own_targets_is_refused(tmp_path):
    with pytest.raises(ValueError, match="average_tokens_across_devices"):
        run_arguments(tmp_path, average_tokens_across_devices=False)


def test_a_saved_model_generates_with_its_cache(tmp_path):
    trainer = trainer_for(tiny_model(), UnevenRows(), run_arguments(tmp_path, max_steps=1))
    assert trainer.model.config.use_cache is False, "the Trainer turns it off: nothing to put back"
    trainer.save_model()
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is True
    assert trainer.model.config.use_cache is False
