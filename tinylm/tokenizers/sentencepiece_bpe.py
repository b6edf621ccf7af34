"""Train a lossless SentencePiece tokenizer from a stream of documents, and check it against its `tokenizer.json`.

Choices, each with its price:
- Nothing is normalised, and what has no piece is spelled in bytes: every text comes back exactly.
- Newlines, tabs and the few characters that SentencePiece reserves are never learned: one byte token for a newline or
  a tab, and no piece crosses one. A run of n spaces costs n tokens, or n - 1 before a word.
- Unigram scores are rounded to 1/16 nat: SentencePiece adds them in float32, and unrounded sums over a long article
  choose other pieces than exact ones do (in 40 of 106 Wikipedia articles).

SentencePiece: https://arxiv.org/abs/1808.06226; byte fallback and identity normalisation as in Llama 2.
"""

import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from .convert_sentencepiece import ESCAPES, SPACE, convert_sentencepiece

logger = logging.getLogger(__name__)

FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")
"""What a tokenizer folder holds, in the order of writing: the first alone does not load, the first two give all ids.

`tokenizer.model` alone would load: transformers converts it, and the reserved strings in a text become specials.
"""

SPECIALS = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
"""Ids 0, 1, 2, 3."""

_SAMPLE_BYTES = 1_000_000
_SENTENCE_LENGTH = 4_000  # characters; SentencePiece fails on a word of more than 65,535
_CHECKED_LENGTH = 32_768  # characters; sixteenths up to a sum of 2**20 are exact in float32
_UNLEARNABLE = "\0\t\n\r\u2047\u2581\u2585\ufdd0"  # its marks for unknown, space and boundary, and our escape
_SENTENCE = re.compile(
    rf"[^{_UNLEARNABLE}]{{1,{_SENTENCE_LENGTH}}}(?![^{_UNLEARNABLE} ])|[^{_UNLEARNABLE}]{{{_SENTENCE_LENGTH}}}"
)


def train_sentencepiece(
    documents: Iterable[str],
    output_dir: str | Path,
    *,
    vocab_size: int = 4096,
    model_type: str = "bpe",
    max_bytes: int = 200_000_000,
    model_max_length: int | None = None,
    overwrite: bool = False,
) -> PreTrainedTokenizerFast:
    """A tokenizer trained on the documents, saved as `tokenizer.model` and as a `tokenizer.json` with the same ids.

    It adds no bos or eos by itself, and reads reserved strings in a text, such as "</s>", as ordinary text. The
    documents are read once, up to `max_bytes` of UTF-8; SentencePiece holds that much in memory.

    Args:
        documents: texts without lone surrogates.
        output_dir: folder for `tokenizer.model`, `tokenizer.json` and `tokenizer_config.json`; made if missing.
        vocab_size: pieces in all, the 4 specials and 256 bytes included.
        model_type: `bpe` or `unigram`.
        max_bytes: bytes of text to learn from at most.
        model_max_length: tokens that the model can read, to be noted in `tokenizer_config.json`.
        overwrite: replace a tokenizer that lies in `output_dir`.

    Raises:
        ValueError: a value is out of range, there is no text, `vocab_size` cannot be reached, `output_dir` holds a
            tokenizer already, or the two forms disagree on the training text.
    """
    if model_type not in ("bpe", "unigram"):
        raise ValueError(f"`model_type` is `bpe` or `unigram`, but is {model_type!r}. Set `--model_type`.")
    output_dir = Path(output_dir)
    present = [name for name in FILES if (output_dir / name).exists()]
    if present and not overwrite:
        raise ValueError(
            f"A tokenizer is never overwritten unasked, and {str(output_dir)!r} holds {', '.join(present)}. Take"
            " another `--output_dir`, or set `--overwrite_tokenizer`."
        )
    text = _TrainingText(documents, max_bytes)
    model = _train(text, vocab_size, model_type)
    logger.info("%s", text.description())
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=output_dir) as unfinished:
        Path(unfinished, "tokenizer.model").write_bytes(model)
        _convert(Path(unfinished), model_type, model_max_length)
        count = check_tokenizer(unfinished, text.sample)
        for name in reversed(present):
            (output_dir / name).unlink()
        for name in FILES:
            os.replace(Path(unfinished, name), output_dir / name)
    logger.info(
        "Tokenizer of %d pieces (%s) in %s; tokenizer.model and tokenizer.json agree on %s tokens of its text.",
        vocab_size,
        model_type,
        output_dir,
        f"{count:,}",
    )
    return AutoTokenizer.from_pretrained(output_dir)


