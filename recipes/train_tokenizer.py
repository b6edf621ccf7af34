"""Train a SentencePiece tokenizer on the training part of a corpus.

python recipes/train_tokenizer.py --config recipes/configs/train_tokenizer/demo.yaml
"""

from tinylm.data.splits import training_part
from tinylm.tokenizers.sentencepiece_bpe import train_sentencepiece
from tinylm.training.arguments import DataArguments, TokenizerArguments, parse_arguments
from tinylm.training.corpus import source_from
from tinylm.training.launch import run_recipe


def main() -> None:
    data_args, tokenizer_args = parse_arguments((DataArguments, TokenizerArguments))
    source = training_part(source_from(data_args))
    train_sentencepiece(
        source.documents(),
        tokenizer_args.output_dir,
        vocab_size=tokenizer_args.vocab_size,
        model_type=tokenizer_args.model_type,
        max_bytes=tokenizer_args.max_bytes,
        overwrite=tokenizer_args.overwrite_tokenizer,
    )


if __name__ == "__main__":
    run_recipe(main)
