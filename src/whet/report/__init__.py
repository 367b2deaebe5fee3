"""Reads run folders and says what a run did; never writes in them.

summary   a run as one frozen value, also as JSON
curve     a curve drawn with characters
text      the report as plain text
view      all there is to see of a run as one value; `parts/` is what it is made of
comparing runs side by side
markdown  a page for an issue or a README
page      the front end: the HTML report, and what the live page draws
watch     the server of the live page
export    its numbers as CSV, Parquet or TensorBoard files, outside of the run
forward   its numbers to W&B, Trackio or MLflow, while it trains or later
"""
