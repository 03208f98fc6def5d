"""TOML files of training libraries, and messages for wrong ones."""

import re
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_smoke.external.library import fill, read_library, require_files

EXAMPLES = sorted((Path(__file__).parents[5] / "examples").glob("*/smoke*.toml"))

WHOLE = r"""
launch = "python train.py --model {model} --output {output} --steps {steps}"
resume = ["--resume-from", "{resume_from}"]
losses.pattern = 'loss (?P<loss>\S+)'
checkpoints.folder = "{output}/step-{step}"
"""


def read(folder: Path, text: str) -> object:
    file = folder / "library.toml"
    file.write_text(text, encoding="utf-8")
    return read_library(file)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            'launch = ["{python}", "trian.py"]',
            "launch: {}/trian.py does not exist; did you mean train.py?",
        ),
        ("launch = 'bash start.sh'", "launch: {}/start.sh does not exist"),
        ("equivalent = 'python other.py'", "equivalent: {}/other.py does not exist"),
        ("model = 'here/tiny'", "there is no folder here/tiny; "),
        ("data = 'rows.jsonl'", "data: {}/rows.jsonl does not exist"),
        ("data = 'here'", ""),
        ("model = './tiny'", "model './tiny': no such folder, and not a valid hub name"),
        ("launch = ['{python}', '-c', 'import there.py']", ""),
        ("launch = 'python train.py --code={output}/new.py {output}/model.py'", ""),
    ],
)
def test_a_file_that_training_needs_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "train.py").touch()
    toml = tmp_path / "library.toml"
    kept = "\n".join(line for line in WHOLE.splitlines() if line[:8] != key[:8])
    toml.write_text(f"{key}\n{kept}", encoding="utf-8")
    if message:
        with pytest.raises(UsageError, match=re.escape(f"{toml}: {message.format(tmp_path)}")):
            require_files(read_library(toml), toml)
    else:
        require_files(read_library(toml), toml)


