"""`[run] memory` bounds queues and caches, and never changes data."""

from pathlib import Path
from typing import Any

import pytest
from small import write_recipe

from zephon import Recipe, RecipeError, Stream
from zephon.digest import lane_digest
from zephon.run.budget import MEMORY, Budget


@pytest.mark.parametrize("memory", [64 * 1024**2, MEMORY, 5 * 1024**3 + 7])
def test_shares_stay_within_the_whole(memory: int) -> None:
    assert memory * 0.99 < sum(Budget.of(memory)) <= memory
    assert min(Budget.of(memory)) > 0


@pytest.mark.parametrize(("text", "size"), [("512MiB", 512 << 20), ("3 GiB", 3 << 30), ("64MiB", 64 << 20)])
def test_sizes_are_read(tmp_path: Path, text: str, size: int) -> None:
    path = write_recipe(tmp_path)
    path.write_text(path.read_text() + f'memory = "{text}"\n')
    assert Recipe.load(path).run.memory == size


@pytest.mark.parametrize("given", ['"63MiB"', '"2GB"', '"2"', '"-1GiB"', '"1.5GiB"', "2147483648", '"9999999GiB"'])
def test_other_sizes_are_refused(tmp_path: Path, given: str) -> None:
    path = write_recipe(tmp_path)
    path.write_text(path.read_text() + f"memory = {given}\n")
    with pytest.raises(RecipeError, match=r"\[run\] memory must be"):
        Recipe.load(path)


class Counting:
    """A runner that works at once and counts what nobody has asked for yet."""

    tasks = 8

    def __init__(self) -> None:
        self.open = self.most = 0

    def submit(self, work: Any, *args: Any) -> Any:
        self.open += 1
        self.most = max(self.most, self.open)
        return Done(self, work(*args))

    def close(self) -> None:
        pass


class Done:
    def __init__(self, runner: Counting, value: Any) -> None:
        self._runner, self._value = runner, value

    def result(self) -> Any:
        self._runner.open -= 1
        return self._value


@pytest.mark.parametrize(("making", "most"), [(0, 1), (3, 3), (100, 9)])
def test_only_so_many_micro_batches_are_made_ahead(tmp_path: Path, making: int, most: int) -> None:
    recipe = write_recipe(tmp_path)
    with Stream.open(recipe) as plain, Stream.open(recipe) as stream:
        want, loader = plain.loader(local_batch_size=1), stream.loader(local_batch_size=1)
        first = next(loader)
        next(want)
        stream.builder = runner = Counting()
        stream.budget = stream.budget._replace(making=making * sum(array.nbytes for array in first.values()))
        for _ in range(30):
            records = [stream.worker.records(next(one)) for one in (want, loader)]
            assert lane_digest(records[0]) == lane_digest(records[1])
        assert runner.most == most


def test_loaders_of_a_stream_share_its_budget(tmp_path: Path) -> None:
    with Stream.open(write_recipe(tmp_path)) as stream:
        loaders = [stream.loader(rank, 4) for rank in range(4)]
        assert stream.making_bytes() * len(loaders) <= stream.budget.making
        for feeds in (1, 8, 10**6):
            assert stream.ahead_bytes(feeds) * len(loaders) <= stream.budget.ahead
