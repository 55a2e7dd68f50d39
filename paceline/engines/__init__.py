"""Engines: what makes tokens."""
