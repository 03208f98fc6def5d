"""Displays tokens in a failing example: positions, texts, ids and labels."""

from collections.abc import Sequence

from assay_smoke.data.protocols import IGNORED, Tokenizer

_AROUND = 3


def show_tokens(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    labels: Sequence[int] | None,
    at: int,
) -> list[str]:
    """Show the token at `at` and its neighbors, one per line, with a mark at the token itself."""
    lines = []
    for position in range(max(0, at - _AROUND), min(len(ids), at + _AROUND + 1)):
        mark = ">" if position == at else " "
        line = f"{mark} {position:4d}  {show_token(tokenizer, ids[position])}"
        if labels is not None:
            label = labels[position]
            shown = "no label" if label == IGNORED else f"label {show_token(tokenizer, label)}"
            line = f"{line:36}  {shown}"
        lines.append(line)
    return lines


def show_token(tokenizer: Tokenizer, id_: int) -> str:
    """Show a token's text and id: '<|eos|>' (257)."""
    if not 0 <= id_ < len(tokenizer):
        return f"no token ({id_})"
    return f"{tokenizer.decode([id_], skip_special_tokens=False)!r} ({id_})"


def show_row(tokenizer: Tokenizer, ids: Sequence[int], most: int = 16) -> str:
    """Show the tokens of a row in one line."""
    shown = " ".join(show_token(tokenizer, id_) for id_ in ids[:most])
    rest = len(ids) - most
    return f"{shown} and {rest} more" if rest > 0 else shown
