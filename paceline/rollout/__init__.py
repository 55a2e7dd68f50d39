"""Rollouts: episodes, rewards, and the groups made of them."""
