"""A toy byte-level tokenizer with 256 entries and chat templates of several manners, made in memory."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|start|>", "<|message|>", "<|return|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GPTOSS = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] }}"
    "{{ ('<|return|>' if m['role'] == 'assistant' else '<|eot_id|>') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
THINKING = (  # drops the thinking of all but the last answer; an empty block is part of the generation prompt when thinking is off
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% if loop.last and m['reasoning_content'] %}{{ '<think>' + m['reasoning_content'] + '</think>' }}"
    "{% elif loop.last and not thinking %}{{ '<think></think>' }}{% endif %}"
    "{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if not thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
UPPER = CHATML.replace("m['content']", "(m['content'] | upper if m['role'] == 'user' else m['content'])")
NOT_A_PREFIX = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>' }}")
QWEN = (  # reads thinking from its field or from the text; drops that of all but the last answer; puts an empty block where there is none
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% set reasoning = m.reasoning_content or (m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '') %}"
    "{% if loop.last %}{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function or call).name + (call.function or call).arguments | tojson + '</call>' }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
PROMPT_THINKS = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
NO_HEADER = CHATML.split("{% if add_generation_prompt %}")[0]
TWO_ENDS = CHATML.replace("{% endfor %}", "{% endfor %}{% if not add_generation_prompt %}{{ eos_token }}{% endif %}")
INST = "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
TEMPLATES = {
    "chatml": CHATML, "llama3": LLAMA3, "gptoss": GPTOSS, "no_end": NO_END, "no_system": NO_SYSTEM, "thinking": THINKING, "upper": UPPER,
    "not_a_prefix": NOT_A_PREFIX, "qwen": QWEN, "prompt_thinks": PROMPT_THINKS, "no_header": NO_HEADER, "two_ends": TWO_ENDS, "inst": INST, "none": None,
}  # fmt: skip


def toy_tokenizer(template: str = "chatml", bos: bool = False, merge_newlines: bool = False) -> PreTrainedTokenizerFast:
    """246 byte symbols (control characters left out) and 10 special tokens.

    Args:
        template: a name in TEMPLATES, or the text of a template.
        bos: plain calls add <s>, as many tokenizers do.
        merge_newlines: two newlines are one token, as in real vocabularies.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = [symbol for symbol in alphabet if symbol.isascii()] + [symbol for symbol in alphabet if not symbol.isascii()]
    unused = [chr(0x100 + byte) for byte in (*range(9), 11)]  # ByteLevel's names of control characters: no text has them
    late = kept[256 - len(SPECIALS) :]
    kept = [late[unused.index(symbol)] if symbol in unused else symbol for symbol in kept[: 256 - len(SPECIALS)]]
    if merge_newlines:
        kept[kept.index("Ń")] = "ĊĊ"  # the soft hyphen's byte makes room
    vocab = {symbol: index for index, symbol in enumerate(kept)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")] if merge_newlines else [], unk_token=None, fuse_unk=False))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    ends = {"llama3": "<|eot_id|>", "gptoss": "<|return|>", "no_end": "</s>", "two_ends": "</s>", "inst": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token=ends.get(template, "<|im_end|>"))
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer
