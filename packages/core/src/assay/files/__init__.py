"""Read files that others may have written or changed, and write files atomically.

Readers limit size and nesting, refuse FIFOs and devices, and raise only `UnreadableFileError`.
This package imports neither torch nor transformers.
"""

from assay.files.reading import (
    UnreadableFileError,
    describe_invalid,
    describe_problem,
    open_file,
    parse_json,
    parse_record,
    read_bytes,
    read_json,
    read_json_lines,
    read_json_object,
    read_lines,
    read_pipe,
    read_record,
    read_record_lines,
    read_text,
    read_toml,
    read_toml_record,
    refuse_link,
    require_numbers,
    validate_record,
)
from assay.files.writing import (
    DIGEST,
    DiskError,
    Url,
    check_seal,
    content_digest,
    create_temporary,
    file_digest,
    parse_location,
    read_sealed,
    read_sealed_json,
    seal,
    write_sealed,
    write_whole,
)

__all__ = [
    "DIGEST", "DiskError", "UnreadableFileError", "Url", "check_seal", "content_digest",
    "create_temporary", "describe_invalid", "describe_problem", "file_digest", "open_file", "parse_json", "parse_location",
    "parse_record", "read_bytes", "read_json", "read_json_lines", "read_json_object", "read_lines", "read_pipe", "read_record",
    "read_record_lines", "read_sealed", "read_sealed_json", "read_text", "read_toml",
    "read_toml_record", "refuse_link", "require_numbers", "seal", "validate_record", "write_sealed",
    "write_whole",
]  # fmt: skip
