"""Faults that users of other loaders reported in public, each a test of ours."""
