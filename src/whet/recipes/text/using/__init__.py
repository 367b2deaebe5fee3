"""A trained classifier in use: questions, answers, files for other programs."""
