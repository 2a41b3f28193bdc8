"""MosaicML Streaming 0.13.0: MDS gives documents one by one; encoding and packing as in the prototype, which it lacks.

Settings: iterated in this process, since its DataLoader would send every document between processes; MDS without
compression; no shuffle.
"""

from common import Clock, Run, Work, look_text, main
from prototype import documents, encoder, pack


def mosaic(work: Work, clock: Clock) -> Run:
    import numpy as np  # noqa: F401
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clock.lap("imports")
    encode = encoder(work.tokenizer, work.options["fast"])
    clock.lap("tokenizer")
    clean_stale_shared_memory()  # of runs that were killed: it refuses to start otherwise
    dataset = StreamingDataset(local=work.data["mds"], shuffle=False, batch_size=work.batch)

    return Run(pack(map(encode, documents(dataset, work.options["rows"])), work), look_text)


if __name__ == "__main__":
    main(mosaic)
