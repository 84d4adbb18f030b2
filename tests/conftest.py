import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests import collected, covering
from tests.world import World

settings.register_profile("quick", derandomize=True, max_examples=15, deadline=None)
settings.register_profile("full", derandomize=False, max_examples=150, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
torch.set_num_threads(1)
# Memory nobody wrote to is NaN: a kernel that reads it is found out.
torch.utils.deterministic.fill_uninitialized_memory = True

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import quicken

    quicken()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    covering.mark_the_others_slow(items)
    collected.remember(config, items)


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[int, World]]:
    """Worlds by size, started when first asked for."""

    class Worlds(dict[int, World]):
        def __missing__(self, size: int) -> World:
            self[size] = World(size)
            return self[size]

    started = Worlds()
    yield started
    for world in started.values():
        world.close()
