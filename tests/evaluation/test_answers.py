"""Scores of held-out answers: conversations whose labels are -100 outside what the model is to say."""

import pytest
import torch
from torch.nn import functional

from tests.distributed import run_on_ranks
from tests.training.tiny import run_arguments, trainer_for
from tinylm.evaluation.scoring import pad_rows, score
from tinylm.evaluation.targets import takes_target_places, target_places

from .tiny import tiny_gpt2, tiny_llama, tiny_tlm

CPU = torch.device("cpu")
Examples = list[dict[str, torch.Tensor]]


def conversations(num: int = 7) -> Examples:
    """Questions of 5 to 11 tokens with answers of 1 to 19: very different shares of targets."""
    generator = torch.Generator().manual_seed(11)
    examples = []
    for number in range(num):
        question, answer = 5 + number, 1 + 3 * number
        ids = torch.randint(3, 257, (question + answer,), generator=generator)
        labels = ids.clone()
        labels[:question] = -100
        examples.append({"input_ids": ids, "labels": labels})
    return examples


def nats_of_answers(model: torch.nn.Module, examples: Examples) -> float:
    """Nats a target, one example at a time over all logits."""
    nats = count = 0
    for example in examples:
        with torch.no_grad():
            logits = model(example["input_ids"][None]).logits[0, :-1].double()
        targets = example["labels"][1:]
        nats += functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").item()
        count += int((targets != -100).sum())
    return nats / count


def test_places_are_where_the_next_token_is_a_target() -> None:
    labels = torch.tensor([[7, -100, 3, 4], [-100, -100, -100, 5]])  # 7 has nothing before it
    places, targets = target_places(labels)
    assert places.tolist() == [[False, True, True, False], [False, False, True, False]]
    assert targets.tolist() == [3, 4, 5]
    places, targets = target_places(labels[:1])
    assert (places.tolist(), targets.tolist()) == ([1, 2], [3, 4])


@pytest.mark.parametrize("build", [tiny_llama, tiny_tlm, tiny_gpt2])
def test_answers_are_scored_by_their_targets_at_every_batch_size(build: object) -> None:
    """Case L4 for conversations."""
    model, examples = build(), conversations()
    expected = nats_of_answers(model, examples)
    for batch_size in (1, 2, 7):
        result = score(model, examples, batch_size=batch_size, device=CPU)
        assert result["nats_per_token"] == pytest.approx(expected, rel=1e-6)
        assert (result["num_tokens"], result["num_documents"]) == (sum(range(1, 20, 3)), 7)
        assert "bits_per_byte" not in result
    means = [nats_of_answers(model, [example]) for example in examples]
    assert sum(means) / 7 != pytest.approx(expected, rel=0.005)  # what it must not be


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_head_runs_on_targets_only(batch_size: int) -> None:
    """Case L9: what is held are the logits of the answers, not of the questions and the padding."""
    model, examples = tiny_llama(), conversations()
    rows = []
    model.lm_head.register_forward_hook(lambda head, args, logits: rows.append(logits.numel() // logits.shape[-1]))
    score(model, examples, batch_size=batch_size, device=CPU)
    assert sum(rows) == sum(range(1, 20, 3))
    assert max(rows) < pad_rows(examples)["labels"].numel()


def test_a_model_of_unknown_code_is_scored_the_plain_way_to_the_same_number() -> None:
    class Foreign(type(tiny_llama())):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
            return super().forward(input_ids, use_cache=use_cache)

    model = tiny_llama()
    known = score(model, conversations(), batch_size=3, device=CPU)
    assert takes_target_places(model)
    model.__class__ = Foreign
    assert not takes_target_places(model)
    assert score(model, conversations(), batch_size=3, device=CPU) == pytest.approx(known, rel=1e-6)


def test_the_trainer_logs_in_training_what_it_evaluates(tmp_path: object) -> None:
    """One definition of the loss: a step over all examples logs what their evaluation finds."""
    examples, model = conversations(), tiny_llama()
    expected = nats_of_answers(model, examples)
    settings = {"per_device_train_batch_size": 7, "max_steps": 1, "learning_rate": 0.0, "optim": "sgd"}
    trainer = trainer_for(model, examples, run_arguments(tmp_path, **settings), data_collator=pad_rows)
    metrics = trainer.evaluate(examples)
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert (metrics["eval_num_tokens"], metrics["eval_num_documents"]) == (70, 7)
    trainer.train()
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == pytest.approx(
        [expected], rel=1e-5
    )


def scores_on_ranks(rank: int, world_size: int, payload: dict[str, object]) -> list[dict[str, object]]:
    assert world_size == 2
    shared = {"device": CPU, "rank": rank, "world_size": world_size}
    return [score(tiny_llama(), conversations(), batch_size=size, **shared) for size in (1, 3)]


def test_two_ranks_score_answers_as_one_does() -> None:
    """Case L4 on two ranks, which have 4 and 3 examples."""
    first, second = run_on_ranks("tests.evaluation.test_answers", "scores_on_ranks", world_size=2)
    expected = score(tiny_llama(), conversations(), batch_size=1, device=CPU)
    assert first == second
    for found in first:
        assert found == pytest.approx(expected, rel=1e-6)
