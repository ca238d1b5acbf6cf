#!/usr/bin/env python3
"""Goldens of the chat templates: what transformers renders and tokenises, for every family.

    make_templates.py TOKENIZERS SMOLLM2 [TEST_PROGRAM]

TOKENIZERS: folder with qwen3/ and deepseek_v3/ (tokenizer_config.json); SMOLLM2: folder of SmolLM2-135M-Instruct. Their
chat templates are taken as they are; those of the other families stand below, as the models' own tokenizer_config.json
has them. TEST_PROGRAM: the built test_template; it prints the Jinja that this project exports, which must render the
same strings and is stored too. Made with transformers 5.24.0, tokenizers 0.22.
Writes templates.json, template_bytes.json (a byte-level tokenizer without merges) and template_spm.json (a small
SentencePiece-like one) beside this file."""
import json, os, subprocess, sys
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

here = os.path.dirname(os.path.abspath(__file__))
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>",
           "<|end|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁begin｜>",
           "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"]

def byte_tokenizer():
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(chars)}, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, normalized=False) for s in SPECIAL])
    t.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return t

def spm_tokenizer():
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + ["▁"] + [chr(c) for c in range(33, 127)]
    merges = []
    for a, b in [("H", "i"), ("▁", "Hi"), ("▁", "["), ("I", "N"), ("S", "T"), ("IN", "ST"), ("▁[", "INST"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]:
        merges.append((a, b)), pieces.append(a + b)
    t = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.add_special_tokens([AddedToken(s, normalized=False) for s in ["<unk>", "<s>", "</s>"]])
    return t

ALTERNATE = "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
CHATML = "{% for message in messages %}%s{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
QWEN25 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {{- "# Tools" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA3 = "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
LLAMA31 = r"""{{- bos_token }}
{%- set date_string = "26 Jul 2024" %}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
LLAMA2 = "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}" + ALTERNATE + "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
def mistral(first, user, system, answer):
    return ("{%- if messages[0][\"role\"] == \"system\" %}{%- set system_message = messages[0][\"content\"] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}{%- for message in loop_messages %}" + ALTERNATE +
            "{%- if message[\"role\"] == \"user\" %}{%- if " + first + " and system_message is defined %}{{- " + system + " }}{%- else %}{{- " + user + " }}{%- endif %}{%- elif message[\"role\"] == \"assistant\" %}{{- " + answer + " }}{%- endif %}{%- endfor %}")
MISTRAL = mistral("loop.first", '" [INST] " + message["content"] + " [/INST]"', '" [INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]"', '" " + message["content"] + eos_token')
# v0.3 writes the system text where `loop.last` holds, so it vanishes once the last user message has its answer; here it stays
# where it stood when the answer was asked for.
MISTRAL3 = mistral("(loop.last or loop.index == loop_messages | length - 1)", '"[INST] " + message["content"] + "[/INST]"', '"[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]"', '" " + message["content"] + eos_token')
MISTRAL_OLD = "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token%s}}{% endif %}{% endfor %}"
GEMMA = "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first_user_prefix = messages[0]['content'] + '\n\n' %}{% set messages = messages[1:] %}{% else %}{% set first_user_prefix = '' %}{% endif %}{% for message in messages %}" + ALTERNATE + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
PHI3 = "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
ZEPHYR = "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
DEEPSEEK2 = "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
# FastChat's conversation "vicuna_v1.1" and the format of Stanford Alpaca's prompt_no_input, as Jinja.
VICUNA = "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + ' ' }}{% set messages = messages[1:] %}{% else %}{{ \"A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite answers to the user's questions. \" }}{% endif %}{% for message in messages %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
INSTRUCTION = "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% set messages = messages[1:] %}%s{% endif %}{% for message in messages %}{% if message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}{% else %}{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
ALPACA = INSTRUCTION.replace("%s", "{% else %}{{ 'Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n' }}")

def own(folder):
    return json.load(open(os.path.join(folder, "tokenizer_config.json")))["chat_template"]

def families(tokenizers, smollm2):
    im, ll, ds = ("<|im_start|>assistant\n", "<|im_end|>"), ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"), "<｜end▁of▁sentence｜>"
    return [  # name, Jinja, bos, eos, adds BOS, (what precedes an answer, what ends it), features
        ("qwen", QWEN25, None, "<|im_end|>", False, im, "system middle tools"),
        ("qwen3", own(tokenizers + "/qwen3"), None, "<|im_end|>", False, im, "system middle tools think"),
        ("smollm2", own(smollm2), "<|im_start|>", "<|im_end|>", False, im, "system middle"),
        ("internlm2", "{{ bos_token }}" + CHATML.replace("%s", ""), "<s>", "</s>", True, im, "system middle"),
        ("chatml", CHATML.replace("%s", ""), None, "<|endoftext|>", False, im, "system middle"),
        ("llama3", LLAMA3, "<|begin_of_text|>", "<|end_of_text|>", True, ll, "system middle trim"),
        ("llama3.1", LLAMA31, "<|begin_of_text|>", "<|eot_id|>", True, ll, "system trim"),
        ("llama2", LLAMA2, "<s>", "</s>", True, ("[/INST]", "</s>"), "system trim"),
        ("mistral", MISTRAL, "<s>", "</s>", True, ("[/INST]", "</s>"), "system"),
        ("mistral-v0.3", MISTRAL3, "<s>", "</s>", True, ("[/INST]", "</s>"), "system"),
        ("mistral-v0.2", MISTRAL_OLD.replace("%s", ""), "<s>", "</s>", True, ("[/INST]", "</s>"), ""),
        ("mistral-v0.1", MISTRAL_OLD.replace("%s", " + ' '"), "<s>", "</s>", True, ("[/INST]", "</s>"), ""),
        ("gemma", GEMMA, "<bos>", "<eos>", True, ("<start_of_turn>model\n", "<end_of_turn>"), "system trim"),
        ("phi3", PHI3, "<s>", "<|endoftext|>", False, ("<|assistant|>\n", "<|end|>"), "system middle"),
        ("zephyr", ZEPHYR, "<s>", "</s>", False, ("<|assistant|>\n", "</s>"), "system middle"),
        ("deepseek", own(tokenizers + "/deepseek_v3"), "<｜begin▁of▁sentence｜>", ds, True, ("<｜Assistant｜>", ds), "system middle outputs"),
        ("deepseek-v2", DEEPSEEK2, "<｜begin▁of▁sentence｜>", ds, True, ("Assistant:", ds), "system middle"),
        ("vicuna", VICUNA, "<s>", "</s>", False, ("ASSISTANT:", "</s>"), "system"),
        ("alpaca", ALPACA, None, "<|endoftext|>", False, ("### Response:\n", "<|endoftext|>"), "system"),
        ("default", INSTRUCTION.replace("%s", ""), None, "<|endoftext|>", False, ("### Response:\n", "<|endoftext|>"), "system"),
    ]

S, U, A, T = (lambda c: {"role": "system", "content": c}), (lambda c: {"role": "user", "content": c}), (lambda c: {"role": "assistant", "content": c}), (lambda c: {"role": "tool", "content": c})
CONVERSATIONS = [  # what a family must know for it, messages
    ("", [U("Hi"), A("Hello!")]),
    ("", [U("Hi"), A("Hello!"), U("How are\nyou?"), A("Fine.\n\nAnd you?"), U("法国的首都是什么？"), A("巴黎。")]),
    ("", [U("  Hi \n"), A("\u3000Hello! ")]),
    ("", [U("Hi")]),
    ("system", [S("Be brief."), U("Hi"), A("Hello!")]),
    ("system", [S("Be brief."), U("Hi"), A("Hello!"), U("the end"), A("Bye")]),
    ("system", [S(" Spaces "), U(" x"), A("y ")]),
    ("middle", [S("One."), U("Hi"), A("Hello!"), S("Two."), U("Again"), A("Hello again!")]),
    ("middle", [U("Hi"), U("there"), A("Hello!"), A("And again")]),
    ("tools", [U("Weather?"), {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}]}, T("18"), T("sunny"), A("18 degrees."), U("Thanks"), A("Welcome")]),
    ("think", [U("2+2?"), A("<think>\nEasy.\n</think>\n\n4"), U("3+3?"), A("<think>\nAlso easy.\n</think>\n\n6")]),
    ("think", [U("2+2?"), A("\n\n4")]),
    ("outputs", [U("Weather?"), T("18"), T("sunny"), A("18 degrees.")]),
]

def ours(m):  # a message as this project's formats write it
    if m.get("tool_calls"):
        return {"role": "function_call", "content": json.dumps(m["tool_calls"][0]["function"])}
    return m

def spans(text, head, stop):  # the trained texts: what stands between a heading and behind its stop token
    found, at = [], 0
    while (i := text.find(head, at)) >= 0 and (j := text.find(stop, i + len(head))) >= 0:
        found.append(text[i + len(head):j + len(stop)])
        at = j + len(stop)
    return found

def main():
    small, spm = byte_tokenizer(), spm_tokenizer()
    for name, t in (("bytes", small), ("spm", spm)):
        json.dump(json.loads(t.to_str()), open(f"{here}/template_{name}.json", "w"), ensure_ascii=False)
    exported = json.loads(subprocess.run([sys.argv[3], "--jinja"], capture_output=True, check=True).stdout) if len(sys.argv) > 3 else {}
    out, compared = [], 0
    for name, jinja, bos, eos, adds, (head, stop), knows in families(sys.argv[1], sys.argv[2]):
        t = PreTrainedTokenizerFast(tokenizer_object=small, bos_token=bos, eos_token=eos)
        cases = []
        for need, messages in CONVERSATIONS:
            if need and need not in knows.split():
                continue
            for generation in (False, True):
                if messages[-1]["role"] == "user" and not generation:
                    continue
                if messages[-1]["role"] == "assistant" and generation:
                    continue
                render = lambda template, m: t.apply_chat_template(m, chat_template=template, tokenize=False, add_generation_prompt=generation)
                text = render(jinja, messages)
                if name in exported:
                    again = render(exported[name], [ours(m) for m in messages])
                    assert again == text, (name, again, text)
                    compared += 1
                case = {"messages": [ours(m) for m in messages], "generation": generation, "text": text, "ids": t(text, add_special_tokens=False)["input_ids"]}
                if need != "outputs":
                    case["trained"] = spans(text, head, stop) if messages[-1]["role"] == "assistant" else []
                if name in ("llama2", "mistral", "mistral-v0.2", "mistral-v0.3"):  # v0.1 has a separator, which is tokenised alone
                    case["spm_ids"] = spm.encode(text, add_special_tokens=False).ids
                cases.append(case)
        out.append({"template": name, "jinja": jinja, "bos": bos, "eos": eos, "adds_bos": adds, "exported": exported.get(name), "cases": cases})
    json.dump(out, open(f"{here}/templates.json", "w"), ensure_ascii=False, indent=0)
    print(sum(len(f["cases"]) for f in out), "cases;", compared, "rendered with the exported Jinja too")

main()
