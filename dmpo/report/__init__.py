"""Diversity measures and reports of rollouts. Pure: imports neither verl nor Ray."""
