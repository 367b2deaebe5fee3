"""Settings chosen by measurement: real optimizer steps are timed, and what finishes the run sooner is kept."""
