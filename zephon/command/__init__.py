"""The `zephon` command: looks, rehearses, proves. Nothing of a training run needs it."""
