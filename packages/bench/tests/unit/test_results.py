from pathlib import Path

import pytest

from assay_bench.results import RESULT_FILE, ResultError, read_result


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "{folder} is no result of `assay bench run`: No such file or directory"),
        ('{"schema": 1}', "{file} is no result of `assay bench run`: task: Field required"),
    ],
)
def test_a_folder_without_a_result_is_an_error_that_names_it(
    tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / RESULT_FILE
    if content is not None:
        file.write_text(content)
    with pytest.raises(ResultError) as raised:
        read_result(tmp_path)
    assert str(raised.value) == message.format(folder=tmp_path, file=file)
