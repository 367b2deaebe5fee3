"""The numbers of a run for other programs: tables and event files, written beside the run, never into it.

numbers      the numbers of one event, by name
tables       which tables a run has, and their rows
csv_files, parquet_files, tensorboard_files   the bytes of each format
exporting    a folder of them that appears complete, or not at all
"""
