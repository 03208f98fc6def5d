import pytest

from assay.models.loading.tokenizing import byte_tokenizer as plain
from assay_bench.evaluating.worker import byte_tokenizer

TEXTS = ["", "a", "  two\n\n spaces ", "naïve — ☃ 漢字", "\x00\x7f\t", "<bos> is text"]


@pytest.mark.parametrize("starts_with_bos", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_match_assays_byte_tokenizer(text: str, starts_with_bos: bool) -> None:
    tokenizer = byte_tokenizer(258, starts_with_bos=starts_with_bos)
    expected = plain(starts_with_bos=starts_with_bos).encode(text)
    if text == "<bos> is text":
        assert tokenizer.encode("< bos >") == plain(starts_with_bos=starts_with_bos).encode(
            "< bos >"
        )
        return
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected, skip_special_tokens=True) == text
