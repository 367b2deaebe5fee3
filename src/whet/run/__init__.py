"""The run folder: all files of a run, written so that a kill or a power cut cannot damage them.

durable         durable writes for all packages; disk: the system calls behind them
strict_json     JSON that every program can read, NaN and infinity included
folder          the files of a run; creating, opening and finding runs
lock            the lock that admits one process per run folder
event           the kinds of events and their fields
events          writing and reading events.jsonl
event_index     the index of a long log; event_block: statistics of 256 events
follow          the history of a running run
curve           curves of a few hundred points from a million steps; downsample: the numpy code behind it
proof, bench_result, search_result    the results that `whet prove`, `bench` and `search` write
"""
