import bz2
import html
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.sample import sample_dump_path
from tinylm.tokenizers import sentencepiece_bpe
from tinylm.tokenizers.sentencepiece_bpe import FILES, check_tokenizer, split_sentences, train_sentencepiece

Both = tuple[SentencePieceProcessor, PreTrainedTokenizerFast]

LINES = [f"line {i} of the text, with words like w{i % 97} and {i * 7919 % 3001}" for i in range(3000)]
RESERVED = ["</s>", "<s>", "<unk>", "<pad>", "<0x41>", "\u2047", "\u2581", "\u2585", "\ufdd0", "\ufdd0a", "\ufdd0b"]


@pytest.fixture(scope="module")
def articles() -> list[str]:
    """The 106 articles of the excerpt as raw wikitext, 5.7 million characters."""
    with bz2.open(sample_dump_path(), "rt", encoding="utf-8") as dump:
        texts = re.findall(r"<text[^>]*>(.*?)</text>", dump.read(), re.DOTALL)
    return [html.unescape(text) for text in texts if not text.lower().startswith("#redirect")]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def folder(request: pytest.FixtureRequest, articles: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    train_sentencepiece(iter(articles), folder, vocab_size=1024, model_type=request.param, max_bytes=150_000)
    return folder


@pytest.fixture(scope="module")
def both(folder: Path) -> Both:
    return SentencePieceProcessor(model_file=str(folder / "tokenizer.model")), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("number", [10, pytest.param(106, marks=pytest.mark.slow)])
def test_every_article_has_the_same_ids_from_both_files_and_comes_back(
    both: Both, articles: list[str], number: int
) -> None:
    processor, tokenizer = both
    assert len(articles) == 106
    ids = tokenizer(articles[:number], verbose=False)["input_ids"]
    assert [processor.encode(text) == got for text, got in zip(articles[:number], ids, strict=True)] == [True] * number
    assert tokenizer.decode(ids) == articles[:number]


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.text(),
            st.sampled_from(RESERVED),
            st.from_regex(r"[ \t\r\n]{1,5}|[a-e ]{1,30}|-{1,40}|[=.]{1,40}", fullmatch=True),
        )
    ).map("".join)
)
def test_any_text_has_the_same_ids_from_both_files_and_comes_back(both: Both, text: str) -> None:
    processor, tokenizer = both
    ids = tokenizer.encode(text)
    assert ids == processor.encode(text)
    assert tokenizer.decode(ids) == text == processor.decode(ids)


@pytest.mark.parametrize(
    "text", ["a  b", "  a", "a  ", "\n\na\r\nb\n", "\ta\t", "ﬁ", "①", "👩‍👩‍👧 e\u0301", "\0a", *RESERVED]
)
def test_texts_that_sentencepiece_changes_by_default_come_back(both: Both, text: str) -> None:  # case T1
    processor, tokenizer = both
    ids = tokenizer.encode(text)
    assert ids == processor.encode(text)
    assert tokenizer.decode(ids) == text == processor.decode(ids)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize(("letters", "vocab_size"), [("ab", 270), ("a-=", 300), ("日本 ", 280), ("<0x41>", 300)])
def test_runs_in_small_alphabets_have_the_same_ids(
    model_type: str, letters: str, vocab_size: int, tmp_path: Path
) -> None:
    # few letters: most pieces overlap themselves, specials and bytes have letters that were not learned
    texts = [
        "".join(letters[(i * 7 + j * j * (i % 5)) % len(letters)] * (1 + i * j % 4) for j in range(30))
        for i in range(200)
    ]
    train_sentencepiece(texts, tmp_path, vocab_size=vocab_size, model_type=model_type)
    assert check_tokenizer(tmp_path, [*texts, *("a b" + text + "x \t" for text in RESERVED)]) > 0


def test_specials_have_fixed_ids_and_are_never_added_nor_read_from_a_text(both: Both, tmp_path: Path) -> None:
    tokenizer = both[1]
    tokenizer.save_pretrained(tmp_path)
    for reloaded in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        specials = [reloaded.pad_token, reloaded.bos_token, reloaded.eos_token, reloaded.unk_token]
        assert specials == ["<pad>", "<s>", "</s>", "<unk>"]
        assert reloaded.convert_tokens_to_ids(specials) == [0, 1, 2, 3]
        assert len(reloaded) == reloaded.vocab_size == 1024
        assert min(reloaded.encode("".join(specials) + " and <s> and</s>")) > 3
        assert reloaded.encode("") == []


