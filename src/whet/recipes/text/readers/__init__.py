"""Read rows from text files, tables and datasets, with the errors of each row. No torch."""
