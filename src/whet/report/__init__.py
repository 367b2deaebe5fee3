"""Reads run folders and says what a run did; never writes in them.

summary   a run as one frozen value, also as JSON
curve     a curve drawn with characters
text      the report as plain text
export    its numbers as CSV, Parquet or TensorBoard files, outside of the run
forward   its numbers to W&B, Trackio or MLflow, while it trains or later
"""
