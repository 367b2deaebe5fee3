"""Training loops side by side: works are what is trained, ways are who trains it, each in a process of its own."""
