"""Errors of single tokens, for the heat map of a report."""

import re
from collections.abc import Iterable, Sequence

from assay.comparing.token_rows import MAX_TOKEN_ROWS, TokenPort, TokenRows
from assay.offline.judging.causes import DumpEvidence
from assay.offline.judging.judged_ports import JudgedPort
from assay.verdicts import Measurement

_IN_BLOCK = re.compile(r"\.\d+(\.|$)")


def list_tokens(
    evidence: DumpEvidence, judged: Sequence[JudgedPort]
) -> tuple[Iterable[Measurement], list[str]]:
    """Return a row for every token at every module output, and a note on omitted rows.

    Large dumps keep outer modules, and some of the tokens.
    """
    outputs = [
        one for one in judged if one.port.direction == "output" and one.port.level == "modules"
    ]
    kept = _keep_outer(outputs)
    steps = {
        (prompt, position): pair.expected.step
        for pair in evidence.dumps.pairing.alignment.pairs
        if pair.expected.rows is not None
        for prompt, positions in zip(
            pair.expected.rows.prompts, pair.expected.rows.positions, strict=True
        )
        for position in positions
    }
    ports = [_token_port(evidence, one) for one in kept]
    rows = TokenRows(ports, lambda *token: steps.get(token, 0), MAX_TOKEN_ROWS)
    is_bounded = len(kept) < len(outputs) or rows.is_bounded
    note = (
        "errors of single tokens are kept for the outer modules and for the"
        f" {len(rows.kept):,} tokens with the largest ones; all were judged"
    )
    return rows, [note] if rows.kept and is_bounded else []


def _keep_outer(outputs: Sequence[JudgedPort]) -> list[JudgedPort]:
    """Return the outputs of the outer modules: all blocks, and inner modules if they fit."""
    kept: list[JudgedPort] = []
    has_blocks = False
    for depth in sorted({_depth(one) for one in outputs}):
        level = [one for one in outputs if _depth(one) == depth]
        num_rows = sum(len(part.prompt) for one in (*kept, *level) for part in one.result.sums.rows)
        if has_blocks and num_rows > MAX_TOKEN_ROWS:
            break
        kept += level
        has_blocks = has_blocks or any(_IN_BLOCK.search(one.port.module) for one in level)
    return sorted(kept, key=lambda one: one.order)


def _depth(judged: JudgedPort) -> int:
    return judged.port.module.count(".")


def _token_port(evidence: DumpEvidence, judged: JudgedPort) -> TokenPort:
    port, noise = judged.port, evidence.dumps.noise
    of_port = noise.of(port) if noise is not None else []
    measured = [one for one in of_port if one.step == judged.result.step]
    place = {"level": "modules", "module": port.module, "port": port.name, "phase": port.phase,
             "order": judged.order, "rank": judged.result.rank}  # fmt: skip
    if measured:
        floor = evidence.dumps.pairing.unit_roundoff / 2
        return TokenPort(judged.result, measured[0].sums.rows, floor, place)
    return TokenPort(judged.result, None, judged.expected_noise, place)
