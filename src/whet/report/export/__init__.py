"""The numbers of a run as CSV, Parquet or TensorBoard files, written outside of the run folder."""
