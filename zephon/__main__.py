"""`python -m zephon`: the command line."""

from zephon.cli import main

main()
