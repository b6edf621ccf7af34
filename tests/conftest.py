"""No test talks to the Hub or to a tracker, and none uses a GPU: set before anything is imported."""

import os

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")
