"""What is learned when no data is given: questions and answers about whet and Python."""
