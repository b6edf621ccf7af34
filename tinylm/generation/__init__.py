"""Text from a causal language model: continuations of prompts, and answers in a conversation."""

from .chat import COMMANDS, Chat, answer, converse
from .continuation import fitting_length, generate_text

__all__ = ["COMMANDS", "Chat", "answer", "converse", "fitting_length", "generate_text"]
