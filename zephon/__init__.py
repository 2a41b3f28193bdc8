"""Zephon: data loading for LLM and VLM pre-training, the same global batches on any number of ranks."""

from zephon.errors import DataError, RecipeError, RestoreError, TopologyError, UsageError, ZephonError
from zephon.loader import Loader
from zephon.recipe import BatchSpec, Recipe
from zephon.stream import Stream

__all__ = [
    "BatchSpec",
    "DataError",
    "Loader",
    "Recipe",
    "RecipeError",
    "RestoreError",
    "Stream",
    "TopologyError",
    "UsageError",
    "ZephonError",
]
