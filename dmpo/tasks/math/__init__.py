"""Competition mathematics: data preparation (`python -m dmpo.tasks.math.prepare`) and reward function."""
