"""From the user's flags to what a run needs: a tokenizer, training data, validation rows.

A corpus comes in one of three ways. *Streamed*: it is read, tokenised and packed while the model trains, and nothing is
written. *Prepared*: it is tokenised once into a folder (`--prepared_corpus`), which is memory-mapped and shuffled
exactly; where that folder is not there yet and a source is named, it is written first. *Records in memory*: with
`--packing false`, local text is tokenised before the first step; records have ids, and epochs an end.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.utils.data import Dataset, IterableDataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from tinylm.data.collators import PadRecords, collate_blocks
from tinylm.data.encoding import check_tokenizer_matches, tokenizer_hash
from tinylm.data.order import usable_workers
from tinylm.data.packing import PackedStream
from tinylm.data.prepare import write_store
from tinylm.data.records import IndexedTextDataset, RecordExamples
from tinylm.data.sources import Source, open_source
from tinylm.data.splits import training_part, validation_part
from tinylm.data.token_store import StoreBlocks, TokenStore
from tinylm.evaluation.scoring import ScoringRows, encode_documents, scoring_rows, scoring_start_id
from tinylm.tokenizers.byte import byte_tokenizer
from tinylm.tokenizers.sentencepiece_bpe import train_sentencepiece

from .arguments import DataArguments, RunArguments
from .launch import rank_zero_first

logger = logging.getLogger(__name__)

# Enough for 4096 pieces to be what they would be with more, and half a minute of SentencePiece.
_TOKENIZER_BYTES = 20_000_000


@dataclass(frozen=True)
class Corpus:
    """What a run trains on and is validated on; `description` is one line for the user and for `run.json`."""

    description: str
    tokenizer: PreTrainedTokenizerBase
    train_dataset: Dataset | IterableDataset
    eval_rows: ScoringRows
    collate: Callable


def load_config(name_or_path: str) -> PreTrainedConfig:
    """The architecture in a config.json, a folder with one, or a repository of the Hub."""
    if name_or_path.endswith(".json") and not Path(name_or_path).is_file():
        raise FileNotFoundError(f"There is no architecture at `{name_or_path}`. Set `--config_name`.")
    return AutoConfig.from_pretrained(name_or_path)


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a local folder or of a repository of the Hub; `bytes` is the one of 258 ids."""
    if name_or_path == "bytes":
        tokenizer = byte_tokenizer()
        tokenizer.name_or_path = name_or_path  # for messages
        return tokenizer
    if name_or_path.count("/") != 1 and not Path(name_or_path).exists():
        raise FileNotFoundError(
            f"There is no tokenizer at `{name_or_path}`. Set `--tokenizer_name_or_path` to a folder that"
            " recipes/train_tokenizer.py has written, or to a repository of the Hub."
        )
    return AutoTokenizer.from_pretrained(name_or_path)


def source_from(data: DataArguments) -> Source:
    """The source that the flags name, announced in one line."""
    source = open_source(
        dataset_name=data.dataset_name,
        dataset_config_name=data.dataset_config_name,
        dataset_split=data.dataset_split,
        text_column=data.text_column,
        data_files=data.data_files,
        document_separator=data.document_separator,
        max_documents=data.max_documents,
    )
    logger.info("Text: %s", source.description)
    return source


def open_corpus(
    data: DataArguments, run: RunArguments, config: PreTrainedConfig, tokenizer_name_or_path: str | None
) -> Corpus:
    """The corpus for a model of `config`; without a tokenizer, one is trained on the training part.

    Raises:
        ValueError: a block that does not fit the context, vocabularies that differ, a stream without `max_steps`, and
            whatever is wrong with the source.
    """
    block_size = checked_block_size(data.block_size, config)
    if data.document_mask and not data.packing:
        raise ValueError(
            "`document_mask` is about blocks; records are documents anyway. Leave it out with `--packing false`."
        )
    if data.split_long and data.packing:
        raise ValueError("`split_long` is about records, and blocks are not records. Set `--packing false` as well.")
    corpus = _way(data)(data, run, config, tokenizer_name_or_path, block_size)
    rows = corpus.eval_rows
    logger.info("Validation: %s documents, %s tokens", f"{rows.num_documents:,}", f"{rows.num_tokens:,}")
    return corpus