def check_tokenizer(folder: str | Path, texts: Iterable[str]) -> int:
    """The number of tokens on which both files of the folder agree; each text also has to come back from its ids.

    Texts are compared in parts of 32,768 characters, because SentencePiece's sums of unigram scores are not exact over
    longer ones.

    Raises:
        ValueError: a text has two encodings, or is not equal to its decoded ids; the place is quoted.
    """
    processor = SentencePieceProcessor(model_file=str(Path(folder, "tokenizer.model")))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    count = 0
    for text in texts:
        for start in range(0, len(text), _CHECKED_LENGTH):
            part = text[start : start + _CHECKED_LENGTH]
            expected = processor.encode(part)
            got = tokenizer.encode(part, add_special_tokens=False, verbose=False)
            if got != expected:
                at = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), 0)
                expected, got = expected[at : at + 8], got[at : at + 8]
                raise ValueError(
                    f"The two files of {str(folder)!r} disagree: near {processor.decode(expected)!r} tokenizer.model"
                    f" gives {expected}, tokenizer.json {got}. Train it again."
                )
            if tokenizer.decode(got) != part or processor.decode(got) != part:
                raise ValueError(f"The tokenizer in {str(folder)!r} does not give back {part[:80]!r}. Train it again.")
            count += len(got)
    return count


class _TrainingText:
    """The sentences that SentencePiece learns from, counted while they pass; keeps a sample and a reader's error.

    SentencePiece turns an exception in the middle of a stream into a `RuntimeError` of its own.
    """

    def __init__(self, documents: Iterable[str], max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"`max_bytes` must be at least 1, but is {max_bytes}. Set `--max_bytes`.")
        self.documents, self.max_bytes = documents, max_bytes
        self.num_documents = self.num_bytes = 0
        self.cut = False
        self.sample: list[str] = []
        self.error: BaseException | None = None

    def sentences(self) -> Iterator[str]:
        try:
            for document in self.documents:
                if self.num_bytes < _SAMPLE_BYTES:
                    self.sample.append(document[:_SAMPLE_BYTES])
                self.num_documents += 1
                for sentence in split_sentences(document):
                    size = len(sentence.encode())
                    if self.num_bytes + size > self.max_bytes:
                        self.cut = True
                        return
                    self.num_bytes += size
                    yield sentence
        except BaseException as error:
            self.error = error
            raise

    def description(self) -> str:
        end = f", the first {self.max_bytes:,} bytes (`--max_bytes`)" if self.cut else ", all of the text"
        return f"Learned from {self.num_documents:,} documents, {self.num_bytes:,} bytes{end}."


def split_sentences(document: str) -> Iterator[str]:
    """The runs of text that can be learned: lines, cut before a space where they are over 4,000 characters long.

    SentencePiece would skip, without a word, a sentence that is too long for it or holds one of its own marks.
    """
    return (match[0] for match in _SENTENCE.finditer(document))


