"""Is it true for your training that nothing is lost? It is killed again and again, resumed, and compared bit by bit.

disk        a disk that counts its calls, and is the end of the process at one of them
life        one life of a training, in a process that may be killed at any instant
zygote      the parent of many lives: loads torch once, each life is a fork of it
births      starts lives, as forks or as fresh processes, and kills them
remains     what lies in a run folder after a kill
result      what a finished run left behind, and the first difference between two
bench       lives of one training in one scratch folder, judged against the run that nobody interrupted
kills       kills at random instants and at every disk call
scratch     where lives write, removed however the proof ends
proving     all of it in its order; the verdict
words       a proof as lines for a screen
"""
