"""One process that feeds one target for some seconds: `… -m benchmarks.fuzz.worker TARGET ENGINE SECONDS SEED DIR`.

Before every execution the input is written to `DIR/current`, a file in memory, so that what kills the process or hangs
is known to whoever started it (`__main__.py`). Findings are appended to `DIR/found`, outcomes at the end to `DIR/told`.
"""

import importlib
import mmap
import random
import re
import resource
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.fuzz import law

MOST_BYTES = 4096
"""Of an input."""

HEAD = struct.Struct("<QdI")  # executions, when the present one started (0: none runs), bytes of its input
ENGINES = ("hypothesis", "atheris", "random")
TARGETS = {
    "jsonl": "rows", "compressed": "rows", "tar": "archives", "parquet": "tables", "image_header": "pictures",
    "image_pixels": "pictures", "media_path": "pictures", "lane_state": "states", "header": "states",
    "recipe": "states", "skips": "states", "index_cache": "caches",
}  # fmt: skip
"""Every target, and its module; a function of the target's name."""


def find(name: str) -> law.Target:
    """The target of a name."""
    return getattr(importlib.import_module(f"benchmarks.fuzz.{TARGETS[name]}"), name)


class Session:
    """What is kept while one target is fed."""

    def __init__(self, name: str, target: law.Target, seconds: float, folder: Path) -> None:
        self.name, self.target, self.folder = name, target, folder
        self.end, self.count, self.outcomes = time.monotonic() + seconds, 0, dict[str, int]()
        self._seen, self._work = set[tuple[str, str]](), folder / "work"
        self._work.mkdir()
        with (folder / "current").open("r+b") as file:
            self._current = mmap.mmap(file.fileno(), HEAD.size + MOST_BYTES)
        law.broken(name, target, b"", self._work, 0)  # imports and seeds count as the start
        self._base = law.peak()

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def run(self, data: bytes) -> bool:
        """One execution; whether its outcome is a new one."""
        data = data[:MOST_BYTES]
        self.count += 1
        self._current[HEAD.size : HEAD.size + len(data)] = data
        HEAD.pack_into(self._current, 0, self.count, time.monotonic(), len(data))
        outcome, finding = law.broken(self.name, self.target, data, self._work, self._base)
        if finding and (key := (finding.kind, finding.where)) not in self._seen:
            self._seen.add(key)
            with (self.folder / "found").open("a") as file:  # first as it is: shrinking may kill the process
                file.write(finding.line())
                file.flush()
                file.write(law.shrunk(finding, self.target, self._work, self._base).line())
        HEAD.pack_into(self._current, 0, self.count, 0.0, 0)
        outcome = re.sub(r"\d+", "n", outcome)
        is_new = outcome not in self.outcomes
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if is_new or not self.count % 1000:
            (self.folder / "told").write_text("\n".join(f"{n}\t{one}" for one, n in self.outcomes.items()))
        if finding and finding.kind == "memory":
            sys.exit(0)  # the peak of a process never falls: what comes next is for a fresh one
        return is_new


def by_random(session: Session, seed: int) -> None:
    """Fresh bytes, and changed ones of those that brought something new."""
    draw, kept = random.Random(seed), [b""]
    while not session.over:
        data = bytearray(draw.choice(kept) if draw.random() < 0.7 else draw.randbytes(draw.choice((8, 40, 300, 2000))))
        for _ in range(draw.choice((0, 1, 1, 2, 5))):
            at, size = draw.randrange(len(data) + 1), draw.choice((1, 1, 2, 8))
            data[at : at + draw.choice((0, size))] = draw.randbytes(size)
        if session.run(bytes(data)):
            kept.append(bytes(data))


def by_hypothesis(session: Session, seed: int) -> None:
    """Bytes of Hypothesis, in rounds; findings are shrunk here like those of the other engines."""
    import hypothesis
    from hypothesis import strategies as st

    sizes = st.binary(max_size=64) | st.binary(min_size=16, max_size=512) | st.binary(min_size=256, max_size=2048)
    quiet = hypothesis.settings(
        max_examples=500, database=None, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    while not session.over:
        seed += 1

        @hypothesis.seed(seed)
        @quiet
        @hypothesis.given(sizes)
        def one_round(data: bytes) -> None:
            if not session.over:
                session.run(data)

        one_round()


def by_atheris(session: Session, seed: int) -> None:
    """libFuzzer, guided by which lines of ours are reached. It ends the process itself."""
    import atheris

    def once(data: bytes) -> None:
        session.run(data)

    corpus, draw = session.folder / "corpus", random.Random(seed)
    corpus.mkdir()
    for number in range(32):
        (corpus / str(number)).write_bytes(draw.randbytes(draw.choice((8, 40, 300, 2000))))
    options = {
        "max_total_time": max(1, int(session.end - time.monotonic())), "seed": 1 + seed % (2**31 - 2),
        "max_len": MOST_BYTES, "rss_limit_mb": 0, "timeout": 100000, "verbosity": 0, "len_control": 0,
        "artifact_prefix": f"{session.folder}/",
    }  # fmt: skip
    atheris.Setup([sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)], once)
    atheris.Fuzz()


_BY: dict[str, Callable[[Session, int], None]] = {
    "random": by_random,
    "hypothesis": by_hypothesis,
    "atheris": by_atheris,
}


def main() -> None:
    name, engine, seconds, seed, folder = sys.argv[1:]
    sys.setrecursionlimit(1000)
    if engine == "atheris":
        import atheris

        ours = ["zephon", "modalities"]
        with atheris.instrument_imports(include=ours):  # pyright: ignore[reportAttributeAccessIssue]
            target = find(name)
    else:
        target = find(name)
    here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = here + 6 * 1024**3  # a bomb ends the process, not the machine
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _BY[engine](Session(name, target, float(seconds), Path(folder)), int(seed))


if __name__ == "__main__":
    main()
