"""What a sample costs, in milliseconds, from its length; saved as JSON for each GPU and model."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from freescale.balance.arrays import FloatArray
from freescale.balance.work import WHOLE
from freescale.errors import DataError, PlanError, nearest

FORMAT = "freescale-cost-model"
VERSION = 1
COEFFICIENTS = ("fixed_ms", "per_sample_ms", "per_token_ms", "per_square_ms")
# Length at which attention costs as much as everything that is linear in the tokens, where nothing was
# measured.
SQUARE_LENGTH = 2048


@dataclass(frozen=True)
class CostModel:
    """Time of a batch: fixed + per_sample * n + per_token * sum(L) + per_square * sum(L^2), in milliseconds.

    Args:
        fixed_ms: overhead of a step; the same for every assignment, so it only dilutes the imbalance.
        per_sample_ms: cost of a sample whatever its length.
        per_token_ms: linear work: projections, normalisation, embedding rows.
        per_square_ms: attention.
        hardware: name of the device it was measured on.
        model: name of the model it was measured with.
        error: median relative error on steps it was not fitted to; None where nothing was measured.
    """

    fixed_ms: float
    per_sample_ms: float
    per_token_ms: float
    per_square_ms: float
    hardware: str = ""
    model: str = ""
    error: float | None = None

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"{name} of a cost model must be finite and not negative.", got=value)
        if self.per_sample_ms == self.per_token_ms == self.per_square_ms == 0:
            raise PlanError("A cost model in which samples cost nothing cannot balance them.")

    @classmethod
    def default(cls) -> CostModel:
        """A model to begin with: one microsecond a token, and attention as much again at 2,048 tokens."""
        return cls(
            fixed_ms=0.0,
            per_sample_ms=0.0,
            per_token_ms=1e-3,
            per_square_ms=1e-3 / SQUARE_LENGTH,
        )

    def cost(self, lengths: npt.NDArray[np.integer] | npt.NDArray[np.floating]) -> FloatArray:
        """[n] milliseconds of each sample, without the fixed part of a step."""
        return self.cost_of(WHOLE.tokens(lengths), WHOLE.squares(lengths))

    def cost_of(self, tokens: FloatArray, squares: FloatArray) -> FloatArray:
        """[n] milliseconds of samples with so many tokens and so much attention (`SampleWork`)."""
        return self.per_sample_ms + self.per_token_ms * tokens + self.per_square_ms * squares

    def batches_ms(self, table: FloatArray) -> FloatArray:
        """[n] milliseconds of many batches: rows of samples, tokens and squares; further columns are passed over."""
        linear = self.fixed_ms + self.per_sample_ms * table[:, 0] + self.per_token_ms * table[:, 1]
        return np.asarray(linear + self.per_square_ms * table[:, 2])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as JSON; a reader never sees half a file."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        part.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        part.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read a saved model.

        Raises:
            DataError: the file is missing, not JSON, of another kind or version, or has wrong or unknown
                fields.
        """
        document = _read(Path(path))
        names = [field.name for field in fields(cls)]
        for key in document:
            if key not in names:
                raise DataError(
                    f"Unknown field {key!r} in the cost model {path}.", allowed=nearest(key, names) or names
                )
        missing = [name for name in COEFFICIENTS if name not in document]
        if missing:
            raise DataError(
                f"The cost model {path} lacks {', '.join(missing)}.", next_step="measure it again"
            )
        for name in (*COEFFICIENTS, "error"):
            _check_number(document.get(name), name=name, path=path, optional=name == "error")
        for name in ("hardware", "model"):
            if not isinstance(document.get(name, ""), str):
                raise DataError(f"{name} in the cost model {path} must be text.", got=document[name])
        try:
            return cls(**document)
        except PlanError as error:
            raise DataError(f"The cost model {path} is not usable: {error.what}", got=error.got) from error


def _read(path: Path) -> dict[str, Any]:
    """The fields of a model file, without the two that mark it as one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"The cost model {path} cannot be read.", got=error.strerror) from error
    except ValueError as error:
        raise DataError(f"The cost model {path} is not valid JSON.", got=str(error)) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DataError(f"{path} is not a cost model.", allowed=f'a JSON object with "format": "{FORMAT}"')
    if document.get("version") != VERSION:
        raise DataError(
            f"The cost model {path} has a version this release cannot read.",
            got=document.get("version"),
            allowed=VERSION,
        )
    return {key: value for key, value in document.items() if key not in ("format", "version")}


def _check_number(value: object, *, name: str, path: str | os.PathLike[str], optional: bool) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{name} in the cost model {path} must be a number.", got=value)
    if not (math.isfinite(value) and value >= 0):
        raise DataError(f"{name} in the cost model {path} must be finite and not negative.", got=value)
