"""Runs: TorchTitan configurations and data recipes to copy and change."""