def _way(data: DataArguments) -> Callable[..., Corpus]:
    """How the corpus comes in. Records of local text fit into memory as a rule; those of the Hub need not."""
    if data.prepared_corpus:
        return _open_prepared
    is_local = data.dataset_name in (None, "sample") or data.max_documents is not None
    return _open_records if is_local and not data.packing else _open_stream


def checked_block_size(block_size: int | None, config: PreTrainedConfig) -> int:
    """`block_size`, or the model's context if it is None.

    Raises:
        ValueError: a block of fewer than 2 tokens, or of more than the context.
    """
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        raise ValueError(
            f"A block has to fit the model's context, and a `{config.model_type}` states none in"
            " `max_position_embeddings`. Choose another architecture with `--config_name`."
        )
    if block_size is not None and not 2 <= block_size <= context:
        raise ValueError(
            f"A block holds at least 2 tokens and at most the model's context of {context}; `block_size` is"
            f" {block_size}. Lower `--block_size`, or raise `max_position_embeddings` in the model's config.json."
        )
    return block_size or context


def _open_stream(
    data: DataArguments,
    run: RunArguments,
    config: PreTrainedConfig,
    tokenizer_name_or_path: str | None,
    block_size: int,
) -> Corpus:
    if run.max_steps <= 0:
        raise ValueError(
            f"A stream has no length, so the run has to be told when it ends; `max_steps` is {run.max_steps}. Set"
            " `--max_steps`, prepare the corpus first (`--prepared_corpus`), or train on records (`--packing false`)."
        )
    if run.record_audit or data.split_long:
        raise ValueError(
            f"The examples of a stream have no lasting number; `record_audit` is {run.record_audit} and `split_long`"
            f" {data.split_long}. Set `--prepared_corpus`, or hold records in memory: `--packing false` with local"
            " text or `--max_documents`."
        )
    source = source_from(data)
    tokenizer = _obtain_tokenizer(tokenizer_name_or_path, source, run, config)
    part = training_part(source)
    run.dataloader_num_workers = usable_workers(len(part.shards), run.world_size, run.dataloader_num_workers)
    stream = PackedStream(
        part,
        tokenizer,
        block_size=block_size,
        seed=run.seed if run.data_seed is None else run.data_seed,
        rank=run.process_index,
        world_size=run.world_size,
        num_workers=run.dataloader_num_workers,
        shuffle_window=data.shuffle_window,
        max_tokens=data.max_tokens,
        packing=data.packing,
        document_mask=data.document_mask,
    )
    held_out = encode_documents(tokenizer, validation_part(source).documents())
    rows = _validation_rows(held_out, tokenizer, block_size, data.max_eval_tokens)
    return Corpus(f"{source.description}, streamed", tokenizer, stream, rows, _collator(data, tokenizer))


def _open_records(
    data: DataArguments,
    run: RunArguments,
    config: PreTrainedConfig,
    tokenizer_name_or_path: str | None,
    block_size: int,
) -> Corpus:
    source = source_from(data)
    tokenizer = _obtain_tokenizer(tokenizer_name_or_path, source, run, config)
    records = IndexedTextDataset.from_source(training_part(source))
    examples = RecordExamples(records, tokenizer, block_size, split_long=data.split_long, max_tokens=data.max_tokens)
    examples.cuts.report()
    held_out = encode_documents(tokenizer, validation_part(source).documents())
    rows = _validation_rows(held_out, tokenizer, block_size, data.max_eval_tokens)
    return Corpus(f"{source.description}, records in memory", tokenizer, examples, rows, _collator(data, tokenizer))


