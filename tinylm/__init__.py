"""tinylm: pretrain and fine-tune small language models with Accelerate and the Hugging Face Trainer."""

__version__ = "0.1.0"
