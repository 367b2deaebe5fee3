"""What is wrong with labelled texts, row by row, and how to get rid of it; streamed, no torch."""
