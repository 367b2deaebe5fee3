"""What the user asked for: `key=value` words, config files, the keys every recipe has, and their resolution."""
