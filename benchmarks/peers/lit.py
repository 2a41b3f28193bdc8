"""LitData 0.2.76: its chunks give documents one by one; encoding and packing as in the prototype.

Its own way to tokens, `TokensLoader`, reads what was encoded beforehand, which is other work. Settings: iterated in
this process, since its DataLoader would send every document between processes; chunks of 64 MB, its own size.
"""

from common import Clock, Run, Work, look_text, main
from prototype import documents, encoder, pack


def lit(work: Work, clock: Clock) -> Run:
    import numpy as np  # noqa: F401
    from litdata import StreamingDataset

    clock.lap("imports")
    encode = encoder(work.tokenizer, work.options["fast"])
    clock.lap("tokenizer")
    dataset = StreamingDataset(work.data["litdata"], shuffle=False)

    return Run(pack(map(encode, documents(dataset, work.options["rows"])), work), look_text)


if __name__ == "__main__":
    main(lit)
