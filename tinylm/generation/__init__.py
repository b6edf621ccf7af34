"""Text from a causal language model: continuations of prompts, and answers in a conversation."""

from .chat import COMMANDS, Chat, answer, check_question, converse
from .continuation import fitting_length, generate_text

__all__ = ["COMMANDS", "Chat", "answer", "check_question", "converse", "fitting_length", "generate_text"]
