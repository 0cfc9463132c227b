"""What preparation did, carried beside the weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Padding:
    """Zeros appended to the hidden size (K) and to the intermediate size (I), so that a recipe's groups divide them."""

    K: int = 0
    I: int = 0


@dataclass(frozen=True)
class PrepReport:
    """What preparation did to one layer's experts. `print(report)` gives one line."""

    path: str
    """Name of the row of prep.decide.PATHS."""
    source: str
    """Kind of the source, one of prep.source.SOURCES."""
    recipe: str
    scale_format: str
    bytes_in: int
    """Of values and scales as the source holds them."""
    bytes_out: int
    """Of prepared values and scales."""
    relative_error: float
    """Added by preparation: ||prepared - source|| / ||source|| over all experts, both dequantised. 0 if nothing was
    rounded; NaN if the source holds NaN."""
    inexact_tiles: int = 0
    """128 x 128 tiles that one scale cannot hold without loss (path mxfp4_to_fp8)."""
    tiles: int = 0
    padding: Padding = Padding()

    def __str__(self) -> str:
        target = self.recipe if self.scale_format == "none" else f"{self.recipe} {self.scale_format}"
        parts = [
            f"{self.source} -> {target}",
            f"path {self.path}",
            f"{_size(self.bytes_in)} -> {_size(self.bytes_out)}",
            f"error added {self.relative_error:.3g}",
        ]
        if self.tiles:
            parts.append(f"inexact tiles {self.inexact_tiles} of {self.tiles}")
        if self.padding != Padding():
            parts.append(f"padded K by {self.padding.K}, I by {self.padding.I}")
        return ", ".join(parts)


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
