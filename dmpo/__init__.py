"""Distribution-Matching Policy Optimization (arXiv 2605.19461) for verl."""

__version__ = "0.1.0"
