"""`python -m zephon`: the command line."""

from zephon.command.cli import main

main()