def _train(text: _TrainingText, vocab_size: int, model_type: str) -> bytes:
    """The serialised model. A soft limit on the vocabulary: what comes short of it tells how much was possible."""
    try:
        model = _run_trainer(text.sentences(), vocab_size, model_type)
    except RuntimeError as failure:
        if text.error is not None:
            raise text.error from None
        if text.num_bytes == 0:
            raise ValueError(
                f"There is no text to learn from in {text.num_documents} document(s), within `max_bytes` ="
                f" {text.max_bytes:,}. Give other `--data_files`, or a larger `--max_bytes`."
            ) from None
        too_small = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(failure))
        if too_small is None:
            raise ValueError(f"SentencePiece cannot train on this text: {failure}") from failure
        sample = (sentence for document in text.sample for sentence in split_sentences(document))
        largest = SentencePieceProcessor(model_proto=_run_trainer(sample, 1_000_000, model_type)).get_piece_size()
        raise _unreachable(vocab_size, int(too_small[1]), f"at least {largest:,}") from None
    processor = SentencePieceProcessor(model_proto=model)
    size = processor.get_piece_size()
    if size < vocab_size:
        smallest = sum(processor.is_byte(i) or processor.is_control(i) or processor.is_unknown(i) for i in range(size))
        smallest += sum(len(processor.id_to_piece(i)) == 1 for i in range(size))
        raise _unreachable(vocab_size, smallest, f"{size:,}")
    return model


def _unreachable(vocab_size: int, smallest: int, largest: str) -> ValueError:
    return ValueError(
        f"A vocabulary of {vocab_size:,} pieces cannot be reached with this text: it allows {smallest:,} (the specials,"
        f" 256 bytes and each common character) to {largest}. Take a size in that range (`--vocab_size` of"
        " train_tokenizer.py, or `vocab_size` in the config.json of a model whose tokenizer is trained on its way), or"
        " give more text."
    )


def _run_trainer(sentences: Iterator[str], vocab_size: int, model_type: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        rules, inverse = Path(folder, "rules.tsv"), Path(folder, "inverse.tsv")
        points = [[" ".join(f"{ord(c):X}" for c in text) for text in pair] for pair in ESCAPES]
        rules.write_text("".join(f"{plain}\t{escape}\n" for plain, escape in points))
        inverse.write_text("".join(f"{escape}\t{plain}\n" for plain, escape in points))
        output = BytesIO()
        parameters = dict(
            sentence_iterator=sentences,
            model_writer=output,
            model_type=model_type,
            vocab_size=max(vocab_size, len(SPECIALS) + 256),  # of fewer it does not say how many it takes
            hard_vocab_limit=False,
            normalization_rule_tsv=str(rules),
            denormalization_rule_tsv=str(inverse),
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            required_chars=SPACE,  # in bytes, where spaces are rare, it would come back as a U+2581
            max_sentence_length=4 * _SENTENCE_LENGTH,
            minloglevel=2,
            **{f"{name}_id": id_ for id_, name in enumerate(SPECIALS)},
            **{f"{name}_piece": piece for name, piece in SPECIALS.items()},
        )
        try:
            SentencePieceTrainer.train(**parameters)
        except RuntimeError as failure:
            if "no pieces are loaded" not in str(failure):
                raise
            raise ValueError(
                "A unigram vocabulary cannot be learned from so little text. Give more, or set `--model_type bpe`."
            ) from None
    model = _without_paths(output.getvalue())
    return _rounded(model) if model_type == "unigram" else model


def _without_paths(model: bytes) -> bytes:
    """The model without the files of its training: they are gone, and their paths are of this machine. What the rules
    say is compiled into it."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    for field in ("input", "model_prefix"):
        proto.trainer_spec.ClearField(field)
    for rules in (proto.normalizer_spec, proto.denormalizer_spec):
        rules.ClearField("normalization_rule_tsv")
    return proto.SerializeToString()


def _rounded(model: bytes) -> bytes:
    """The model with scores in sixteenths of a nat, whose sums are exact in float32 up to 2**20 nats (some 300 kB)."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    for piece in proto.pieces:
        piece.score = round(piece.score * 16) / 16
    return proto.SerializeToString()


def _convert(folder: Path, model_type: str, model_max_length: int | None) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` beside `tokenizer.model`."""
    processor = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    length = {} if model_max_length is None else {"model_max_length": model_max_length}
    PreTrainedTokenizerFast(
        tokenizer_object=convert_sentencepiece(processor, model_type),
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": piece for name, piece in SPECIALS.items()},
        **length,
    ).save_pretrained(folder)
