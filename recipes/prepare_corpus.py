"""Write a corpus to disk as tokens, once, so that training reads it through memory maps in an exactly shuffled order.

    python recipes/prepare_corpus.py --config recipes/configs/prepare_corpus/demo.yaml

The same command goes on where a stopped one left off. `pretrain_tlm.py --prepared_corpus FOLDER` trains on the result.
"""

import logging
import os

from tinylm.data.prepare import write_store
from tinylm.training.arguments import DataArguments, PrepareArguments, parse_arguments
from tinylm.training.corpus import load_tokenizer, source_from
from tinylm.training.launch import run_recipe

logger = logging.getLogger("tinylm.prepare_corpus")


def main() -> None:
    data, prepare = parse_arguments((DataArguments, PrepareArguments))
    tokenizer = load_tokenizer(prepare.tokenizer_name_or_path)
    store = write_store(
        source_from(data),
        tokenizer,
        prepare.output_dir,
        num_proc=prepare.num_proc or os.cpu_count(),
        max_tokens=data.max_tokens,
        num_shards=prepare.num_shards,
    )
    logger.info("%s, %d parts, vocabulary %d", store.description, len(store.parts), store.vocab_size)
    for split, counts in store.counts.items():
        logger.info(
            "%s: %s documents, %s tokens, %s bytes",
            *(split, *(f"{counts[name]:,}" for name in ("documents", "tokens", "bytes"))),
        )


if __name__ == "__main__":
    run_recipe(main)
