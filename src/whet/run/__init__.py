"""The run folder: everything a run leaves on disk, written so that a kill or a power cut cannot spoil it.

durable      every call that makes bytes survive (also for other rooms)
strict_json  JSON that every program can read, NaN and infinity included
folder       what lies in a run folder; creating and opening one
lock         one process per run folder
event        what one line of events.jsonl means
events       writing and reading events.jsonl
tally        what is known of 256 events without reading them again
index        finding one's way in a long events.jsonl
spare_index  what a reader keeps of a long run that has no index
columns      the numbers of a run, field by field
buckets      which events become one point of a curve
thin         curves of a few hundred points from a million steps
live         the history of a run that may still grow, extended by what is new
follow       the events of a live run as they come
runs         all runs of a folder, and which of them hold nothing
"""
