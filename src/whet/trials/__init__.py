"""Hyperparameter search: Optuna proposes, every trial is a run folder trained in a process of its own.

space     which settings are tried: `lr=1e-5..1e-3:log`, `arch.layers=[1,2,4]`, `global_batch_size=32..512:step=32`
question  what is searched, as it is kept beside the trials
sampling  Optuna's samplers and pruners by their names
storage   where trials are kept: a journal file, PostgreSQL, SQLite
owner     which process works on a trial, and does it still live?
ledger    which trials count, which go on elsewhere, which are given up
child     the process in which a trial is trained
life      that process as its worker sees it
worker    takes trials one after the other until there are enough
side_by_side  how many trials run at once, and where
seeds     the best few once more with other seeds, before a winner is named
outcome   what was found, as a record
"""
