"""Export the numbers of a run as CSV or TensorBoard files, outside the run folder."""
