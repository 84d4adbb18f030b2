"""Density that begins higher than it ends, so that the same bytes in all are spent earlier."""

from __future__ import annotations

from dataclasses import dataclass

STAGES = 4
SHARE = 0.1  # of the training, that all stages take together


@dataclass(frozen=True)
class FrontLoaded:
    """Over the first tenth of a training the density falls to its last one, in four stages of equal ratio.

    Args:
        density: the last one.
        factor: of it in the first stage.
        steps: of the training.
    """

    density: float
    factor: float
    steps: int

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ValueError(f"factor must be 1 or more, got {self.factor!r}")

    def __call__(self, step: int) -> float:
        stage = step // self._length
        return min(1.0, self.density * self.factor ** (1 - stage / STAGES)) if stage < STAGES else self.density

    def stages(self) -> list[tuple[float, int]]:
        """Densities and for how many steps each."""
        begins = [stage * self._length for stage in range(STAGES)]
        counts = [max(0, min(self._length, self.steps - begin)) for begin in begins]
        return [*zip(map(self, begins), counts, strict=True), (self.density, self.steps - sum(counts))]

    @property
    def _length(self) -> int:
        return max(1, round(SHARE * self.steps / STAGES))
