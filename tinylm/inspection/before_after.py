"""What a model answers before it is fine-tuned and after: the shortest report of what the training has done."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tinylm.data.chat_format import Message
from tinylm.generation import answer, generate_text
from tinylm.generation.continuation import fitting_length
from tinylm.training.run_record import write_atomically
from tinylm.training.trainer import LanguageModelTrainer

ANSWERS_NAME = "answers.json"
_NEW_TOKENS = 80


class BeforeAfter:
    """Greedy answers of the model as it is now, kept in the run's folder for the end of the run.

    Args:
        prompts: conversations that wait for an answer, or beginnings of texts.
        go_on: the run began earlier, and its answers are in the folder.

    `samples` are what `compared` has compared: `prompt`, `before` and `after` of each.
    """

    def __init__(
        self, trainer: LanguageModelTrainer, prompts: Sequence[str] | Sequence[list[Message]], *, go_on: bool
    ) -> None:
        self._trainer, self._prompts = trainer, prompts
        self.samples: list[dict[str, str]] = []
        self._path = Path(trainer.args.output_dir, ANSWERS_NAME)
        if trainer.is_world_process_zero() and not go_on:
            rows = [{"prompt": prompt, "before": text} for prompt, text in zip(prompts, self._answers(), strict=True)]
            self._write(rows)

    def compared(self, metrics: Mapping[str, float]) -> str:
        """The answers of before and of now, and the losses of a run's `metrics`; they are added to the folder."""
        before = json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else []
        known = {json.dumps(row["prompt"]): row["before"] for row in before}
        rows = [
            {"prompt": prompt, "before": known.get(json.dumps(prompt), "(not known)"), "after": text}
            for prompt, text in zip(self._prompts, self._answers(), strict=True)
        ]
        self._write(rows)
        self.samples = [{**row, "prompt": _shown(row["prompt"])} for row in rows]
        lines = [
            f"--- {row['prompt']}\nbefore: {row['before'].strip()}\nafter:  {row['after'].strip()}"
            for row in self.samples
        ]
        losses = [f"{metrics[name]:.4f}" for name in ("before_eval_loss", "eval_loss") if name in metrics]
        return "\n".join([*lines, f"held out, nats per target: {' -> '.join(losses)}"])

    def _answers(self) -> list[str]:
        tokenizer, model = self._trainer.processing_class, self._trainer.model
        length = fitting_length(model, _NEW_TOKENS)
        with self._trainer.accelerator.autocast():  # as in training: the frozen base may be held in half precision
            if self._prompts and not isinstance(self._prompts[0], str) and tokenizer.chat_template:
                return [answer(model, tokenizer, prompt, max_new_tokens=length) for prompt in self._prompts]
            texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in self._prompts]
            return generate_text(model, tokenizer, texts, max_new_tokens=length, temperature=0.0)

    def _write(self, rows: Sequence[Mapping[str, object]]) -> None:
        if not self._trainer.is_world_process_zero():
            return  # it was here to run the model
        write_atomically(self._path, json.dumps(rows, indent=2, ensure_ascii=False) + "\n")


def _shown(prompt: str | list[Message]) -> str:
    """A prompt in one line."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return " ".join(text.split())[:200] or "(the beginning of a text)"
