"""Tasks to train and evaluate on: data preparation and reward functions. Pure: imports neither verl nor Ray."""
