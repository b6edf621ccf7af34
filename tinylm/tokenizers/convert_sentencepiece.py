"""A SentencePiece model as a `tokenizer.json` with the same ids, for BPE and for unigram models without dummy prefix.

- SentencePiece merges by the score of the piece that results, whatever its two halves: so every split of a piece into
  two pieces is a merge here, ranked by that score.
- No piece goes on after a space, so the text is cut before each space first. The ids stay the same, and the time stays
  linear in the length of a document.
- The trie of a `Unigram` here holds every entry, SentencePiece's only the learned pieces. A literal "</s>" or "<0x41>"
  in a document must not become one of the others: they get a score that no path of learned pieces falls to, and the
  text is cut around those of their characters that were not learned, which are spelled in bytes anyway.
"""

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPACE = "\u2581"
"""SentencePiece's spelling of a space."""

ESCAPES = (("\ufdd0", "\ufdd0a"), (SPACE, "\ufdd0b"))
"""What a literal U+2581 in a text becomes before spaces take its place, and how the escape (a noncharacter) escapes
itself. Applied in this order and undone in the reverse one."""

_NEVER = -1000.0


def convert_sentencepiece(processor: SentencePieceProcessor, model_type: str) -> Tokenizer:
    """The same tokenizer for the `tokenizers` library; `model_type` is `bpe` or `unigram`. It adds no specials."""
    model = _bpe(processor) if model_type == "bpe" else _unigram(processor)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(plain, escape) for plain, escape in ESCAPES])
    cuts = [pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=True)]
    if unlearned := _unlearned_characters(processor):
        cuts.insert(0, pre_tokenizers.Split(Regex(f"[{unlearned}]"), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *(decoders.Replace(escape, plain) for plain, escape in reversed(ESCAPES)),
        ]
    )
    specials = [processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id()]
    tokenizer.add_special_tokens(
        [AddedToken(processor.id_to_piece(id_), special=True, normalized=False) for id_ in specials]
    )
    return tokenizer


def _learned_ids(processor: SentencePieceProcessor) -> list[int]:
    return [
        id_
        for id_ in range(processor.get_piece_size())
        if not (processor.is_control(id_) or processor.is_unknown(id_) or processor.is_byte(id_))
    ]


def _unlearned_characters(processor: SentencePieceProcessor) -> str:
    """The letters, digits and brackets of the specials and byte pieces that are no pieces themselves."""
    learned = set(_learned_ids(processor))
    reserved = {processor.id_to_piece(id_) for id_ in range(processor.get_piece_size()) if id_ not in learned}
    return "".join(sorted({*"".join(reserved)} - {processor.id_to_piece(id_) for id_ in learned}))


def _bpe(processor: SentencePieceProcessor) -> models.BPE:
    learned = [processor.id_to_piece(id_) for id_ in sorted(_learned_ids(processor), key=processor.get_score)]
    halves = set(learned)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in reversed(learned)  # the best score first
        for cut in range(1, len(piece))
        if piece[:cut] in halves and piece[cut:] in halves
    ]
    vocabulary = {processor.id_to_piece(id_): id_ for id_ in range(processor.get_piece_size())}
    return models.BPE(vocabulary, merges, byte_fallback=True, unk_token=processor.id_to_piece(processor.unk_id()))


def _unigram(processor: SentencePieceProcessor) -> models.Unigram:
    scores = dict.fromkeys(range(processor.get_piece_size()), _NEVER)
    scores |= {id_: processor.get_score(id_) for id_ in _learned_ids(processor)}
    vocabulary = [(processor.id_to_piece(id_), score) for id_, score in scores.items()]
    return models.Unigram(vocabulary, unk_id=processor.unk_id(), byte_fallback=True)