def _open_prepared(
    data: DataArguments,
    run: RunArguments,
    config: PreTrainedConfig,
    tokenizer_name_or_path: str | None,
    block_size: int,
) -> Corpus:
    folder = Path(data.prepared_corpus)
    if data.dataset_name or data.data_files:
        source = source_from(data)
        if tokenizer_name_or_path is None and (folder / "tokenizer" / "tokenizer.json").is_file():
            tokenizer_name_or_path = str(folder / "tokenizer")
        tokenizer = _obtain_tokenizer(tokenizer_name_or_path, source, run, config)
        with rank_zero_first("prepare corpus") as first:
            if first:
                write_store(
                    source, tokenizer, folder, max_tokens=data.max_tokens
                )  # large: prepare_corpus.py, all cores
    store = TokenStore.open(folder)
    store.check_vocabulary(config.vocab_size)
    tokenizer = load_tokenizer(str(store.tokenizer_path))
    if tokenizer_name_or_path and tokenizer_hash(load_tokenizer(tokenizer_name_or_path)) != tokenizer_hash(tokenizer):
        raise ValueError(
            f"`{folder}` was prepared with another tokenizer than `{tokenizer_name_or_path}`. Leave"
            " `--tokenizer_name_or_path` out, or prepare the corpus again in another folder."
        )
    blocks = StoreBlocks(
        store,
        block_size,
        max_tokens=data.max_tokens,
        packing=data.packing,
        split_long=data.split_long,
        document_mask=data.document_mask,
    )
    if blocks.cuts is not None:
        blocks.cuts.report()
    rows = _validation_rows(store.validation_documents(), tokenizer, block_size, data.max_eval_tokens)
    return Corpus(store.description, tokenizer, blocks, rows, _collator(data, tokenizer))


def _obtain_tokenizer(
    name_or_path: str | None, source: Source, run: RunArguments, config: PreTrainedConfig
) -> PreTrainedTokenizerBase:
    """The tokenizer named, or one that rank 0 trains on the source into the run's folder."""
    if name_or_path is None and run.resume_from_checkpoint not in (None, "auto"):
        name_or_path = run.resume_from_checkpoint  # whose weights go with its ids
    if name_or_path is None:
        name_or_path = str(Path(run.output_dir, "tokenizer"))
        going_on = run.resume_from_checkpoint and Path(name_or_path, "tokenizer.json").is_file()
        with rank_zero_first("train tokenizer") as first:
            if first and not going_on:
                logger.info("No tokenizer named: training one on up to %d MB of the text", _TOKENIZER_BYTES // 10**6)
                train_sentencepiece(
                    training_part(source).documents(),
                    name_or_path,
                    vocab_size=config.vocab_size,
                    max_bytes=_TOKENIZER_BYTES,
                    model_max_length=config.max_position_embeddings,
                    overwrite=True,
                )
    tokenizer = load_tokenizer(name_or_path)
    check_tokenizer_matches(config.vocab_size, tokenizer)
    return tokenizer


def _validation_rows(
    documents: Iterable[tuple[list[int], int]], tokenizer: PreTrainedTokenizerBase, context: int, max_tokens: int
) -> ScoringRows:
    held_out = list(first_documents(documents, max_tokens))
    if not held_out:
        raise ValueError(
            "No document is held out for validation: a hash of its text picks one in ten, and this corpus is too small"
            " or repeats itself. Give more documents (`--data_files`, `--max_documents`)."
        )
    return scoring_rows(held_out, context=context, start_id=scoring_start_id(tokenizer))


def first_documents(documents: Iterable[tuple[list[int], int]], max_tokens: int) -> Iterator[tuple[list[int], int]]:
    """Whole documents `(token_ids, num_bytes)` until `max_tokens` are reached; the first one whatever its length."""
    num_tokens = 0
    for token_ids, num_bytes in documents:
        num_tokens += len(token_ids)
        if num_tokens > max(max_tokens, len(token_ids)):
            return
        yield token_ids, num_bytes


def _collator(data: DataArguments, tokenizer: PreTrainedTokenizerBase) -> Callable:
    return collate_blocks if data.packing else PadRecords.for_tokenizer(tokenizer)
