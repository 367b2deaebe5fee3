"""Export the metrics of a run as CSV or TensorBoard files, outside the run folder."""