def test_data_and_a_model_begin_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ci").mkdir()
    (tmp_path / "models/tiny").mkdir(parents=True)
    (tmp_path / "models/tiny/config.json").touch()
    (tmp_path / "rows.jsonl").touch()
    toml = tmp_path / "ci" / "library.toml"
    kept = WHOLE.replace("python train.py", "trainer")
    toml.write_text(f"model = 'models/tiny'\ndata = 'rows.jsonl'\n{kept}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    library = read_library(toml)

    require_files(library, toml)
    assert library.data_path == tmp_path / "rows.jsonl"


def test_a_launch_line_is_split_into_words(tmp_path: Path) -> None:
    (tmp_path / "library.toml").write_text(WHOLE, encoding="utf-8")

    library = read_library(tmp_path / "library.toml")

    assert library.launch[:3] == ["python", "train.py", "--model"]
    assert library.name == "library"
    assert library.saved_steps == library.kept_steps == [3, 6, 9]
    assert library.resume_at == 6


@pytest.mark.parametrize(
    ("keys", "saved", "kept", "resume_at"),
    [
        ("steps = 6\nsave_every = 2\nkeep = 2", [2, 4, 6], [4, 6], 4),
        ("steps = 8\nsave_every = 4", [4, 8], [4, 8], 4),
        ("steps = 8\nsave_every = 2\nkeep = 3", [2, 4, 6, 8], [4, 6, 8], 6),
    ],
)
def test_it_resumes_from_the_middle_one_of_those_that_are_kept(
    tmp_path: Path, keys: str, saved: list[int], kept: list[int], resume_at: int
) -> None:
    (tmp_path / "library.toml").write_text(f"{keys}\n{WHOLE}", encoding="utf-8")

    library = read_library(tmp_path / "library.toml")

    assert (library.saved_steps, library.kept_steps, library.resume_at) == (saved, kept, resume_at)


@pytest.mark.parametrize(
    ("numbers", "number", "step"),
    [
        ("", 6, 6),
        ("checkpoints.numbers = [0, 1]", 0, 3),
        ("checkpoints.numbers = [0, 1]", 2, 9),
        ("checkpoints.numbers = [1, 1]", 1, 3),
        ("checkpoints.numbers = [48, 48]", 96, 6),
        ("checkpoints.numbers = [48, 48]", 64, 4),
        ("checkpoints.numbers = [48, 48]", 50, None),
    ],
)
def test_checkpoints_may_count_epochs_or_samples(
    tmp_path: Path, numbers: str, number: int, step: int | None
) -> None:
    (tmp_path / "library.toml").write_text(f"{WHOLE}\n{numbers}", encoding="utf-8")

    library = read_library(tmp_path / "library.toml")

    assert library.step_of(number, library.checkpoints.numbers) == step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("launch =", "lunch ="),
         "unknown key 'lunch'; did you mean launch?"),
        (("launch =", "xyz ="), "unknown key 'xyz'; known: name, launch, resume, "),
        (("resume =", "steps = '9'\nresume ="), "steps: it must be a whole number; expected: the number of optimizer steps"),
        (("launch =", "name ="), "launch: it is missing; expected: the command line that"),
        (("resume =", "learning_rates = [0.1]\nresume ="),
         "`learning_rates` has 1 numbers for 9 `steps`: each step needs one"),
        (("resume =", "learning_rates = [1, 2, 3, 4, 5, 6, 7, 8, 9]\nresume ="),
         "`learning_rates` needs a group `lr` in losses.pattern"),
        (("launch =", "launch = []\nname ="), "launch: it needs at least 1 item"),
        (('"python train.py', '3 # "'), "launch: it must be a list; expected:"),
        (("{model}", "{modle}"), "`launch` has an unknown placeholder 'modle'; did you mean model?"),
        (("{steps}", "{num-steps}"), "`launch` has an unknown placeholder 'num-steps'; did you mean steps?"),
        (("{model}", "{data}"), "`launch` has {data}, but there is no key `data`"),
        (('"{resume_from}"', '"last"'), "`resume` has no {resume_from}; a library that"),
        (("losses.pattern", "losses.patern"), "losses: unknown key 'patern'; did you mean pattern?"),
        (("(?P<loss>", "("), "losses: `pattern` has no group `loss`"),
        (("(?P<loss>", "(?P<loss"), "losses: `pattern` is not a regular expression: "),
        (("(?P<loss>\\S+)", "(?P<loss>a{99999999999})"), "losses: `pattern` is not a regular expression: "),
        (("resume =", "steps = 1000000000000\nresume ="), "steps: it must be at most 1000000"),
        (("losses.pattern", 'losses.file = "a"\nlosses.pattern'), "losses: give either `pattern` or `f"),
        (("/step-{step}", ""), "checkpoints: `folder` has no {step}"),
        (("checkpoints.folder", 'checkpoints.kind = "zip"\ncheckpoints.folder'),
         "checkpoints.kind: it must be 'hugging-face' or 'adapter'"),
        (("resume =", "steps = 8\nresume ="), "`steps` is 8, not a multiple of `save_every`, 3"),
        (("resume =", "save_every = 9\nresume ="), "9 `steps` with `save_every` 9 leave one check"),
        (("resume =", "keep = 3\nresume ="), "`keep` is 3, but only 3 checkpoints are written"),
        (("resume =", "keep = 1\nresume ="), "keep: it must be at least 2"),
        (("resume =", 'frozen = ["a"]\ncheckpoints.kind = "adapter"\nresume ='),
         "`frozen` has no effect on checkpoints.kind"),
        (("resume =", "name = my\nresume ="), "(at line 3, column 8); a text needs quotes"),
        (("resume =", "ranks = 0\nresume ="), "ranks: it must be at least 1; expected: a number of processes"),
        (("resume =", "= 3\nresume ="), "Invalid statement"),
    ],
)  # fmt: skip
def test_a_file_that_describes_no_library_is_told_by_its_key(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    text = WHOLE.replace(*change, 1)
    assert text != WHOLE
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        read(tmp_path, text)
    assert str(raised.value).startswith(str(tmp_path / "library.toml"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "keys", "split"),
    [
        ("{batch_size} {accumulation}", "", {"batch_size": 4, "accumulation": 1}),
        ("{batch_size} {accumulation}", "accumulation = 1", {"batch_size": 1, "accumulation": 2}),
        ("{batch_size} {ranks}", "ranks = 3", {"batch_size": 6, "ranks": 1}),
        ("{accumulation} {ranks}", "ranks = 2", {"accumulation": 4, "ranks": 1}),
        ("{batch_size} {accumulation} {ranks}", "ranks = 2",
         {"batch_size": 8, "accumulation": 1, "ranks": 1}),
        ("{batch_size} {ranks}", "", None),
        ("{batch_size} {accumulation}", "batch_size = 1\naccumulation = 1", None),
        ("{batch_size}", "", None),
        ("{ranks}", "ranks = 2", None),
        ("", "", None),
    ],
)  # fmt: skip
def test_the_rows_of_a_step_are_split_otherwise_where_the_launch_line_can(
    tmp_path: Path, words: str, keys: str, split: dict[str, int] | None
) -> None:
    text = f"{keys}\n{WHOLE}".replace("{steps}", f"{{steps}} {words}")
    (tmp_path / "library.toml").write_text(text, encoding="utf-8")

    other = read_library(tmp_path / "library.toml").split_otherwise()

    assert (None if other is None else other.split) == split


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml: cannot be read: No such file"):
        read_library(tmp_path / "absent.toml")


def test_placeholders_are_filled_and_other_braces_stay() -> None:
    assert fill('{"a": {steps}} {b}', {"steps": 3}) == '{"a": 3} {b}'


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_shipped_file_can_be_read(file: Path) -> None:
    assert read_library(file).name


def test_there_are_shipped_files() -> None:
    assert len(EXAMPLES) >= 3
