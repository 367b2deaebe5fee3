"""What is trained, one file each; a work is made anew in every process, from the same seed."""
