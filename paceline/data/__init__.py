"""Prompts: where they come from, in which order they are drawn, and the batches made of them."""
