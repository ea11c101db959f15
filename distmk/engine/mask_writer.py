"""Asks the constraints of requests for masks, and writes them for the launch."""

from __future__ import annotations

from distmk.abi import FinishReason
from distmk.backends.launch_block import Token
from distmk.backends.token_masks import TokenMasks
from distmk.engine.request import Request
from distmk.errors import one_line


class MaskWriter:
    """Keeps the masks of a launch's constrained requests one token ahead. An error of a constraint is kept for `take_error`."""

    def __init__(self, masks: TokenMasks) -> None:
        self._masks = masks
        self._errors: dict[int, str] = {}  # by launch_id

    def begin(self, request: Request) -> None:
        """Write the first mask of a request that has been sent to the launch."""
        if request.constraint is not None:
            self._write(request)

    def advance(self, request: Request, token: Token) -> None:
        """Tell a request's constraint of its new token, which is not part of the request yet, and write the next mask."""
        if request.constraint is None or token.token < 0 or token.finish != FinishReason.NONE:
            return
        if request.is_over or token.token in request.params.stop_token_ids:
            return
        self._write(request, token.token)

    def take_error(self, request: Request) -> str | None:
        """What went wrong with a request's constraint, once; None: nothing."""
        return self._errors.pop(request.launch_id, None) if self._errors else None

    def _write(self, request: Request, accepted: int | None = None) -> None:
        constraint, entry = request.constraint, request.entry
        assert constraint is not None and entry is not None
        position = len(request.prompt_ids) + len(request.token_ids)
        try:
            if accepted is not None:
                constraint.accept(accepted)
                position += 1
            constraint.fill_mask(self._masks.words(entry))
        except Exception as error:  # of whatever kind: it is the constraint's
            self._errors[request.launch_id] = f"the constraint failed: {type(error).__name__}: {one_line(error)}"
        else:
            self._masks.publish(entry, position)
