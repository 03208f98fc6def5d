"""Imported by the fork server of a check: what both sides need, and nothing that runs."""

import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401 - what decoders have in common

import assay.training.candidate  # noqa: F401 - imported for those that are forked
