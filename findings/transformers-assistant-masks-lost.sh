#!/usr/bin/env bash
# transformers 5.23.0 loses tokens of the assistant in `assistant_masks`, in two ways.
#
# `apply_chat_template(return_assistant_tokens_mask=True)` marks the tokens of each generation block by the token of its
# last character. A byte-level vocabulary may split that character into several tokens, and all but the first are
# left out. With `truncation_side="left"`, a cut within a turn of the assistant also removes the marks of all later turns,
# which are whole. Code that makes labels of these masks does not train the missing tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 jinja2==3.1.6

HF_HUB_OFFLINE=1 "$folder/env/bin/python" - <<'PYTHON' 2>/dev/null | tee "$folder/seen"
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

bytes_only = Tokenizer(BPE({one: number for number, one in enumerate(sorted(ByteLevel.alphabet()))}, []))
bytes_only.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only)
tokenizer.chat_template = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)


def show(title, *texts, **options):
    chat = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts)]
    made = tokenizer.apply_chat_template(
        chat, return_assistant_tokens_mask=True, return_dict=True, **options
    )
    print(f"{title}: {''.join(map(str, made['assistant_masks']))}")


show("'ask', then 'abc' of 3 tokens", "ask", "abc")
show("'ask', then 'a本' of 4 tokens", "ask", "a本")
turns = "ask", "abcdef", "more", "ghi"
show("two turns", *turns)
for side in ("right", "left"):
    tokenizer.truncation_side = side
    show(f"two turns, cut to 12 tokens from the {side}", *turns, truncation=True, max_length=12)
PYTHON

diff "$folder/seen" - <<'SEEN'
'ask', then 'abc' of 3 tokens: 000111
'ask', then 'a本' of 4 tokens: 0001100
two turns: 0001111110000111
two turns, cut to 12 tokens from the right: 000111111000
two turns, cut to 12 tokens from the left: 000000000000
SEEN
