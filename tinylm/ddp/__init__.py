"""Data parallelism, seen from inside: all-reduces by hand, overlap by hooks, and the proof that they are right."""
