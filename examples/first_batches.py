"""Open a recipe and look at its first batches.

python examples/first_batches.py [RECIPE]
"""

import sys

from _data import sample_recipe

import zephon

recipe = sys.argv[1] if len(sys.argv) > 1 else sample_recipe()

with zephon.Stream.open(recipe) as stream:
    for source in stream.sources:
        print(f"{source.name}: {source.catalogue.rows} rows in {source.catalogue.chunks.count} chunks")
    loader = stream.loader()  # rank 0 of 1; every rank of a job makes its own
    for _ in range(2):
        batch = next(loader)
        print({name: (array.dtype.name, array.shape) for name, array in batch.items()})
        print("  first ids     ", batch["input"][0, :12])
        print("  first labels  ", batch["labels"][0, :12])
        print("  first position", batch["positions"][0, :12])
    print(loader.stats())
