"""Text from a causal language model: continuations of prompts, and answers in a conversation."""

from .chat import Chat, answer
from .continuation import generate_text

__all__ = ["Chat", "answer", "generate_text"]
