"""PostponedPieces: gradients of weights that a padded step puts off, as pieces of work that can be recorded one by one.

    graph 1: forward, gradients of rows ┃ rows' gradients leave ┃ graph 2 ┃ graph 3 ┃ ...
                                                                          └ sum 1 ──> └ sum 2 ──> ...

All gradients lie one after the other in one tensor, cut into pieces in the order of the model. A group of weights is
computed together that completes at least one more piece, whose sum over the ranks can then begin. Which groups these
are follows from the order in which the backward has put weights off: it is the same on all ranks, in every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor, nn

from freescale.kernels.runtime import PostponedGradients
from freescale.train.accounts.timer import StepTimer
from freescale.train.compute.dense_gradients import FlatSum, in_pieces
from freescale.train.compute.late_update import LateUpdate, Piece


class DensePiece(NamedTuple):
    """A piece of all gradients: its parameters, and where those of each lie in it."""

    values: Tensor
    params: tuple[nn.Parameter, ...]
    places: tuple[Tensor, ...]


class Group(NamedTuple):
    """Weights that are computed together, how many they are, and the pieces that are complete behind them."""

    num_weights: int
    pieces: tuple[DensePiece, ...]


class PostponedPieces:
    """Puts gradients off, and computes them group by group to where they belong.

    Args:
        parameters: in the order of their places.
        places: by parameter, where its gradient belongs.
        flat: in which all places lie, one behind the other.
        most_bytes: what is kept for gradients that are put off may take.
        piece_bytes: about how large a piece is.
        unit_of: parameters with the same answer are needed at once, and stay together.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        places: Sequence[Tensor],
        flat: Tensor,
        *,
        most_bytes: int,
        piece_bytes: int,
        unit_of: Callable[[nn.Parameter], object] | None = None,
    ) -> None:
        self.postponed = PostponedGradients(most_bytes=most_bytes)
        self._places: dict[Tensor, Tensor] = dict(zip(parameters, places, strict=True))
        self.pieces = _cut(parameters, places, flat, in_pieces(parameters, piece_bytes, unit_of))
        self._each: Iterator[Tensor] = iter(())

    def taking(self) -> AbstractContextManager[None]:
        """Around forward and backward; what an earlier one has left, that was given up, is forgotten."""
        self.forget()
        return self.postponed.taking()

    def groups(self, direct: Collection[int]) -> list[Group]:
        """What the backward has put off; the first group has nothing to compute.

        Args:
            direct: ids of parameters whose places hold a gradient of the backward already.
        """
        order = list(reversed(self.postponed.waiting))
        left = {id(weight) for weight in order}
        for weight in order:
            # What other uses of a weight have left is added to.
            weight.grad = self._places[weight] if id(weight) in direct else None
        complete = iter(self.pieces)
        following = next(complete, None)

        def completed() -> Iterator[DensePiece]:
            nonlocal following
            while following is not None and left.isdisjoint(map(id, following.params)):
                yield following
                following = next(complete, None)

        found, num = [Group(0, tuple(completed()))], 0
        for weight in order:
            left.discard(id(weight))
            num += 1
            if pieces := tuple(completed()):
                found.append(Group(num, pieces))
                num = 0
        self._each = self.postponed.each(self._places)
        return found

    def compute(self, num_weights: int) -> None:
        """Compute the next ones."""
        for _ in range(num_weights):
            next(self._each).grad = None

    def forget(self) -> None:
        """Compute nothing of what was put off."""
        self._each = iter(())
        self.postponed.forget()


class PieceSums:
    """Adds pieces up over the ranks, while other things are done.

    Args:
        total: adds up.
        late: updates weights when the next forward reaches them; None: all sums are waited for.
        timer: of the step.
    """

    def __init__(self, total: FlatSum, *, late: LateUpdate | None, timer: StepTimer) -> None:
        self._total, self._late, self._timer = total, late, timer
        self._under_way: list[Piece] = []

    def send(self, piece: DensePiece) -> None:
        """It is complete."""
        arrival = self._timer.handed_over()
        wait = self._total.start(piece.values)
        self._under_way.append(Piece(piece.params, piece.values, wait, arrival, piece.places))

    def leave(self, *, lr: Tensor) -> bool:
        """Leave what is under way to the next forward, where that is possible; gradients are in their `.grad`."""
        under_way, self._under_way = self._under_way, []
        if self._late is None:
            return False
        self._total.forget()
        for piece in under_way:
            assert piece.places is not None
            # What no loss depends on is not updated, as at the end of a step.
            own = [
                (param, place) for param, place in zip(piece.params, piece.places) if param.grad is not None
            ]
            if not own:
                piece.wait()  # nobody else will, and the next step writes to the same place
                continue
            params, places = zip(*own)
            used = piece._replace(params=params, places=places)
            # Replays are cut by whole pieces, whatever of them is used.
            self._late.leave(used, lr=lr, layer=self._late.layer_of(piece.params))
        return True


def _cut(
    parameters: Sequence[nn.Parameter],
    places: Sequence[Tensor],
    flat: Tensor,
    members: Sequence[Sequence[nn.Parameter]],
) -> list[DensePiece]:
    """Pieces of `flat` from end to end."""
    place_of = dict(zip(map(id, parameters), places, strict=True))
    starts = [int(place_of[id(own[0])].storage_offset() - flat.storage_offset()) for own in members]
    return [
        DensePiece(flat[start:end], tuple(own), tuple(place_of[id(param)] for param in own))
        for start, end, own in zip(starts, [*starts[1:], flat.numel()], members)
    ]
