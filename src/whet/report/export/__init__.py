"""The numbers of a run as CSV, Parquet or TensorBoard files."""
