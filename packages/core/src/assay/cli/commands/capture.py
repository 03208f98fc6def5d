"""`assay capture`: record the reference, for candidates elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from assay.cli import generation_options as options
from assay.output.streams import print_text
from assay.sites import RecordedLevel


def capture(  # noqa: PLR0913 - one for each option
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, hub name, or micro:RECIPE.")
    ],
    *,
    run: Annotated[str, typer.Option(metavar="RUN", help="The trusted device: cpu/float32.")],
    output: Annotated[Path, typer.Option(metavar="TRACE", help="Folder of the golden.")],
    noise_for: Annotated[
        str, typer.Option(metavar="DTYPES", help="Dtypes of the candidates to come.")
    ] = "bfloat16,float16",
    level: Annotated[RecordedLevel, typer.Option(help="What is recorded.")] = "module",
    prompts: options.Prompts = None,
    prompt_length: options.PromptLength = None,
    batch_size: options.BatchSize = None,
    max_new_tokens: options.MaxNewTokens = None,
    chat: options.Chat = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    generation_config: options.GenerationConfigFile = None,
    seed: options.Seed = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Record MODEL on a trusted device as a golden for `assay check generate --golden`.

    Example: assay capture micro:llama --run cpu/float32 --output golden --noise-for bfloat16
    """
    from assay.api.inputs import input_options
    from assay.comparing.coverage import CoverageParts, judge_coverage
    from assay.comparing.wording.coverage import describe_coverage
    from assay.generate.check import capture as capture_golden
    from assay.generate.processes.golden_folder import GoldenSection
    from assay.generate.processes.requests import CaptureRequest
    from assay.models.remote_code import remote_code_of
    from assay.runs import RunFolder, open_progress

    inputs = input_options(
        prompts=prompts,
        prompt_length=prompt_length,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        chat=chat,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        generation_config=generation_config,
        seed=seed,
    )
    dtypes = _dtypes(noise_for)
    folder = RunFolder.create("capture", output)
    request = CaptureRequest(
        model=model,
        reference=run,
        noise_for=dtypes,
        inputs=inputs,
        level=level,
        folder=str(folder.path),
        remote_code=remote_code_of(trusted=trust_remote_code),
    )
    with open_progress() as progress:
        capture_golden(request, folder.path, progress)
        usage = GoldenSection.open(folder.path, dtypes[0]).usage()
        progress.note(describe_coverage(judge_coverage(CoverageParts(usage, usage))))
    print_text(folder.path)


def _dtypes(text: str) -> list[str]:
    from assay.devices.run_string import RUN_DTYPES
    from assay.errors import UsageError

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in RUN_DTYPES:
            known = ", ".join(RUN_DTYPES)
            raise UsageError(f"--noise-for {text!r}: unknown dtype {name!r}; known: {known}")
        if names.count(name) > 1:
            raise UsageError(f"--noise-for {text!r}: {name} is given twice")
    return names
