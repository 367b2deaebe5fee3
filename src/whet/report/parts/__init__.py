"""The parts of a view of a run, one file each; `whet.report.view` puts them together.

work_clock  the seconds a run was at work, without the nights between its sittings
tracks      curves that share their steps, seconds and samples
spells      stretches of heat, low power and memory pressure
moments     what happened, on a time line
phases      where the time went
evidence    what was measured for the plan, candidate by candidate
foresight   what was foretold, beside what came
findings    the confusion matrix and the samples of an evaluation
origin      the machine, the versions, and how to do it again
advice      what to try next, with the measurement that speaks for it
"""