def test_the_saved_tokenizer_is_a_class_of_transformers(both: Both, folder: Path) -> None:
    assert type(both[1]).__module__.startswith("transformers.")
    assert "auto_map" not in json.loads((folder / "tokenizer_config.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_saved_model_names_no_file_of_this_machine_and_has_the_ids_of_one_that_does(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentencepiece_bpe.tempfile, "tempdir", str(tmp_path))
    saved = {}
    for name in ("cleaned", "as it came"):
        train_sentencepiece(LINES, tmp_path / name, vocab_size=400, model_type=model_type)
        saved[name] = (tmp_path / name / "tokenizer.model").read_bytes()
        monkeypatch.setattr(sentencepiece_bpe, "_without_paths", lambda model: model)
    for place in (str(tmp_path).encode(), b".tsv"):
        assert place in saved["as it came"] and place not in saved["cleaned"]
    processors = [SentencePieceProcessor(model_proto=model) for model in saved.values()]
    texts = [*LINES[:50], *RESERVED, "a  b \n\tﬁ①"]
    assert processors[0].encode(texts) == processors[1].encode(texts)
    assert processors[0].decode(processors[0].encode(texts)) == texts


def test_a_long_line_and_a_long_word_are_learned_from(tmp_path: Path) -> None:
    line = " ".join(["zyzzyva"] * 3000)  # 24 kB; SentencePiece skips lines of over 4,192 bytes
    tokenizer = train_sentencepiece([line + "\n" + "q" * 100_000], tmp_path, vocab_size=285)
    assert tokenizer.tokenize(" zyzzyva") == ["▁zyzzyva"]
    assert tokenizer.tokenize("q" * 8) != ["q"] * 8


@given(st.lists(st.one_of(st.text(max_size=20), st.sampled_from([" ", "\n", "word " * 1000, "x" * 9001]))).map("".join))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_sentences_hold_all_of_a_document_but_the_unlearnable_characters(document: str) -> None:
    sentences = list(split_sentences(document))
    assert "".join(sentences) == re.sub("[\0\t\n\r\u2047\u2581\u2585\ufdd0]", "", document)
    assert all(1 <= len(sentence) <= 4000 for sentence in sentences)


def test_a_long_line_is_cut_before_a_space() -> None:
    assert {len(sentence.replace(" word", "")) for sentence in split_sentences(" word" * 5000)} == {0}


def test_newlines_and_tabs_are_one_token_each_and_a_run_of_spaces_ends_in_its_word(both: Both) -> None:
    tokens = both[1].tokenize("the\n\n\t   the")
    assert tokens == ["the", "<0x0A>", "<0x0A>", "<0x09>", "▁", "▁", "▁the"]


@pytest.mark.slow
def test_rounded_scores_are_what_makes_unigram_ids_equal_on_long_articles(
    articles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentencepiece_bpe, "_rounded", lambda model: model)
    monkeypatch.setattr(sentencepiece_bpe, "check_tokenizer", lambda folder, texts: 0)
    tokenizer = train_sentencepiece(articles, tmp_path, vocab_size=1024, model_type="unigram", max_bytes=150_000)
    processor = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert any(processor.encode(article) != tokenizer.encode(article, verbose=False) for article in articles[:30])


def test_check_tokenizer_finds_another_models_file(folder: Path, tmp_path: Path) -> None:
    train_sentencepiece(LINES, tmp_path, vocab_size=1024)
    assert check_tokenizer(tmp_path, ["line 17"]) > 0
    shutil.copy(folder / "tokenizer.model", tmp_path)
    with pytest.raises(ValueError, match=r"two files of .* disagree: near 'line 17'"):
        check_tokenizer(tmp_path, ["line 17"])


def test_check_tokenizer_finds_a_text_that_does_not_come_back(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["decoder"]["decoders"].pop(0)
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="does not give back 'a b'"):
        check_tokenizer(tmp_path, ["ab", "a b"])


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("vocab_size", [400_000, 40])
def test_a_vocabulary_out_of_reach_names_a_range_that_can_be_trained(
    model_type: str, vocab_size: int, tmp_path: Path
) -> None:  # case T2
    with pytest.raises(ValueError, match=rf"of {vocab_size:,} pieces cannot be reached") as caught:
        train_sentencepiece(LINES, tmp_path, vocab_size=vocab_size, model_type=model_type)
    assert "INTERNAL" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    smallest, largest = re.search(r"allows ([\d,]+) .* to (?:at least )?([\d,]+)\.", str(caught.value)).groups()
    for size in (int(smallest.replace(",", "")), int(largest.replace(",", ""))):
        assert len(train_sentencepiece(LINES, tmp_path / str(size), vocab_size=size, model_type=model_type)) == size
    for size in (int(smallest) - 1, 0, -1):
        with pytest.raises(
            ValueError, match=rf"of {size} pieces cannot be reached with this text: it allows {smallest}"
        ):
            train_sentencepiece(LINES[:1000], tmp_path / "too few", vocab_size=size, model_type=model_type)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_one_tiny_document_is_not_enough_for_the_default_vocabulary(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"4,096 pieces cannot be reached .* or give more text|so little text"):
        train_sentencepiece(["A tiny document."], tmp_path, model_type=model_type)


@pytest.mark.parametrize("documents", [[], [""], ["\n\n\t"]])
def test_a_corpus_without_text_is_refused(documents: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"no text to learn from in {len(documents)} document"):
        train_sentencepiece(documents, tmp_path)


def test_a_unigram_vocabulary_of_one_letter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unigram vocabulary cannot be learned from so little text"):
        train_sentencepiece(["a" * 50], tmp_path, vocab_size=263, model_type="unigram")


def test_an_unknown_model_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is 'wordpiece'\. Set `--model_type`"):
        train_sentencepiece(LINES[:300], tmp_path, model_type="wordpiece")


def test_an_error_of_the_reader_comes_through_as_it_is(tmp_path: Path) -> None:
    def broken() -> Iterator[str]:
        yield from LINES[:100]
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    with pytest.raises(UnicodeDecodeError, match="invalid start byte"):
        train_sentencepiece(broken(), tmp_path, vocab_size=300)
    assert not list(tmp_path.iterdir())


def test_max_bytes_ends_the_reading_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read = []
    documents = (read.append(line) or line for line in LINES)
    with caplog.at_level("INFO", logger="tinylm"):
        train_sentencepiece(documents, tmp_path, vocab_size=320, max_bytes=5_000)
    assert sum(map(len, read[:-1])) <= 5_000 < sum(map(len, read))
    assert f"{sum(map(len, read[:-1])):,} bytes, the first 5,000 bytes (`--max_bytes`)" in caplog.text
    with pytest.raises(ValueError, match=r"at least 1, but is 0\. Set `--max_bytes`"):
        train_sentencepiece(LINES[:300], tmp_path / "none", max_bytes=0)


def test_a_tokenizer_is_overwritten_only_when_asked(tmp_path: Path) -> None:
    train_sentencepiece(LINES[:300], tmp_path, vocab_size=300)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    with pytest.raises(ValueError, match=r"holds tokenizer_config\.json, .* set `--overwrite_tokenizer`"):
        train_sentencepiece(LINES[:300], tmp_path, vocab_size=310)
    assert before == {name: (tmp_path / name).read_bytes() for name in FILES}
    assert len(train_sentencepiece(LINES[:300], tmp_path, vocab_size=310, overwrite=True)) == 310


@pytest.mark.parametrize("moved", [0, 1, 2])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_killed_while_saving_leaves_no_half_tokenizer_that_loads(
    moved: int, overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if overwrite:
        train_sentencepiece(LINES[:300], tmp_path, vocab_size=300)
    replace, calls = sentencepiece_bpe.os.replace, []

    def killed_after_some(source: Path, target: Path) -> None:
        if len(calls) == moved:
            raise KeyboardInterrupt
        calls.append(target)
        replace(source, target)

    monkeypatch.setattr(sentencepiece_bpe.os, "replace", killed_after_some)
    with pytest.raises(KeyboardInterrupt):
        train_sentencepiece(LINES[:300], tmp_path, vocab_size=310, overwrite=overwrite)
    if moved < 2:
        with pytest.raises((ValueError, OSError)):
            AutoTokenizer.from_pretrained(tmp_path)
    else:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert len(tokenizer) == 310
        assert min(tokenizer.encode("</s>")) > 3


def test_the_models_context_can_be_noted(tmp_path: Path) -> None:
    assert train_sentencepiece(LINES[:300], tmp_path, vocab_size=300, model_max_length=512).model_max_length == 512
