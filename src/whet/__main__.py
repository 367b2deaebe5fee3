"""python -m whet: the same as whet."""

from whet.cli.main import main

main()
